"""Conversations as clients send them: messages, tools, and how both become a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from ridgeline.decoding.messages.tools import Tool, ToolUse
from ridgeline.server.dialects.openai.tools import wanted_tools
from ridgeline.server.http.request_model import Strict, contradiction, document, typed

_MAX_MESSAGES = 1 << 13
_MAX_TOOLS = 128
_NOT_OF_TEMPLATES = (
    *("add_generation_prompt", "bos_token", "continue_final_message", "eos_token"),
    *("messages", "reasoning_effort", "tools"),
)


class TextPart(Strict):
    """A piece of a message."""

    droppable = ("cache_control",)

    type: Literal["text"]
    text: str


_Part = Annotated[
    TextPart,
    typed(("text",), "is not supported: this model reads only text, so send what matters as text"),
]


def _document_message(schema: dict[str, Any], model: type[Strict]) -> None:
    """Say as well that a message has content or calls tools."""
    document(schema, model)
    said = {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]}
    calls = {
        "properties": {"tool_calls": {"type": "array", "minItems": 1}},
        "required": ["tool_calls"],
    }
    schema["anyOf"] = [said, calls]


class Message(Strict):
    """One message of a conversation; the model's template decides how each field is used.

    Clients send an answer back as they got it, with all that a server or a library added to it.
    """

    model_config = ConfigDict(json_schema_extra=_document_message)
    droppable = (
        *("annotations", "audio", "refusal", "parsed"),  # of OpenAI's own assistant
        "thinking_blocks",
        *("provider_specific_fields", "cache_control"),
    )
    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {"function_call": ()}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[_Part], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # what newer servers call it

    def ignored(self) -> list[str]:
        """Return the names of what was dropped, each once."""
        parts = self.content if isinstance(self.content, list) else []
        inside = dict.fromkeys(name for part in parts for name in part.ignored())
        return [*self._dropped, *(f"content.{name}" for name in inside)]

    def plain(self) -> dict[str, Any]:
        """Return what was set, for the template."""
        said = self.model_dump(exclude={"reasoning"}, exclude_none=True)
        if self.reasoning is not None and self.reasoning_content is None:
            said["reasoning_content"] = self.reasoning
        return said


class FunctionDefinition(Strict):
    """A function that the model may call."""

    name: str = Field(pattern="^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Strict):
    """A tool; functions are the only kind there is."""

    droppable = ("cache_control",)

    type: Literal["function"]
    function: FunctionDefinition

    def plain(self) -> dict[str, Any]:
        """Return what a template shows of it."""
        return self.model_dump(exclude={"function": {"strict"}}, exclude_none=True)

    @property
    def tool(self) -> Tool:
        """What the engine knows of it."""
        schema = self.function.parameters or {"properties": {}, "additionalProperties": False}
        return Tool(self.function.name, schema, bool(self.function.strict))


class Rendering(Strict):
    """How messages become a prompt."""

    messages: list[Message] = Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True)
    tools: Annotated[list[ToolDefinition], Field(max_length=_MAX_TOOLS, fail_fast=True)] | None = (
        None
    )
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def ignored(self) -> list[str]:
        """Return the names of what was dropped, each once."""
        inside = dict.fromkeys(name for one in self.messages for name in one.ignored())
        return [*self._dropped, *(f"messages.{name}" for name in inside)]

    @property
    def use(self) -> ToolUse | None:
        """What may be called."""
        return wanted_tools([one.tool for one in self.tools or ()], None, is_parallel=True)

    def template_options(self) -> dict[str, Any]:
        """Return the options for the chat template; a continued message needs no opening."""
        going_on = bool(self.continue_final_message)
        opening = not going_on if self.add_generation_prompt is None else self.add_generation_prompt
        if going_on and opening:
            raise contradiction("add_generation_prompt", "continue_final_message excludes it")
        options = dict(self.chat_template_kwargs or {})
        for name in _NOT_OF_TEMPLATES:
            if name in options:
                raise contradiction(f"chat_template_kwargs.{name}", "it has another place")
        if use := self.use:
            names = [tool.name for tool in use.tools]
            every = [one for one in self.tools or () if one.function.name in names]
            options["tools"] = [one.plain() for one in every]
        return {
            **options,
            "add_generation_prompt": opening,
            "continue_final_message": going_on,
        }


class Prediction(Strict):
    """What the answer will be like: it comes sooner where that is right, and is the same."""

    type: Literal["content"]
    content: str | Annotated[list[_Part], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        """All of it."""
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)
