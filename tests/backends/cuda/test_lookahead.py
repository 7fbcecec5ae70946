"""What was computed ahead is given only to who asks for exactly that."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.backends.cuda.step.lookahead import Ahead, next_work
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, Step, Wait, Work

HOW = Sampling(SamplingParams(), 3, ())
ITEM = Work((0, 0), 31, (7,), (4, 5, 6), (99,), HOW, (), (), others=((8, 9, 10),))


def step_of(*work: Work, waits: tuple[Any, ...] = ()) -> Step:
    return Step(work, (), (), (), waits)


def test_the_next_step_is_one_position_further() -> None:
    (item,) = next_work(step_of(ITEM), 16, 64) or ()
    assert item._replace(tokens=ITEM.tokens) == ITEM._replace(start=32)


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": (7, 8)},
        {"seeds": ()},
        {"seeds": (1, 2)},
        {"drafts": 1},
        {"masks": (b"1",)},
        {"top": 3},
        {"pool": "last"},
        {"similar": True},
        {"targets": (3,)},
        {"start": 47},  # whose next block is not there
        {"others": ((8, 9),)},  # nor in a group
        {"start": 62, "table": (4, 5, 6, 7, 8), "others": ((8, 9, 10, 11, 12),)},  # the longest
    ],
    ids=str,
)
def test_nobody_runs_ahead_where_the_next_step_is_not_known(change: dict[str, Any]) -> None:
    plain = ITEM._replace(seq_id=(1, 0))
    assert next_work(step_of(plain), 16, 64) is not None
    assert next_work(step_of(plain, ITEM._replace(**change)), 16, 64) is None


def test_who_waits_for_more_than_a_reader_keeps_weights_for_both() -> None:
    assert next_work(step_of(ITEM, waits=(((1, 0), Wait.PAUSED),)), 16, 64) is not None
    for reason in (Wait.TOKEN_BUDGET, Wait.BLOCKS, Wait.MAX_NUM_SEQS, Wait.POLICY):
        assert next_work(step_of(ITEM, waits=(((1, 0), reason),)), 16, 64) is None


def ahead_of(item: Work, token: int) -> Ahead:
    work = next_work(step_of(ITEM._replace(seq_id=(5, 0)), item), 16, 64)
    assert work is not None
    ahead = Ahead(work, None, None)  # type: ignore[arg-type]
    ahead.tokens = [1, token]
    return ahead


ASKED = ITEM._replace(start=32, tokens=(11,))


def test_what_is_asked_for_is_there() -> None:
    ahead = ahead_of(ITEM, 11)
    assert ahead.places(step_of(ASKED), 16) == [1]
    grown = ASKED._replace(table=(*ASKED.table, 12))
    assert ahead.places(step_of(grown, ASKED._replace(seq_id=(6, 0))), 16) == [1, -1]
    behind = ASKED._replace(table=(-1, *ASKED.table[1:]))  # a window has left a block
    assert ahead.places(step_of(behind), 16) == [1]


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": (12,)},
        {"tokens": (11, 12)},
        {"start": 33},
        {"seeds": (98,)},
        {"seeds": (99, 98)},
        {"sampling": Sampling(SamplingParams(), 3, ())},
        {"table": (4, 5, 7)},
        {"others": ((8, 9, 11),)},
        {"masks": (b"1",)},
        {"drafts": 1, "tokens": (11,)},
        {"top": 2},
    ],
    ids=str,
)
def test_what_differs_in_anything_is_computed(change: dict[str, Any]) -> None:
    assert ahead_of(ITEM, 11).places(step_of(ASKED._replace(**change)), 16) == [-1]


def test_nothing_is_known_before_its_tokens_are() -> None:
    ahead = ahead_of(ITEM, 11)
    ahead.tokens = []
    assert ahead.places(step_of(ASKED), 16) == [-1]
