"""What clients may ask of POST /v1/messages: the fields that are honoured.

``serve.dialects.anthropic.request`` makes a chat request of it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, LiteralString

from pydantic import Discriminator, Field, Tag

from ridgeline.serve.answer import fields
from ridgeline.serve.answer.conversation import MAX_TOOLS, NAME_OF_TOOL
from ridgeline.serve.answer.protocol import Length
from ridgeline.serve.dialects.anthropic.history import READ, read_messages
from ridgeline.serve.http.request_body import RequestModel, kind_of, typed

_INT64 = 1 << 63
_MAX_MESSAGES = 1 << 13
_ONLY_TEXT: LiteralString = (
    "is not supported: this model reads only text, so send what matters as a text block"
)


class TextBlock(RequestModel):
    """A piece of text."""

    extras = fields.BLOCK

    type: Literal["text"]
    text: str


class ToolUseBlock(RequestModel):
    """A call that the model made."""

    extras = fields.TOOL_USE

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


_Text = Annotated[TextBlock, typed(("text",), _ONLY_TEXT)]
_Texts = Annotated[list[_Text], Field(fail_fast=True)]


class ToolResultBlock(RequestModel):
    """What a call returned. A template shows no sign of ``is_error``: its text says it."""

    extras = fields.TOOL_RESULT

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | _Texts | None = None


class ThinkingBlock(RequestModel):
    """What the model thought."""

    extras = fields.THINKING_BLOCK

    type: Literal["thinking"]
    thinking: str


class RedactedBlock(RequestModel):
    """Thoughts that cannot be read here; dropped."""

    extras = fields.ANY

    type: Literal["redacted_thinking"]
    data: str


_Block = Annotated[
    Annotated[TextBlock, Tag("[text]")]
    | Annotated[ToolUseBlock, Tag("[tool_use]")]
    | Annotated[ToolResultBlock, Tag("[tool_result]")]
    | Annotated[ThinkingBlock, Tag("[thinking]")]
    | Annotated[RedactedBlock, Tag("[redacted_thinking]")],
    Discriminator(kind_of("text")),
    typed(READ, _ONLY_TEXT),
]


class InputMessage(RequestModel):
    """A turn of one side, or instructions that came up between turns."""

    extras = fields.ANY

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[_Block], Field(fail_fast=True)]


class ToolParam(RequestModel):
    """A tool that the client runs."""

    extras = fields.MESSAGES_TOOL

    type: Literal["custom"] | None = None
    name: str = Field(pattern=NAME_OF_TOOL)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


_Tool = Annotated[
    ToolParam,
    typed(
        ("custom",),
        "is not supported: tools are run by the client here, so give a name and an input_schema",
        "custom",
    ),
]


class ToolChoice(RequestModel):
    """Whether tools are called, and which."""

    extras = fields.ANY

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestModel):
    """Whether the model thinks first. How long it may is not limited."""

    extras = fields.THINKING

    type: Literal["enabled", "disabled", "adaptive"]


class OutputConfig(RequestModel):
    """The form of the answer, and how much effort goes into it."""

    extras = fields.OUTPUT_CONFIG

    format: dict[str, Any] | None = None
    effort: str | None = None


class Metadata(RequestModel):
    """Who asks: written to the log."""

    extras = fields.ANY

    user_id: str | None = Field(None, max_length=256)


class Conversation(RequestModel):
    """What both routes take."""

    extras = fields.MESSAGES
    runs = ("custom",)

    model: str
    messages: list[InputMessage] = Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True)
    system: str | _Texts | None = None
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: dict[str, Any] | None = None  # as betas had output_config.format

    @classmethod
    def _read_history(cls, values: dict[str, Any], *, may_lose: bool) -> list[str]:
        if not isinstance(messages := values.get("messages"), list):
            return []
        values["messages"], lost = read_messages(messages, may_lose=may_lose)
        return lost


class CountTokensRequest(Conversation):
    """POST /v1/messages/count_tokens."""


class MessagesRequest(Conversation):
    """POST /v1/messages."""

    max_tokens: Length
    metadata: Metadata | None = None
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=0, lt=_INT64)
    top_p: float | None = Field(None, ge=0, le=1)
    receipt: bool | None = None  # ours
