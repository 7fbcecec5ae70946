"""Host cost: what scheduling and committing a step cost, with no model behind it.

    python -m peers.host_cost

256 sequences decode side by side; a runner that returns constants stands for the backend. Printed
are the median and the best microseconds per step of ``schedule`` plus ``commit``. The goal is at
most 300: under 1 % of a decode step of 256 sequences on two cores.
"""

from __future__ import annotations

import json
import statistics
import time

from ridgeline.core.cache.kvcache import KVCache
from ridgeline.core.commit import commit
from ridgeline.core.params import SamplingParams
from ridgeline.core.request import Request
from ridgeline.core.scheduling.policies import SplitFuse
from ridgeline.core.scheduling.scheduler import Scheduler
from ridgeline.core.step import StepOutput


def measure(num_seqs: int, prompt_len: int = 128, num_steps: int = 512) -> dict[str, float]:
    """Return microseconds per decode step of ``num_seqs`` sequences."""
    max_len = prompt_len + num_steps + 8
    kv = KVCache(num_seqs * (max_len // 16 + 1), 16)
    scheduler = Scheduler(kv, SplitFuse(), max_num_batched_tokens=8192, max_num_seqs=num_seqs)
    params = SamplingParams(max_tokens=None, temperature=0)
    for i in range(num_seqs):
        prompt = (i, *range(1, prompt_len))
        scheduler.add(Request(i, prompt, params, eos_ids=(2,), max_model_len=max_len))
    costs_us: list[float] = []
    for number in range(num_steps):
        start_s = time.perf_counter()
        step = scheduler.schedule()
        middle_s = time.perf_counter()
        # Every sequence gets another token, so that no block has a twin to share.
        fresh = 1000 + number * num_seqs
        output = StepOutput(
            tuple((fresh + i,) if work.seeds else () for i, work in enumerate(step.work))
        )
        again_s = time.perf_counter()
        commit(scheduler.queues, step, output)
        cost_s = middle_s - start_s + time.perf_counter() - again_s
        if all(len(work.tokens) == 1 for work in step.work):
            costs_us.append(cost_s * 1e6)
    return {"median_us": round(statistics.median(costs_us), 1), "best_us": round(min(costs_us), 1)}


def main() -> None:
    """Print a line per batch size, then one JSON document."""
    results = {}
    for num_seqs in (1, 16, 64, 256):
        results[f"decode_{num_seqs}"] = cost = measure(num_seqs)
        print(
            f"{num_seqs:4d} decodes: schedule + commit {cost['median_us']:7.1f} us (median), "
            f"{cost['best_us']:7.1f} us (best)"
        )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
