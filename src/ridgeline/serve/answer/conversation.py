"""Conversations as clients send them: messages, tools, and how both become a prompt."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from ridgeline.serve.answer import fields
from ridgeline.serve.answer.tools import wanted_tools
from ridgeline.serve.http.request_body import RequestModel, contradiction, document, typed
from ridgeline.text.messages.tools import Tool, ToolUse
from ridgeline.text.template.messages import familiar

_MAX_MESSAGES = 1 << 13
MAX_TOOLS = 1 << 10
NAME_OF_TOOL = "^[A-Za-z0-9_-]{1,128}$"  # Anthropic's; OpenAI has half of it
_MAX_TEMPLATE_CHARS = 1 << 16
_NOT_OF_TEMPLATES = (
    *("add_generation_prompt", "bos_token", "continue_final_message", "eos_token"),
    *("messages", "reasoning_effort", "tools"),
)


class TextPart(RequestModel):
    """A piece of a message."""

    extras = fields.CONTENT_PART

    type: Literal["text"]
    text: str


_Part = Annotated[
    TextPart,
    typed(("text",), "is not supported: this model reads only text, so send what matters as text"),
]


def _document_message(schema: dict[str, Any], model: type[RequestModel]) -> None:
    """Say as well that a message of the user or the system has content."""
    document(schema, model)
    said = {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]}
    silent = {"properties": {"role": {"enum": ["assistant", "tool"]}}}
    schema["anyOf"] = [said, silent]


class Message(RequestModel):
    """One message of a conversation; the model's template decides how each field is used.

    Clients send an answer back as they got it, with all that a server or a library added to it.
    """

    model_config = ConfigDict(json_schema_extra=_document_message)
    extras = fields.MESSAGE

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[_Part], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # what newer servers call it

    @classmethod
    def _read_history(cls, values: dict[str, Any], *, may_lose: bool) -> list[str]:
        read, lost = familiar(values, may_lose=may_lose)
        values.clear()
        values.update(read)
        return lost

    @property
    def text(self) -> str:
        """Its content."""
        parts = self.content or ""
        return parts if isinstance(parts, str) else "\n".join(part.text for part in parts)

    def plain(self) -> dict[str, Any]:
        """Return what was set, for the template."""
        return self.model_dump(exclude_none=True)


class FunctionDefinition(RequestModel):
    """A function that the model may call."""

    extras = fields.FUNCTION

    name: str = Field(pattern=NAME_OF_TOOL)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(RequestModel):
    """A tool; functions are the only kind there is."""

    extras = fields.TOOL

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


_Tool = Annotated[
    ToolDefinition,
    typed(("function",), "is not supported: no tools run on this server, so give a function"),
]


class ThinkingSwitch(RequestModel):
    """Whether to think first, as DeepSeek and GLM have it."""

    extras = fields.THINKING

    type: Literal["enabled", "disabled", "adaptive", "auto"]


class Reasoning(RequestModel):
    """How much to think, as OpenRouter has it."""

    extras = fields.REASONING

    effort: str | None = None
    enabled: bool | None = None


class Rendering(RequestModel):
    """How messages become a prompt."""

    extras = fields.RENDERING
    runs = ("function",)

    messages: list[Message] = Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True)
    tools: Annotated[list[_Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    chat_template: str | None = Field(None, max_length=_MAX_TEMPLATE_CHARS)
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    # Whether to think, and how much, under all names that clients use:
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    think: bool | str | None = None
    thinking: ThinkingSwitch | None = None
    reasoning: Reasoning | None = None

    @property
    def effort(self) -> str | None:
        """How much to think before the answer, if the request says so; "none" means not at all."""
        efforts = (self.reasoning_effort, self.think, self.reasoning and self.reasoning.effort)
        said = [one for one in efforts if isinstance(one, str)]
        return said[0] if said else "none" if False in self._switches else None

    @property
    def _switches(self) -> list[bool | str | None]:
        """Whether to think at all, if the request says so."""
        kind = self.thinking.type if self.thinking else None
        enabled = self.reasoning.enabled if self.reasoning else None
        return [self.enable_thinking, self.think, kind and kind != "disabled", enabled]

    @property
    def has_thoughts(self) -> bool:
        """Whether earlier messages tell what was thought."""
        return any(one.reasoning_content or one.reasoning for one in self.messages)

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
        options: dict[str, Any] = {"enable_thinking": True} if True in self._switches else {}
        options |= self.chat_template_kwargs or {}
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


class Prediction(RequestModel):
    """What the answer will be like: it comes sooner where that is right, and is the same."""

    extras = fields.ANY

    type: Literal["content"]
    content: str | Annotated[list[_Part], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        """All of it."""
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)
