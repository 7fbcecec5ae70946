"""Promises where the model of time is right: none is broken, and none is refused in vain."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.core.records import EngineRecord
from ridgeline.core.scheduling.policies import Load
from ridgeline.foresight.deadline import (
    AdmissionRound,
    AdmissionVerdict,
    Due,
    Lengths,
    PromiseRequest,
    latest_start_s,
)
from ridgeline.foresight.simulator.forecast import PredictedTimes, State, new_snapshot, state_of
from tests.foresight.simulator.test_forecast import SETUPS, Machine
from tests.foresight.simulator.test_run import SETTINGS, TIMES

SETUP = replace(SETTINGS, enable_prefix_caching=False)


class Wish(NamedTuple):
    """A request: lengths, when it comes, and when it is due after that; without, best effort."""

    num_prompt: int
    num_new: int
    after_s: float
    ttft_s: float = inf
    total_s: float = inf

    @property
    def is_promised(self) -> bool:
        return min(self.ttft_s, self.total_s) < inf


class Served:
    """A server with promises under a virtual clock: a round of decisions before each step."""

    def __init__(self, setup: EngineRecord, wishes: list[Wish]) -> None:
        self.machine = Machine(setup)
        self.to_come = deque(sorted(wishes, key=lambda wish: wish.after_s))
        self.queue: deque[tuple[Wish, float]] = deque()
        self.promised: dict[int, tuple[Wish, float]] = {}  # by the engine's numbers
        self.best_effort: list[int] = []
        self.refused: list[Wish] = []
        self.num_wishes = 0

    def run(self) -> None:
        machine = self.machine
        while self.to_come or self.queue or machine.engine.has_work():
            if not (self.queue or machine.engine.has_work()):
                machine.clock.now_s = max(machine.clock.now_s, self.to_come[0].after_s)
            asking = []
            while self.to_come and self.to_come[0].after_s <= machine.clock.now_s:
                wish = self.to_come.popleft()
                if wish.is_promised:
                    asking.append(wish)
                else:
                    self.queue.append((wish, wish.after_s))
            self.decide(asking)
            before = len(machine.ended())
            if machine.engine.has_work():
                machine.engine.step(Load(self.num_permitted))
                num_ended = len(machine.ended()) - before
                machine.clock.now_s += TIMES.after(machine._num_rows, num_ended)

    def decide(self, asking: list[Wish]) -> None:
        machine, now_s = self.machine, self.machine.clock.now_s
        state = state_of(machine.setup, machine.engine.scheduler)
        alive = {snapshot.number: snapshot for snapshot in state.requests}
        begun = {n for n, s in alive.items() if s.answers[0].num_tokens > s.num_prompt}
        open_ = {
            n: PromiseRequest(
                (alive[n],),
                Due(
                    inf if n in begun else wish.after_s + wish.ttft_s - now_s,
                    wish.after_s + wish.total_s - now_s,
                ),
            )
            for n, (wish, _) in self.promised.items()
            if n in alive and (n not in begun or wish.total_s < inf)
        }
        asked = []
        for i, wish in enumerate(asking):
            late_s = now_s - wish.after_s
            due = Due(wish.ttft_s - late_s, wish.total_s - late_s)
            due_s = now_s + latest_start_s(TIMES, wish.num_prompt, wish.num_new, due)
            number = machine.engine._next_id + i
            snapshot = new_snapshot(number, wish.num_prompt, wish.num_new, due_s=due_s)
            asked.append(PromiseRequest((snapshot,), due))
        admission_round = AdmissionRound(state, TIMES, 1.0, open_)
        for wish, one, verdict in zip(asking, asked, admission_round.decide(asked), strict=True):
            if verdict is None or verdict.outlook == "refused":
                self.refused.append(wish)
                continue
            number = self.add(wish, one.snapshots[0].due_s)
            self.promised[number] = wish, one.snapshots[0].due_s
        queued = [
            new_snapshot((1 << 50) + i, wish.num_prompt, wish.num_new)
            for i, (wish, _) in enumerate(self.queue)
        ]
        self.num_permitted = admission_round.num_may_enter(queued)
        while self.num_permitted and min(machine.engine.scheduler.room()[:2]) > 0:
            self.num_permitted -= 1
            self.best_effort.append(self.add(self.queue.popleft()[0]))

    def add(self, wish: Wish, due_s: float = inf) -> int:
        self.num_wishes += 1
        prompt = tuple(1000 * self.num_wishes + i for i in range(wish.num_prompt))
        return self.machine.add(prompt, wish.num_new, due_s=due_s)


MAYBE = st.sampled_from((0.05, 0.1, 0.2, 0.4, 1.0, 3.0, inf))
WISHES = st.lists(
    st.builds(Wish, st.integers(1, 40), st.integers(1, 16), st.floats(0, 0.6), MAYBE, MAYBE),
    min_size=1,
    max_size=14,
)


@settings(max_examples=150)
@given(WISHES, SETUPS)
def test_no_promise_is_broken_and_every_request_ends_once(
    wishes: list[Wish], setup: EngineRecord
) -> None:
    served = Served(setup, wishes)
    served.run()
    ended = served.machine.ended()
    assert len(ended) + len(served.refused) == len(wishes)
    assert sorted(ended) == sorted([*served.promised, *served.best_effort])
    for number, (wish, _) in served.promised.items():
        first_s, end_s = ended[number].first_token_s, ended[number].finish_s
        assert first_s is not None
        assert first_s <= wish.after_s + wish.ttft_s + 1e-9
        assert end_s <= wish.after_s + wish.total_s + 1e-9


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(1, 16), SETUPS)
def test_alone_nothing_is_refused_that_can_be_kept(
    num_prompt: int, num_new: int, setup: EngineRecord
) -> None:
    free = Served(setup, [Wish(num_prompt, num_new, 0.0)])
    free.run()
    (record,) = free.machine.ended().values()
    assert record.first_token_s is not None
    for share, is_kept in ((1.001, True), (0.999, False)):
        due = record.first_token_s * share, record.finish_s * share
        served = Served(setup, [Wish(num_prompt, num_new, 0.0, *due)])
        served.run()
        assert len(served.refused) == (not is_kept)


def test_who_is_promised_is_not_hurt_by_who_comes_later() -> None:
    """The second would be in time if it went first, and then the first would not."""
    long = Wish(32, 16, 0.0, total_s=0.50)
    alone = Served(SETUP, [long])
    alone.run()
    end_s = alone.machine.ended()[0].finish_s
    both = Served(SETUP, [long._replace(total_s=end_s * 1.05), Wish(32, 16, 0.05, ttft_s=0.07)])
    both.run()
    assert [wish.after_s for wish in both.refused] == [0.05]


def test_best_effort_waits_outside_while_it_would_break_a_promise() -> None:
    wish = Wish(8, 16, 0.0)
    alone = Served(SETUP, [wish])
    alone.run()
    took_s = alone.machine.ended()[0].finish_s
    others = [Wish(30, 8, 0.0) for _ in range(3)]
    tight = Served(SETUP, [wish._replace(total_s=1.01 * took_s), *others])
    tight.run()
    ended = tight.machine.ended()
    first_s = min(ended[number].first_token_s or 0.0 for number in tight.best_effort)
    assert ended[0].finish_s < first_s
    easy = Served(SETUP, [wish._replace(total_s=10 * took_s), *others])
    easy.run()
    ended = easy.machine.ended()
    assert min(ended[number].first_token_s or inf for number in easy.best_effort) < took_s


class Told:
    """Forecasts by hand: each number in the engine makes all that is wanted a second later."""

    def __init__(self) -> None:
        self.num_asked = 0

    def __call__(
        self, state: State, times: Any, wanted: list[int], *, queued: Any, coming: Any, **_: Any
    ) -> Mapping[int, PredictedTimes]:
        self.num_asked += 1
        took_s = float(len(state.requests) + len(queued) + len(coming))
        return {number: PredictedTimes(took_s, took_s) for number in wanted}


def asks(number: int, total_s: float) -> PromiseRequest:
    return PromiseRequest((new_snapshot(number, 4, 4),), Due(inf, total_s))


def outlooks(verdicts: list[AdmissionVerdict | None]) -> list[str | None]:
    return [verdict and verdict.outlook for verdict in verdicts]


def test_all_are_promised_by_one_forecast_if_all_can_be() -> None:
    told = Told()
    admission_round = AdmissionRound(State(SETUP, ()), TIMES, 1.0, {}, forecaster=told)
    verdicts = admission_round.decide([asks(i, 9.0) for i in range(8)])
    assert outlooks(verdicts) == ["promised"] * 8
    assert verdicts[0] == AdmissionVerdict(
        "promised", PredictedTimes(8.0, 8.0), PredictedTimes(8.0, 8.0)
    )
    assert told.num_asked == 1


def test_of_too_many_those_that_come_first_are_promised() -> None:
    admission_round = AdmissionRound(State(SETUP, ()), TIMES, 1.0, {}, forecaster=Told())
    verdicts = admission_round.decide([asks(0, 2.0), asks(1, 2.0), asks(2, 2.0)])
    assert outlooks(verdicts) == ["promised", "promised", "refused"]


def test_a_storm_costs_a_bounded_number_of_forecasts() -> None:
    told = Told()
    admission_round = AdmissionRound(State(SETUP, ()), TIMES, 1.0, {}, forecaster=told)
    verdicts = admission_round.decide([asks(i, 0.5) for i in range(500)])
    assert {*outlooks(verdicts)} == {"refused", None}
    assert outlooks(verdicts).count(None) > 400
    assert told.num_asked <= 12


def test_a_refusal_is_told_before_the_next_forecast() -> None:
    told, refused = Told(), list[tuple[int, int, str]]()
    admission_round = AdmissionRound(State(SETUP, ()), TIMES, 1.0, {}, forecaster=told)
    asked = [asks(0, 9.0), asks(1, 0.5), asks(2, 9.0), asks(3, 0.5)]
    verdicts = admission_round.decide(
        asked, lambda i, verdict: refused.append((i, told.num_asked, verdict.outlook))
    )
    assert outlooks(verdicts) == ["promised", "refused", "promised", "refused"]
    # Of all, of the first two, of each of these; of the last two, of each of these.
    assert refused == [(1, 4, "refused"), (3, 7, "refused")]


def test_what_is_broken_already_forbids_nothing() -> None:
    old = asks(0, -1.0)
    state = State(SETUP, old.snapshots)
    admission_round = AdmissionRound(state, TIMES, 1.0, {0: old}, forecaster=Told())
    (verdict,) = admission_round.decide([asks(1, 5.0)])
    assert verdict is not None
    assert verdict.outlook == "promised"


def test_as_many_may_enter_as_break_nothing() -> None:
    one = asks(0, 6.0)
    admission_round = AdmissionRound(
        State(SETUP, one.snapshots), TIMES, 1.0, {0: one}, forecaster=Told()
    )
    queued = [new_snapshot(10 + i, 4, 4) for i in range(16)]
    assert admission_round.num_may_enter(queued) == 4
    assert admission_round.num_may_enter(queued[:5]) == 5
    assert (
        AdmissionRound(State(SETUP, ()), TIMES, 1.0, {}, forecaster=Told()).num_may_enter(queued)
        == 16
    )


def test_what_others_delay_is_no_error_of_a_forecast() -> None:
    one = asks(0, 30.0)
    admission_round = AdmissionRound(
        State(SETUP, one.snapshots), TIMES, 1.0, {0: one}, forecaster=Told()
    )
    assert admission_round.delays_s() == {0: (0.0, 0.0)}
    admission_round.decide([asks(1, 9.0), asks(2, 9.0)])
    assert admission_round.delays_s()[0] == (2.0, 2.0)
    assert admission_round.num_may_enter([new_snapshot(9, 4, 4)]) == 1
    assert admission_round.delays_s()[0] == (3.0, 3.0)


def test_a_forecast_is_compared_with_its_margin() -> None:
    admission_round = AdmissionRound(State(SETUP, ()), TIMES, 1.5, {}, forecaster=Told())
    (verdict,) = admission_round.decide([asks(0, 1.6)])
    assert verdict == AdmissionVerdict(
        "promised", PredictedTimes(1.0, 1.0), PredictedTimes(1.5, 1.5)
    )


def test_who_is_in_time_without_the_margin_only_is_accepted_and_not_promised() -> None:
    admission_round = AdmissionRound(State(SETUP, ()), TIMES, 1.5, {}, forecaster=Told())
    verdicts = admission_round.decide([asks(0, 9.0), asks(1, 2.5), asks(2, 2.5), asks(3, 9.0)])
    assert outlooks(verdicts) == ["promised", "unpromised", "refused", "promised"]


def test_who_has_no_promise_hinders_nobody() -> None:
    """It may become late by one that is promised; nor does best effort wait for it."""
    one = asks(0, 1.2)._replace(is_protected=False)
    admission_round = AdmissionRound(
        State(SETUP, one.snapshots), TIMES, 1.5, {0: one}, forecaster=Told()
    )
    assert admission_round.num_may_enter([new_snapshot(9, 4, 4)]) == 1
    assert outlooks(admission_round.decide([asks(1, 9.0)])) == ["promised"]
    assert admission_round.delays_s()[0] == (1.0, 1.0)


def test_who_would_harm_a_promise_is_refused_even_without_one() -> None:
    one = asks(0, 1.6)
    admission_round = AdmissionRound(
        State(SETUP, one.snapshots), TIMES, 1.5, {0: one}, forecaster=Told()
    )
    assert outlooks(admission_round.decide([asks(1, 2.5)])) == ["refused"]


def test_the_verdict_stays_what_it_was_when_others_delay_it_in_the_same_round() -> None:
    admission_round = AdmissionRound(State(SETUP, ()), TIMES, 1.5, {}, forecaster=Told())
    verdicts = admission_round.decide([asks(0, 1.2), asks(1, 9.0), asks(2, 9.0)])
    assert outlooks(verdicts) == ["unpromised", "promised", "promised"]
    assert [verdict.foreseen.end_s for verdict in verdicts if verdict] == [3.0, 3.0, 3.0]


def test_what_may_fail_is_not_delayed() -> None:
    """A promise that would be late with a margin, and is in time without: nobody goes before."""
    one = asks(0, 1.05)
    state = State(SETUP, one.snapshots)
    admission_round = AdmissionRound(state, TIMES, 1.2, {0: one}, forecaster=Told())
    (verdict,) = admission_round.decide([asks(1, 100.0)])
    assert verdict is not None
    assert verdict.outlook == "refused"
    assert admission_round.num_may_enter([new_snapshot(9, 4, 4)]) == 0

    class Behind(Told):
        """Who is not in the engine delays nobody."""

        def __call__(self, *arguments: Any, **more: Any) -> Mapping[int, PredictedTimes]:
            return super().__call__(*arguments, **more | {"queued": (), "coming": ()})

    admission_round = AdmissionRound(state, TIMES, 1.2, {0: one}, forecaster=Behind())
    (verdict,) = admission_round.decide([asks(1, 100.0)])
    assert verdict is not None
    assert verdict.outlook == "promised"


def test_what_is_foreseen_counts_all_that_come_in_the_same_round() -> None:
    told = Told()
    admission_round = AdmissionRound(State(SETUP, ()), TIMES, 1.0, {}, forecaster=told)
    verdicts = admission_round.decide([asks(0, 9.0), asks(1, 9.0), asks(2, 0.5), asks(3, 9.0)])
    assert [verdict.foreseen.end_s for verdict in verdicts if verdict] == [3.0, 3.0, 3.0, 3.0]
    assert outlooks(verdicts) == ["promised", "promised", "refused", "promised"]


def test_no_forecast_begins_when_the_time_is_over() -> None:
    told, left = Told(), [True, True]

    def has_time() -> bool:
        return bool(left and left.pop())

    admission_round = AdmissionRound(
        State(SETUP, ()), TIMES, 1.0, {}, has_time=has_time, forecaster=told
    )
    assert admission_round.decide([asks(i, 0.5) for i in range(8)]) == [None] * 8
    assert told.num_asked == 2


def test_the_length_of_an_answer_is_expected_from_those_to_the_same_key() -> None:
    lengths = Lengths()
    for num in range(1, 21):
        lengths.note("a", num)
    assert lengths.expected("a", 500) == 18
    assert lengths.expected("a", 5) == 5
    assert lengths.expected("b", 500) == 500


def test_slack_is_less_for_who_has_more_to_do() -> None:
    due = Due(2.0, 5.0)
    start_s = latest_start_s(TIMES, 30, 4, due)
    assert latest_start_s(TIMES, 30, 450, due) < latest_start_s(TIMES, 30, 400, due) < start_s
    assert latest_start_s(TIMES, 32, 4, Due(1.0)) < latest_start_s(TIMES, 4, 4, Due(1.0)) < 1.0


def test_slack_counts_only_the_keys_that_windows_let_through() -> None:
    """A model with windows has less to read of a long prompt, and may begin later."""
    of_attention = replace(TIMES, per_position_s=1e-5, per_pair_s=1e-6)
    with_windows = replace(of_attention, windows=((16, 0.5),))
    for due in (Due(first_s=2.0), Due(end_s=9.0)):
        start_s = latest_start_s(of_attention, 500, 100, due)
        assert latest_start_s(with_windows, 500, 100, due) > start_s
    short = Due(first_s=2.0)
    assert latest_start_s(with_windows, 16, 1, short) == pytest.approx(
        latest_start_s(of_attention, 16, 1, short)
    )


# --- promises to others ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_before", "owner", "is_kept"), [(30, "v", True), (30, "a", False), (3, "v", False)]
)
def test_what_a_key_was_promised_beyond_its_share_hinders_no_other(
    num_before: int, owner: str, is_kept: bool
) -> None:
    """Eight slots, and a newcomer for whom all promises of before would be late."""

    def forecaster(
        state: State, times: object, numbers: list[int], *, coming: tuple[Any, ...], **more: object
    ) -> dict[int, PredictedTimes]:
        return {n: PredictedTimes(0.5, 0.5 if n >= 100 or not coming else 3.0) for n in numbers}

    admission_round = AdmissionRound(
        State(replace(SETUP, max_num_seqs=8), ()),
        TIMES,
        1.0,
        {
            i: PromiseRequest((new_snapshot(i, 5, 5, owner="a"),), Due(2.0, 2.0))
            for i in range(num_before)
        },
        forecaster=forecaster,
    )
    newcomer = PromiseRequest((new_snapshot(100, 5, 5, num_answers=6, owner=owner),), Due(2.0, 2.0))
    (verdict,) = admission_round.decide([newcomer])
    assert verdict is not None
    assert (verdict.outlook == "promised") == is_kept
