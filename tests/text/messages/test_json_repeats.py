"""Lists and objects that repeat end; those whose elements differ do not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import chain, cycle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.text.grammar.grammars import Grammars, Source
from ridgeline.text.messages.json_repeats import (
    LEAST_CHARS,
    MOST_NESTED,
    EndingRepeats,
    JsonRepeats,
    json_tokens,
)
from ridgeline.text.messages.message import MessageForm
from ridgeline.text.messages.tools import Tool, ToolUse, format_named
from tests.text.grammar.test_grammars import EOS, Bytes, allowed

MANY = 3 * LEAST_CHARS
LONG = [b"0,0,", b'",', b'","', b"},", b'},{"a":1', b",1", b"[[[", b"]],"]


class Words(Bytes):
    """The same with a few tokens that are more than a byte."""

    vocab_size = EOS + 1 + len(LONG)

    def token_bytes(self, token: int) -> bytes:
        return LONG[token - EOS - 1] if token > EOS else super().token_bytes(token)


TOKENS = json_tokens(
    Words().token_bytes(i).decode(errors="replace") for i in range(Words.vocab_size)
)


@pytest.fixture(scope="module")
def of_words() -> Iterator[Grammars]:
    found = Grammars(Words(), [EOS], timeout_s=20)  # type: ignore[arg-type]
    yield found
    found.close()


def watched(of_words: Grammars, schema: Any) -> EndingRepeats:
    new = of_words.constraint(Source("json", json.dumps(schema)))
    return EndingRepeats(new(), Words().token_bytes, TOKENS)


def answer(of_words: Grammars, schema: Any, wish: Iterable[int], ends: bytes = b"]}:0") -> str:
    """What is written by who wants these tokens, and any of ``ends`` where one may not come."""
    state, written = watched(of_words, schema), b""
    wanted = iter(wish)
    wanted_now = next(wanted)
    while not state.is_over and len(written) < MANY:
        [mask] = state.masks(())
        may_come = [i for i in range(Words.vocab_size) if mask[i // 8] >> i % 8 & 1]
        if wanted_now in may_come:
            token, wanted_now = wanted_now, next(wanted, EOS)
        else:
            token = next(i for i in (*ends, EOS, *may_come) if i in may_come)
        if token == EOS:
            break
        state.accept(token)
        written += Words().token_bytes(token)
    return written.decode()


@pytest.mark.parametrize(
    "unit",
    ["0,", '"ab",', '{"a":1},', "0,1,", "[0,0],", '"a,]",', "null,true,1,", "1.50,", '[[""]],'],
)
def test_a_list_that_repeats_ends(of_words: Grammars, unit: str) -> None:
    text = answer(of_words, {"type": "array"}, chain(b"[", cycle(unit.encode())))
    assert LEAST_CHARS <= len(text) < LEAST_CHARS + 8 * len(unit) + 40
    assert text.startswith(f"[{unit * 8}")
    json.loads(text)


def test_so_does_a_list_within_another_and_the_other_goes_on(of_words: Grammars) -> None:
    text = answer(of_words, {"type": "array"}, chain(b"[[", (b"0,"[i % 2] for i in range(600))))
    first, *others = json.loads(text)
    assert len(first) * 2 < LEAST_CHARS + 20
    assert len(others) > 8


@pytest.mark.parametrize("unit", ['"a":1,', '"a":1,"b":[2],', '"a":{"b":{}},'])
def test_an_object_whose_names_repeat_ends(of_words: Grammars, unit: str) -> None:
    """Whatever their values are."""
    text = answer(of_words, {"type": "object"}, chain(b"{", cycle(unit.encode())))
    assert text.startswith(f"{{{unit * 8}")
    json.loads(text)
    digits = (f'"a":{i},'.encode() for i in range(10_000))
    assert len(answer(of_words, {"type": "object"}, chain(b"{", *digits))) < MANY


def test_elements_that_differ_may_be_any_number(of_words: Grammars) -> None:
    for units in (
        (f"{i}," for i in range(10_000)),
        (f'{{"id":{i},"a":0}},' for i in range(10_000)),
        (f"{i * i % 97}," for i in range(10_000)),
    ):
        wish = chain(b"[", *(unit.encode() for unit in units))
        assert len(answer(of_words, {"type": "array"}, wish)) == MANY
    members = (f'"n{i}":0,'.encode() for i in range(10_000))
    assert len(answer(of_words, {"type": "object"}, chain(b"{", *members))) == MANY


def test_what_the_schema_asks_for_comes(of_words: Grammars) -> None:
    zeros = {"type": "array", "items": {"const": 0}}
    numbers = {"type": "array", "items": {"type": "number"}}
    for schema in (zeros, numbers):
        for bounds in ({"minItems": 400}, {"minItems": 20, "maxItems": 20}):
            found = answer(of_words, schema | bounds, chain(b"[", cycle(b"0,")))
            assert json.loads(found) == [0] * bounds["minItems"]
            assert found.count("0") == len(found) // 2


@pytest.mark.parametrize("unit", [b"[", b'{"a":'])
def test_brackets_are_nested_only_so_deep(of_words: Grammars, unit: bytes) -> None:
    text = answer(of_words, {"type": ["array", "object"]}, cycle(unit))
    assert text.count(unit.decode()) == MOST_NESTED
    json.loads(text)


def test_tokens_of_several_characters_get_around_nothing(of_words: Grammars) -> None:
    place = {text: EOS + 1 + i for i, text in enumerate(LONG)}
    wishes = {
        "zeros": chain(b"[", cycle([place[b"0,0,"]])),
        "texts": chain(b'["a', cycle([place[b'","'], *b"a"])),
        "objects": chain(b'[{"a":1', cycle([place[b'},{"a":1']])),
        "brackets": cycle([place[b"[[["]]),
    }
    for name, wish in wishes.items():
        ends = b'"]' if name == "texts" else b"]}:0"
        text = answer(of_words, {"type": "array"}, wish, ends)
        assert len(text) < LEAST_CHARS + 80, name
        json.loads(text)


def test_no_draft_is_verified_where_a_repeat_may_end(of_words: Grammars) -> None:
    """So the masks behind drafts are those without them."""
    state = watched(of_words, {"type": "array"})
    for i, byte in enumerate(b"[" + b"0," * (LEAST_CHARS // 2)):
        num_left = LEAST_CHARS + 1 - i
        drafts = tuple(b"0,0,0,0,"[(i + 1) % 2 :] if i else b"[0,0")
        num_valid = state.num_valid(drafts)
        if num_left > len(drafts) + 8:
            assert num_valid == len(drafts)
        elif num_left < len(drafts) - 2:
            assert not num_valid
        if allowed(state.masks(())[0]) >= {byte}:
            state.accept(byte)


def test_one_that_is_forked_goes_on_alone(of_words: Grammars) -> None:
    state = watched(of_words, {"type": "array"})
    for byte in b"[" + b"0," * (LEAST_CHARS // 2 + 1) + b"0":
        state.accept(byte)
    other = state.fork()
    assert state.masks(()) == other.masks(())
    assert ord(",") not in allowed(other.masks(())[0])
    for byte in b".5":  # it is no zero again
        other.accept(byte)
    assert ord(",") in allowed(other.masks(())[0])
    assert ord(",") not in allowed(state.masks(())[0])


def test_the_arguments_of_calls_are_read(of_words: Grammars) -> None:
    form = MessageForm(tools=(format_named("hermes", ""), ToolUse((Tool("f", {}),))))
    frame = 'start: "<tool_call>{\\"name\\": \\"f\\", \\"arguments\\": " @body "}</tool_call>"'
    new = of_words.constraint(Source("json", '{"type": "object"}', frame=frame))
    for has_json in (True, False):
        state = EndingRepeats(new(), Words().token_bytes, TOKENS, form, has_json=has_json)
        text = '<tool_call>{"name": "f", "arguments": {"é":[' + "0," * LEAST_CHARS
        written = ""
        for byte in text.encode():
            if byte not in allowed(state.masks(())[0]):
                break
            state.accept(byte)
            written += chr(byte)
        assert text[len(written) - 1] == ","
        assert LEAST_CHARS < len(written) < LEAST_CHARS + 80


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner),
)


@given(values, st.integers(0, 3))
def test_no_short_value_is_ruled_out_anywhere(value: Any, indent: int) -> None:
    text = json.dumps(value, indent=indent or None, ensure_ascii=False)
    reader = JsonRepeats()
    for i, char in enumerate(text):
        assert not reader.rules_out(text[i : i + 5])
        reader.feed(char)
