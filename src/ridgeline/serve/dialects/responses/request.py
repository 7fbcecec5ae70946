"""POST /v1/responses, OpenAI's newer API: what was asked, as a chat request.

The conversation comes whole with each request, as items; ``responses.response`` writes the
answer as items again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ridgeline.serve.answer.dialect import Dialect, text_of
from ridgeline.serve.answer.protocol import ChatRequest
from ridgeline.serve.dialects.responses.protocol import (
    LOGPROBS,
    AllowedTools,
    CallItem,
    CallOutputItem,
    MessageItem,
    NamedFunction,
    ReasoningItem,
    ResponsesRequest,
)

RESPONSES = Dialect(
    names={
        "messages.reasoning_content": "input.reasoning",
        "messages": "input",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "max_completion_tokens": "max_output_tokens",
        "reasoning_effort": "reasoning.effort",
        ".function.": ".",
        ".allowed_tools.": ".",
    },
    same=(
        *("metadata", "model", "parallel_tool_calls", "prompt_cache_key", "safety_identifier"),
        *("stream", "temperature", "top_logprobs", "top_p", "user"),
        *("timings_per_token", "return_progress", "receipt"),
    ),
)


def chat_request(request: ResponsesRequest) -> ChatRequest:
    """Return the same as a chat request. Raises ApiError, which names a field of the chat's."""
    wants_logprobs = LOGPROBS in (request.include or ()) or request.top_logprobs is not None
    tools = [one.model_dump(exclude={"type"}, exclude_none=True) for one in request.tools or ()]
    fields = {
        "messages": list(_messages(request)),
        "max_completion_tokens": request.max_output_tokens,
        "tools": [{"type": "function", "function": tool} for tool in tools],
        "tool_choice": _chat_choice(request.tool_choice),
        "response_format": _chat_format(request.text.format if request.text else None),
        "reasoning_effort": request.reasoning.effort if request.reasoning else None,
        "logprobs": wants_logprobs or None,
    }
    return RESPONSES.request(ChatRequest, request, fields)


def _messages(request: ResponsesRequest) -> Iterator[dict[str, Any]]:
    """Yield the messages that the items make; one of the assistant may take several."""
    if request.instructions:
        yield {"role": "system", "content": request.instructions}
    if isinstance(request.input, str):
        yield {"role": "user", "content": request.input}
        return
    own: dict[str, Any] = {}  # a message of the assistant that is not complete
    for item in request.input:
        match item:
            case CallItem():
                function = {"name": item.name, "arguments": item.arguments}
                call = {"id": item.call_id, "type": "function", "function": function}
                own.setdefault("tool_calls", []).append(call)
            case ReasoningItem():
                if own:
                    yield _assistant(own)
                own = {"reasoning_content": text_of(item.content or "")}
            case MessageItem(role="assistant"):
                if "content" in own or "tool_calls" in own:
                    yield _assistant(own)
                    own = {}
                own["content"] = text_of(item.content)
            case _:
                if own:
                    yield _assistant(own)
                    own = {}
                yield _other(item)
    if own:
        yield _assistant(own)


def _assistant(said: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", **({} if "tool_calls" in said else {"content": ""}), **said}


def _other(item: MessageItem | CallOutputItem) -> dict[str, Any]:
    """Return the message of an item that is not the assistant's."""
    if isinstance(item, CallOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
    return {"role": item.role, "content": text_of(item.content)}


def _chat_choice(choice: str | NamedFunction | AllowedTools | None) -> str | dict[str, Any] | None:
    match choice:
        case NamedFunction():
            return {"type": "function", "function": {"name": choice.name}}
        case AllowedTools():
            some = [{"type": "function", "function": {"name": one.name}} for one in choice.tools]
            allowed = {"mode": choice.mode, "tools": some}
            return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _chat_format(form: Mapping[str, Any] | None) -> dict[str, Any] | None:
    if form is None or form.get("type") != "json_schema":
        return None if form is None else dict(form)
    return {
        "type": "json_schema",
        "json_schema": {name: value for name, value in form.items() if name != "type"},
    }
