"""The anthropic package: messages, streams, tools, counts, errors."""

import os

import anthropic
import pytest

MODEL = os.environ["RIDGELINE_MODEL"]
CLIENT = anthropic.Anthropic(base_url=os.environ["RIDGELINE_URL"], api_key="x", max_retries=0)
ASK = {"model": MODEL, "max_tokens": 12, "messages": [{"role": "user", "content": "Say hi."}]}
TOOL = {
    "name": "weather",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def test_a_message_and_its_stream():
    whole = CLIENT.messages.create(**ASK, extra_body={"temperature": 0})
    with CLIENT.messages.stream(**ASK, extra_body={"temperature": 0}) as stream:
        assert stream.get_final_message().content[0].text == whole.content[0].text
    assert whole.usage.output_tokens == 12


def test_the_next_turn():
    first = CLIENT.messages.create(**ASK)
    turns = [*ASK["messages"], {"role": "assistant", "content": first.content}, *ASK["messages"]]
    assert CLIENT.messages.create(**ASK | {"messages": turns}).content


def test_tools():
    found = CLIENT.messages.create(
        **ASK | {"max_tokens": 100}, tools=[TOOL], tool_choice={"type": "any"}
    )
    assert found.stop_reason == "tool_use"
    assert found.content[0].input.keys() == {"city"}


def test_counting():
    counted = CLIENT.messages.count_tokens(model=MODEL, messages=ASK["messages"])
    usage = CLIENT.messages.create(**ASK).usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def test_errors():
    with pytest.raises(anthropic.NotFoundError, match="claude"):
        CLIENT.messages.create(**ASK | {"model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        CLIENT.messages.create(**ASK, extra_body={"temperature": 2})
