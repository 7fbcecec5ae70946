"""How many requests a second one core simulates, with all records and without.

    python -m peers.simulator_speed

A thousand requests, prompts of 50 to 300 tokens and answers of 20 to 120, at two rates: one at
which few run at a time, and one at which many do. Three rows for each: a simulation with all
records (``simulate``; the goal is 1,000 requests a second); a fleet of one, which plans and sweeps
use and which records how requests ended, not the steps; and a forecast, which drives the scheduler
without an engine (lean; the goal is 3,000). The first two decide the same in every step; a forecast
lets prompts into the scheduler as they come, so in a crowd it takes them in another order.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ridgeline.core.records import EngineRecord, RequestRecord, StepRecord
from ridgeline.foresight.simulator.fleet import serve_fleet
from ridgeline.foresight.simulator.forecast import State, forecast, new_snapshot
from ridgeline.foresight.simulator.run import SimRequest, simulate
from ridgeline.foresight.step_time.features import StepTime

_TIMES = StepTime(
    (1, 6, 16, 64, 2048), (3e-3, 4e-3, 6e-3, 18e-3, 0.5), 3e-4, 1e-5, 1e-5, 1e-8, 1e-9, 1e-4
)
_SETTINGS = EngineRecord(
    policy="splitfuse", block_size=16, num_blocks=8192, max_num_batched_tokens=2048,
    max_num_seqs=256, max_model_len=2048, enable_prefix_caching=True, seed=0, eos_ids=(2,),
)  # fmt: skip
_NUM = 1000


class Run(NamedTuple):
    """One way to simulate a load: processor seconds, and when each request ended, in order.

    ``num_steps`` is 0 where they are as many as with records.
    """

    took_s: float
    ends_s: list[float]
    num_steps: int


def new_load(rate_per_s: float, num: int = _NUM) -> list[SimRequest]:
    """Return requests that come at random times, at this rate."""
    dice, at_s, load = random.Random(1), 0.0, []
    for i in range(num):
        at_s += dice.expovariate(rate_per_s)
        prompt = tuple(dice.choices(range(40_000), k=dice.randint(50, 300)))
        num_new = (dice.randint(20, 120),)
        load.append(SimRequest(prompt=prompt, num_new=num_new, arrival_s=at_s, name=str(i)))
    return load


def with_records(load: Sequence[SimRequest]) -> Run:
    """Simulate with all records."""
    start_s = time.process_time()
    records = simulate(load, _SETTINGS, _TIMES)
    took_s = time.process_time() - start_s
    steps = [record for record in records if isinstance(record, StepRecord)]
    ends_s = {r.name: r.finish_s for r in records if isinstance(r, RequestRecord)}
    return Run(took_s, [ends_s[asked.name] for asked in load], len(steps))


def as_fleet(load: Sequence[SimRequest]) -> Run:
    """Simulate a fleet of one replica."""
    start_s = time.process_time()
    ended = serve_fleet(load, _SETTINGS, _TIMES, 1)
    took_s = time.process_time() - start_s
    ends_s = {one.request.name: one.finish_s for one in ended}
    return Run(took_s, [ends_s[asked.name] for asked in load], 0)


def as_forecast(load: Sequence[SimRequest]) -> Run:
    """Foresee all of a load, from an idle engine."""
    start_s = time.process_time()
    coming = [
        (asked.arrival_s or 0.0, new_snapshot(i, len(asked.prompt), asked.num_new[0]))
        for i, asked in enumerate(load)
    ]
    steps = Counter[str]()
    foreseen = forecast(
        State(_SETTINGS, ()),
        _TIMES,
        range(len(load)),
        coming=coming,
        check_cancel=lambda: steps.update(("step",)),
    )
    took_s = time.process_time() - start_s
    return Run(took_s, [foreseen[i].end_s for i in range(len(load))], steps["step"])


WAYS = {"with records": with_records, "fleet of one": as_fleet, "lean (forecast)": as_forecast}


def measure(rate_per_s: float, num: int = _NUM) -> dict[str, dict[str, float]]:
    """Return requests a second and microseconds a step of each way, with tokens in a step."""
    load = new_load(rate_per_s, num)
    runs = {name: simulated(load) for name, simulated in WAYS.items()}
    num_tokens = sum(asked.num_new[0] for asked in load)
    rows = {}
    for name, run in runs.items():
        num_steps = run.num_steps or runs["with records"].num_steps
        rows[name] = {
            "requests_per_s": round(num / run.took_s),
            "us_per_step": round(1e6 * run.took_s / num_steps, 1),
            "new_tokens_per_step": round(num_tokens / num_steps, 1),
        }
    return rows


def main() -> None:
    """Print a line per rate and way, then one JSON document."""
    results = {}
    for rate_per_s in (4.0, 30.0):
        results[f"rate_{rate_per_s:g}"] = result = measure(rate_per_s)
        for name, row in result.items():
            print(
                f"{name:16} {row['requests_per_s']:6,} requests/s, {row['us_per_step']:6.1f} us a "
                f"step with {row['new_tokens_per_step']:.1f} new tokens"
            )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
