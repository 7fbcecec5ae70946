"""How answers end: stop ids, stop strings, lengths; and what a request settles at its start."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from ridgeline.core.commit import abort, commit
from ridgeline.core.decoding.text import TextStream
from ridgeline.core.params import SamplingParams
from ridgeline.core.request import Request, Status
from ridgeline.core.step import Event, FinishReason, StepOutput
from tests.core.decoding.letters import Letters
from tests.core.harness import make_scheduler

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def answer(
    sampled: str, *, eos: str = "", max_model_len: int = 100, text: bool = True, **params: Any
) -> list[Event]:
    """Return the events of one answer whose backend samples these letters, as far as it gets."""
    if "stop_ids" in params:
        params["stop_token_ids"] = [ord(letter) for letter in params.pop("stop_ids")]
    settled = SamplingParams(**params)
    request = Request(
        0,
        (0,),
        settled,
        eos_ids=tuple(map(ord, eos)),
        max_model_len=max_model_len,
        new_text=(lambda: TextStream(Letters(), tuple(settled.stop))) if text else None,
    )
    scheduler = make_scheduler()
    scheduler.add(request)
    events: list[Event] = []
    for letter in sampled:
        if not scheduler.queues.has_work():
            break
        events += commit(scheduler.queues, scheduler.schedule(), StepOutput(((ord(letter),),)))
        scheduler.queues.check()
    assert request.is_finished is not scheduler.queues.has_work()
    assert request.is_finished is (request.sequences[0].status is Status.FINISHED)
    assert request.sequences[0].finish_reason is events[-1].finish_reason
    assert all(event.finish_reason is None for event in events[:-1])
    return events


def summary(events: list[Event]) -> tuple[int, str, FinishReason | None, object]:
    """Return how many tokens, the text, how it ended and what ended it."""
    last = events[-1]
    return len(events), "".join(e.text for e in events), last.finish_reason, last.stop_reason


def test_max_tokens_end_an_answer() -> None:
    assert summary(answer("abcdef", max_tokens=3)) == (3, "abc", LENGTH, None)
    assert summary(answer("abcdef", max_tokens=1)) == (1, "a", LENGTH, None)


def test_the_context_length_ends_an_answer() -> None:
    assert summary(answer("abcdef", max_tokens=None, max_model_len=5)) == (4, "abcd", LENGTH, None)
    assert summary(answer("abcdef", max_tokens=50, max_model_len=5)) == (4, "abcd", LENGTH, None)


def test_eos_ends_an_answer_and_is_not_text() -> None:
    assert summary(answer("ab$cd", eos="$")) == (3, "ab", STOP, None)
    assert summary(answer("ab!cd", eos="$!")) == (3, "ab", STOP, None)


def test_ignore_eos_goes_on_but_stop_ids_still_count() -> None:
    events = answer("a$b.c", eos="$", ignore_eos=True, stop_ids=".")
    assert summary(events) == (4, "a$b", STOP, ord("."))


def test_stop_ids_are_named_as_the_reason() -> None:
    assert summary(answer("ab.cd", stop_ids="!.")) == (3, "ab", STOP, ord("."))


def test_a_stop_id_as_the_last_token_allowed_is_a_stop() -> None:
    assert summary(answer("ab.", stop_ids=".", max_tokens=3)) == (3, "ab", STOP, ord("."))


def test_stop_strings_cut_the_text_exactly() -> None:
    assert summary(answer("abcdefg", stop="cde")) == (5, "ab", STOP, "cde")
    assert summary(answer("abcdefg", stop=["x", "ef", "fg"])) == (6, "abcd", STOP, "ef")


def test_a_stop_string_with_the_last_token_allowed_is_a_stop() -> None:
    assert summary(answer("abc", stop="bc", max_tokens=3)) == (3, "a", STOP, "bc")


def test_text_that_may_become_a_stop_string_is_held_back_until_it_cannot() -> None:
    events = answer("axxbxx", stop="xxx", max_tokens=6)
    assert [event.text for event in events] == ["a", "", "", "xxb", "", "xx"]
    assert summary(events)[2:] == (LENGTH, None)


def test_held_back_text_is_released_by_a_stop_id() -> None:
    assert summary(answer("axx.", stop="xxx", stop_ids=".")) == (4, "axx", STOP, ord("."))


def test_stop_strings_do_not_count_before_min_tokens() -> None:
    assert summary(answer("xaxbx", stop="x", min_tokens=3)) == (5, "xaxb", STOP, "x")
    assert summary(answer("xx", stop="x", min_tokens=1)) == (2, "x", STOP, "x")
    assert summary(answer("xx", stop="x", min_tokens=0)) == (1, "", STOP, "x")


def test_stop_ids_cannot_be_chosen_before_min_tokens() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=[9, 4])
    request = Request(0, (1, 2, 3), params, eos_ids=(7,), max_model_len=50)
    assert request.sampling.suppressed == (4, 7, 9)
    assert (request.sampling.params, request.sampling.prompt_len) == (params, 3)
    params = SamplingParams(stop_token_ids=[9])
    assert Request(0, (1,), params, eos_ids=(7,), max_model_len=50).sampling.suppressed == ()
    params = SamplingParams(min_tokens=2, ignore_eos=True)
    assert Request(0, (1,), params, eos_ids=(7,), max_model_len=50).sampling.suppressed == ()


def test_without_a_text_there_are_only_tokens() -> None:
    assert summary(answer("abc", text=False, stop="b", max_tokens=3)) == (3, "", LENGTH, None)
    assert summary(answer("abc", text=False, stop_ids="b")) == (2, "", STOP, ord("b"))


def test_an_aborted_answer_keeps_its_held_back_text() -> None:
    request = Request(
        0,
        (0,),
        SamplingParams(stop="xyz"),
        max_model_len=50,
        new_text=lambda: TextStream(Letters(), ("xyz",)),
    )
    scheduler = make_scheduler()
    scheduler.add(request)
    events = commit(scheduler.queues, scheduler.schedule(), StepOutput(((ord("x"),),)))
    assert events[0].text == ""
    (event,) = abort(scheduler.queues, request)
    assert (event.token, event.text, event.finish_reason) == (None, "x", FinishReason.ABORT)
    assert abort(scheduler.queues, request) == []


# --- what a request settles ------------------------------------------------------------------


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        Request(0, (), SamplingParams(), max_model_len=10)


def test_a_prompt_must_leave_room_for_an_answer() -> None:
    with pytest.raises(ValueError, match=r"has 10 tokens, but .* may have 10 \(--max-model-len;"):
        Request(0, (1,) * 10, SamplingParams(), max_model_len=10)
    assert Request(0, (1,) * 9, SamplingParams(), max_model_len=10).max_len == 10


def test_seeds_differ_between_answers_and_follow_from_the_first() -> None:
    def seeds(default_seed: int = 0, **params: Any) -> tuple[int, ...]:
        settled = SamplingParams(**params)
        request = Request(0, (1,), settled, max_model_len=9, default_seed=default_seed)
        return request.sequences[0].seeds

    many = seeds(n=100, seed=5)
    assert len(set(many)) == 100
    assert all(0 <= seed < 1 << 64 for seed in many)
    assert many[:1] == seeds(seed=5), "the first answer does not depend on how many there are"
    assert seeds(7) == (7,)
    assert seeds(7, seed=5) == (5,)
    assert seeds(7, seed=0) == (0,)
    assert seeds(seed=-1) == ((1 << 64) - 1,)
    assert len({(b - a) % (1 << 64) for a, b in pairwise(many)}) == 1
