"""Anthropic's Messages API: streamed as whole, blocks, tools, thinking, counts, what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ridgeline.serve.dialects.anthropic.schemas import MessageObject
from tests.serve.answer.test_tools import SCHEMA, thinker
from tests.serve.dialects.test_responses import reasoner
from tests.serve.serving import Served, check_shape, serving

__all__ = ["reasoner", "thinker"]  # fixtures

PATH = "/v1/messages"
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 40, "messages": HELLO, "temperature": 0}
ADD: dict[str, Any] = {"name": "add", "description": "Adds.", "input_schema": SCHEMA}
USE = {"type": "tool_use", "id": "a", "name": "b", "input": {}}
NOW: dict[str, Any] = {"name": "now", "input_schema": {"type": "object", "maxProperties": 0}}


def post(
    served: Served, body: dict[str, Any], path: str = PATH, **headers: str
) -> tuple[int, Any, dict[str, str]]:
    """The status, the body and the headers of an answer, as no client of OpenAI's asks for it."""
    return served.call(path, body, anthropic_version="2023-06-01", **headers)


def events_of(text: bytes) -> Iterator[dict[str, Any]]:
    for frame in text.decode().strip().split("\n\n"):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        yield event


def assembled(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Add events up as a client does, and hold them to Anthropic's order."""
    first, *middle, delta, last = events
    assert (first["type"], delta["type"], last["type"]) == (
        "message_start", "message_delta", "message_stop"
    )  # fmt: skip
    message = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    is_open, arguments = False, ""
    for event in middle:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(message["content"])
                message["content"].append(dict(event["content_block"]))
                is_open, arguments = True, ""
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(message["content"]) - 1
                block, news = message["content"][-1], event["delta"]
                if news["type"] == "input_json_delta":
                    assert block["type"] == "tool_use"
                    arguments += news["partial_json"]
                else:
                    kind = news["type"].removesuffix("_delta")
                    assert block["type"] == kind
                    block[kind] += news[kind]
            case "content_block_stop":
                assert is_open
                is_open = False
                if message["content"][-1]["type"] == "tool_use":
                    message["content"][-1]["input"] = json.loads(arguments or "{}")
            case other:
                raise AssertionError(other)
    assert not is_open
    return message | delta["delta"] | {"usage": delta["usage"]}


def both(served: Served, **fields: Any) -> dict[str, Any]:
    """The message, which must be the same streamed and whole but for names and what was cached."""
    status, whole, _ = post(served, ASK | fields)
    assert status == 200, whole
    check_shape(MessageObject, whole)
    status, text, headers = post(served, ASK | fields | {"stream": True})
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    streamed = assembled(list(events_of(text)))
    assert _plain(streamed) == _plain(whole)
    return dict(whole)


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    content = [{k: v for k, v in block.items() if k != "id"} for block in message["content"]]
    usage = message["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    counts = {"prompt": prompt, "output": usage["output_tokens"]}
    return message | {"content": content, "usage": counts, "id": ""}


def test_text_is_that_of_a_chat(served: Served) -> None:
    message = both(served)
    chat = {"messages": HELLO, "max_tokens": 40, "temperature": 0}
    answer = served.call("/v1/chat/completions", chat)[1]
    (block,) = message["content"]
    assert block == {"type": "text", "text": answer["choices"][0]["message"]["content"]}
    assert message["id"].startswith("msg_")
    assert (message["model"], message["role"]) == ("tiny", "assistant")
    assert message["stop_reason"] == "max_tokens"
    usage = message["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert prompt == answer["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == 40


def test_blocks_are_the_text_that_they_hold(served: Served) -> None:
    blocks = [{"type": "text", "text": "Hello"}]
    assert _plain(both(served, messages=[{"role": "user", "content": blocks}])) == _plain(
        both(served)
    )
    system = both(served, system="Be kind")
    assert _plain(both(served, system=[{"type": "text", "text": "Be kind"}])) == _plain(system)
    assert system["content"] != both(served)["content"]


def test_a_stop_sequence_is_named(served: Served) -> None:
    (block,) = both(served)["content"]
    stop = block["text"][5:9]
    message = both(served, stop_sequences=["\0none", stop])
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", stop)
    assert message["content"][0]["text"] == block["text"][: block["text"].index(stop)]


def test_a_last_message_of_the_assistant_is_continued(served: Served) -> None:
    begun = [*HELLO, {"role": "assistant", "content": "Well,"}]
    chat = {"messages": begun, "max_tokens": 40, "temperature": 0, "continue_final_message": True}
    wanted = served.call("/v1/chat/completions", chat)[1]["choices"][0]["message"]["content"]
    assert both(served, messages=begun)["content"][0]["text"] == wanted


@pytest.mark.parametrize(
    "choice",
    [{"type": "any"}, {"type": "tool", "name": "add"},
     {"type": "any", "disable_parallel_tool_use": True}],
    ids=str,
)  # fmt: skip
def test_calls_fit_their_schemas(thinker: Served, choice: dict[str, Any]) -> None:
    message = both(thinker, tools=[ADD, NOW], tool_choice=choice, max_tokens=300)
    calls = [block for block in message["content"] if block["type"] == "tool_use"]
    assert calls
    assert (len(calls) == 1) or "name" not in choice
    for call in calls:
        jsonschema.validate(call["input"], {"add": ADD, "now": NOW}[call["name"]]["input_schema"])
        assert call["id"].startswith("call_")
    if message["stop_reason"] != "max_tokens":
        assert message["stop_reason"] == "tool_use"


def test_a_call_and_its_result_go_back(thinker: Served) -> None:
    call = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1, "b": 2}}
    turns = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "text", "text": "I add."}, call]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": "3", "is_error": False},
                {"type": "text", "text": "So?"},
            ],
        },
    ]
    chat: list[dict[str, Any]] = [
        *HELLO,
        {
            "role": "assistant",
            "content": "I add.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "user", "content": "So?"},
    ]
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds.",
              "parameters": SCHEMA}}]  # fmt: skip
    asked = {"tools": tools, "reasoning_effort": "none"}
    status, counted, headers = post(
        thinker, {"model": "tiny", "messages": turns, "tools": [ADD]}, f"{PATH}/count_tokens"
    )
    assert status == 200
    assert headers["x-ridgeline-ignored"] == "messages.content.is_error"
    wanted = thinker.call("/tokenize", {"messages": chat} | asked)[1]["count"]
    assert counted == {"input_tokens": wanted}
    usage = both(thinker, messages=turns, tools=[ADD])["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == wanted


def test_instructions_may_come_between_turns(served: Served) -> None:
    """Claude Code tells the model of its surroundings in a message of the system."""
    texts = [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]
    for told in ("Be\nbrief.", [*texts[:1], texts[1] | {"cache_control": {"type": "ephemeral"}}]):
        turns = [*HELLO, {"role": "system", "content": told}]
        status, counted, _ = post(
            served, {"model": "tiny", "messages": turns}, f"{PATH}/count_tokens"
        )
        chat = [*HELLO, {"role": "system", "content": "Be\nbrief."}]
        wanted = served.call("/tokenize", {"messages": chat})[1]["count"]
        assert (status, counted) == (200, {"input_tokens": wanted})
        assert both(served, messages=turns)["content"]


def test_thoughts_are_blocks_of_their_own(reasoner: Served) -> None:
    message = both(reasoner, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert message["content"][0]["thinking"]
    quiet = both(reasoner)
    assert [block["type"] for block in quiet["content"]] == ["text"]
    thought, said = message["content"]
    again = [*HELLO, {"role": "assistant", "content": [thought | {"signature": "x"}, said]}, *HELLO]
    assert both(reasoner, messages=again)["content"]


THOUGHT = "I should look at the files first."


def thinking_turns(*thoughts: str) -> list[dict[str, Any]]:
    blocks = [{"type": "thinking", "thinking": one} for one in thoughts]
    call = {"type": "tool_use", "id": "a", "name": "add", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "main.py"}
    return [
        *HELLO,
        {"role": "assistant", "content": [*blocks, call]},
        {"role": "user", "content": [result]},
    ]


def test_thoughts_of_earlier_turns_count(reasoner: Served) -> None:
    counts = []
    for turns in (thinking_turns(), thinking_turns(THOUGHT), thinking_turns(THOUGHT, THOUGHT)):
        asked = ASK | {"messages": turns, "tools": [ADD], "max_tokens": 1}
        counted = {name: asked[name] for name in ("model", "messages", "tools")}
        count = post(reasoner, counted, f"{PATH}/count_tokens")[1]["input_tokens"]
        status, answer, headers = post(reasoner, asked)
        usage = answer["usage"]
        assert (status, usage["input_tokens"] + usage["cache_read_input_tokens"]) == (200, count)
        assert "x-ridgeline-ignored" not in headers
        counts.append(count)
    thought = {"prompt": THOUGHT, "add_special_tokens": False}
    num_tokens = reasoner.call("/tokenize", thought)[1]["count"]
    assert counts[1] - counts[0] == num_tokens
    assert counts[2] - counts[1] > num_tokens, "and what stands between them"


def test_thoughts_that_a_template_leaves_out_are_named(served: Served) -> None:
    asked = ASK | {"messages": thinking_turns(THOUGHT), "max_tokens": 1}
    assert post(served, asked)[2]["x-ridgeline-ignored"] == "messages.content.thinking"
    said = {"role": "assistant", "content": "Hm"}
    chat = {"model": "tiny", "max_tokens": 1, "stream": False}
    items: list[dict[str, Any]] = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": THOUGHT}]},
        said,
        *HELLO,
    ]
    for path, body, name in (
        (
            "/v1/chat/completions",
            chat | {"messages": [said | {"reasoning": THOUGHT}, *HELLO]},
            "messages.reasoning_content",
        ),
        ("/api/chat", chat | {"messages": [said | {"thinking": THOUGHT}]}, "messages.thinking"),
        ("/v1/responses", {"input": items, "max_output_tokens": 1}, "input.reasoning"),
    ):
        status, _, headers = served.call(path, body)
        assert status == 200
        assert name in headers["x-ridgeline-ignored"].split(", "), path


def test_a_schema_is_kept(served: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    config = {"format": {"type": "json_schema", "schema": schema}}
    (block,) = both(served, output_config=config)["content"]
    assert json.loads(block["text"])["a"] in (1, 2)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens is missing"),
        ({"max_tokens": 0}, "max_tokens is 0: it must"),
        ({"model": None}, "model is missing"),
        ({"messages": []}, "messages is wrong"),
        ({"temperature": 1.5}, "temperature is 1.5: it must"),
        ({"stop_sequences": [f"{i}" for i in range(65)]}, "stop_sequences asks for 65"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role is "),
        ({"messages": [*HELLO, {"role": "system", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": "b"}]}]},
         "messages is wrong: tool_result belongs into a message whose role is user"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
         "messages[0].content[0].type is not supported: this model reads only text"),
        ({"messages": [{"role": "user", "content": [USE]}]},
         "messages is wrong: tool_use belongs into a message whose role is assistant"),
        ({"messages": [*HELLO, {"role": "assistant", "content": [USE]}]},
         "messages is wrong: the last message calls a tool: its result must follow"),
        ({"tools": [{"type": "web_search_20250305", "name": "x"}]}, "tools[0].type is not"),
        ({"tools": [ADD, ADD]}, "tools[1].name is wrong: 'add' is there twice"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice.name is"),
        ({"tool_choice": {"type": "any"}}, "tool_choice is wrong: it requires"),
        ({"output_config": {"format": {"type": "json"}}}, "output_config.format is wrong: send"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}},
         "output_config.format.schema cannot be used"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_is_named(served: Served, fields: dict[str, Any], named: str) -> None:
    status, error, _ = post(served, {k: v for k, v in (ASK | fields).items() if v is not None})
    assert status == 400
    assert error["type"] == "error"
    assert error["error"]["type"] == "invalid_request_error"
    assert error["error"]["message"].startswith(named), error
    assert error["request_id"]


def test_what_changes_no_answer_is_taken_and_named(served: Served) -> None:
    block = {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}
    extra = {
        "messages": [{"role": "user", "content": [block]}],
        "service_tier": "auto",
        "metadata": {"user_id": "u1"},
        "mcp_servers": [],
    }
    status, message, headers = post(served, ASK | extra, **{"anthropic-beta": "x-2025"})
    assert status == 200
    assert headers["x-ridgeline-ignored"] == "service_tier, messages.content.cache_control"
    assert message["content"] == post(served, ASK)[1]["content"]


def test_keys_in_anthropics_header(model: Path) -> None:
    with serving(model, {}, api_key=["secret"]) as served:
        assert post(served, ASK, **{"x-api-key": "secret"})[0] == 200
        assert post(served, ASK, authorization="Bearer secret")[0] == 200
        for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": "secret", "authorization": "x"}):
            status, error, _ = post(served, ASK, **headers)
            assert (status, error["error"]["type"]) == (401, "authentication_error")
        status, error, _ = post(served, {**ASK, "model": "gpt"}, **{"x-api-key": "secret"})
        assert (status, error["error"]["type"]) == (404, "not_found_error")


def test_a_failure_within_a_stream_is_its_last_event(model: Path) -> None:
    with serving(model) as served:

        def fail(step: Any) -> None:
            if served.valve.num_steps == 4:
                raise MemoryError("gone")

        served.valve.before = fail
        _, text, _ = post(served, ASK | {"stream": True})
    *_, last = events_of(text)
    assert last["type"] == "error"
    assert last["error"]["type"] in ("api_error", "overloaded_error")


def test_the_real_client(served: Served) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the anthropic client is not installed")
    client = anthropic.Anthropic(
        base_url=f"http://127.0.0.1:{served.port}", api_key="none", max_retries=0
    )
    ask: dict[str, Any] = {name: ASK[name] for name in ("model", "max_tokens", "messages")}
    ask["extra_body"] = {"temperature": 0}  # its newest version has no such parameter
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == 40
    counted = client.messages.count_tokens(model="tiny", messages=HELLO)
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    with pytest.raises(anthropic.BadRequestError, match="reads only text"):
        client.messages.create(**ask | {"messages": [{"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
        ]}]})  # fmt: skip
