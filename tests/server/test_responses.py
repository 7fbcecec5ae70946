"""The Responses API with the real client: streamed as whole, tools, forms, what is refused."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import jsonschema
import pytest
from pydantic import BaseModel

from tests.server.serving import Served
from tests.server.test_tools import END_OF_THOUGHT, SCHEMA, thinker

__all__ = ["thinker"]  # a fixture

PATH = "/v1/responses"
ADD: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}
NOW: Any = {"type": "function", "name": "now"}
ASK: dict[str, Any] = {"model": "tiny", "input": "Hello", "temperature": 0, "max_output_tokens": 40}


def both(served: Served, **fields: Any) -> Any:
    """The response to a request, which must be the same streamed and whole."""
    ask: dict[str, Any] = ASK | fields
    with served.client() as client:
        whole = client.responses.create(**ask)
        events = list(client.responses.create(**ask, stream=True))
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert [one.type for one in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    last = events[-1].response
    assert [_plain(item) for item in last.output] == [_plain(item) for item in whole.output]
    assert last.usage.output_tokens == whole.usage.output_tokens
    for i, item in enumerate(whole.output):
        shown = "".join(one.delta for one in events if one.type.endswith(".delta")
                        and one.output_index == i)  # fmt: skip
        assert shown == (item.arguments if item.type == "function_call" else item.content[0].text)
    assert whole.store is False  # type: ignore[attr-defined]
    return whole


def _plain(item: Any) -> dict[str, Any]:
    return {k: v for k, v in item.model_dump().items() if k not in ("id", "call_id")}


def test_text(thinker: Served) -> None:
    response = both(thinker, instructions="Be brief.")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    ask = {"messages": messages, "temperature": 0, "max_tokens": 40}
    chat = thinker.call("/v1/chat/completions", ask)[1]
    assert response.output_text == chat["choices"][0]["message"]["content"]
    assert response.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert response.usage.total_tokens == chat["usage"]["total_tokens"]
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"


def test_items_are_a_conversation(thinker: Served) -> None:
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "Add."}]},
        {"type": "reasoning", "id": "rs_1", "summary": [],
         "content": [{"type": "reasoning_text", "text": "Hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "now", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "7"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "7"}]},
        {"role": "user", "content": "And?"},
    ]  # fmt: skip
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}, "id": "c1"}
    other = {"type": "function", "function": {"name": "now", "arguments": "{}"}, "id": "c2"}
    messages = [
        {"role": "user", "content": "Add."},
        {"role": "assistant", "reasoning_content": "Hm", "tool_calls": [call, other]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
        {"role": "assistant", "content": "7"},
        {"role": "user", "content": "And?"},
    ]
    response = both(thinker, input=items, tools=[ADD, NOW], tool_choice="none")
    ask = {"messages": messages, "temperature": 0, "max_tokens": 40}
    answer = thinker.call("/v1/chat/completions", ask)[1]
    assert response.output_text == answer["choices"][0]["message"]["content"]


def test_calls(thinker: Served) -> None:
    named = {"type": "function", "name": "add"}
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [named]}
    for choice in (named, allowed, "required"):
        asked: dict[str, Any] = {"tools": [ADD, NOW], "tool_choice": choice}
        response = both(thinker, **asked, parallel_tool_calls=False, max_output_tokens=300)
        [call] = response.output
        assert call.type == "function_call"
        assert call.call_id.startswith("call_")
        if response.status == "completed":
            jsonschema.validate(json.loads(call.arguments), SCHEMA)


class Sum(BaseModel):
    a: int


def test_a_form(thinker: Served) -> None:
    form = {"type": "json_schema", "name": "sum", "schema": SCHEMA, "strict": True}
    response = both(thinker, text={"format": form}, max_output_tokens=300)
    if response.status == "completed":
        jsonschema.validate(json.loads(response.output_text), SCHEMA)
    with thinker.client() as client:
        parsed = client.responses.parse(
            model="tiny", input="Hello", text_format=Sum, max_output_tokens=200, temperature=0
        )
    assert parsed.status == "incomplete" or isinstance(parsed.output_parsed, Sum)


def test_reasoning_is_an_item(thinker: Served) -> None:
    assert thinker.llm.tokenizer.token_bytes(END_OF_THOUGHT) == b"</think>"
    response = both(thinker, reasoning={"effort": "none"})
    assert [item.type for item in response.output] == ["message"]
    assert response.usage.output_tokens_details.reasoning_tokens == 0


def test_logprobs(thinker: Served) -> None:
    response = both(thinker, include=["message.output_text.logprobs"], top_logprobs=2)
    [item] = response.output
    logprobs = item.content[0].logprobs
    assert len(logprobs) == response.usage.output_tokens
    assert all(len(one.top_logprobs) == 2 for one in logprobs)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [ADD, ADD]}, "tools[1]"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [ADD]}, "tool_choice"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "cat", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id"),
        ({"input": "x " * 9000}, "input"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
    ],
)
def test_what_is_refused_by_name(thinker: Served, fields: dict[str, Any], param: str) -> None:
    status, error = thinker.refused(PATH, ASK | fields)
    assert status == 400
    assert (error["param"] or "").startswith(param), error


def test_a_stream_that_fails_says_so(thinker: Served) -> None:
    steps = count()

    def fail(step: object) -> None:
        if next(steps) == 3:
            raise RuntimeError("boom")

    thinker.valve.before = fail
    try:
        with thinker.client() as client:
            *_, last = client.responses.create(**ASK, stream=True)
    finally:
        thinker.valve.before = lambda step: None
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error.message
