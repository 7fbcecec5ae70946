"""How far a search is off, on simulated servers of many shapes: ``-s`` prints the figures.

The server's own scheduler, cache and admission run under a clock that is a number. What a search
finds stands beside the highest load of an exhaustive grid, 2.5 % apart, of ten times as many
requests at each load. Plans, verdicts and the search are the real ones.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from random import Random

import pytest

from ridgeline.bench.load.client_flags import ClientFlags
from ridgeline.bench.load.stats import Outcome
from ridgeline.bench.search.knee import LoadSearch, Trial, interval, likely_limit
from ridgeline.bench.search.slo import RequestSlo
from ridgeline.bench.search.trial import TrialSetting
from ridgeline.core.records import EngineRecord
from ridgeline.foresight.simulator.fleet import serve_fleet
from ridgeline.foresight.simulator.run import SimRequest
from ridgeline.foresight.simulator.workload import Workload, gamma_arrivals
from ridgeline.foresight.step_time.features import StepTime
from tests.bench.search.test_error_on_a_queue import run

GRID, NUM_GRID, NUM_TRIAL, NUM_SHAPES = 1.025, 4000, 400, 4
Serve = Callable[[list[float], int, int], list[Outcome]]


def server(seed: int) -> Serve:
    """Return a simulated server of a shape that is drawn."""
    rng = Random(seed)
    base_s, token_s = rng.uniform(2e-3, 2e-2), rng.uniform(2e-5, 2e-4)
    times = StepTime((1, 512), (base_s, base_s + 511 * token_s), token_s, 1e-4, 1e-5, 1e-8, 1e-9)
    settings = EngineRecord(
        policy=rng.choice(["splitfuse", "orca"]), block_size=16, num_blocks=4096,
        max_num_batched_tokens=512, max_num_seqs=rng.choice([4, 8, 16, 32]), max_model_len=512,
        enable_prefix_caching=False, seed=0, eos_ids=(2,),
    )  # fmt: skip
    longest, most_new = rng.choice([32, 100, 250]), rng.choice([3, 6, 12])

    def serve(arrivals_s: list[float], first: int, seed: int) -> list[Outcome]:
        dice = Random(seed)
        asked = [
            SimRequest(
                prompt=(7,) * dice.randint(longest // 4, longest),
                num_new=(dice.randint(1, most_new),),
                arrival_s=arrival_s,
                name=str(index),
            )
            for index, arrival_s in enumerate(arrivals_s, first)
        ]
        outcomes = [
            Outcome(int(e.request.name), e.arrival_s, e.arrival_s, e.finish_s, list(e.token_s))
            for e in serve_fleet(asked, settings, times, 1)
        ]
        return sorted(outcomes, key=lambda outcome: outcome.index)

    return serve


def highest_of_grid(serve: Serve, slo: RequestSlo, start: float) -> float:
    """Return the highest load of the grid that holds; shares fall with it, so it is bisected."""

    def holds(step: int) -> bool:
        arrivals_s = gamma_arrivals(NUM_GRID, start * GRID**step, 1.0, Random(step))
        outcomes = serve(arrivals_s, 0, step)[NUM_GRID // 20 :]
        met = sum(slo.is_met(outcome) for outcome in outcomes)
        return 100 * met >= (slo.percent or 0) * len(outcomes)

    low, high = 0, 8
    while holds(high):
        low, high = high, high + 32
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return start * GRID ** (low + 0.5)


def searched(seed: int) -> tuple[float, list[Trial]]:
    """Return the highest load of the grid, and the trials of a search."""
    serve = server(seed)
    alone = serve([100.0 * i for i in range(20)], 0, 1)
    first_s = statistics.mean(one.chunk_s[0] - one.sent_s for one in alone)
    answer_s = statistics.mean(one.end_s - one.sent_s for one in alone)
    slo = RequestSlo("ttft", 95, 1e3 * first_s * Random(seed).uniform(3, 12))
    workload = Workload(request_rate=1.0, prompt_words="1", seed=1000 * seed)
    client_flags = ClientFlags(base_url="http://127.0.0.1:1", model="m")
    setting = TrialSetting(client_flags.target(), workload, [slo], True, NUM_TRIAL, answer_s)
    best = highest_of_grid(serve, slo, 0.5 / answer_s)
    search = LoadSearch(1 / answer_s, 0.25 / answer_s, is_whole=False)
    while len(search.trials) < 16 and (load := search.next_load()) is not None:
        setting.is_rough = interval(search.trials).high is None
        search.trials.append(run(setting, load, len(search.trials), serve, min(0.1, 2 / load)))
    return best, search.trials


@pytest.mark.full
def test_searches_of_many_shapes_come_close_to_an_exhaustive_grid() -> None:
    middles, likely, nums = [], [], []
    for seed in range(NUM_SHAPES):
        best, trials = searched(seed)
        ends, limit = interval(trials), likely_limit(trials)
        assert ends.low is not None
        assert ends.high is not None
        assert limit is not None
        middles.append(abs(math.sqrt(ends.low.load * ends.high.load) / best - 1))
        likely.append(abs(limit / best - 1))
        nums.append(len(trials))
    for name, errors in (("middle of the interval", middles), ("likely limit", likely)):
        nine_in_ten = sorted(errors)[math.ceil(0.9 * NUM_SHAPES) - 1]
        print(f"{name}: |error| median {statistics.median(errors):.3f}, 90 % {nine_in_ten:.3f}")
        assert statistics.median(errors) < 0.08
        assert nine_in_ten < 0.2
    print(f"trials: median {statistics.median(nums):g}, most {max(nums)}")
    assert statistics.median(nums) <= 14
