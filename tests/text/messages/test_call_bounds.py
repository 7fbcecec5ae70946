"""An answer ends before a call that it has made already, however its text is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.decoding.text import TextStream
from ridgeline.text.messages.call_bounds import (
    MAX_CALLS,
    REPEATED_CALL,
    TOO_MANY_CALLS,
    BoundedCalls,
    CallBounds,
    may_become,
)
from ridgeline.text.messages.message import MessageForm, MessageReader
from ridgeline.text.messages.tools import Tool, ToolUse, format_named
from tests.core.decoding.letters import Letters

PARAMETERS = {"properties": {"city": {"type": "string"}, "tags": {}}}
USE = ToolUse((Tool("weather", PARAMETERS), Tool("now", {})))
JSON_CALL = '{"name": "%s", "%s": %s}'


def spelled(name: str, calls: list[tuple[str, str]]) -> str:
    """Calls as a format writes them, their arguments in JSON."""
    form = format_named(name, "")
    if name == "qwen3_xml":
        return "\n".join(f"<tool_call>\n{_xml(*call)}\n</tool_call>" for call in calls)
    if name == "gemma4":
        texts = [f"call:{tool}{_quoted(arguments)}" for tool, arguments in calls]
    else:
        texts = [JSON_CALL % (tool, form.key, arguments) for tool, arguments in calls]
    if form.separator is None:
        return "\n".join(f"{form.begin}\n{text}\n{form.end}" for text in texts)
    inner = f"{form.separator} ".join(texts)
    return f"{form.begin} {form.opening}{inner}{form.closing}{form.end}".lstrip()


def _xml(tool: str, arguments: str) -> str:
    parts = [
        f"<parameter={key}>\n{value if key == 'city' else json.dumps(value)}\n</parameter>\n"
        for key, value in json.loads(arguments).items()
    ]
    return f"<function={tool}>\n{''.join(parts)}</function>"


def _quoted(arguments: str) -> str:
    parts = [
        f'{key}:<|"|>{value}<|"|>' if isinstance(value, str) else f"{key}:{json.dumps(value)}"
        for key, value in json.loads(arguments).items()
    ]
    return "{" + ",".join(parts) + "}"


def calls_in(name: str, text: str) -> list[list[str]]:
    reader = MessageReader(MessageForm(tools=(format_named(name, ""), USE)))
    found: list[list[str]] = []
    for kind, piece in reader.feed(text) + reader.finish():
        if kind == "call":
            found.append([piece, ""])
        elif kind == "arguments":
            found[-1][1] += piece
    return found


def bounded(name: str, text: str, places: list[int]) -> tuple[str, str | None]:
    """What of a text is shown, and which bound has ended it."""
    bounds = CallBounds(MessageForm(tools=(format_named(name, ""), USE)))
    cuts = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    shown = "".join([bounds.feed(text[a:b]) for a, b in pairwise(cuts)])
    return shown + bounds.finish(), bounds.ended_by


OSLO = ("weather", '{"city": "Os\\"lo", "tags": [1]}')
SAME = ("weather", '{"tags":[1.0],  "city":"Os\\"lo"}')  # once it is parsed
NAMES = ("hermes", "llama3_json", "mistral", "gemma4", "phi4_mini_json", "qwen3_xml")
names = st.sampled_from(NAMES)
places = st.lists(st.integers(0, 1000), max_size=40)


@given(name=names, places=places, second=st.sampled_from([OSLO, SAME]))
def test_a_call_that_was_made_ends_the_answer_before_it(
    name: str, places: list[int], second: tuple[str, str]
) -> None:
    others = [OSLO, ("now", "{}"), ("weather", '{"city": "Os", "tags": [1]}')]
    text = spelled(name, [*others, second, ("now", '{"a": 1}')])
    shown, ended_by = bounded(name, text, places)
    assert ended_by == REPEATED_CALL
    assert text.startswith(shown)
    found = calls_in(name, shown)
    assert [(tool, json.loads(one)) for tool, one in found] == [
        (tool, json.loads(one)) for tool, one in others
    ]


@given(name=names, places=places)
def test_calls_that_differ_are_shown_as_they_are(name: str, places: list[int]) -> None:
    tags: list[Any] = [1, True, "1", [1], {"a": 1}, {"a": 2}, None, 1.5]
    calls = [("weather", json.dumps({"city": "Oslo", "tags": one})) for one in tags]
    text = spelled(name, [*calls, ("weather", '{"city": "Oslo"}'), ("now", "{}")])
    assert bounded(name, text, places) == (text, None)


@pytest.mark.parametrize("name", NAMES)
def test_no_answer_has_more_calls_than_the_bound(name: str) -> None:
    calls = [("weather", json.dumps({"city": f"{i}", "tags": i})) for i in range(MAX_CALLS + 5)]
    shown, ended_by = bounded(name, spelled(name, calls), [])
    assert ended_by == TOO_MANY_CALLS
    assert len(calls_in(name, shown)) == MAX_CALLS
    assert bounded(name, spelled(name, calls[:MAX_CALLS]), [])[1] is None


@pytest.mark.parametrize("name", NAMES)
def test_a_call_is_shown_as_soon_as_it_can_be_no_earlier_one(name: str) -> None:
    """So a long second call comes piece by piece, like the first."""
    first, second = ({"city": f"{one} of the north", "tags": "x" * 200} for one in ("Oslo", "Oslu"))
    text = spelled(name, [("weather", json.dumps(one)) for one in (first, second)])
    at = text.index("Oslu") + len("Oslu")
    bounds = CallBounds(MessageForm(tools=(format_named(name, ""), USE)))
    held = len(text[: at - 1]) - len(bounds.feed(text[: at - 1]))
    assert 0 < held < 100, "what may become the first call again is held back"
    assert bounds.feed(text[at - 1 : at]), "the last letter tells them apart"
    for char in text[at : text.index("x" * 200, at) + 190]:
        assert bounds.feed(char) == char


def test_a_call_of_another_tool_is_shown_once_its_name_is_known() -> None:
    bounds = CallBounds(MessageForm(tools=(format_named("hermes", ""), USE)))
    text = spelled("hermes", [OSLO, ("now", '{"a": 1}')])
    end = text.index('"arguments"', text.index('"now"')) + len('"arguments": ')
    assert bounds.feed(text[:end]) + bounds.feed(text[end]) == text[: end + 1]


def test_what_must_go_on_is_not_ended() -> None:
    """As with ``min_tokens``: then all is text."""
    form = MessageForm(tools=(format_named("hermes", ""), USE))
    text = BoundedCalls(TextStream(Letters()), form)
    written = spelled("hermes", [OSLO, OSLO])
    assert [text.feed(ord(char), may_stop=False) for char in written] == [None] * len(written)
    assert text.take() == written
    ends = [text.feed(ord(char), may_stop=True) for char in written]
    assert {*ends} == {None, REPEATED_CALL}
    text.finish()
    assert not text.take().strip(), "nothing of a call that was made is shown"


@given(
    one=st.dictionaries(st.sampled_from("ab\\"), st.text('ab\\\n"é', max_size=4), max_size=3),
    other=st.dictionaries(
        st.sampled_from("ab\\"), st.text('ab\\\n"é', max_size=4) | st.integers(0, 20), max_size=3
    ),
    is_ascii=st.booleans(),
)
def test_nothing_that_may_become_equal_is_told_apart(
    one: dict[str, Any], other: dict[str, Any], is_ascii: bool
) -> None:
    text = json.dumps(other, ensure_ascii=is_ascii)
    found = [may_become(text[:end], one) for end in range(1, len(text) + 1)]
    assert found == sorted(found, reverse=True), "once it is told apart it stays so"
    if one == other:
        assert all(found)
    assert may_become("{", one)
