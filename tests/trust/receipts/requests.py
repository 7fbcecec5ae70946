"""What is asked for a receipt, and how one is read and written again as a liar would."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM
from ridgeline.trust.receipts.compare import wrong_in_file
from ridgeline.trust.receipts.reading import Signed, read
from ridgeline.trust.receipts.verify import differences, notes_on, opened, other_files
from tests.serve.serving import Served

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "y"]}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "send", "parameters": SCHEMA}}
LONG = {"prompt": "The cat", "max_tokens": 14, "ignore_eos": True}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a chat": (CHAT, HELLO),
    "a chat of three answers, streamed": (CHAT, HELLO | {"n": 3, "stream": True}),
    "a chat with logprobs": (CHAT, HELLO | {"seed": 5, "logprobs": True, "top_logprobs": 3}),
    "a call": (CHAT, HELLO | {"max_tokens": 60, "tools": [TOOL], "tool_choice": "required"}),
    "calls that repeat": (
        CHAT,
        HELLO
        | {
            "max_tokens": 200,
            "tools": [TOOL],
            "tool_choice": "required",
            "parallel_tool_calls": True,
        },
    ),
    "a call that may come": (CHAT, HELLO | {"tools": [TOOL], "stream": True}),
    "JSON": (CHAT, HELLO | {"max_tokens": 60, "structured_outputs": {"json": SCHEMA}}),
    "an expression": (TEXT, {**LONG, "ignore_eos": False, "regex": "[a-f]{3,9} end"}),
    "greedy": (TEXT, LONG | {"temperature": 0}),
    "two prompts of ids": (TEXT, LONG | {"prompt": [[40, 41, 42], [50, 51]], "n": 2}),
    "penalties": (TEXT, LONG | {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "seed": -3}),
    "samplers": (
        TEXT,
        LONG | {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9, "top_n_sigma": 3.0},
    ),
    "DRY and XTC": (TEXT, LONG | {"dry_multiplier": 1.0, "xtc_probability": 0.5}),
    "biases": (TEXT, LONG | {"logit_bias": {"60": 5, "61": -100}, "bad_words": ["cat"]}),
    "some ids": (TEXT, LONG | {"allowed_token_ids": [50, 51, 52, 53], "stop_token_ids": [53]}),
    "stop strings": (TEXT, LONG | {"max_tokens": 80, "stop": ["e", "a"], "min_tokens": 3}),
    "beams": (TEXT, LONG | {"use_beam_search": True, "n": 2, "best_of": 3}),
    "contrast": (TEXT, LONG | {"penalty_alpha": 0.6, "top_k": 4}),
    "a cut prompt": (TEXT, LONG | {"prompt": "a long one " * 9, "truncate_prompt_tokens": 8}),
    "a middle": (TEXT, LONG | {"suffix": " sat", "ignore_eos": False}),
    "an adapter": (TEXT, LONG | {"model": "a"}),
    "a short list": (TEXT, LONG | {"samplers": ["top_k", "infill"], "top_k": 20}),
}
_TURN = {"messages": HELLO["messages"]}
_CHAT_TOOL = {"name": "send", "input_schema": SCHEMA}
_RESPONSES_TOOL = {"type": "function", "name": "send", "parameters": SCHEMA}
APIS: dict[str, tuple[str, dict[str, Any], list[str]]] = {  # with the places of texts
    "a chat": (CHAT, HELLO, ["choices[0].message.content"]),
    "completions of the best": (
        TEXT,
        LONG | {"best_of": 5, "n": 2},
        ["choices[0].text", "choices[1].text"],
    ),
    "a response": (
        "/v1/responses",
        {"input": "Hello", "max_output_tokens": 12},
        ["output[0].content[0].text"],
    ),
    "a response with a call": (
        "/v1/responses",
        {
            "input": "Hello",
            "max_output_tokens": 60,
            "tools": [_RESPONSES_TOOL],
            "tool_choice": "required",
        },
        ["output[0].name", "output[0].arguments"],
    ),
    "a message": ("/v1/messages", _TURN | {"model": "tiny", "max_tokens": 12}, ["content[0].text"]),
    "a message with a call": (
        "/v1/messages",
        _TURN
        | {
            "model": "tiny",
            "max_tokens": 60,
            "tools": [_CHAT_TOOL],
            "tool_choice": {"type": "any"},
        },
        ["content[0].name"],
    ),
    "Ollama's chat": (
        "/api/chat",
        _TURN | {"model": "tiny", "options": {"num_predict": 12}},
        ["message.content"],
    ),
    "Ollama's call": (
        "/api/chat",
        _TURN | {"model": "tiny", "tools": [TOOL], "tool_choice": "required"},
        ["message.content", "message.tool_calls[0].function.name"],
    ),
    "Ollama's text": (
        "/api/generate",
        {"model": "tiny", "prompt": "Hello", "options": {"num_predict": 12}},
        ["response"],
    ),
    "llama.cpp's text": (
        "/completion",
        {"prompt": "The cat", "n_predict": 12, "n_probs": 2, "post_sampling_probs": True},
        ["content"],
    ),
    "llama.cpp's texts": (
        "/completion",
        {"prompt": ["The cat", "A dog"], "n_predict": 12, "response_fields": ["content"]},
        ["[0].content", "[1].content"],
    ),
    "llama.cpp's middle": (
        "/infill",
        {"input_prefix": "The cat", "input_suffix": " mat", "n_predict": 12},
        ["content"],
    ),
}
SMALL = {"kv_cache_memory": "1MiB", "threads": 1}


def receipt_of(served: Served, path: str, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    """Ask for an answer with a receipt, and return that."""
    status, answer, _ = served.call(path, body | {"receipt": True}, **headers)
    assert status == 200, answer
    if body.get("stream"):
        *_, last, end, _ = answer.decode().split("\n\n")
        assert end == "data: [DONE]"
        answer = json.loads(last.removeprefix("data: "))
        assert answer["choices"] == []
    found: dict[str, Any] = answer["receipt"]
    return found


def file_of(served: Served, api: str, *, is_streamed: bool, **fields: Any) -> bytes:
    """Ask an API for an answer with a receipt, and return it as a client keeps it."""
    path, body, _ = APIS[api]
    if is_streamed and "best_of" in body:
        pytest.skip("the best of several answers are not streamed")
    status, answer, _ = served.call(path, body | fields | {"receipt": True, "stream": is_streamed})
    assert status == 200, answer
    return answer if is_streamed else json.dumps(answer).encode()


def checked(verifier: Verifier, data: bytes) -> Signed:
    """Return what a file has, whose texts are those of its receipt, and its tokens right."""
    assert verifier.wrong(data) == []
    signed = read(data)
    assert signed.shown is not None
    assert list(wrong_in_file(signed.receipt, signed.subject, signed.shown)) == []
    return signed


def statement_of(receipt: dict[str, Any]) -> dict[str, Any]:
    """Return what a receipt states."""
    found: dict[str, Any] = json.loads(base64.b64decode(receipt["payload"]))
    return found


def stating(receipt: dict[str, Any], statement: Any) -> bytes:
    """Return the file of a receipt that states something else, which nobody has signed."""
    payload = base64.b64encode(json.dumps(statement).encode()).decode()
    return json.dumps(receipt | {"payload": payload, "signatures": []}).encode()


def written(receipt: dict[str, Any]) -> bytes:
    """Return the file of a receipt."""
    return json.dumps(receipt).encode()


class Verifier:
    """Verifies receipts of one model; models of each formats are loaded once."""

    def __init__(self, model: Path, **options: Any) -> None:
        self.model, self._options = model, SMALL | options
        self._llms: dict[Any, LLM] = {}

    def llm(self, signed: Signed) -> LLM:
        """Return the model as the receipt's was."""
        receipt = signed.receipt
        key = receipt.formats, receipt.max_model_len
        if key not in self._llms:
            self._llms[key] = opened(receipt, self.model, **self._options)
        self._llms[key].text.choose_parsers(*receipt.parsers)
        return self._llms[key]

    def wrong(self, data: bytes, *prompts: list[int]) -> list[str]:
        """Return what is wrong with a receipt, and what is told besides.

        Without ``prompts`` those of the receipt are computed. Raises ValueError for what is none,
        and for what cannot be computed.
        """
        signed = read(data)
        receipt, llm = signed.receipt, self.llm(signed)
        if found := list(other_files(receipt, llm.digest, llm.file_digests)):
            return found
        own = [list(one.tokens.ids or ()) for one in receipt.prompts]
        return [*notes_on(receipt, llm), *differences(receipt, llm, prompts or own)]

    def close(self) -> None:
        for one in self._llms.values():
            one.close()
