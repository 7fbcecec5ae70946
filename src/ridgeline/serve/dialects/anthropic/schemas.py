"""The shapes of Anthropic's answers, and what is documented of its streams and errors."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from ridgeline.serve.answer.schemas import (
    TEXT,
    ClosedDict,
    EndedBy,
    StageFields,
    errors_of,
    object_of,
)

MESSAGE_EVENTS = "Anthropic's events, from `message_start` to `message_stop`."


class MessageUsage(ClosedDict):
    """Anthropic's counts of tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class ContentBlock(ClosedDict):
    """A block of a message: text, thinking or a call."""

    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[dict[str, Any]]


class MessageEnd(EndedBy):
    """Why a message has ended."""

    stop_reason: Literal[
        "end_turn",
        "max_tokens",
        "model_context_window_exceeded",
        "refusal",
        "stop_sequence",
        "tool_use",
    ]
    stop_sequence: str | None


class MessageObject(MessageEnd, StageFields):
    """What POST /v1/messages returns, unless it streams."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    usage: MessageUsage


_ERROR = object_of(type=TEXT, message=TEXT)
MESSAGE_ERRORS = errors_of(object_of(type={"const": "error"}, error=_ERROR, request_id=TEXT))
