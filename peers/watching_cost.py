"""Cost of being watched: what it takes to foresee and remember each step, with no model behind it.

    python -m peers.watching_cost

A server predicts every step and compares (``step_time.monitor``), and remembers the last steps for
explanations (``server.history``). Printed are the median microseconds that a step of answers alone
costs, and their share of such a step as it was calibrated here. The goal is at most 0.5 % of a step
of one stream.
"""

from __future__ import annotations

import json
import statistics
import time
from types import SimpleNamespace
from typing import Any

from ridgeline.core.records import EngineRecord, StepRecord
from ridgeline.engine.calibration import stored_calibrations
from ridgeline.engine.setup.home import default_home
from ridgeline.foresight.simulator.run import SimRequest, simulate
from ridgeline.foresight.step_time.calibration import Calibration
from ridgeline.foresight.step_time.features import StepTime
from ridgeline.foresight.step_time.fit import PredictionMonitor
from ridgeline.model.cost.costs import Features
from ridgeline.serve.observe.trace_buffer import TraceBuffer

_UNKNOWN = StepTime((1, 64), (3e-3, 20e-3), 3e-4, 0.0, 0.0, 0.0, 0.0)


def calibration_here() -> Calibration:
    """Return the newest calibration of this machine, or one of a step of three milliseconds."""
    calibrations = sorted(stored_calibrations(default_home()), key=lambda one: one.measured_at)
    return calibrations[-1] if calibrations else Calibration(
        model="none", arch="", dtype="", kv_cache_dtype="", backend="cpu", threads=1,
        processor="", source="measured", measured_at=0.0, version="", times=_UNKNOWN,
        step_error=None, total_error=None, factors=(), samples=(), after=(),
    )  # fmt: skip


def measure(calibration: Calibration, num_seqs: int, num_steps: int = 2000) -> dict[str, float]:
    """Return microseconds for each step of ``num_seqs`` answers, and the share of the step."""
    settings = EngineRecord(
        policy="splitfuse", block_size=16, num_blocks=1 << 16, max_num_batched_tokens=8192,
        max_num_seqs=num_seqs, max_model_len=4096, enable_prefix_caching=True, seed=0, eos_ids=(),
    )  # fmt: skip
    load = [
        SimRequest(prompt=(i, *range(1, 128)), num_new=(num_steps,), arrival_s=0.0)
        for i in range(num_seqs)
    ]
    records = simulate(load, settings, calibration.times)
    monitor = PredictionMonitor(calibration, start=lambda work: None)
    # All that a history asks of an engine's thread.
    async_engine: Any = SimpleNamespace(
        settings=settings,
        listeners=[],
        tenant_of=lambda number: "-",
    )
    TraceBuffer(async_engine, monitor)
    costs_us: dict[str, list[float]] = {"foresee": [], "remember": []}
    for record in records:
        is_decode = isinstance(record, StepRecord) and not record.num_prompt_tokens
        for name, listen in (
            ("foresee", monitor.on_record),
            ("remember", async_engine.listeners[0]),
        ):
            start_s = time.perf_counter()
            listen(record)
            if is_decode:
                costs_us[name].append(1e6 * (time.perf_counter() - start_s))
    features = Features(num_seqs, num_seqs, num_seqs, 256 * num_seqs, 256 * num_seqs)
    step_us = 1e6 * calibration.times.seconds(features)
    median_us = {name: statistics.median(costs) for name, costs in costs_us.items()}
    return {
        **{f"{name}_us": round(cost_us, 2) for name, cost_us in median_us.items()},
        "step_us": round(step_us),
        "share_of_step": round(sum(median_us.values()) / step_us, 5),
    }


def main() -> None:
    """Print a line per number of answers, then one JSON document."""
    calibration = calibration_here()
    results = {}
    for num_seqs in (1, 16, 64):
        results[f"decode_{num_seqs}"] = cost = measure(calibration, num_seqs)
        print(
            f"{num_seqs:3d} answers: foresee {cost['foresee_us']:.1f} us, remember "
            f"{cost['remember_us']:.1f} us, {cost['share_of_step']:.2%} of a step of "
            f"{cost['step_us'] / 1e3:.1f} ms"
        )
    print(json.dumps({"model": calibration.model} | results))


if __name__ == "__main__":
    main()
