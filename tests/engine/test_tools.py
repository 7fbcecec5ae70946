"""Messages written under their grammar: every call parses and fits its schema, in every format."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.engine.text_processor import TextProcessor
from ridgeline.text.messages.message import MessageForm, MessageReader, ReasoningMarkers
from ridgeline.text.messages.tools import (
    FORMATS,
    MAX_UNMARKED_TOOLS,
    Tool,
    ToolUse,
    format_named,
)
from tests.engine.test_llm import model
from tests.real_models import real_model

__all__ = ["model"]  # a fixture

TOOLS = (
    Tool(
        "add",
        {
            "type": "object",
            "properties": {
                "a": {"type": "integer", "minimum": 0, "maximum": 99},
                "b": {"type": "string", "maxLength": 5},
                "c": {"type": "string", "enum": ["red", "blue"]},
                "d": {"$ref": "#/$defs/bits"},
            },
            "required": ["a", "c"],
            "additionalProperties": False,
            "$defs": {"bits": {"type": "array", "items": {"enum": [0, 1]}, "maxItems": 2}},
        },
    ),
    Tool("now", {"properties": {}, "additionalProperties": False}),
)
USE = ToolUse(TOOLS)
FREE = SamplingParams(max_tokens=500)


@pytest.fixture(scope="module")
def text(model: Path) -> Iterator[TextProcessor]:
    with LLM(model, kv_cache_memory="1MiB", threads=1) as llm:
        yield llm.text


def written(text: TextProcessor, form: MessageForm, wish: str, seed: int) -> str | None:
    """A message of random tokens that the grammar allows; it keeps to ``wish`` while it can."""
    new = text.new_constraint(FREE, form)
    assert new is not None
    state, dice, ids = new(), random.Random(seed), list[int]()
    for token in text.tokenizer.encode(wish, add_bos=False):
        if not state.num_valid((token,)):
            break
        state.accept(token)
        ids.append(token)
    while len(ids) < 400 and not state.is_over:
        [mask] = state.masks(())
        allowed = [i for i in range(text.vocab_size) if mask[i // 8] >> i % 8 & 1]
        solid = [i for i in allowed if text.tokenizer.token_bytes(i).strip()]
        token = 0 if 0 in allowed else dice.choice(solid or allowed)  # 0 ends it
        if token == 0:
            break
        state.accept(token)
        ids.append(token)
    return text.tokenizer.decode(ids, skip_special=False) if len(ids) < 400 else None


def calls_of(form: MessageForm, message: str) -> list[tuple[str, Any]]:
    reader = MessageReader(form)
    calls: list[list[str]] = []
    for kind, piece in reader.feed(message) + reader.finish():
        if kind == "call":
            calls.append([piece, ""])
        elif kind == "arguments":
            calls[-1][1] += piece
    found = [(name, json.loads(arguments)) for name, arguments in calls]
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    for name, arguments in found:
        jsonschema.validate(arguments, schemas[name])
    return found


@pytest.mark.parametrize("name", [form.name for form in FORMATS])
@pytest.mark.parametrize("reasoning", ["none", "may", "inside"])
def test_a_call_that_must_come_fits(text: TextProcessor, name: str, reasoning: str) -> None:
    marks = None if reasoning == "none" else ReasoningMarkers()
    wish = {"none": "", "may": "<think>Hm</think>", "inside": "Hm</think>"}[reasoning]
    num_calls = 0
    for seed in range(12):
        use = USE._replace(is_required=True, is_parallel=seed % 2 == 0)
        form = MessageForm(marks, reasoning == "inside", (format_named(name, ""), use))
        message = written(text, form, wish, seed)
        if message is None:
            continue  # a random walk may not end
        calls = calls_of(form, message)
        assert calls, message
        assert len(calls) == 1 or use.is_parallel
        num_calls += len(calls)
    assert num_calls > 5


@pytest.mark.parametrize("name", [form.name for form in FORMATS])
def test_text_is_free_until_a_call_begins(text: TextProcessor, name: str) -> None:
    form = MessageForm(tools=(format_named(name, ""), USE))
    said = 'Well, {"a": [1]} & <b>: fine.\n'
    assert (written(text, form, said, 1) or "").startswith(said)
    marker = form.tools[0].begin if form.tools else ""
    for seed in range(6):
        message = written(text, form, f"See {marker}" if marker else '{"name": "', seed)
        assert message is None or calls_of(form, message)


@pytest.mark.parametrize("name", [form.name for form in FORMATS if form.key and form.begin])
def test_a_call_without_marker_fits_too(text: TextProcessor, name: str) -> None:
    """As small models write it: indented, and in a fence; a package's JSON stays text."""
    tool_format = format_named(name, "")
    form = MessageForm(tools=(tool_format, USE))
    head = f'{{\n  "name": "add",\n  "{tool_format.key}": '
    whole = f'{head}{{\n    "a": 5,\n    "c": "red"\n  }}\n}}'
    for said in (whole, f"```json\n{whole}\n```"):
        assert written(text, form, said, 1) == said
        assert calls_of(form, said) == [("add", {"a": 5, "c": "red"})]
    for seed in range(4):
        message = written(text, form, f"```json\n{head}", seed)
        assert message is None or calls_of(form, message)
    for said in ('```json\n{\n  "name": "add-on",\n  "version": "1"\n}\n``` That is it.\n',
                 '```json\n{"name": "sum", "arguments": {"a": 100}}\n```'):  # fmt: skip
        assert (written(text, form, said, 1) or "").startswith(said)


def test_many_tools_may_be_offered_at_once() -> None:
    """The vocabulary is a real one: a grammar that is too large shows only there."""
    path = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    with LLM(real_model("smollm2"), kv_cache_memory="16MiB") as llm:
        for num_tools in (4, 24, MAX_UNMARKED_TOOLS, MAX_UNMARKED_TOOLS + 1, 200):
            tools = tuple(Tool(f"server_{i}_read_the_page", path) for i in range(num_tools))
            form = MessageForm(tools=(format_named("hermes", ""), ToolUse(tools)))
            new = llm.text.new_constraint(FREE, form)
            assert new is not None
            named = f'{{"name": "{tools[-1].name}", "arguments": {{"path": "a"}}}}'
            fenced = f"```json\n{named}\n```"
            indented = named.replace(", ", ",\n  ").replace("{", "{\n  ")
            package = '```json\n{\n  "name": "server_1",\n  "version": "1.0"\n}\n```\nFine.'
            texts = (f"Well.\n<tool_call>\n{named}\n</tool_call>", fenced, indented, package, named)
            for said in texts * 2:  # one after the other: answers share what the library finds
                state = new()
                for token in llm.text.tokenizer.encode(said, add_bos=False):
                    assert any(state.masks(())[0]), (num_tools, said)
                    assert state.num_valid((token,)), (num_tools, said)
                    state.accept(token)
                if said in (indented, package):
                    continue
                is_read = said != fenced or num_tools <= MAX_UNMARKED_TOOLS
                reader = MessageReader(form)
                pieces = reader.feed(said) + reader.finish()
                assert (("call", tools[-1].name) in pieces) == is_read


def test_arguments_in_gemmas_notation_fit_their_schema(text: TextProcessor) -> None:
    place = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "at": {"type": "number"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    schema = {
        "type": "object",
        "properties": {
            "places": {"type": "array", "items": place},
            "is_metric": {"type": "boolean", "description": "or imperial"},
            "Unit": {"type": "string", "enum": ["c", "f"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            "note": {"type": "string"},
        },
        "required": ["days"],
        "additionalProperties": False,
    }
    use = ToolUse((Tool("weather", schema),), is_required=True, is_parallel=False)
    form = MessageForm(tools=(format_named("gemma4", ""), use))
    for wish in (
        '{days:3,is_metric:true,note:<|"|>a {b} "c"<|"|>,places:[{at:-1.5,city:<|"|>Oslo<|"|>},'
        '{city:<|"|><|"|>}],Unit:<|"|>c<|"|>}',
        "{days:4}",
        "{days:1,places:[]}",
    ):
        said = f"<|tool_call>call:weather{wish}<tool_call|>"
        assert written(text, form, said, 1) == said
        assert read_call(form, said, schema)["days"] in (1, 3, 4)
    found = [message for seed in range(20) if (message := written(text, form, "", seed))]
    assert len(found) > 3
    for message in found:
        read_call(form, message, schema)
    # Nothing else is a call: a text for a number, a key that is not there, one that is missing.
    for wish in ('{days:<|"|>3<|"|>}', "{days:3,x:1}", "{is_metric:true}", '{"days":3}'):
        said = f"<|tool_call>call:weather{wish}<tool_call|>"
        assert written(text, form, said, 1) != said
    # What these rules cannot say is JSON.
    strict = Tool("weather", {**schema, "properties": {"days": {"type": "string", "minLength": 2}}})
    form = MessageForm(tools=(format_named("gemma4", ""), use._replace(tools=(strict,))))
    said = '<|tool_call>call:weather{"days": "33"}<tool_call|>'
    assert written(text, form, said, 1) == said
    assert read_call(form, said, strict.parameters) == {"days": "33"}


def read_call(form: MessageForm, message: str, schema: Any) -> Any:
    """The arguments of the only call in a message, which fit."""
    reader = MessageReader(form)
    (call, *pieces) = reader.feed(message) + reader.finish()
    assert call == ("call", "weather")
    arguments = json.loads("".join(piece.text for piece in pieces))
    jsonschema.validate(arguments, schema)
    return arguments


def test_one_call_and_no_more(text: TextProcessor) -> None:
    form = MessageForm(tools=(format_named("hermes", ""), USE._replace(is_parallel=False)))
    one = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    message = written(text, form, f"{one}\n{one}", 1)
    assert message is not None
    assert calls_of(form, message) == [("now", {})]


def test_a_form_and_tools_go_together(text: TextProcessor) -> None:
    schema = {"properties": {"name": {"const": "Ada"}}, "required": ["name"]}
    params = replace(
        FREE,
        structured_outputs={"json": schema | {"type": "object", "additionalProperties": False}},
    )
    for reasoning in (None, ReasoningMarkers()):
        form = MessageForm(reasoning, tools=(format_named("hermes", ""), USE), has_body=True)
        new = text.new_constraint(params, form)
        assert new is not None
        for message, is_whole in (
            ('{"name": "Ada"}', True),
            ('<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', True),
            ("Hello", False),
            ('<think>x</think>\n{"name": "Ada"}', reasoning is not None),
        ):
            ids = tuple(text.tokenizer.encode(message, add_bos=False))
            assert (new().num_valid(ids) == len(ids)) == is_whole, message


@pytest.mark.parametrize(
    ("wish", "good", "bad"),
    [
        ({"choice": ["yes", "no"]}, "yes", "maybe"),
        ({"regex": "a/b|\\d+"}, "42", "x"),
        ({"grammar": 'root ::= "<" [0-9] ">"'}, "<7>", "<x>"),
        ({"grammar": 'start: "<" /[0-9]/ ">"'}, "<7>", "<x>"),
    ],
)
def test_any_form_goes_with_tools_and_reasoning(
    text: TextProcessor, wish: dict[str, Any], good: str, bad: str
) -> None:
    params = replace(FREE, structured_outputs=wish)
    form = MessageForm(ReasoningMarkers(), tools=(format_named("hermes", ""), USE), has_body=True)
    new = text.new_constraint(params, form)
    assert new is not None
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    for message, is_taken in ((good, True), (f"<think>x</think>{good}", True), (call, True),
                              (bad, False)):  # fmt: skip
        ids = tuple(text.tokenizer.encode(message, add_bos=False))
        assert (new().num_valid(ids) == len(ids)) == is_taken, message


def test_what_cannot_be_held_to_is_left_out_alone(text: TextProcessor) -> None:
    items = {"type": "array", "items": {"type": "integer", "maximum": 5}, "uniqueItems": True}
    odd = {"type": "object", "properties": {"a": items}, "required": ["a"]}
    use = ToolUse((TOOLS[1], Tool("odd", odd)), is_required=True)
    form = MessageForm(tools=(format_named("hermes", ""), use))
    new = text.new_constraint(FREE, form)
    assert new is not None
    assert new.ignored == ("tools[1].function.parameters.properties.a.uniqueItems",)
    for arguments, is_taken in (('{"a": [5, 5]}', True), ('{"a": [6', False), ("{}", False)):
        said = f'<tool_call>\n{{"name": "odd", "arguments": {arguments}'
        ids = tuple(text.tokenizer.encode(said, add_bos=False))
        assert (new().num_valid(ids) == len(ids)) == is_taken, arguments


@pytest.mark.parametrize("name", [form.name for form in FORMATS])
def test_nothing_is_left_out_for_a_strict_tool(text: TextProcessor, name: str) -> None:
    items = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    odd = {"type": "object", "properties": {"a": items}}
    use = ToolUse((TOOLS[1], Tool("odd", odd, is_strict=True)))
    with pytest.raises(ValueError, match=r"tools\[1\].function.parameters.*a.uniqueItems"):
        text.new_constraint(FREE, MessageForm(tools=(format_named(name, ""), use)))


def test_xml_names_what_it_cannot_say(text: TextProcessor) -> None:
    schema = {"properties": {"a": {"type": "integer"}, "b": {}}, "anyOf": [{"required": ["a"]}],
              "required": ["c"]}  # fmt: skip
    form = MessageForm(tools=(format_named("qwen3_xml", ""), ToolUse((Tool("odd", schema),))))
    new = text.new_constraint(FREE, form)
    assert new is not None
    at = "tools[0].function.parameters"
    assert new.ignored == (f"{at}.anyOf", f"{at}.required")
    strict = ToolUse((Tool("odd", schema, is_strict=True),))
    with pytest.raises(ValueError, match=r"parameters.anyOf: "):
        text.new_constraint(FREE, form._replace(tools=(format_named("qwen3_xml", ""), strict)))


@pytest.mark.parametrize("schema", [{"$ref": "https://a.b"}, {"type": "x"}, {"enum": []}])
def test_of_a_schema_that_cannot_be_read_nothing_holds(
    text: TextProcessor, schema: dict[str, Any]
) -> None:
    form = MessageForm(tools=(format_named("hermes", ""), ToolUse((Tool("odd", schema),))))
    new = text.new_constraint(FREE, form)
    assert new is not None
    assert new.ignored == ("tools[0].function.parameters",)
    said = '<tool_call>{"name": "odd", "arguments": {"any": 1}}'
    ids = tuple(text.tokenizer.encode(said, add_bos=False))
    assert new().num_valid(ids) == len(ids)


@pytest.mark.parametrize("name", [form.name for form in FORMATS])
@pytest.mark.parametrize(
    "schema",
    [{"properties": []}, {"properties": None}, {"required": 5}, {"required": [[]]}, {"type": []},
     {"properties": {"a": {"type": "string", "enum": 5}}}, {"properties": {"a": 7}},
     {"properties": {"a": {"type": "string", "enum": []}}, "required": ["a"]},
     {"properties": {"a": {"type": "array", "items": 7}}}, {"properties": {"a": None}}],
    ids=str,
)  # fmt: skip
def test_what_is_no_schema_is_named_in_every_format(
    text: TextProcessor, name: str, schema: dict[str, Any]
) -> None:
    tool = Tool("odd", schema)
    form = MessageForm(tools=(format_named(name, ""), ToolUse((TOOLS[1], tool))))
    new = text.new_constraint(FREE, form)
    assert new is not None
    assert new.ignored
    assert all(one.startswith("tools[1].function.parameters") for one in new.ignored)
    use = ToolUse((TOOLS[1], tool._replace(is_strict=True)))
    with pytest.raises(ValueError, match="parameters"):
        text.new_constraint(FREE, form._replace(tools=(format_named(name, ""), use)))
