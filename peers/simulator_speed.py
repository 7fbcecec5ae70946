"""How many requests a second one core simulates, with all records.

    python -m peers.simulator_speed

A thousand requests, prompts of 50 to 300 tokens and answers of 20 to 120, at two rates: one at
which few run at a time, and one at which many do. The goal is 1,000 requests a second.
"""

from __future__ import annotations

import json
import random
import time

from ridgeline.core.records import EngineRecord, StepRecord
from ridgeline.simulator.run import Asked, simulate
from ridgeline.simulator.steptime import StepTime

_TIMES = StepTime(
    (1, 6, 16, 64, 2048), (3e-3, 4e-3, 6e-3, 18e-3, 0.5), 3e-4, 1e-5, 1e-5, 1e-8, 1e-9, 1e-4
)
_SETTINGS = EngineRecord(
    policy="splitfuse", block_size=16, num_blocks=8192, max_num_batched_tokens=2048,
    max_num_seqs=256, max_model_len=2048, enable_prefix_caching=True, seed=0, eos_ids=(2,),
)  # fmt: skip
_NUM = 1000


def measure(rate_per_s: float) -> dict[str, float]:
    """Return requests a second, and sequences in a step, of a load that comes at this rate."""
    dice, at_s, load = random.Random(1), 0.0, []
    for _ in range(_NUM):
        at_s += dice.expovariate(rate_per_s)
        prompt = tuple(dice.choices(range(40_000), k=dice.randint(50, 300)))
        load.append(Asked(prompt=prompt, num_new=(dice.randint(20, 120),), arrival_s=at_s))
    start_s = time.perf_counter()
    records = simulate(load, _SETTINGS, _TIMES)
    took_s = time.perf_counter() - start_s
    steps = [record for record in records if isinstance(record, StepRecord)]
    return {
        "requests_per_s": round(_NUM / took_s),
        "us_per_step": round(1e6 * took_s / len(steps), 1),
        "seqs_per_step": round(sum(len(step.work) for step in steps) / len(steps), 1),
    }


def main() -> None:
    """Print a line per rate, then one JSON document."""
    results = {}
    for rate_per_s in (4.0, 30.0):
        results[f"rate_{rate_per_s:g}"] = result = measure(rate_per_s)
        print(
            f"{result['requests_per_s']:6,} requests/s, {result['us_per_step']:6.1f} us a step of "
            f"{result['seqs_per_step']:.1f} sequences"
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
