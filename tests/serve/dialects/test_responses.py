"""The Responses API with the real client: streamed as whole, tools, forms, what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from copy import copy
from itertools import count
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest
from pydantic import BaseModel
from safetensors.numpy import load_file, save_file

from ridgeline import LLM, SamplingParams
from ridgeline.core.decoding.text import TextStream
from ridgeline.core.step import Event, FinishReason, TokenLogprobs
from ridgeline.serve.answer.response_builder import ResponseBuilder
from ridgeline.serve.dialects.responses.protocol import ResponsesRequest
from ridgeline.serve.dialects.responses.request import chat_request
from ridgeline.serve.dialects.responses.response import ResponsesWriter
from ridgeline.serve.dialects.responses.schemas import ResponseObject
from ridgeline.serve.engine.request_stream import RequestStream, StreamCaller
from ridgeline.text.messages.message import MessageForm
from ridgeline.text.messages.tools import HERMES
from tests.core.decoding.test_text import Pieces
from tests.engine.test_llm import write_model
from tests.serve.answer.test_tools import END_OF_THOUGHT, SCHEMA, TEMPLATE, thinker
from tests.serve.serving import Served, check_shape, hold, serving
from tests.waiting import eventually

__all__ = ["thinker"]  # a fixture

PATH = "/v1/responses"
ADD: Any = {"type": "function", "name": "add", "parameters": SCHEMA, "strict": True}
NOW: Any = {"type": "function", "name": "now"}
ASK: dict[str, Any] = {"model": "tiny", "input": "Hello", "temperature": 0, "max_output_tokens": 40}
CALL: Any = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
CALLS: dict[str, Any] = {"tools": [ADD, NOW], "tool_choice": "required", "max_output_tokens": 300}
RANKED: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}


@pytest.fixture(scope="module")
def reasoner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A random model that thinks, and stops it: the end is likelier than its fifth thought."""
    path = write_model(tmp_path_factory.mktemp("models") / "reasoner")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1024}))
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({"id": END_OF_THOUGHT, "content": "</think>"})
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    template = TEMPLATE.replace("if enable_thinking", "if enable_thinking | default(true)")
    spec = {"chat_template": template, "add_bos_token": False}
    (path / "tokenizer_config.json").write_text(json.dumps(spec))
    with LLM(path, kv_cache_memory="1MiB", threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
        [found] = llm.chat([{"role": "user", "content": "Hello"}], params, progress=False)
    thoughts = found.outputs[0].token_ids
    assert thoughts[-1] not in thoughts[:-1]
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"][END_OF_THOUGHT] = weights["lm_head.weight"][thoughts[-1]] * 2
    save_file({k: np.ascontiguousarray(v) for k, v in weights.items()}, path / "model.safetensors")
    with serving(path, {"kv_cache_memory": "8MiB"}) as served:
        yield served
        served.assert_idle()


def both(served: Served, **fields: Any) -> Any:
    """The response to a request, which must be the same streamed and whole."""
    ask: dict[str, Any] = ASK | fields
    with served.client() as client:
        raw = client.responses.with_raw_response.create(**ask)
        check_shape(ResponseObject, json.loads(raw.content))
        whole = raw.parse()
        events = list(client.responses.create(**ask, stream=True))
        with client.responses.stream(**ask) as stream:  # the client adds the deltas up
            sums = {one.output_index: one.snapshot for one in stream
                    if one.type.endswith(("output_text.delta", "arguments.delta"))}  # fmt: skip
            if whole.status == "completed":  # it knows no other end
                final = stream.get_final_response().output
                assert [_plain(item) for item in final] == [_plain(item) for item in whole.output]
    assert [one.sequence_number for one in events] == list(range(len(events)))
    assert [one.type for one in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == f"response.{whole.status}"
    last = events[-1].response
    assert [_plain(item) for item in last.output] == [_plain(item) for item in whole.output]
    for name in ("input_tokens", "output_tokens", "output_tokens_details", "total_tokens"):
        assert getattr(last.usage, name) == getattr(whole.usage, name)
    ended = [one.item for one in events if one.type == "response.output_item.done"]
    assert [_plain(item) for item in ended] == [_plain(item) for item in whole.output]
    for i, item in enumerate(whole.output):
        shown = "".join(one.delta for one in events if one.type.endswith(".delta")
                        and one.output_index == i)  # fmt: skip
        assert shown == (item.arguments if item.type == "function_call" else item.content[0].text)
        assert sums.get(i, shown) == shown
        assert (i in sums) == (item.type != "reasoning")
        prefix = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}[item.type]
        assert item.id.startswith(prefix)
    assert whole.store is False  # type: ignore[attr-defined]
    return whole


def _plain(item: Any) -> dict[str, Any]:
    known = item.model_dump(exclude_none=True)
    for part in known.get("content", ()):
        part.pop("parsed", None)  # the client's own
    return {k: v for k, v in known.items() if k not in ("id", "call_id", "parsed_arguments")}


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


def test_calls_and_results_go_back(reasoner: Served) -> None:
    """A response's items and a result make the conversation that the same messages make."""
    first = both(reasoner, **CALLS, parallel_tool_calls=False)
    assert [item.type for item in first.output] == ["reasoning", "function_call"]
    thought, call = first.output
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "7"}
    items = [{"role": "user", "content": "Hello"}, *first.output, result]
    second = both(reasoner, input=items, tools=[ADD, NOW])
    called = {"id": call.call_id, "type": "function",
              "function": {"name": call.name, "arguments": call.arguments}}  # fmt: skip
    messages = [
        {"role": "user", "content": "Hello"},
        {
            "role": "assistant",
            "reasoning_content": thought.content[0].text,
            "tool_calls": [called],
        },
        {"role": "tool", "tool_call_id": call.call_id, "content": "7"},
    ]
    tools = [{"type": "function", "function": {k: v for k, v in one.items() if k != "type"}}
             for one in (ADD, NOW)]  # fmt: skip
    ask = {"messages": messages, "tools": tools, "temperature": 0, "max_tokens": 40}
    chat = reasoner.call("/v1/chat/completions", ask)[1]
    assert second.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert second.output_text == (chat["choices"][0]["message"]["content"] or "")


def test_reasoning_is_an_item(reasoner: Served) -> None:
    response = both(reasoner, **RANKED)
    assert [item.type for item in response.output] == ["reasoning", "message"]
    thought, message = response.output
    assert [thought.status, message.status] == ["completed", "incomplete"]
    chat = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 40}
    said = reasoner.call("/v1/chat/completions", chat)[1]["choices"][0]["message"]
    assert thought.content[0].text == said["reasoning_content"]
    assert response.output_text == said["content"]
    assert response.usage.output_tokens_details.reasoning_tokens == 5  # the end is the fifth
    assert len(message.content[0].logprobs) == 35, "those of the text alone"
    response = both(reasoner, reasoning={"effort": "none"})
    assert [item.type for item in response.output] == ["message"]
    assert response.usage.output_tokens_details.reasoning_tokens == 0
    response = both(reasoner, max_output_tokens=3)
    assert [(item.type, item.status) for item in response.output] == [("reasoning", "incomplete")]


def test_logprobs(thinker: Served) -> None:
    response = both(thinker, **RANKED)
    [item] = response.output
    logprobs = item.content[0].logprobs
    assert len(logprobs) == response.usage.output_tokens
    assert all(len(one.top_logprobs) == 2 for one in logprobs)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_logprobs_are_those_of_text(thinker: Served, stream: bool, size: int) -> None:
    """A text, calls and a text, in tokens of any length: each text has its own logprobs."""
    call = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    texts = ["Hello there", f"{call}{call}", "it is done"]
    tokens = [one[i : i + size] for one in texts for i in range(0, len(one), size)]
    fields = {"input": "x", "tools": [ADD], "stream": stream, **RANKED}
    body = ResponsesRequest.model_validate(fields)
    chat, text = chat_request(body), copy(thinker.llm.text)
    text.new_text = lambda *args, **kwargs: TextStream(Pieces(tokens))  # type: ignore[method-assign]
    params = chat.params(text.default_params, text.vocab_size)
    form = MessageForm(tools=(HERMES, chat.use)) if chat.use else None
    events: list[Any] = [
        (0, Event((0, 0), i, token, TokenLogprobs(i, -1.0, 1, ()), None, None, None))
        for i, token in enumerate(tokens)
    ]
    events.append((0, Event((0, 0), None, "", None, FinishReason.STOP, None, None)))

    async def response() -> dict[str, Any]:
        one = RequestStream([(1,)], params, text.new_text, StreamCaller(""))
        answers = ResponseBuilder(text, chat, one, form)
        shape = ResponsesWriter(answers, "tiny", "", body=body)
        for event in events:
            shape.take(event)
        return shape.whole()

    output = asyncio.run(response())["output"]
    assert [item["type"] for item in output] == ["message", *["function_call"] * 2, "message"]
    assert [call["arguments"] for call in output[1:3]] == ['{"a": 1}'] * 2
    for item, said in zip((output[0], output[3]), (texts[0], texts[2]), strict=True):
        [part] = item["content"]
        assert part["text"] == said
        num = -(-len(said) // size)
        own = range(num) if item is output[0] else range(len(tokens) - num, len(tokens))
        assert [one["token"] for one in part["logprobs"]] == [text.spell(i) for i in own]


def test_an_answer_without_a_word_is_a_message(reasoner: Served, tmp_path: Path) -> None:
    """The first token ends the answer."""
    path = write_model(tmp_path / "silent")
    with LLM(path, kv_cache_memory="1MiB", threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        [found] = llm.chat([{"role": "user", "content": "Hello"}], params, progress=False)
    ends = {"eos_token_id": [0, found.outputs[0].token_ids[0]]}
    (path / "generation_config.json").write_text(json.dumps(ends))
    with serving(path) as served:
        response = both(served)
        assert (response.status, response.output_text) == ("completed", "")
        assert [item.type for item in response.output] == ["message"]


def test_keys_and_limits_hold_here_too(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model")
    with serving(path, api_key=["a", "b"], max_tokens_per_minute=60) as served:
        served.stop_clock_of_limits()
        with served.client("wrong") as client, pytest.raises(openai.AuthenticationError):
            client.responses.create(**ASK)
        with served.client("a") as client:
            raw = client.responses.with_raw_response.create(**ASK, user="me")
            used = raw.parse().usage
            assert used is not None
            eventually(lambda: "completion_tokens=40" in "".join(served.lines[-1:]))
            assert "user=me" in served.lines[-1]
            with pytest.raises(openai.RateLimitError) as limited:
                client.responses.create(**ASK)
            assert int(limited.value.response.headers["x-ratelimit-remaining-tokens"]) <= (
                60 - used.output_tokens
            )
        with served.client("b") as client:
            assert client.responses.create(**ASK, stream=False).status == "incomplete"


def test_a_reader_that_leaves_ends_its_request(thinker: Served) -> None:
    asked = ASK | {"max_output_tokens": 900, "stream": True}
    num_lines, go_on = thinker.num_lines(), hold(thinker, 5)
    with thinker.client() as client:
        stream = client.responses.create(**asked)
        assert next(iter(stream)).type == "response.created"
        eventually(lambda: thinker.llm.engine.requests)
        stream.close()
    eventually(lambda: not thinker.running.async_engine.num_streams)
    go_on.set()
    thinker.assert_idle()
    eventually(lambda: any("finish=abort" in line for line in thinker.lines[num_lines:]))


def test_what_is_dropped_is_named(thinker: Served) -> None:
    part = {"type": "output_text", "text": "A", "annotations": [], "logprobs": []}
    item = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant"}
    asked = {"input": [item | {"content": [part]}], "reasoning": {"summary": "auto"}}
    headers = thinker.call(PATH, ASK | asked)[2]
    assert headers["x-ridgeline-ignored"].split(", ") == [
        *("input.id", "input.status", "input.content.annotations", "input.content.logprobs"),
        "reasoning.summary",
    ]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"previous_response_id": "resp_1"},
         "previous_response_id is not supported: nothing is stored here, so send all items of the "
         "conversation as input"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True},
         "background is not supported: nothing is stored here, so use stream"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"tools": [{"type": "web_search"}]},
         "tools[0].type is not supported: no tools run on this server, so give a function"),
        ({"tools": [{"name": "add"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools[0].name"),
        ({"tools": [ADD] * 1025}, "tools"),
        ({"tools": [ADD | {"name": "messages"}] * 2},  # the client's own words are not renamed
         "tools[1].name is wrong: 'messages' is there twice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "must"}, "tool_choice"),
        ({"tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [ADD]}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "x", "tools": []}}, "tool_choice.mode"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools", "mode": "auto",
                                          "tools": [{"type": "function", "name": "x"}]}},
         "tool_choice.tools"),
        ({"include": [1]}, "include[0]"),
        ({"input": []}, "input is wrong: it must have at least 1 item"),
        ({"input": [{"role": "user", "content": "x"}] * 8193},
         "input is wrong: it must have at most 8192 items, not 8193"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "cat", "content": "x"}]}, "input[0].role"),
        ({"instructions": "x", "input": [CALL, CALL, {"role": "cat", "content": "x"}]},
         "input[2].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type is not supported: this model reads only text, so send what "
         "matters as text"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 1}]}]},
         "input[0].content[0].text"),
        ({"input": [{"type": "function_call", "name": "x", "arguments": ""}]}, "input[0].call_id"),
        ({"input": [CALL, {"type": "function_call_output", "output": "x"}]}, "input[1].call_id"),
        ({"input": "x " * 9000}, "input"),  # "this model takes 1024 tokens, ..."
        ({"text": {"format": {}}}, "text.format.type"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "x"}}}},
         "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "tools": [ADD], "tool_choice": "required"},
         "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": -2}, "max_output_tokens"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"metadata": {"a": 1}}, "metadata.a"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)  # fmt: skip
def test_what_is_refused_by_name(thinker: Served, fields: dict[str, Any], said: str) -> None:
    """A message begins with the name of the field at fault, as this API has it."""
    param = said.split()[0]
    error = thinker.refused_for(param, PATH, ASK | fields)
    assert error["message"].startswith((said, "this model takes")), error
    others = {"messages", "max_completion_tokens", "response_format", "reasoning_effort"}
    assert "'messages'" in said or not any(name in error["message"] for name in others), error


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


def test_the_tokens_of_an_input_can_be_counted_alone(served: Served) -> None:
    asked = {"instructions": "Be brief.", "input": "hello", "max_output_tokens": 1}
    counted = served.call("/v1/responses/input_tokens", asked)[1]
    usage = served.call("/v1/responses", asked)[1]["usage"]
    assert counted == {"object": "response.input_tokens", "input_tokens": usage["input_tokens"]}
    assert usage["input_tokens_details"]["cache_write_tokens"] == 0
