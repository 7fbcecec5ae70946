"""Ollama's requests as OpenAI's."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

from ridgeline.serve.answer.dialect import Dialect
from ridgeline.serve.answer.protocol import ChatRequest
from ridgeline.serve.dialects.ollama.protocol import (
    GenerateRequest,
    OllamaChatRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
    RawRequest,
)
from ridgeline.serve.http.errors import ApiError

_SAME = (
    *("seed", "temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("presence_penalty", "frequency_penalty", "stop", "repeat_penalty", "repeat_last_n"),
)
OLLAMA = Dialect(
    names={
        "max_tokens": "options.num_predict",
        "reasoning_effort": "think",
        "messages.reasoning_content": "messages.thinking",
        "truncate_prompt_tokens: -1": "truncate: true",
        **{name: f"options.{name}" for name in _SAME},
    },
    same=_SAME,
)


def chat_request(request: OllamaChatRequest) -> ChatRequest:
    """Return a conversation as a chat request. Raises ApiError."""
    fields = {
        **_common(request),
        "think": request.think,
        "messages": list(openai_messages(request.messages)),
        "tools": request.tools or None,
        "tool_choice": request.tool_choice,
        "parallel_tool_calls": request.parallel_tool_calls,
        **_logprobs(request),
    }
    return OLLAMA.request(ChatRequest, request.options, fields)


def prompt_request(request: GenerateRequest) -> ChatRequest:
    """Return a prompt as a conversation of one message. Raises ApiError."""
    messages = [{"role": "system", "content": request.system}] if request.system else []
    messages.append({"role": "user", "content": request.prompt})
    fields = {**_common(request), "think": request.think, **_logprobs(request)}
    fields["messages"] = messages
    return OLLAMA.request(ChatRequest, request.options, fields)


def raw_request(request: GenerateRequest) -> RawRequest:
    """Return a prompt that is continued as it stands. Raises ApiError."""
    for name in ("system", "think"):
        if getattr(request, name):
            why = f"{name} needs the model's template: leave out raw and suffix"
            raise ApiError(400, why, param=name, code="invalid_value")
    fields = {**_common(request), "prompt": request.prompt, "suffix": request.suffix}
    fields["logprobs"] = (request.top_logprobs or 0) if request.logprobs else None
    return OLLAMA.request(RawRequest, request.options, fields)


def _logprobs(request: OllamaRequest) -> dict[str, Any]:
    """Return what a chat is asked to tell of its tokens."""
    top = request.top_logprobs if request.logprobs else None
    return {"logprobs": request.logprobs, "top_logprobs": top}


def _common(request: OllamaRequest) -> dict[str, Any]:
    options = request.options or OllamaOptions.model_validate({})
    length = options.num_predict
    return {
        "model": request.model,
        "stream": request.is_streamed,
        "max_tokens": length if length is not None and length >= 0 else None,
        "format": request.format,
        "receipt": request.receipt,
    }


def openai_messages(messages: Sequence[OllamaMessage]) -> Iterator[dict[str, Any]]:
    """Yield the messages; results of tools belong to the calls before them, in their order."""
    open_calls: deque[tuple[str, str]] = deque()  # id and name
    count = 0
    for message in messages:
        said: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.thinking:
            said["reasoning_content"] = message.thinking
        if message.tool_calls:
            calls = []
            for call in message.tool_calls:
                name, call_id = call.function.name, call.id or f"call_{count}"
                count += 1
                open_calls.append((call_id, name))
                function = {"name": name, "arguments": json.dumps(call.function.arguments)}
                calls.append({"id": call_id, "type": "function", "function": function})
            said["tool_calls"] = calls
        if message.role == "tool":
            said["tool_call_id"] = message.tool_call_id or _answered(open_calls, message.tool_name)
            if message.tool_name:
                said["name"] = message.tool_name
        yield said


def _answered(calls: deque[tuple[str, str]], name: str | None) -> str:
    """Return the id of the call that a result is for: the first one of its name, if it has one."""
    for call in calls:
        if name in (None, call[1]):
            calls.remove(call)
            return call[0]
    return "call"
