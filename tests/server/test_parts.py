"""The edge's small pure parts: the fair queue, buckets, halving a step, names of fields."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, Step, StepOutput, TokenLogprobs, Work
from ridgeline.server.contain import ContainedRunner, StepLost
from ridgeline.server.errors import ApiError
from ridgeline.server.fair import FairQueue
from ridgeline.server.limits import Keys, Limits

PLAIN = Sampling(SamplingParams(), 1, ())
TENANTS = ("a", "b", "c")


@given(st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 50)), max_size=60))
def test_a_tenant_keeps_its_order_and_nothing_is_lost(pushed: list[tuple[str, int]]) -> None:
    queue: FairQueue[tuple[str, int, int]] = FairQueue()
    for i, (tenant, size) in enumerate(pushed):
        queue.push(tenant, (tenant, i, size))
    popped = []
    for left in range(len(pushed), 0, -1):
        assert len(queue) == left
        item = queue.pop()
        queue.charge(item[0], item[2])
        popped.append(item)
    assert not queue
    assert sorted(item[1] for item in popped) == list(range(len(pushed)))
    for tenant in TENANTS:
        order = [i for name, i, _ in popped if name == tenant]
        assert order == sorted(order)


@given(st.lists(st.integers(1, 50), min_size=30, max_size=60))
def test_tenants_that_wait_are_served_alike(sizes: list[int]) -> None:
    """However large their requests, two who always wait are never further apart than a request."""
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for size in sizes:
        queue.push("small", ("small", size))
        queue.push("large", ("large", 5 * size))
    served = {"small": 0, "large": 0}
    for _ in range(len(sizes)):
        tenant, size = queue.pop()
        queue.charge(tenant, size)
        served[tenant] += size
        assert abs(served["small"] - served["large"]) <= 250


def test_who_was_away_cannot_save_up() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(20):
        queue.push("busy", "busy")
    for _ in range(10):
        queue.charge(queue.pop(), 100)
    for _ in range(10):
        queue.push("new", "new")
    order = []
    for _ in range(10):
        order.append(queue.pop())
        queue.charge(order[-1], 100)
    assert order.count("busy") == 5


def served_alone(num_tokens: int) -> FairQueue[str]:
    """A queue through which one tenant, "old", went alone; nobody waits in it now."""
    queue: FairQueue[str] = FairQueue()
    queue.push("old", "old")
    queue.charge(queue.pop(), num_tokens)
    return queue


def test_who_was_served_long_shares_with_a_newcomer_from_now_on() -> None:
    queue = served_alone(1_000_000)
    for _ in range(10):
        queue.push("new", "new")
    for _ in range(10):
        queue.push("old", "old")
    order = []
    for _ in range(10):
        order.append(queue.pop())
        queue.charge(order[-1], 100)
    assert order.count("old") == 5


def test_a_newcomer_is_level_with_what_the_last_one_has_had_by_now() -> None:
    queue = served_alone(10)
    queue.charge("old", 500)  # its answer, after it left the queue
    for _ in range(3):
        queue.push("new", "new")
    queue.push("old", "old")
    queue.charge(queue.pop(), 1)
    assert queue.pop() == "old"


def test_no_counter_is_lowered_by_coming_back() -> None:
    """Who had more than the last one served still has, and waits until that is made up for."""
    queue = served_alone(1000)
    queue.push("new", "new")
    queue.charge(queue.pop(), 10)
    queue.charge("old", 500)  # 1500; the one served last has 1010
    for _ in range(9):
        queue.push("new", "new")
    queue.push("old", "old")
    order = [queue.pop()]
    while order[-1] != "old":
        queue.charge(order[-1], 100)
        order.append(queue.pop())
    assert order.count("new") == 5


def test_removing_takes_out_exactly_what_is_named() -> None:
    queue: FairQueue[int] = FairQueue()
    for i in range(10):
        queue.push("ab"[i % 2], i)
    assert sorted(queue.remove(lambda i: i % 3 == 0)) == [0, 3, 6, 9]
    assert len(queue) == 6
    assert sorted(queue.pop() for _ in range(6)) == [1, 2, 4, 5, 7, 8]


def test_buckets_fill_with_time_and_remember_debt() -> None:
    now_s = [0.0]
    limits = Limits(None, 60, None, lambda: now_s[0])
    limits.enter("a", 30)
    limits.leave("a", 90)  # an answer longer than what was left
    with pytest.raises(ApiError) as refused:
        limits.enter("a", 10)
    assert refused.value.headers["retry-after"] == "70"  # 60 tokens of debt, and 10 more
    now_s[0] = 70.0
    limits.enter("a", 10)
    now_s[0] = 1e6
    assert limits.enter("a", 200)["x-ratelimit-remaining-tokens"] == "0"  # more than a minute's
    assert limits.enter("b", 1)["x-ratelimit-remaining-tokens"] == "59"


def test_keys_are_compared_whole() -> None:
    keys = Keys(["secret"], None)
    assert keys.label_of(b"Bearer secret") == "key1"
    for header in (None, b"", b"Bearer secre", b"Bearer secrets", b"secret", b"Bearer Secret"):
        assert keys.label_of(header) is None
    assert "secret" not in str(vars(keys)["_digests"])


# --- halving a step -----------------------------------------------------------------------------


class Brittle:
    """A runner that raises if any of some sequences is in the step, and notes what ran."""

    def __init__(self, bad: set[int]) -> None:
        self.bad = bad
        self.done: list[int] = []

    def execute(self, step: Step) -> StepOutput:
        ids = tuple(work.seq_id[0] for work in step.work)
        if self.bad & set(ids):
            raise RuntimeError(f"{self.bad & set(ids)}")
        self.done += ids
        ranked = {i: (TokenLogprobs(100 + n, 0.0, 1, ()),) for i, n in enumerate(ids)}
        return StepOutput(tuple((100 + n,) for n in ids), ranked, ranked, {})


@given(st.integers(1, 17), st.sets(st.integers(0, 16)))
def test_exactly_the_guilty_fail_and_everything_stays_in_its_place(
    size: int, bad: set[int]
) -> None:
    bad &= set(range(size))
    work = tuple(Work((i, 0), 0, (i,), (i,), (0,), PLAIN, (), ()) for i in range(size))
    runner, errors = Brittle(bad), list[Exception]()
    output = ContainedRunner(runner, errors.append).execute(Step(work, (), (), (), ()))
    assert set(output.errors) == bad
    assert len(errors) == len(bad)
    good = [i for i in range(size) if i not in bad]
    assert output.tokens == tuple((100 + i,) if i in good else () for i in range(size))
    assert [output.logprobs[i][0].token for i in good] == [100 + i for i in good]
    assert output.prompt_logprobs == output.logprobs
    assert runner.done == good  # each once, in order


def test_a_step_with_copies_is_not_repeated() -> None:
    """The source of a copy may belong to another sequence of the same step by now."""
    work = tuple(Work((i, 0), 0, (i,), (i,), (0,), PLAIN, (), ()) for i in range(2))
    runner = Brittle({1})
    with pytest.raises(StepLost):
        ContainedRunner(runner, lambda error: None).execute(Step(work, ((0, 1),), (), (), ()))
    assert not runner.done
