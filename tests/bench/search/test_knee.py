"""The search's decisions: which load comes next, and when a trial's verdict is certain."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.bench.load.client_flags import ClientFlags
from ridgeline.bench.load.stats import Outcome
from ridgeline.bench.search import SearchFlags
from ridgeline.bench.search.knee import (
    WIDTH,
    LoadSearch,
    Trial,
    interval,
    likely_limit,
    points,
)
from ridgeline.bench.search.slo import (
    RequestSlo,
    Tally,
    at_least,
    parse_slo,
    pooled,
    queue_grows,
    tally,
    verdict,
)
from ridgeline.bench.search.trial import Judge, TrialSetting, percentile_ms
from ridgeline.foresight.simulator.workload import Workload

TTFT = RequestSlo("ttft", 95, 100)
Oracle = Callable[[float], Trial]


def trial(load: float, tightness: float, capacity: float = math.inf) -> Trial:
    num_met = 200 if tightness <= 1 else 100
    done = min(load, capacity)
    return Trial(load, (Tally(TTFT, num_met, 200),), load >= capacity, tightness, done)


def queue(base: float, capacity: float) -> tuple[Oracle, float]:
    """An M/M/1 queue: latency ``base`` of its limit without load. Returns it and its knee."""

    def oracle(load: float) -> Trial:
        is_full = load >= capacity
        return trial(load, math.inf if is_full else base / (1 - load / capacity), capacity)

    return oracle, capacity * (1 - base)


def step(knee: float) -> tuple[Oracle, float]:
    """A server that says nothing of how close it is."""
    return lambda load: trial(load, 0.3 if load <= knee else 3.0), knee


def line(alone: float, knee: float) -> tuple[Oracle, float]:
    """A closed loop: latency grows as a straight line, ``alone`` of its limit at nothing."""
    return lambda load: trial(load, alone + (1 - alone) / knee * load), knee


def searched(oracle: Oracle, start: float, least: float, *, is_whole: bool = False) -> list[Trial]:
    search = LoadSearch(start, least, is_whole=is_whole)
    while (load := search.next_load()) is not None:
        search.trials.append(oracle(load))
        assert len(search.trials) <= 20
    return search.trials


@given(st.floats(0.03, 0.9), st.floats(1, 16))
def test_the_knee_of_a_queue_is_found_within_five_per_cent_in_eight_trials(
    base: float, capacity: float
) -> None:
    oracle, knee = queue(base, capacity)
    trials = searched(oracle, 1.0, 0.02)
    found = interval(trials)
    assert found.low is not None
    assert found.high is not None
    assert found.low.load <= knee * (1 + 1e-9)
    assert knee <= found.high.load * (1 + 1e-9)
    assert found.high.load <= WIDTH * found.low.load
    assert min(found.low.num_trials, found.high.num_trials) == 2  # both ends were tried again
    assert len(trials) <= 8


@given(st.floats(0.03, 0.9), st.floats(1, 16), st.floats(0.8, 1.25))
def test_from_a_knee_that_was_foreseen_no_more_trials_are_needed(
    base: float, capacity: float, error: float
) -> None:
    oracle, knee = queue(base, capacity)
    search = LoadSearch(error * knee, 0.25 * knee, is_whole=False, is_near=True)
    while (load := search.next_load()) is not None:
        search.trials.append(oracle(load))
        assert 0.5 * knee < load < 2 * knee
    found = interval(search.trials)
    assert found.low is not None
    assert found.high is not None
    assert found.low.load <= knee * (1 + 1e-9)
    assert knee <= found.high.load * (1 + 1e-9)
    assert found.high.load <= WIDTH * found.low.load
    assert len(search.trials) <= 7


@given(st.floats(0.02, 400))
def test_a_knee_that_was_foreseen_wrongly_is_found_all_the_same(knee: float) -> None:
    oracle, _ = step(knee)
    search = LoadSearch(1.0, 0.01, is_whole=False, is_near=True)
    while (load := search.next_load()) is not None:
        search.trials.append(oracle(load))
        assert len(search.trials) <= 18
    found = interval(search.trials)
    assert found.low is not None
    assert found.high is not None
    assert found.low.load <= knee < found.high.load <= WIDTH * found.low.load


@given(st.floats(0.02, 0.6), st.floats(4, 100))
def test_the_most_requests_at_a_time_are_found_in_nine_trials(alone: float, knee: float) -> None:
    oracle, _ = line(alone, knee)
    trials = searched(oracle, 4.0, 1.0, is_whole=True)
    found = interval(trials)
    assert found.low is not None
    assert found.high is not None
    assert found.low.load <= knee * (1 + 1e-9)
    assert knee <= found.high.load * (1 + 1e-9)
    assert found.high.load <= max(WIDTH * found.low.load, found.low.load + 1)
    assert all(one.load.is_integer() for one in trials)
    assert len(trials) <= 9


@given(st.floats(0.02, 400))
def test_a_knee_that_nothing_announces_is_found_too(knee: float) -> None:
    oracle, _ = step(knee)
    trials = searched(oracle, 1.0, 0.01)
    found = interval(trials)
    assert found.low is not None
    assert found.high is not None
    assert found.low.load <= knee < found.high.load <= WIDTH * found.low.load
    assert len(trials) <= 16


@given(st.floats(0.01, 0.9), st.floats(2, 30), st.integers(0, 10**6))
def test_noise_ends_in_an_interval_whose_ends_are_what_their_trials_say(
    base: float, capacity: float, seed: int
) -> None:
    rng, (oracle, _) = Random(seed), queue(base, capacity)

    def noisy(load: float) -> Trial:
        sure = oracle(load)
        share = 1 - 0.05 * min(sure.tightness, 9) * rng.uniform(0.7, 1.4)
        num_met = sum(rng.random() < share for _ in range(200))
        return Trial(load, (Tally(TTFT, num_met, 200),), False, sure.tightness, load)

    search = LoadSearch(1.0, 0.01, is_whole=False)
    while len(search.trials) < 25 and (load := search.next_load()) is not None:
        assert load >= 0.01
        search.trials.append(noisy(load))
    found = interval(search.trials)
    held = {point.load: point.holds for point in points(search.trials)}
    if found.low:
        assert held[found.low.load]
    if found.high:
        assert not held[found.high.load]
        assert all(holds for load, holds in held.items() if load < found.high.load)


@given(st.floats(0.03, 0.9), st.floats(1, 16))
def test_what_all_trials_speak_for_is_close_to_the_limit(base: float, capacity: float) -> None:
    oracle, knee = queue(base, capacity)
    assert likely_limit(searched(oracle, 1.0, 0.02)) == pytest.approx(knee, rel=0.05)


def test_one_lucky_trial_moves_the_likely_limit_little() -> None:
    fair = [trial(load, 0.8 if load <= 10 else 1.2) for load in (2, 9.6, 10, 10.4, 10.8, 40)]
    luck, bad_luck = trial(10.8, 0.8), trial(9.2, 1.2)
    assert likely_limit(fair) == pytest.approx(10.2, rel=0.01)
    assert likely_limit([*fair, luck]) == pytest.approx(10.4, rel=0.02)
    assert interval([*fair, bad_luck]).high == points([bad_luck])[0]  # the ends move all the way
    moved = likely_limit([*fair, bad_luck])
    assert moved is not None
    assert 9.6 < moved < 10.2
    assert likely_limit(fair[:3]) is None  # none failed
    assert likely_limit([]) is None


def test_an_end_that_does_not_stand_does_not_send_the_search_far_away() -> None:
    search = LoadSearch(1.0, 0.1, is_whole=False)
    search._num_guesses = 3  # interpolation has had its turns
    for load, tightness in ((1.0, 0.8), (4.0, 3.0), (1.96, 0.9), (2.04, 1.1), (1.96, 0.9)):
        search.trials.append(trial(load, tightness))
    assert search.next_load() == pytest.approx(2.04)
    search.trials += [trial(2.04, 0.9)] * 20  # pooled, it holds
    load = search.next_load()
    assert load is not None
    assert 2.04 < load < 2.4  # the middle of what is left would be 2.86


def test_a_second_trial_that_disagrees_opens_the_search_again() -> None:
    search = LoadSearch(1.0, 0.1, is_whole=False)
    for load, tightness in ((1.0, 0.8), (1.04, 1.2), (1.0, 1.3)):
        search.trials.append(trial(load, tightness))
    assert interval(search.trials).low is None  # 300 of 400 are too few
    assert search.next_load() == pytest.approx(0.25)


def test_what_cannot_be_met_is_tried_twice_at_the_least_load() -> None:
    trials = searched(lambda load: trial(load, 4.0), 1.0, 0.2)
    assert [one.load for one in trials] == [1.0, 0.25, 0.2, 0.2]
    assert interval(trials).low is None


# --- service levels ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["ttft", "ttft:p95", "ttft:95:", "itl:p95:5", "ttft:p0:5", "ttft:p100:5", "ttft:p95:0"]
)
def test_a_service_level_that_is_none_says_what_one_is(text: str) -> None:
    with pytest.raises(ValueError, match=f"--slo {text} is not METRIC:PERCENTILE:MS"):
        parse_slo(text)


def test_a_service_level_is_read_and_written_the_same() -> None:
    assert parse_slo("e2el:99.9:1500") == RequestSlo("e2el", 99.9, 1500)
    assert str(parse_slo("ttft:95:500")) == "ttft:p95:500"


@given(st.integers(1, 300), st.data(), st.floats(0.05, 0.99))
def test_the_tail_of_a_binomial_is_the_sum_of_its_terms(
    n: int, data: st.DataObject, p: float
) -> None:
    k = data.draw(st.integers(0, n))
    exact = sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))
    assert at_least(k, n, p) == pytest.approx(exact, rel=1e-6, abs=1e-12)


MEAN = RequestSlo("ttft", None, 100)


def test_a_mean_is_a_service_level_too() -> None:
    assert parse_slo("ttft:mean:100") == MEAN
    assert (str(MEAN), MEAN.label) == ("ttft:mean:100", "ttft mean")
    done = [ended(i, 0.05 + 0.001 * (i % 7)) for i in range(40)]
    open_ = Outcome(40, 0.0, 1.0, 1.0)
    (found,) = tally([MEAN], [*done, ended(41, 9.0)], [open_], 99.0)
    assert (found.num, found.holds, found.certain) == (40, True, True)  # open, however late
    assert found.mean_ms == pytest.approx(sum(50 + i % 7 for i in range(40)) / 40)
    (begun,) = tally([MEAN], done, [Outcome(40, 0.0, 1.0, 1.0, [1.09])], 2.0)
    assert (begun.num, begun.mean_ms) == (41, pytest.approx((40 * found.mean_ms + 90) / 41))
    (late,) = tally([MEAN], [ended(i, 0.15) for i in range(40)], [], 99.0)
    assert (late.holds, late.certain) == (False, False)
    (failed,) = tally([MEAN], [*done, ended(40, 0.05, "broken")], [], 99.0)
    assert (failed.holds, failed.certain) == (False, False)
    (wide,) = tally([MEAN], [ended(i, 0.02 if i % 2 else 0.17) for i in range(40)], [], 9.0)
    assert (wide.holds, wide.certain) == (True, None)
    assert pooled([found, late]).mean_ms == pytest.approx((found.mean_ms + 150) / 2)
    assert percentile_ms(MEAN, done, 3) == pytest.approx(found.mean_ms)


def test_certainty_comes_with_numbers() -> None:
    assert Tally(TTFT, 19, 19).certain is None  # too few, however good
    assert Tally(TTFT, 60, 60).certain is None  # 0.95 ** 60 is 0.05
    assert Tally(TTFT, 110, 110).certain is True
    assert Tally(TTFT, 12, 20).certain is False
    assert Tally(TTFT, 190, 200).certain is None
    sure, open_, missed = Tally(TTFT, 110, 110), Tally(TTFT, 60, 60), Tally(TTFT, 12, 20)
    assert verdict([sure, sure]) is True
    assert verdict([sure, open_]) is None
    assert verdict([open_, missed]) is False


@pytest.mark.parametrize("share", [0.90, 0.97])
def test_an_early_verdict_is_seldom_wrong(share: float) -> None:
    """Each of 200 requests meets it with a probability that is not 0.95; looked at after each."""
    rng, num_wrong = Random(5), 0
    for _ in range(120):
        num_met = 0
        for n in range(1, 201):
            num_met += rng.random() < share
            if (certain := Tally(TTFT, num_met, n).certain) is not None:
                num_wrong += certain != (share > 0.95)
                break
    assert num_wrong <= 6


def ended(index: int, ttft_s: float, error: str | None = None) -> Outcome:
    return Outcome(index, 0.0, 1.0, 3.0, [1.0 + ttft_s], usage_tokens=5, error=error)


def test_requests_count_up_to_the_first_whose_fate_is_open() -> None:
    done = [ended(0, 0.05), ended(1, 0.2), ended(3, 0.05), ended(4, 0.05, "broken"), ended(-1, 9)]
    open_ = Outcome(2, 0.0, 1.0, 1.0)
    assert tally([TTFT], done, [open_], 1.05) == [Tally(TTFT, 1, 2)]
    assert tally([TTFT], done, [open_], 1.2) == [Tally(TTFT, 2, 5)]  # now it is late
    begun = Outcome(2, 0.0, 1.0, 1.0, [1.05])
    assert tally([TTFT], done, [begun], 1.2) == [Tally(TTFT, 3, 5)]
    assert (
        tally([RequestSlo("tpot", 95, 100)], done, [begun], 99.0)[0].num == 2
    )  # open until its end


def test_percentiles_agree_with_shares() -> None:
    """Of 20 requests 19 may be late for p5, and one for p95."""
    outcomes = [ended(i, 0.01 * (i + 1)) for i in range(20)]
    assert percentile_ms(TTFT, outcomes, 0) == pytest.approx(190)
    assert percentile_ms(RequestSlo("ttft", 50, 1), outcomes, 0) == pytest.approx(100)
    assert percentile_ms(TTFT, [*outcomes[:18], ended(18, 0.0, "x")], 1) == math.inf
    assert percentile_ms(TTFT, [], 0) == math.inf
    one_token = Outcome(0, 0.0, 1.0, 3.0, [2.0], usage_tokens=1)
    assert RequestSlo("tpot", 95, 100).is_met(one_token)


@given(st.integers(0, 10**6))
def test_a_queue_that_only_fluctuates_does_not_grow(seed: int) -> None:
    rng, sent_s, now_s = Random(seed), list[float](), 0.0
    for _ in range(220):
        now_s += rng.expovariate(10.0)
        sent_s.append(now_s)
    ends_s = [s + rng.uniform(0.5, 1.5) for s in sent_s]
    assert not queue_grows(sent_s, [e for e in ends_s if e <= now_s], sent_s[20], now_s)


def test_a_server_that_cannot_keep_up_is_seen() -> None:
    sent_s = [0.1 * i for i in range(100)]
    ends_s = [1 + 0.2 * i for i in range(100)]  # half as fast
    now_s = sent_s[-1]
    assert queue_grows(sent_s, [e for e in ends_s if e <= now_s], 1.0, now_s)
    ends_s = [1 + s for s in sent_s]
    assert not queue_grows(sent_s, [e for e in ends_s if e <= now_s], 1.0, now_s)


def test_near_the_limit_the_warm_up_is_long_and_only_a_failure_ends_a_trial_early() -> None:
    client_flags = ClientFlags(base_url="http://127.0.0.1:1", model="m")
    load = Workload(request_rate=1.0, num_warmups=1, seed=1)
    setting = TrialSetting(client_flags.target(), load, [TTFT], True, 300, 0.1)
    good, bad = [ended(i, 0.05) for i in range(120)], [ended(i, 0.2) for i in range(120)]

    def judged(outcomes: list[Outcome]) -> bool:
        return Judge(setting, 300, lambda done, total: None).is_enough(outcomes, [], 4.0)

    assert (judged(good), judged(bad)) == (True, True)
    assert sum(one.index < 0 for one in setting.plan(2.0, 1)[0]) == 5
    setting.is_rough = False
    assert (judged(good), judged(bad)) == (False, True)
    planned, num_workers = setting.plan(2.0, 1)
    assert [one.index for one in planned] == list(range(-200, 500))
    assert num_workers is None


# --- flags ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"slo": None}, "give a latency limit"),
        ({"slo": ["ttft:95"]}, "--slo ttft:95 is not"),
        ({"base_url": None}, "name the server"),
        ({"serve": "x {port}"}, "name the server"),
        ({"num_prompts": 5}, "--num-prompts is 5"),
        ({"start": 0.0}, "--start is 0.0"),
        ({"out": "curve.pdf"}, "--out curve.pdf.*.svg"),
    ],
)
def test_wishes_that_make_no_sense(flags: dict[str, object], words: str) -> None:
    given = {"slo": ["ttft:p95:100"], "base_url": "http://127.0.0.1:1"} | flags
    if isinstance(given.get("out"), str):
        given["out"] = Path(str(given["out"]))
    with pytest.raises(ValueError, match=words):
        SearchFlags(**given)  # type: ignore[arg-type]
