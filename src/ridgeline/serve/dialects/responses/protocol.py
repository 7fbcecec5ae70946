"""What clients may ask of POST /v1/responses: the fields that are honoured.

Nothing is stored, so what needs a stored response is refused, and the error says what to do
instead. ``serve.dialects.responses.request`` makes a chat request of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from ridgeline.serve.answer import fields
from ridgeline.serve.answer.conversation import FunctionDefinition
from ridgeline.serve.answer.protocol import Length
from ridgeline.serve.dialects.responses.history import READ, read_items
from ridgeline.serve.http.request_body import RequestModel, kind_of, typed

_MAX_ITEMS = 1 << 13
LOGPROBS = "message.output_text.logprobs"
_TEXTS = ("input_text", "output_text", "reasoning_text")


class ResponsesText(RequestModel):
    """A piece of an item."""

    extras = fields.RESPONSE_PART

    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str


_Part = Annotated[
    ResponsesText,
    typed(_TEXTS, "is not supported: this model reads only text, so send what matters as text"),
]
_Parts = Annotated[list[_Part], Field(fail_fast=True)]


class MessageItem(RequestModel):
    """A message of either side."""

    extras = fields.RESPONSE_MESSAGE

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | _Parts


class CallItem(RequestModel):
    """A call that the model asked for."""

    extras = fields.RESPONSE_CALL

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(RequestModel):
    """What a call returned."""

    extras = fields.RESPONSE_OUTPUT

    type: Literal["function_call_output"]
    call_id: str
    output: str | _Parts


class ReasoningItem(RequestModel):
    """What the model thought; its summary is dropped, because the text itself is there."""

    extras = fields.RESPONSE_REASONING

    type: Literal["reasoning"]
    content: _Parts | None = None


_Items = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[CallItem, Tag("[function_call]")]
    | Annotated[CallOutputItem, Tag("[function_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")],
    Discriminator(kind_of("message")),
    typed(
        READ,
        "is not supported: nothing is stored here, and functions are the only tools, so send "
        "message, function_call, function_call_output and reasoning items whole",
        "message",
    ),
]


class FunctionTool(FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"]


class NamedFunction(RequestModel):
    """The name of a tool."""

    extras = fields.ANY

    type: Literal["function"]
    name: str


class AllowedTools(RequestModel):
    """Some of the tools."""

    extras = fields.ANY

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(fail_fast=True)]


_Choice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("[mode]")]
    | Annotated[NamedFunction, Tag("[function]")]
    | Annotated[AllowedTools, Tag("[allowed_tools]")],
    Discriminator(kind_of("mode")),
    typed(
        ("function", "allowed_tools"),
        "is not supported: name a function, or use allowed_tools, none, auto or required",
    ),
]


class ReasoningOptions(RequestModel):
    """How much to think before the answer."""

    extras = fields.RESPONSE_THINKING

    effort: str | None = None


class TextOptions(RequestModel):
    """The form of the text."""

    extras = fields.RESPONSE_TEXT

    format: dict[str, Any] | None = None


# What may be included; nothing is encrypted here, so the second adds nothing.
_INCLUDED = (LOGPROBS, "reasoning.encrypted_content")


class ResponsesRequest(RequestModel):
    """POST /v1/responses."""

    extras = fields.RESPONSES
    runs = ("function",)

    input: str | Annotated[list[_Items], Field(max_length=_MAX_ITEMS, fail_fast=True)] = ""
    model: str | None = None
    include: Annotated[list[str], Field(fail_fast=True)] | None = None
    instructions: str | None = None
    max_output_tokens: Length | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    reasoning: ReasoningOptions | None = None
    safety_identifier: str | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    text: TextOptions | None = None
    tool_choice: _Choice | None = None
    tools: (
        Annotated[
            list[
                Annotated[
                    FunctionTool,
                    typed(
                        ("function",),
                        "is not supported: no tools run on this server, so give a function, and "
                        "call it yourself",
                    ),
                ]
            ],
            Field(fail_fast=True),
        ]
        | None
    ) = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    top_p: float | None = Field(None, ge=0, le=1)
    user: str | None = None
    # llama.cpp's names:
    timings_per_token: bool | None = None
    return_progress: bool | None = None
    receipt: bool | None = None  # ours

    @classmethod
    def _read_history(cls, values: dict[str, Any], *, may_lose: bool) -> list[str]:
        if not isinstance(items := values.get("input"), list):
            return []
        values["input"], lost = read_items(items, may_lose=may_lose)
        return lost

    def _inside(self) -> Iterator[str]:
        yield from super()._inside()
        yield from (f"include ({one})" for one in self.include or () if one not in _INCLUDED)
