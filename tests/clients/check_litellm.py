"""litellm, by each of the names under which it knows such servers."""

import asyncio
import os

import litellm
import pytest

MODEL, URL = os.environ["RIDGELINE_MODEL"], os.environ["RIDGELINE_URL"]
ASK = [{"role": "user", "content": "Name three colours."}]
OWN = {"api_base": URL + "/v1", "api_key": "x", "max_tokens": 8, "num_retries": 0}
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}


def chat(prefix="openai", messages=ASK, **more):
    return (
        litellm.completion(f"{prefix}/{MODEL}", messages=messages, **OWN | more).choices[0].message
    )


@pytest.mark.parametrize("prefix", ["openai", "hosted_vllm", "lm_studio"])
def test_each_name(prefix):
    assert chat(prefix).content


def test_ollama():
    assert chat("ollama_chat", api_base=URL).content
    assert chat("ollama", api_base=URL).content


def test_ollama_asynchronously():
    """It says that its body is application/octet-stream."""

    async def ask():
        own = OWN | {"api_base": URL}
        return await litellm.acompletion(f"ollama_chat/{MODEL}", messages=ASK, **own)

    assert asyncio.run(ask()).choices[0].message.content


def test_anthropic():
    assert chat("anthropic", api_base=URL).content


def test_the_next_turn():
    first = chat()
    for again in (first, first.model_dump()):
        assert chat(messages=[*ASK, again, *ASK]).content


def test_streams_and_usage():
    parts = litellm.completion(
        f"openai/{MODEL}", messages=ASK, stream=True, stream_options={"include_usage": True}, **OWN
    )
    assert any(getattr(part, "usage", None) for part in parts)


def test_fields():
    assert chat(logprobs=True, top_logprobs=2, user="u", metadata={"a": "b"}).content
    assert chat(response_format={"type": "json_object"}).content
    assert chat(tools=[TOOL]) is not None
    assert chat(reasoning_effort="low").content  # a model that knows none is not told of it
    text = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="2+2=", **OWN)
    assert text.choices[0].text
    own = {name: OWN[name] for name in ("api_base", "api_key")}
    found = litellm.responses(model=f"openai/{MODEL}", input="Hi", max_output_tokens=16, **own)
    assert found.output


def test_embeddings_and_ranks():
    own = {name: OWN[name] for name in ("api_base", "api_key")}
    found = litellm.embedding(f"openai/{MODEL}", input=["x", "y"], **own)
    assert [len(one["embedding"]) for one in found.data] == [576, 576]
    ranked = litellm.rerank(
        f"hosted_vllm/{MODEL}",
        query="x",
        documents=["y", "x"],
        api_base=own["api_base"].removesuffix("/v1"),
        api_key="x",
    )
    assert ranked.results[0]["index"] == 1
