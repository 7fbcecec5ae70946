"""A request that goes on: cut after any token and added to another engine, the rest is the same."""

from __future__ import annotations

import random
from collections.abc import Sequence as Listing
from typing import Any

import pytest

from ridgeline.core.decoding.text import TextStream
from ridgeline.core.engine import Engine
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import Record, RequestRecord
from ridgeline.core.request import Constraint
from ridgeline.core.scheduling.policies import Policy
from ridgeline.core.scheduling.speculate import Speculation
from ridgeline.core.step import Event
from tests.core.decoding.letters import Letters
from tests.core.harness import (
    POLICIES,
    Oracle,
    adapter,
    finish,
    make_engine,
    make_scheduler,
)

PROMPT = (1, 2, 1, 2, 1, 2, 3, 1, 2)
# Letters are the text of tokens: 0 to 3 are the ledger's.
KINDS: dict[str, dict[str, Any]] = {
    "one answer": {"max_tokens": 11, "seed": 4},
    "three answers": {"max_tokens": 9, "seed": 5, "n": 3},
    "answers that end at different times": {
        "max_tokens": 9,
        "seed": 3,
        "n": 4,
        "stop_token_ids": (3,),
    },
    "stop strings": {"max_tokens": 20, "seed": 9, "n": 2, "stop": ("\x01\x02\x03", "\x02\x02\x01")},
    "min_tokens": {"max_tokens": 20, "seed": 9, "n": 2, "stop": ("\x02", "\x00"), "min_tokens": 5},
    "ranked prompts": {"max_tokens": 6, "seed": 1, "n": 2, "prompt_logprobs": 0},
    "best of": {"max_tokens": 6, "seed": 1, "n": 1, "best_of": 3},
    "a form": {"max_tokens": 20, "seed": 2, "n": 2, "structured_outputs": {"regex": "."}},
}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "small": {"num_blocks": 14, "block_size": 3, "budget": 12, "seats": 3},
    "without a cache": {"caching": False},
    "with states": {"checkpoints": 3, "every": 4},
    "with windows": {"windows": (None, 5), "num_blocks": 40},
    "that looks ahead": {"looks_ahead": True, "block_size": 2},
}


class Counted:
    """A form that allows everything, and is complete after seven tokens."""

    def __init__(self, num_taken: int = 0) -> None:
        self.num_taken = num_taken

    @property
    def is_over(self) -> bool:
        return self.num_taken >= 7

    def masks(self, drafts: tuple[int, ...]) -> tuple[bytes, ...]:
        return (b"\xff",) * (len(drafts) + 1)

    def forced(self, most: int) -> tuple[int, ...]:
        return ()

    def num_valid(self, drafts: tuple[int, ...]) -> int:
        return min(len(drafts), 6 - self.num_taken)

    def accept(self, token: int) -> None:
        assert not self.is_over, "a token behind the end"
        self.num_taken += 1

    def fork(self) -> Constraint:
        return Counted(self.num_taken)


def add(engine: Engine, wishes: dict[str, Any], answers: Listing[Listing[int]] = ()) -> int:
    params = SamplingParams(**wishes)
    stop = tuple(params.stop)
    return engine.add(
        PROMPT,
        params,
        new_text=lambda: TextStream(Letters(), stop),
        new_constraint=Counted if params.structured_outputs else None,
        adapter=adapter(1),
        answers=tuple(map(tuple, answers)),
    )


def told(events: Listing[Event]) -> dict[int, list[tuple[object, ...]]]:
    """Return what is told of each answer, in order."""
    out: dict[int, list[tuple[object, ...]]] = {}
    for e in events:
        news = (e.token, e.text, e.finish_reason, e.stop_reason, e.error)
        out.setdefault(e.seq_id[1], []).append(news)
    return out


def said(events: Listing[Event], num_answers: int) -> list[list[int]]:
    """Return the tokens of each answer."""
    answers: list[list[int]] = [[] for _ in range(num_answers)]
    for event in events:
        if event.token is not None:
            answers[event.seq_id[1]].append(event.token)
    return answers


@pytest.mark.parametrize("accuracy", [None, 0.8])
@pytest.mark.parametrize("setting", ENGINES)
@pytest.mark.parametrize("kind", KINDS)
def test_cut_after_any_token_the_rest_is_the_same(
    kind: str, setting: str, accuracy: float | None
) -> None:
    wishes, num_answers = KINDS[kind], SamplingParams(**KINDS[kind]).num_seqs
    whole, _ = make_engine(eos_ids=(7,))
    add(whole, wishes)
    events = finish(whole)
    dice = random.Random(7)
    speculation = None if accuracy is None else Speculation(Oracle(accuracy, dice))
    other, _ = make_engine(
        make_scheduler(**{"speculation": speculation} | ENGINES[setting]), eos_ids=(7,)
    )
    num_ended = 0
    for cut in range(1, len(events)):
        so_far, rest = events[:cut], events[cut:]
        request_id = add(other, wishes, said(so_far, num_answers))
        after = finish(other)
        assert {event.seq_id[0] for event in after} == {request_id}
        assert told(after) == told(rest), f"cut after {cut}"
        num_ended += any(event.finish_reason for event in so_far)
    assert num_ended or num_answers == 1, "no answer had ended when another went on"


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_many_go_on_at_once_under_every_policy(policy: Policy) -> None:
    whole, _ = make_engine(eos_ids=(7,))
    wanted: dict[int, dict[int, list[tuple[object, ...]]]] = {}
    other, _ = make_engine(
        make_scheduler(num_blocks=40, policy=policy, budget=40, seats=4), eos_ids=(7,)
    )
    for wishes in KINDS.values():
        num_answers = SamplingParams(**wishes).num_seqs
        add(whole, wishes)
        events = finish(whole)
        for cut in range(1, len(events), 3):
            request_id = add(other, wishes, said(events[:cut], num_answers))
            wanted[request_id] = told(events[cut:])
    found: dict[int, list[Event]] = {request_id: [] for request_id in wanted}
    for event in finish(other):
        found[event.seq_id[0]].append(event)
    assert {request_id: told(events) for request_id, events in found.items()} == wanted


@pytest.mark.parametrize(
    "wishes",
    [
        {"use_beam_search": True, "best_of": 2, "max_tokens": 5},
        {"penalty_alpha": 0.6, "top_k": 3, "max_tokens": 5},
        {"pool": "last"},
    ],
    ids=["beams", "contrastive search", "a vector"],
)
def test_what_draws_nothing_begins_again(wishes: dict[str, Any]) -> None:
    records: list[Record] = []
    whole, _ = make_engine()
    add(whole, wishes)
    events = finish(whole)
    other, _ = make_engine(listeners=[records.append])
    add(other, wishes, said(events[:2], 1))
    assert told(finish(other)) == told(events)
    (record,) = (one for one in records if isinstance(one, RequestRecord))
    assert record.answers == ()


def test_answers_without_a_token_begin_as_ever() -> None:
    """The prompt is computed once, for all of them."""
    engine, runner = make_engine()
    add(engine, KINDS["three answers"], [[], [], []])
    engine.step()
    assert [len(work.seeds) for work in runner.steps[0].work] == [3]
    finish(engine)


@pytest.mark.parametrize(
    ("kind", "answers", "words"),
    [
        ("three answers", [[1], [2]], "answers has 2, but the request asks for 3"),
        ("one answer", [[1], [2]], "answers has 2, but the request asks for 1"),
        ("one answer", [[1] * 12], r"answers\[0\] goes on behind its end"),
        ("one answer", [[1] * 11], "nothing is left to say"),
        ("one answer", [[1, 7, 1]], r"answers\[0\] goes on behind its end"),
        ("stop strings", [[1, 2], [1, 2, 3, 0]], r"answers\[1\] goes on behind its end"),
        ("stop strings", [[1, 2, 3], [2, 1, 2, 3]], "nothing is left to say"),
        ("a form", [[1] * 8, []], r"answers\[0\] goes on behind its end"),
    ],
)
def test_what_cannot_go_on_is_refused_and_changes_nothing(
    kind: str, answers: list[list[int]], words: str
) -> None:
    records: list[Record] = []
    engine, _ = make_engine(eos_ids=(7,), listeners=[records.append])
    with pytest.raises(ValueError, match=words):
        add(engine, KINDS[kind], answers)
    assert not engine.has_work()
    engine.check()
    assert add(engine, KINDS["one answer"]) == 0
    finish(engine)
    assert sum(isinstance(record, RequestRecord) for record in records) == 1


def test_a_record_says_what_came_from_elsewhere() -> None:
    records: list[Record] = []
    engine, _ = make_engine(eos_ids=(7,), listeners=[records.append])
    add(engine, KINDS["three answers"], [[1, 2, 1, 2], [1, 7], []])
    finish(engine)
    add(engine, KINDS["three answers"], [[1, 2, 1, 2], [1, 7], []])
    finish(engine)
    first, again = (one for one in records if isinstance(one, RequestRecord))
    assert first.answers == again.answers == ((1, 2, 1, 2), (1, 7), ())
    assert first.num_generated[1] == 0
    assert first.num_generated[0] <= 5
    assert first.finish_reasons[1] == "stop"
    assert again.num_cached_tokens == len(PROMPT), "what is cached of answers is none of the prompt"
