"""Stages that run ahead: the same answers, and tokens that are there when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline import LLM, SamplingParams
from ridgeline.backends.cpu.pipeline.parts import LEAST_ROWS, TokenSpan
from ridgeline.backends.cpu.pipeline.runner import Drawn, PartAhead
from ridgeline.backends.step_codec import StepDecoder, StepEncoder
from ridgeline.core.step import Step, StepOutput, Work
from ridgeline.core.structured import StructuredOutputsParams
from tests.backends.runners import step, work
from tests.engine.test_llm import model  # noqa: F401  (a fixture)

BLOCK, LONGEST = 16, 128
OPTIONS: dict[str, Any] = {"threads": 2, "max_model_len": LONGEST}
TIGHT = {"kv_cache_memory": "48KiB"}  # so that texts lose their blocks


@pytest.fixture(scope="module")
def staged(model: Path) -> Iterator[LLM]:  # noqa: F811
    with LLM(model, stages=2, **OPTIONS, **TIGHT) as llm:
        yield llm
        llm.runner.close()  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def whole(model: Path) -> Iterator[LLM]:  # noqa: F811
    with LLM(model, **OPTIONS, **TIGHT) as llm:
        yield llm


FORM = StructuredOutputsParams(regex="[a-f]{9}")
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.2, "top_p": 0.9},
    "what was said counts": {"repetition_penalty": 1.3, "presence_penalty": 0.5},
    "log-probabilities": {"logprobs": 4},
    "several": {"temperature": 1.0, "n": 3},
    "a form": {"structured_outputs": FORM, "ignore_eos": False},
    "beams": {"n": 2, "temperature": 0.0, "use_beam_search": True},
    "ends by chance": {"temperature": 1.5, "ignore_eos": False},
}


def told(llm: LLM, kind: str) -> Any:
    """Twenty-four answers of different lengths, more than there are blocks for."""
    prompts = [[40 + i] * (1 + 5 * (i % 7)) for i in range(24)]
    fields = {"ignore_eos": True} | KINDS[kind]
    params = [SamplingParams(max_tokens=12 + i, seed=i, **fields) for i in range(24)]
    found = llm.generate(prompts, params, progress=False)
    return [[(a.token_ids, a.logprobs, a.finish_reason) for a in one.outputs] for one in found]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_of_one_process(whole: LLM, staged: LLM, kind: str) -> None:
    before = staged.runner.num_ahead  # type: ignore[attr-defined]
    wanted, found = told(whole, kind), told(staged, kind)
    assert found == wanted
    num_ahead = staged.runner.num_ahead - before  # type: ignore[attr-defined]
    num_tokens = sum(len(answer[0]) for one in wanted for answer in one)
    if kind == "beams":  # what follows a beam is not known before all are ranked
        assert num_ahead == 0
    else:
        assert num_ahead > 0.7 * num_tokens


def test_drafts_and_texts_that_are_given_up(model: Path, whole: LLM) -> None:  # noqa: F811
    """Tokens that are guessed are not computed ahead, and what nobody asks for is passed over."""
    options = OPTIONS | TIGHT | {"speculative_config": {"method": "ngram"}}
    with LLM(model, stages=2, **options) as llm:
        try:
            for length in (3, 30):
                llm.engine.add(tuple(range(40, 40 + length)), SamplingParams(max_tokens=40))
            for _ in range(5):
                llm.engine.step()
            llm.engine.abort(0)
            llm.engine.step()
            llm.engine.abort(1)
            assert told(llm, "greedy") == told(whole, "greedy")
        finally:
            llm.runner.close()  # type: ignore[attr-defined]


# --- what is asked for ---------------------------------------------------------------------------

ITEM = work((5, 6, 7), (4, 8), start=2)._replace(others=((9, 10),))
MINE = PartAhead(3, (work((1,), (3,))._replace(others=((2,),)), ITEM))


def test_who_asks_for_what_was_computed_gets_its_row() -> None:
    other = ITEM._replace(seq_id=(77, 0))
    asked = ITEM._replace(table=(4, 8, 11), others=((9, 10, 12),), seeds=(1, 2), history=())
    found = MINE.matches(step(other, asked), {other.seq_id: 0, asked.seq_id: 1}, BLOCK)
    assert found == ([TokenSpan(1, 0, 1)], [1])


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": (8,)},
        {"tokens": (7, 8)},
        {"start": 3},
        {"table": (5, 8)},
        {"others": ((11, 10),)},
        {"seq_id": (4, 1)},
    ],
    ids=str,
)
def test_who_asks_for_anything_else_gets_nothing(change: dict[str, Any]) -> None:
    item = ITEM._replace(**change)
    assert MINE.matches(step(item), {item.seq_id: 0}, BLOCK) == ([], [])


def drawing(index: int, **changes: Any) -> Work:
    return work((index,), (index, 90))._replace(seq_id=(index, 0), others=(), **changes)


def output_of(step: Step) -> StepOutput:
    return StepOutput(tuple((900 + item.seq_id[0],) * len(item.seeds) for item in step.work))


@given(st.integers(1, 200), st.integers(1, 5), st.lists(st.integers(1, 40), min_size=1))
def test_each_token_is_in_one_part_and_parts_are_about_equal(
    count: int, most: int, sizes: list[int]
) -> None:
    asked = step(*(drawing(i) for i in range(count)))
    drawn, parts, begin = Drawn(asked, most, BLOCK, LONGEST), [], 0
    while begin < count:  # results come in parts of any size
        end = min(count, begin + sizes[len(parts) % len(sizes)])
        pieces = [TokenSpan(i, 0, 1) for i in range(begin, end)]
        output = output_of(asked._replace(work=asked.work[begin:end]))
        parts.append(drawn.note(pieces, output))
        begin = end
    parts.append(drawn.rest())
    full = [part for part in parts if part]
    items = [item for part in full for item in part]
    assert [item.tokens for item in items] == [(900 + i,) for i in range(count)]
    assert all(item.start == 1 for item in items)
    assert len(full) <= most
    assert all(len(part) >= min(LEAST_ROWS, count) for part in full[:-1])


@pytest.mark.parametrize(
    "change",
    [
        {"seeds": ()},
        {"seeds": (1, 2)},
        {"top": 3},
        {"drafts": 1, "tokens": (1, 2)},
        {"start": 31},  # whose next block is not there
        {"start": LONGEST - 2, "table": tuple(range(9))},  # the last there is room for
    ],
    ids=str,
)
def test_nothing_is_computed_where_what_follows_is_not_known(change: dict[str, Any]) -> None:
    item = drawing(1, **change)
    drawn = Drawn(step(item), 3, BLOCK, LONGEST)
    assert drawn.note([TokenSpan(0, 0, len(item.tokens))], output_of(step(item))) == ()
    assert drawn.rest() == ()


def test_a_piece_of_a_prompt_and_what_failed_are_not_gone_on_with() -> None:
    asked = step(work(tuple(range(8)), (3, 4)), drawing(2))
    drawn = Drawn(asked, 3, BLOCK, LONGEST)
    assert drawn.note([TokenSpan(0, 0, 4)], StepOutput(((),))) == ()
    failed = StepOutput(((1,),), errors={0: "it is damaged"})
    assert drawn.note([TokenSpan(1, 0, 1)], failed) == ()
    drawn.note([TokenSpan(0, 4, 8)], StepOutput(((6,),)))
    (item,) = drawn.rest()
    assert (item.start, item.tokens) == (8, (6,))


# --- what is told --------------------------------------------------------------------------------

STEPS = st.lists(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), min_size=1, max_size=5,
             unique_by=lambda one: one[0]),
    max_size=12,
)  # fmt: skip


@given(STEPS, st.integers(1, 4))
def test_both_ends_know_the_same_of_earlier_steps(steps: Any, num_steps: int) -> None:
    encoder, decoder = StepEncoder(num_steps), StepDecoder(num_steps)
    last: dict[int, int] = {}
    for number, items in enumerate(steps):
        tables = {index: tuple(range(length + number)) for index, length in items}
        asked = step(*(drawing(index)._replace(table=tables[index]) for index, _ in items))
        written = encoder.write(asked)
        assert decoder.read(written) == asked
        for (index, _), (_, growth) in zip(items, written[0], strict=True):
            known = index in last and number - last[index] <= num_steps
            assert (growth is not None) == known
            last[index] = number
