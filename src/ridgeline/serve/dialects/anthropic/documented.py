"""The shapes of Anthropic's answers, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from ridgeline.serve.dialects.documented import TEXT, Shaped, errors_of

MESSAGE_EVENTS = "Anthropic's events, from `message_start` to `message_stop`."


class MessageUsage(Shaped):
    """Anthropic's counts of tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class ContentBlock(Shaped):
    """A block of a message: text, thinking or a call."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class MessageObject(Shaped):
    """What POST /v1/messages returns, unless it streams."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal[
        "end_turn",
        "max_tokens",
        "model_context_window_exceeded",
        "refusal",
        "stop_sequence",
        "tool_use",
    ]
    stop_sequence: str | None
    ended_by: str | None = None
    usage: MessageUsage
    receipt: dict[str, Any] | None = None


_MESSAGE_ERROR_SCHEMA = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": TEXT, "message": TEXT},
        },
        "request_id": TEXT,
    },
}
MESSAGE_ERRORS = errors_of(_MESSAGE_ERROR_SCHEMA)  # in Anthropic's
