"""Messages read as they are written: the same pieces joined, however the text is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ridgeline.core.step import Event, FinishReason
from ridgeline.text.messages.message import (
    REASONINGS,
    AnswerReader,
    MessageForm,
    MessageReader,
    ReasoningMarkers,
)
from ridgeline.text.messages.tool_calls import JsonScan, is_text
from ridgeline.text.messages.tools import FORMATS, HERMES, Tool, ToolUse, format_named

TOOLS = (
    Tool(
        "weather",
        {
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "unit": {"type": "string", "enum": ["c", "f"]},
                "tags": {"type": "array"},
            },
        },
    ),
    Tool("now", {}),
)
USE = ToolUse(TOOLS)
WRITTEN = {
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "a \\"}</tool_call>", "tags": [1]}}'
        '\n</tool_call>\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    ),
    "llama3_json": (
        '{"name": "weather", "parameters": {"city": "a \\"}</tool_call>", "tags": [1]}}; '
        '{"name": "now", "parameters": {}}'
    ),
    "mistral": (
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "a \\"}</tool_call>", '
        '"tags": [1]}}, {"name": "now", "arguments": {}}]'
    ),
    "gemma4": (
        '<|tool_call>call:weather{city:<|"|>a "}</tool_call><|"|>,tags:[1]}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>"
    ),
    "phi4_mini_json": (
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "a \\"}</tool_call>", '
        '"tags": [1]}}, {"name": "now", "arguments": {}}]<|/tool_call|>'
    ),
    "qwen3_xml": (
        "<tool_call>\n<function=weather>\n<parameter=city>\na \"}</tool_call>\n</parameter>\n"
        "<parameter=tags>\n[1]\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
}  # fmt: skip
CALLS = [("weather", {"city": 'a "}</tool_call>', "tags": [1]}), ("now", {})]


def read(form: MessageForm, parts: list[str]) -> dict[str, Any]:
    """All of a message: its texts, and its calls with arguments as text."""
    reader = MessageReader(form)
    pieces = [piece for part in parts for piece in reader.feed(part)] + reader.finish()
    found: dict[str, Any] = {"reasoning": "", "content": "", "calls": []}
    for kind, text in pieces:
        if kind == "call":
            found["calls"].append([text, ""])
        elif kind == "arguments":
            found["calls"][-1][1] += text
        else:
            found[kind] += text
    return found


def cut(text: str, places: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in pairwise(bounds)]


places = st.lists(st.integers(0, 1000), max_size=40)
names = st.sampled_from(list(WRITTEN))


def form_of(name: str, **more: Any) -> MessageForm:
    return MessageForm(tools=(format_named(name, ""), USE), **more)


@given(name=names, text=st.sampled_from(["", "Let me see <b.\n", "[TOOL <tool_"]), places=places)
def test_calls_are_the_same_however_they_are_cut(name: str, text: str, places: list[int]) -> None:
    text = "" if name == "llama3_json" else text
    found = read(form_of(name), cut(text + WRITTEN[name], places))
    assert [(name, json.loads(arguments)) for name, arguments in found["calls"]] == CALLS
    assert found["content"] == text.rstrip()


@given(name=names, inside=st.booleans(), places=places)
def test_reasoning_comes_first_and_its_markers_are_dropped(
    name: str, inside: bool, places: list[int]
) -> None:
    thoughts = "\nI might <tool_call> or {\n"
    text = f"{'' if inside else '<think>'}{thoughts}</think>\n\n{WRITTEN[name]}"
    found = read(
        form_of(name, reasoning=ReasoningMarkers(), is_reasoning=inside), cut(text, places)
    )
    assert found["reasoning"] == thoughts.strip()
    assert [name for name, _ in found["calls"]] == ["weather", "now"]
    assert found["content"] == ""


@given(text=st.text(alphabet='<think>/ \n{"ao_cl[', max_size=60), places=places)
def test_a_text_without_markers_is_shown_as_it_is(text: str, places: list[int]) -> None:
    for name in WRITTEN:
        if not any(form.begin and form.begin in text for form in FORMATS):
            assert read(form_of(name), cut(text, places))["content"] == text


@given(places=places)
def test_text_behind_calls_is_content_too(places: list[int]) -> None:
    found = read(form_of("hermes"), cut(f"Well. {WRITTEN['hermes']}\nDone. ", places))
    assert found["content"] == "Well.Done. "
    assert len(found["calls"]) == 2


@given(places=places)
def test_a_call_without_marker_is_one_where_the_message_begins(places: list[int]) -> None:
    call = '{"name": "now", "arguments": {"a": 1}}'
    found = read(form_of("hermes"), cut(f" {call}\n{call}", places))
    assert found == {"reasoning": "", "content": "", "calls": [["now", '{"a": 1}']] * 2}
    assert read(form_of("hermes", has_body=True), [call])["content"] == call
    assert read(form_of("hermes"), [f"See: {call}"])["content"] == f"See: {call}"


UNMARKED = (
    '{\n"name": "now",\n"arguments": {\n"a": 1\n}\n}',
    ' {"name": "now", "arguments": {"a": 1} }\n',
    '```json\n{\n  "name": "now",\n  "arguments": {\n    "a": 1\n  }\n}\n```',
    '\n```json\n{"name": "now", "arguments": {"a": 1}}\n```\n',
)


@given(places=places, call=st.sampled_from(UNMARKED))
def test_a_call_without_marker_may_be_indented_and_fenced(places: list[int], call: str) -> None:
    found = read(form_of("hermes"), cut(call, places))
    [[name, arguments]] = found.pop("calls")
    assert (name, json.loads(arguments)) == ("now", {"a": 1})
    assert found == {"reasoning": "", "content": ""}
    assert read(form_of("hermes", has_body=True), cut(call, places))["content"] == call
    [[name, arguments]] = read(form_of("phi4_mini_json"), cut(call, places))["calls"]
    assert (name, json.loads(arguments)) == ("now", {"a": 1})


@given(
    places=places,
    text=st.sampled_from(UNMARKED),
    change=st.sampled_from([('"now"', '"nowhere"'), ("arguments", "args"), ("{", "[")]),
)
def test_json_that_calls_no_tool_is_text(
    places: list[int], text: str, change: tuple[str, str]
) -> None:
    text = text.replace(*change)
    assert read(form_of("hermes"), cut(text, places))["content"] == text


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_cut_off_is_delivered_as_far_as_it_is_known(name: str) -> None:
    whole = WRITTEN[name]
    shown = ""
    for end in range(len(whole)):
        found = read(form_of(name), [whole[:end]])
        assert whole[:end].endswith(found["content"])  # the beginning of a marker
        assert len(found["content"]) < len("<|tool_call|>")
        calls = "".join(name + arguments for name, arguments in found["calls"])
        assert calls.startswith(shown)
        shown = calls
    assert len(read(form_of(name), [whole])["calls"]) == 2


@given(places=places, label=st.sampled_from(["thought\n", "", "thoug"]))
def test_a_label_behind_the_marker_is_no_thought(places: list[int], label: str) -> None:
    form = form_of("gemma4", reasoning=REASONINGS["gemma4"])
    found = read(form, cut(f"<|channel>{label}Hm, <b>.\n<channel|>Well.", places))
    rest = "" if label == "thought\n" else label
    assert found == {"reasoning": f"{rest}Hm, <b>.", "content": "Well.", "calls": []}
    found = read(form, cut("<|channel>thought\n<channel|>" + WRITTEN["gemma4"], places))
    assert (found["reasoning"], len(found["calls"])) == ("", 2)
    assert read(form, ["<|channel>thou"]) == {"reasoning": "", "content": "", "calls": []}
    reader = MessageReader(form)
    reader.feed("<|channel>th")
    assert reader.is_reasoning


QUOTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(alphabet='ab<|"{}[]:,\\\n é'),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.from_regex(r"[A-Za-z_]\w{0,3}", fullmatch=True), inner, max_size=3)
    ),
)


def in_notation(value: Any) -> str:
    """As Gemma 4's template writes it."""
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case list():
            return f"[{','.join(map(in_notation, value))}]"
        case dict():
            return "{" + ",".join(f"{k}:{in_notation(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


@given(value=QUOTED, places=places, is_json=st.booleans())
def test_any_arguments_in_gemmas_notation_become_json(
    value: Any, places: list[int], is_json: bool
) -> None:
    assume('<|"|>' not in json.dumps(value).replace("\\", ""))
    arguments = {"a": value, "b": 1}
    written = json.dumps(arguments) if is_json else in_notation(arguments)
    found = read(form_of("gemma4"), cut(f"<|tool_call>call:now{written}<tool_call|>", places))
    assert [(name, json.loads(text)) for name, text in found["calls"]] == [("now", arguments)]


def test_reasoning_that_does_not_end() -> None:
    form = MessageForm(reasoning=ReasoningMarkers())
    assert read(form, ["<think>\nHm </th"])["reasoning"] == "Hm </th"
    assert read(form, ["<thi"])["content"] == "<thi"
    reader = MessageReader(form)
    reader.feed("<think>")
    assert reader.is_reasoning
    reader.feed("a</think>")
    assert not reader.is_reasoning
    assert read(form, ["<think>a</think> b"]) == {"reasoning": "a", "content": "b", "calls": []}


def test_events_of_an_answer_are_read_and_its_tokens_of_reasoning_counted() -> None:
    texts = ["<thi", "nk>", "a", "</think>b", "", " c "]
    events = [Event((0, 0), i, text, None, None, None, None) for i, text in enumerate(texts)]
    last = Event((0, 0), None, "", None, FinishReason.STOP, None, None)
    reader = AnswerReader(MessageForm(reasoning=ReasoningMarkers()))
    assert reader.take(events[0]) == []
    assert reader.num_held == 4
    pieces = [piece for event in (*events[1:], last) for piece in reader.take(event)]
    assert [*map(tuple, pieces)] == [
        *(("reasoning", "a"), ("content", "b"), ("content", " c"), ("content", " "))
    ]
    assert reader.num_reasoning == 3, "the token that ends it is one"
    plain = AnswerReader(None)
    pieces = [piece for event in (*events, last) for piece in plain.take(event)]
    assert pieces == [("content", text) for text in texts if text]
    assert (plain.num_held, plain.num_reasoning) == (0, 0)


@given(
    value=st.recursive(st.none() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v))
)
def test_the_end_of_an_object_is_found(value: Any) -> None:
    text = json.dumps({"a": value})
    scan = JsonScan()
    assert scan.feed(text + '}"{') == len(text)
    assert scan.is_over


def test_formats_are_chosen_by_name_or_by_template() -> None:
    for form in FORMATS:
        assert format_named(form.name, "") == form
    assert format_named("auto", "<tool_call>\n<function=example") == format_named("qwen3_xml", "")
    assert format_named("auto", "uses <tool_call> tags") == HERMES
    assert format_named("auto", 'use {"name": n, "parameters": p}').name == "llama3_json"
    assert format_named("auto", "writes '<|tool_call>call:'").name == "gemma4"
    assert format_named("auto", "nothing") == HERMES
    with pytest.raises(ValueError, match="no tool-call parser 'x': use auto or one of gemma4"):
        format_named("x", "")


def test_what_xml_writes_without_quotes() -> None:
    assert is_text({"type": "string", "description": "a city"})
    assert is_text({"type": "string", "enum": ["a", "b"]})
    for schema in ({"type": "string", "pattern": "a"}, {"type": "integer"}, True,
                   {"type": "string", "enum": ["a\nb"]}):  # fmt: skip
        assert not is_text(schema)
