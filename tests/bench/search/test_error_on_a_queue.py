"""How far a search is off, on a queue whose highest load is known: ``-s`` prints the figures.

Beside it stands a grid: as many requests at each of the loads 5 % apart, and the highest that held.

The queue runs in virtual time; the plans, the verdicts and the search are the real ones.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Callable
from random import Random

import pytest

from ridgeline.bench.load.client_flags import ClientFlags
from ridgeline.bench.load.stats import Outcome
from ridgeline.bench.search.knee import LoadSearch, Trial, interval, likely_limit
from ridgeline.bench.search.slo import RequestSlo
from ridgeline.bench.search.trial import Judge, TrialSetting, percentile_ms
from ridgeline.foresight.simulator.workload import Workload, gamma_arrivals

NUM_SEATS, SERVICE_S = 4, 0.1
TTFT = RequestSlo("ttft", 95, 300)


def served(arrivals_s: list[float], first: int, seed: int) -> list[Outcome]:
    """Serve first come first served on the seats; half of the service is the first token."""
    rng, free_s, found = Random(seed), [0.0] * NUM_SEATS, []
    for index, arrival_s in enumerate(arrivals_s, first):
        begin_s = max(arrival_s, heapq.heappop(free_s))
        service_s = rng.uniform(0.5, 1.5) * SERVICE_S
        heapq.heappush(free_s, begin_s + service_s)
        found.append(
            Outcome(index, arrival_s, arrival_s, begin_s + service_s, [begin_s + service_s / 2])
        )
    return found


def share(rate_per_s: float, num: int) -> float:
    outcomes = served(gamma_arrivals(num, rate_per_s, 1.0, Random(1)), 0, 2)[num // 50 :]
    return sum(TTFT.is_met(outcome) for outcome in outcomes) / len(outcomes)


def knee_per_s() -> float:
    low, high = 10.0, NUM_SEATS / SERVICE_S
    for _ in range(12):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle, 100_000) >= 0.95 else (low, middle)
    return low


def run(
    setting: TrialSetting,
    load: float,
    number: int,
    serve: Callable[[list[float], int, int], list[Outcome]] = served,
    look_s: float = 0.1,
) -> Trial:
    """Run a trial whose judge looks every ``look_s``: looks decide how early it may end."""
    planned, _ = setting.plan(load, number)
    arrivals_s = [one.arrival_s or 0.0 for one in planned]
    outcomes = serve(arrivals_s, planned[0].index, 7 + (setting.workload.seed or 0) + number)
    judge = Judge(setting, setting.num_measured, lambda done, total: None)
    (slo,) = setting.slos
    now_s, is_over = 0.0, False
    while not is_over:
        now_s += look_s
        ended = [one for one in outcomes if one.end_s <= now_s]
        under_way = [
            Outcome(o.index, o.arrival_s, o.sent_s, o.sent_s, [t for t in o.chunk_s if t <= now_s])
            for o in outcomes
            if o.sent_s <= now_s < o.end_s
        ]
        is_over = judge.is_enough(ended, under_way, now_s)
    measured = [one for one in ended if 0 <= one.index < setting.num_measured]
    if measured:
        setting.answer_s = statistics.mean(one.end_s - one.sent_s for one in measured)
    start_s = next(one.sent_s for one in outcomes if one.index == 0)
    return Trial(
        load=load,
        tallies=tuple(judge.tallies),
        is_overloaded=judge.is_overloaded,
        tightness=percentile_ms(slo, measured, judge.num_late) / slo.limit_ms,
        completed_per_s=sum(one.end_s >= start_s for one in ended) / (now_s - start_s),
    )


def new_setting(seed: int) -> TrialSetting:
    workload = Workload(request_rate=1.0, prompt_words="1", seed=1000 * seed)
    client_flags = ClientFlags(base_url="http://127.0.0.1:1", model="m")
    return TrialSetting(client_flags.target(), workload, [TTFT], True, 400, SERVICE_S)


@pytest.mark.full
@pytest.mark.parametrize("is_foreseen", [False, True], ids=["from nothing", "foreseen to 15 %"])
def test_searches_of_a_queue_come_close_to_its_highest_load(is_foreseen: bool) -> None:
    knee, ratios, likely, nums = knee_per_s(), [], [], []
    for seed in range(40):
        setting = new_setting(seed)
        start = knee * Random(seed).uniform(0.85, 1.15) if is_foreseen else 8.0
        search = LoadSearch(start, 2.5, is_whole=False, is_near=is_foreseen)
        while len(search.trials) < 16 and (load := search.next_load()) is not None:
            setting.is_rough = not is_foreseen and interval(search.trials).high is None
            search.trials.append(run(setting, load, len(search.trials)))
        found = interval(search.trials)
        assert found.low is not None
        assert found.high is not None
        ratios.append(math.sqrt(found.low.load * found.high.load) / knee)
        limit = likely_limit(search.trials)
        assert limit is not None
        likely.append(abs(limit / knee - 1))
        nums.append(len(search.trials))
    errors = [abs(ratio - 1) for ratio in ratios]
    print(
        f"knee {knee:.2f}/s; middle of the interval: {statistics.median(ratios):.3f} of it, "
        f"|error| median {statistics.median(errors):.3f}, 90 % {sorted(errors)[35]:.3f}; "
        f"likely limit: {statistics.median(likely):.3f}, 90 % {sorted(likely)[35]:.3f}; "
        f"trials: median {statistics.median(nums):g}, most {max(nums)}"
    )
    assert statistics.median(errors) < 0.06
    assert sorted(errors)[35] < 0.15
    assert statistics.median(likely) < 0.06
    assert sorted(likely)[35] < 0.12
    assert statistics.median(nums) <= 9


@pytest.mark.full
def test_a_grid_of_as_long_trials_is_no_closer() -> None:
    knee, errors = knee_per_s(), []
    for seed in range(40):
        setting, load, number = new_setting(seed), 0.5 * knee, 0
        setting.is_rough = False
        while all(one.holds for one in run(setting, load, number).tallies):
            load, number = 1.05 * load, number + 1
        errors.append(abs(load / math.sqrt(1.05) / knee - 1))
    print(f"grid: |error| median {statistics.median(errors):.3f}, 90 % {sorted(errors)[35]:.3f}")
    assert statistics.median(errors) > 0.03
