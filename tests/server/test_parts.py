"""The edge's small pure parts: buckets, halving a step, names of fields."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, Step, StepOutput, TokenLogprobs, Work
from ridgeline.server.engine.bisect_faults import ContainedRunner, StepLost
from ridgeline.server.http.errors import ApiError, shortened
from ridgeline.server.http.keys import Keys
from ridgeline.server.http.limits import Limits

PLAIN = Sampling(SamplingParams(), 1, ())


def test_buckets_fill_with_time_and_remember_debt() -> None:
    now_s = [0.0]
    limits = Limits(None, 60, None, lambda: now_s[0])
    limits.take("a", 30)
    limits.charge("a", 90)  # an answer longer than what was left
    with pytest.raises(ApiError) as refused:
        limits.take("a", 10)
    assert refused.value.headers["retry-after"] == "70"  # 60 tokens of debt, and 10 more
    now_s[0] = 70.0
    limits.take("a", 10)
    now_s[0] = 1e6
    limits.take("a", 200)  # more than a minute's
    limits.take("b", 1)
    left = [limits.headers(key)["x-ratelimit-remaining-tokens"] for key in "ab"]
    assert left == ["0", "59"]


def test_keys_are_compared_whole() -> None:
    keys = Keys(["secret"], None)
    assert keys.label_of(b"Bearer secret") == "key1"
    for header in (None, b"", b"Bearer secre", b"Bearer secrets", b"secret", b"Bearer Secret"):
        assert keys.label_of(header) is None
    assert "secret" not in str(vars(keys)["_keys"])


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
    of_states = Step(work, (), (), (), (), ((0, 1),))
    with pytest.raises(StepLost):
        ContainedRunner(runner, lambda error: None).execute(of_states)
    assert not runner.done


@pytest.mark.parametrize("quote", ["'", '"', ""])
def test_a_message_is_short_however_long_the_value_is_that_it_quotes(quote: str) -> None:
    message = str(ApiError(400, f"keep_alive: {quote}{'x' * 8_000_000}{quote} is not a time"))
    assert message == f"keep_alive: {quote}{'x' * 80}...{quote} is not a time"


def test_a_short_message_stays_as_it_is() -> None:
    for message in (
        "the server's log says more than the client's own words, which nobody has ever read at all",
        f"{'x' * 80!r} is not a time: write seconds, or a number with s, m or h",
        "this server has " + ", ".join(f"'model {i}'" for i in range(60)),
    ):
        assert shortened(message) == message


@given(st.text("a' \"", max_size=3000))
def test_every_message_is_short(text: str) -> None:
    assert len(str(ApiError(400, text, param=text))) <= 1005
