"""The first request in the documents of other servers: who tries ours instead begins with it.

Names of models and bodies are theirs; what has no Content-Type there is sent as curl -d does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.serving import Served, serving

CURL = {"content_type": "application/x-www-form-urlencoded"}
HELPFUL = {"role": "system", "content": "You are a helpful assistant."}
Reads = Callable[[Any], Any]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(answer: Any) -> str:
    return str(answer["choices"][0]["message"]["content"])


def text(answer: Any) -> str:
    return str(answer["choices"][0]["text"])


def last_line(data: bytes) -> bool:
    return bool(json.loads(data.splitlines()[-1])["done"])


def deltas(data: bytes) -> str:
    events = [line[6:] for line in data.decode().splitlines() if line.startswith("data: {")]
    return "".join(json.loads(one)["text_output"] for one in events)


# The server, the path, the body, its headers, and what a reader looks at.
EXAMPLES: list[tuple[str, str, Any, dict[str, str], Reads]] = [
    ("OpenAI", "/v1/responses", {"model": "gpt-5.5", "input": "Write a short bedtime story."}, {},
     lambda answer: answer["output"][-1]["content"][0]["text"]),
    ("OpenAI", "/v1/chat/completions",
     {"model": "gpt-5.5", "messages": [
         {"role": "developer", "content": "You are a helpful assistant."}, user("Hello!")]},
     {}, said),
    ("OpenAI", "/v1/embeddings",
     {"input": "The food was delicious.", "model": "text-embedding-3-small",
      "encoding_format": "float"}, {}, lambda answer: answer["data"][0]["embedding"]),
    ("vLLM", "/v1/completions",
     {"model": "Qwen/Qwen2.5-1.5B-Instruct", "prompt": "San Francisco is a", "max_tokens": 7,
      "temperature": 0}, {}, text),
    ("vLLM", "/v1/chat/completions",
     {"model": "Qwen/Qwen2.5-1.5B-Instruct",
      "messages": [HELPFUL, user("Who won the world series in 2020?")]}, {}, said),
    ("SGLang", "/v1/chat/completions",
     {"model": "qwen/qwen2.5-0.5b-instruct", "messages": [user("What is the capital of France?")]},
     {}, said),
    ("llama.cpp", "/completion",
     {"prompt": "Building a website can be done in 10 simple steps:", "n_predict": 128}, {},
     lambda answer: answer["content"]),
    ("llama.cpp", "/v1/chat/completions",
     {"model": "gpt-3.5-turbo", "messages": [
         {"role": "system", "content": "You are ChatGPT, an AI assistant."},
         user("Write a limerick about python exceptions")]},
     {"authorization": "Bearer no-key"}, said),
    ("Ollama", "/api/generate", {"model": "gemma3", "prompt": "Why is the sky blue?"}, CURL,
     last_line),
    ("Ollama", "/api/chat", {"model": "gemma3", "messages": [user("why is the sky blue?")]}, CURL,
     last_line),
    ("Ollama", "/api/embed", {"model": "all-minilm", "input": "Why is the sky blue?"}, CURL,
     lambda answer: answer["embeddings"][0]),
    ("Ollama", "/api/pull", {"model": "tiny"}, CURL, lambda data: json.loads(data)["status"]),
    ("TensorRT-LLM", "/v2/models/ensemble/generate",
     {"text_input": "What is machine learning?", "max_tokens": 20, "bad_words": "",
      "stop_words": ""}, CURL, lambda answer: answer["text_output"]),
    ("Triton", "/v2/models/vllm_model/generate_stream",
     {"text_input": "What is Triton Inference Server?",
      "parameters": {"stream": True, "temperature": 0}}, CURL, deltas),
    ("Anthropic", "/v1/messages",
     {"model": "claude-opus-4-8", "max_tokens": 1024, "messages": [user("Hello, Claude")]},
     {"x_api_key": "my-key", "anthropic_version": "2023-06-01"},
     lambda answer: answer["content"][0]["text"]),
]  # fmt: skip


@pytest.fixture(scope="module")
def named(roomy: Path) -> Iterator[Served]:
    with serving(roomy, {"max_model_len": 256}, any_model_name=True) as served:
        yield served


@pytest.mark.parametrize(
    ("path", "body", "headers", "reads"),
    [one[1:] for one in EXAMPLES],
    ids=[f"{one[0]} {one[1]}" for one in EXAMPLES],
)
def test_the_first_example_runs(
    named: Served, path: str, body: Any, headers: dict[str, str], reads: Reads
) -> None:
    status, answer, told = named.call(path, body, **headers)
    assert status == 200, answer
    assert reads(answer)
    assert "x-ridgeline-ignored" not in told, "nothing of it is dropped"
    named.assert_idle()
