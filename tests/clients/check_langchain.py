"""langchain-openai: chats, streams, batches, typed answers, tools, the Responses API."""

import os

import openai
import pydantic
import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

OWN = {
    "model": os.environ["RIDGELINE_MODEL"],
    "base_url": os.environ["RIDGELINE_URL"] + "/v1",
    "api_key": "x",
    "max_retries": 0,
}
CHAT = ChatOpenAI(**OWN, max_tokens=16, temperature=0)


class City(pydantic.BaseModel):
    """A city."""

    name: str = pydantic.Field(max_length=20)


@tool
def weather(city: str) -> str:
    """Return the weather of a city."""
    return "sunny"


def test_turns_streams_and_batches():
    first = CHAT.invoke("Hi")
    assert CHAT.invoke([SystemMessage("Be short."), HumanMessage("Hi"), first, HumanMessage("Bye")])
    parts = list(ChatOpenAI(**OWN, max_tokens=16, stream_usage=True).stream("Hi"))
    assert any(part.usage_metadata for part in parts)
    assert len(CHAT.batch(["Hi"] * 8)) == 8


def test_completions_and_fields():
    assert OpenAI(**OWN, max_tokens=4).invoke("2+2=")
    assert CHAT.bind(stop=["."], seed=3).invoke("Hi").content
    found = CHAT.bind(logprobs=True, top_logprobs=2).invoke("Hi")
    assert found.response_metadata["logprobs"]["content"]


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_typed_answers(method):
    chat = ChatOpenAI(**OWN, max_tokens=200, temperature=0)
    found = chat.with_structured_output(City, method=method).invoke("Name a city.")
    assert isinstance(found, City)


def test_json_mode():
    """Any object fits, so this small model may write one without an end."""
    chat = ChatOpenAI(**OWN, max_tokens=300, temperature=0)
    mode = chat.with_structured_output(City, method="json_mode", include_raw=True)
    try:
        assert mode.invoke("As JSON")["raw"].content.lstrip().startswith("{")
    except openai.LengthFinishReasonError as error:
        assert error.completion.choices[0].message.content.lstrip().startswith("{")


def test_tools_and_responses():
    assert CHAT.bind_tools([weather]).invoke("Weather of Rome?") is not None
    forced = ChatOpenAI(**OWN, max_tokens=100).bind_tools([weather], tool_choice="any")
    assert forced.invoke("Weather of Rome?").tool_calls[0]["name"] == "weather"
    assert ChatOpenAI(**OWN, use_responses_api=True, max_tokens=32).invoke("Hi").content


def test_embeddings():
    texts = ["A dog barks.", "A dog barks loudly.", "Bread is baked at night."]
    make = OpenAIEmbeddings(**OWN, check_embedding_ctx_length=False)
    one, *others = make.embed_documents(texts)
    assert make.embed_query(texts[0]) == one
    near, far = (sum(a * b for a, b in zip(one, other, strict=True)) for other in others)
    assert near > far
