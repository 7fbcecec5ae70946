"""The openai package: chats, streams, forms, tools, responses, files it sends by itself, errors."""

import concurrent.futures
import json
import os

import openai
import pydantic
import pytest

MODEL = os.environ["RIDGELINE_MODEL"]
CLIENT = openai.OpenAI(base_url=os.environ["RIDGELINE_URL"] + "/v1", api_key="x", max_retries=0)
ASK = [{"role": "user", "content": "Name three colours."}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


def chat(messages=ASK, **more):
    return CLIENT.chat.completions.create(
        model=MODEL, messages=messages, **{"max_tokens": 8} | more
    )


def test_a_conversation_goes_on_with_what_the_client_dumps():
    first = chat().choices[0].message
    for again in (first, first.model_dump(), dict(first), first.model_dump(exclude_none=True)):
        assert chat([*ASK, again, *ASK]).choices[0].message.content


def test_streams_are_the_whole_answer():
    whole = chat(temperature=0).choices[0].message.content
    parts = list(chat(temperature=0, stream=True, stream_options={"include_usage": True}))
    assert "".join(p.choices[0].delta.content or "" for p in parts if p.choices) == whole
    assert parts[-1].usage.completion_tokens == 8
    with CLIENT.chat.completions.stream(model=MODEL, messages=ASK, temperature=0) as stream:
        assert stream.get_final_completion().choices[0].message.content


def test_sixteen_at_once_are_as_one():
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda i: chat(seed=5, temperature=1), range(16)))
    assert len({answer.choices[0].message.content for answer in answers}) == 1


def test_logprobs_n_and_parts():
    found = chat(logprobs=True, top_logprobs=3, n=2)
    assert len(found.choices) == 2
    assert len(found.choices[0].logprobs.content[0].top_logprobs) == 3
    parts = [{"type": "text", "text": "Name three "}, {"type": "text", "text": "colours."}]
    assert chat([{"role": "user", "content": parts}]).usage.total_tokens
    assert chat([{"role": "developer", "content": "Be short."}, *ASK]).choices


def test_completions():
    echoed = CLIENT.completions.create(
        model=MODEL, prompt="2+2=", max_tokens=0, echo=True, logprobs=1
    )
    assert echoed.choices[0].text == "2+2="
    assert len(CLIENT.completions.create(model=MODEL, prompt=["a", "b"], best_of=2).choices) == 2


def test_forms():
    class City(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=20)

    for wish in (
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}},
    ):
        found = chat(response_format=wish, max_tokens=200, temperature=0).choices[0]
        if found.finish_reason == "stop":
            assert isinstance(json.loads(found.message.content), dict)
    parsed = CLIENT.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=City, max_tokens=100
    )
    assert isinstance(parsed.choices[0].message.parsed, City)


def test_tools():
    call = chat(tools=[TOOL], tool_choice="required", max_tokens=100).choices[0].message
    said = json.loads(call.tool_calls[0].function.arguments)
    assert set(said) == {"city"}
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "sunny"}
    history = [*ASK, call.model_dump(), result] if len(call.tool_calls) == 1 else ASK
    assert chat(history, tools=[TOOL], tool_choice="none").choices[0].message.content
    assert chat(tools=[TOOL], max_tokens=20).choices


def test_responses():
    found = CLIENT.responses.create(model=MODEL, input="Hi", max_output_tokens=16)
    assert found.output_text
    kinds = [event.type for event in CLIENT.responses.create(model=MODEL, input="Hi", stream=True)]
    assert kinds[-1] == "response.completed"


def test_what_servers_like_vllm_take():
    assert chat(extra_body={"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}).choices
    assert chat(extra_body={"chat_template_kwargs": {"enable_thinking": False}}).choices
    assert chat(reasoning_effort="none").choices
    assert [one.id for one in CLIENT.models.list()] == [MODEL]


def test_embeddings():
    """The client asks for base64 and decodes it, unless it is told otherwise."""
    packed = CLIENT.embeddings.create(model=MODEL, input=["dog", "cat"], dimensions=32)
    plain = CLIENT.embeddings.create(
        model=MODEL, input=["dog", "cat"], dimensions=32, encoding_format="float"
    )
    assert [one.embedding for one in packed.data] == [one.embedding for one in plain.data]
    assert [len(one.embedding) for one in packed.data] == [32, 32]
    assert packed.usage.prompt_tokens == packed.usage.total_tokens > 0
    ids = CLIENT.embeddings.create(model=MODEL, input=[[5, 6], [7]])
    assert [one.index for one in ids.data] == [0, 1]


def test_errors_have_their_classes():
    with pytest.raises(openai.NotFoundError, match="gpt-4o"):
        CLIENT.chat.completions.create(model="gpt-4o", messages=ASK)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        chat(temperature=3)
    image = {"type": "image_url", "image_url": {"url": "data:,x"}}
    with pytest.raises(openai.BadRequestError, match="is not supported"):
        chat([{"role": "user", "content": [image]}])
    with pytest.raises(openai.NotFoundError):
        CLIENT.moderations.create(input="x")


def test_what_is_dropped_and_capped_is_named():
    raw = CLIENT.chat.completions.with_raw_response.create(
        model=MODEL, messages=ASK, max_tokens=100_000, temperature=0, reasoning_effort="low"
    )
    assert raw.headers["x-ridgeline-ignored"] == "reasoning_effort"
    assert raw.headers["x-ridgeline-capped"].startswith("max_tokens 100000 -> ")
    assert raw.parse().choices[0].finish_reason == "stop"
