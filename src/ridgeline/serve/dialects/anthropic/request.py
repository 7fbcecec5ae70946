"""POST /v1/messages: what was asked, as a chat request; and errors in Anthropic's form."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ridgeline.serve.answer.dialect import Dialect, text_of
from ridgeline.serve.answer.protocol import ChatRequest
from ridgeline.serve.dialects.anthropic.protocol import (
    Conversation,
    InputMessage,
    MessagesRequest,
    TextBlock,
    ThinkingBlock,
    ToolChoice,
    ToolResultBlock,
    ToolUseBlock,
)
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.request_body import bad_value

ANTHROPIC = Dialect(
    names={
        "^stop": "stop_sequences",
        "messages.reasoning_content": "messages.content.thinking",
        "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "tool_choice.function.name": "tool_choice.name",
        ".function.parameters": ".input_schema",
        ".function.": ".",
    },
    same=("max_tokens", "model", "receipt", "stream", "temperature", "top_p"),
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def chat_request(request: Conversation) -> ChatRequest:
    """Return the same as a chat request. Raises ApiError, which names a field of the chat's."""
    messages = list(_messages(request))
    goes_on = request.messages[-1].role == "assistant"  # the answer continues it
    if goes_on and "tool_calls" in messages[-1]:
        why = "the last message calls a tool: its result must follow"
        raise bad_value("messages", why)
    config, choice = request.output_config, request.tool_choice
    fields: dict[str, Any] = {
        "messages": messages,
        "continue_final_message": goes_on or None,
        "tools": [_tool(one.model_dump(exclude_none=True)) for one in request.tools or ()] or None,
        "tool_choice": _choice(choice),
        "parallel_tool_calls": _is_parallel(choice.disable_parallel_tool_use if choice else None),
        "reasoning_effort": config.effort if config else None,
    }
    if form := (config and config.format) or request.output_format:
        fields["response_format"] = _format(form)
    if request.thinking is None or request.thinking.type == "disabled":
        fields["reasoning_effort"] = fields["reasoning_effort"] or "none"
    if isinstance(request, MessagesRequest):
        fields |= {
            "stop": request.stop_sequences,
            "top_k": request.top_k or None,  # 0 is no limit
            "user": request.metadata.user_id if request.metadata else None,
        }
    return ANTHROPIC.request(ChatRequest, request, fields)


def _is_parallel(is_disabled: bool | None) -> bool | None:
    return None if is_disabled is None else not is_disabled


def _format(form: dict[str, Any]) -> dict[str, Any]:
    match form:
        case {"type": "json_schema", "schema": {**schema}}:
            wanted = {"name": "answer", "schema": schema, "strict": True}
            return {"type": "json_schema", "json_schema": wanted}
    raise bad_value("output_config.format", 'send {"type": "json_schema", "schema": {...}}')


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": function | {"parameters": tool["input_schema"]}}


def _choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type != "tool":
        return _CHOICES[choice.type]
    return {"type": "function", "function": {"name": choice.name or ""}}


def _messages(request: Conversation) -> Iterator[dict[str, Any]]:
    if request.system:
        yield {"role": "system", "content": text_of(request.system)}
    for message in request.messages:
        if isinstance(message.content, str):
            yield {"role": message.role, "content": message.content}
        elif message.role == "assistant":
            yield _assistant(message)
        else:
            yield from _others(message)


def _assistant(message: InputMessage) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant"}
    texts, thoughts, calls = [], [], []
    for block in message.content:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ThinkingBlock():
                thoughts.append(block.thinking)
            case ToolUseBlock():
                function = {"name": block.name, "arguments": json.dumps(block.input)}
                calls.append({"id": block.id, "type": "function", "function": function})
            case ToolResultBlock():
                raise _misplaced("tool_result", "user")
    if thoughts:
        said["reasoning_content"] = "\n".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    if texts or not calls:
        said["content"] = "\n".join(texts)
    return said


def _others(message: InputMessage) -> Iterator[dict[str, Any]]:
    """Yield results of tools, each a message of its own, and what the role says, in order."""
    texts: list[str] = []
    for block in message.content:
        match block:
            case TextBlock():
                texts.append(block.text)
            case ToolResultBlock() if message.role == "user":
                if texts:
                    yield {"role": message.role, "content": "\n".join(texts)}
                    texts = []
                content = text_of(block.content or "")
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
            case ToolResultBlock():
                raise _misplaced(block.type, "user")
            case ToolUseBlock() | ThinkingBlock():
                raise _misplaced(block.type, "assistant")
    if texts:
        yield {"role": message.role, "content": "\n".join(texts)}


def _misplaced(kind: str, role: str) -> ApiError:
    return bad_value("messages", f"{kind} belongs into a message whose role is {role}")
