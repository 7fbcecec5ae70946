"""Schemas through every API: refused by name where the answer must fit, else named and left out."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.engine.test_llm import HELLO
from tests.serve.answer.test_tools import thinker
from tests.serve.serving import Served

__all__ = ["thinker"]  # a fixture

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"messages": HELLO, "seed": 3, "max_tokens": 100}
ITEM = {"type": "integer", "minimum": 0, "maximum": 5}
LIST = {"type": "array", "items": ITEM, "minItems": 1, "maxItems": 3, "uniqueItems": True}
ODD = {"type": "object", "properties": {"a": LIST}, "required": ["a"]}
LOST = "tools[0].function.parameters.properties.a.uniqueItems"
FUNCTION: dict[str, Any] = {"name": "f", "parameters": ODD}


def of_openai(body: Any) -> str:
    [call] = body["choices"][0]["message"]["tool_calls"]
    return call["function"]["arguments"]  # type: ignore[no-any-return]


def of_responses(body: Any) -> str:
    [call] = [one for one in body["output"] if one["type"] == "function_call"]
    return call["arguments"]  # type: ignore[no-any-return]


def of_anthropic(body: Any) -> str:
    [call] = [one for one in body["content"] if one["type"] == "tool_use"]
    return json.dumps(call["input"])


def of_ollama(body: Any) -> str:
    call = body["message"]["tool_calls"][0]
    return json.dumps(call["function"]["arguments"])


APIS: list[tuple[str, dict[str, Any], Any]] = [
    (CHAT, {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required",
            "parallel_tool_calls": False, **ASK}, of_openai),
    ("/v1/responses", {"input": "Hello", "tools": [{"type": "function", **FUNCTION}],
                       "tool_choice": "required", "parallel_tool_calls": False}, of_responses),
    ("/v1/messages", {"model": "tiny", "messages": HELLO,
                      "tools": [{"name": "f", "input_schema": ODD}],
                      "tool_choice": {"type": "tool", "name": "f"}, "max_tokens": 200},
     of_anthropic),
    ("/api/chat", {"model": "tiny", "messages": HELLO, "stream": False, "options": {"seed": 3},
                   "tools": [{"type": "function", "function": FUNCTION}],
                   "tool_choice": "required"}, of_ollama),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "arguments_of"), APIS, ids=lambda one: str(one)[:20])
def test_one_keyword_is_left_out_and_named_and_the_rest_holds(
    thinker: Served, path: str, body: dict[str, Any], arguments_of: Any
) -> None:
    status, answer, headers = thinker.call(path, body)
    assert status == 200, answer
    assert headers["x-ridgeline-ignored"].split(", ")[-1] == LOST
    arguments = json.loads(arguments_of(answer))
    assert list(arguments) == ["a"]
    assert 1 <= len(arguments["a"]) <= 3
    assert all(0 <= one <= 5 for one in arguments["a"])


def test_a_stream_names_it_too(thinker: Served) -> None:
    _, body, _ = APIS[0]
    _, _, headers = thinker.call(CHAT, body | {"stream": True})
    assert headers["x-ridgeline-ignored"] == LOST


def test_names_in_the_header_are_plain(thinker: Served) -> None:
    odd = {"type": "object", "properties": {"é\n,": LIST}}
    tool = {"type": "function", "function": {"name": "f", "parameters": odd}}
    status, _, headers = thinker.call(CHAT, ASK | {"tools": [tool], "max_tokens": 2})
    assert status == 200
    assert headers["x-ridgeline-ignored"] == LOST.replace(".a.", r".\xe9\n,.")


def test_a_strict_tool_is_refused_instead(thinker: Served) -> None:
    tool = {"type": "function", "function": FUNCTION | {"strict": True}}
    error = thinker.refused_for("tools", CHAT, ASK | {"tools": [tool]})
    assert f"{LOST}: " in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema":
                                    {"name": "x", "schema": ODD}}, **ASK},
         "response_format.json_schema.schema"),
        ("/v1/completions", {"prompt": "x", "guided_json": ODD}, "guided_json"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"json": ODD}},
         "structured_outputs.json"),
        ("/v1/responses", {"input": "x", "text": {"format": {"type": "json_schema", "name": "x",
                                                             "schema": ODD}}},
         "text.format.schema"),
    ],
)  # fmt: skip
def test_an_answer_that_must_fit_is_refused_by_name(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    error = served.refused_for(param, path, body)
    assert "properties.a.uniqueItems: no grammar can tell that no item comes twice" in str(error)


def test_ollamas_format_is_refused_by_name(served: Served) -> None:
    body = {"model": "tiny", "messages": HELLO, "format": ODD}
    status, answer, _ = served.call("/api/chat", body)
    assert status == 400
    assert "properties.a.uniqueItems" in answer["error"]


def test_objects_are_closed(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": ITEM, "b": ITEM}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for seed in range(6):
        fields = {"response_format": form, "seed": seed, "temperature": 1}
        _, body, _ = served.call(CHAT, ASK | fields)
        assert body["choices"][0]["finish_reason"] == "stop"
        assert json.loads(body["choices"][0]["message"]["content"]).keys() <= {"a", "b"}


# That nothing fits both is found out too late: only where the text would have to begin.
STUCK = {"type": "object", "properties": {"a": {"type": "string", "pattern": "é",
         "format": "email"}}, "required": ["a"]}  # fmt: skip
STUCK_FORM = {"type": "json_schema", "name": "x", "schema": STUCK}
STUCK_TOOL = {"name": "f", "parameters": STUCK, "strict": True}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"response_format": {"type": "json_schema", "json_schema":
                                    {"name": "x", "schema": STUCK}}, **ASK},
         "response_format.json_schema.schema"),
        (CHAT, {"tools": [{"type": "function", "function": STUCK_TOOL}],
                "tool_choice": "required", **ASK}, "tools"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 100, "guided_json": STUCK},
         "guided_json"),
        ("/v1/responses", {"input": "x", "text": {"format": STUCK_FORM}}, "text.format.schema"),
    ],
)  # fmt: skip
def test_an_answer_that_gets_stuck_is_an_error(
    thinker: Served, path: str, body: dict[str, Any], param: str
) -> None:
    sampling = {} if path == "/v1/responses" else {"seed": 5}
    for temperature in (0, 1):
        error = thinker.refused_for(param, path, body | sampling | {"temperature": temperature})
        assert "the grammar allows no token here" in error["message"]


def test_a_stream_that_gets_stuck_has_no_end(thinker: Served) -> None:
    tool = {"type": "function", "function": STUCK_TOOL}
    fields = {"tools": [tool], "tool_choice": "required", "stream": True}
    _, body, _ = thinker.call(CHAT, ASK | fields)
    *_, last = body.decode().strip().splitlines()
    assert json.loads(last.removeprefix("data: "))["error"]["param"] == "tools"
    assert '"finish_reason":"' not in body.decode()
