"""What clients may ask of POST /v1/responses: every field, honoured or refused by name.

Nothing is stored, so what needs a stored response is refused, and the error says what to do
instead. ``server.dialects.responses.request`` makes a chat request of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, LiteralString

from pydantic import Discriminator, Field, Tag

from ridgeline.server.dialects.openai.conversation import FunctionDefinition
from ridgeline.server.dialects.openai.protocol import Length
from ridgeline.server.http.request_model import Strict, kind_of, typed

_INT64 = 1 << 63
_MAX_ITEMS = 1 << 13
LOGPROBS = "message.output_text.logprobs"
_MODES = ("none", "auto", "required")
_TEXTS = ("input_text", "output_text", "reasoning_text")
_SEND_ALL: LiteralString = (
    "is not supported: nothing is stored here, so send all items of the conversation as input"
)


class TextPart(Strict):
    """A piece of an item."""

    droppable = ("annotations", "logprobs")  # of answers that come back

    type: Literal["input_text", "output_text", "reasoning_text"]
    text: str


_Part = Annotated[
    TextPart,
    typed(_TEXTS, "is not supported: this model reads only text, so send what matters as text"),
]
_Parts = Annotated[list[_Part], Field(fail_fast=True)]


class _Item(Strict):
    """Items come back as they were sent, with all that the server added."""

    droppable: ClassVar[tuple[str, ...]] = ("id", "status")

    def ignored(self) -> list[str]:
        """Return the names of what was dropped, each once."""
        inside = (
            f"{name}.{one}"
            for name, value in self
            for part in (value if isinstance(value, list) else ())
            for one in part.ignored()
        )
        return [*self._dropped, *dict.fromkeys(inside)]


class MessageItem(_Item):
    """A message of either side."""

    droppable = (*_Item.droppable, "phase")

    type: Literal["message"] | None = None
    role: Literal["system", "developer", "user", "assistant"]
    content: str | _Parts


class CallItem(_Item):
    """A call that the model asked for."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CallOutputItem(_Item):
    """What a call returned."""

    droppable = (*_Item.droppable, "name")

    type: Literal["function_call_output"]
    call_id: str
    output: str | _Parts


class ReasoningItem(_Item):
    """What the model thought; its summary is dropped, because the text itself is there."""

    droppable = (*_Item.droppable, "summary")
    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {"encrypted_content": ()}
    instead: ClassVar[Mapping[str, LiteralString]] = {
        "encrypted_content": "is not supported: it cannot be read here, so send content"
    }

    type: Literal["reasoning"]
    content: _Parts | None = None


_Items = Annotated[
    Annotated[MessageItem, Tag("[message]")]
    | Annotated[CallItem, Tag("[function_call]")]
    | Annotated[CallOutputItem, Tag("[function_call_output]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")],
    Discriminator(kind_of("message")),
    typed(
        ("message", "function_call", "function_call_output", "reasoning"),
        "is not supported: nothing is stored here, and functions are the only tools, so send "
        "message, function_call, function_call_output and reasoning items whole",
        "message",
    ),
]


class FunctionTool(FunctionDefinition):
    """A function that the model may call."""

    type: Literal["function"]


class NamedFunction(Strict):
    """The name of a tool."""

    type: Literal["function"]
    name: str


class AllowedTools(Strict):
    """Some of the tools."""

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


class Reasoning(Strict):
    """How much to think before the answer."""

    droppable = ("summary", "generate_summary")  # summaries of reasoning that is shown whole

    effort: str | None = None


class TextOptions(Strict):
    """The form of the text."""

    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}

    format: dict[str, Any] | None = None


_Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]


class ResponsesRequest(Strict):
    """POST /v1/responses."""

    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "max_tool_calls": (),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_retention": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "truncation": ("disabled",),
    }
    instead: ClassVar[Mapping[str, LiteralString]] = {
        "background": "is not supported: nothing is stored here, so use stream, and stay connected",
        "context_management": "is not supported: shorten the input yourself",
        "conversation": _SEND_ALL,
        "max_tool_calls": "is not supported: it limits tools that a server runs, and here are none",
        "previous_response_id": _SEND_ALL,
        "prompt": "is not supported: no prompts are stored here, so send instructions and input",
        "store": "can only be false: nothing is stored here, so keep the response yourself",
        "truncation": "can only be disabled: shorten the input yourself",
    }
    droppable = ("stream_options",)  # it only asks for padding

    input: str | Annotated[list[_Items], Field(max_length=_MAX_ITEMS, fail_fast=True)]
    model: str | None = None
    # Nothing is encrypted here, so of the second there is none:
    include: Annotated[list[_Included], Field(fail_fast=True)] | None = None
    instructions: str | None = None
    max_output_tokens: Length | None = None
    metadata: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prompt_cache_key: str | None = None
    reasoning: Reasoning | None = None
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

    def ignored(self) -> list[str]:
        """Return the names of what was dropped, each once."""
        return [*self._dropped, *dict.fromkeys(self._inside())]

    def _inside(self) -> Iterator[str]:
        items = self.input if isinstance(self.input, list) else []
        yield from (f"input.{name}" for item in items for name in item.ignored())
        yield from (f"reasoning.{name}" for name in (self.reasoning or Reasoning()).ignored())
