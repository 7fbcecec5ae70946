"""What clients may ask of /api/chat and /api/generate: the fields that are honoured.

``serve.dialects.ollama.request`` makes a request of OpenAI's kind of it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from ridgeline.serve.answer import fields, samplers
from ridgeline.serve.answer.conversation import MAX_TOOLS
from ridgeline.serve.answer.protocol import EACH, CompletionRequest, kind_of_prompt
from ridgeline.serve.http.request_body import RequestModel, wrong
from ridgeline.text.template.messages import readable

_INT64 = 1 << 63
_MAX_MESSAGES = 1 << 13


def _whole(value: Any) -> Any:
    """Return a whole number as one, also where it is written 8.0, as Ollama reads it."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


_Whole = Annotated[int, BeforeValidator(_whole)]


class OllamaOptions(RequestModel):
    """Sampling, and hints about the machine, which cannot change an answer and are dropped.

    A prompt is never cut, so ``num_ctx`` changes nothing.
    """

    extras = fields.OLLAMA_OPTIONS

    seed: _Whole | None = Field(None, ge=-_INT64, lt=_INT64)
    # Below 0: as many as there is room for.
    num_predict: _Whole | None = Field(None, ge=-2, lt=_INT64)
    temperature: float | None = Field(None, ge=0, le=2)
    top_k: _Whole | None = Field(None, ge=-1, lt=_INT64)
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: samplers.Share | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repeat_penalty: float | None = Field(None, gt=0, le=100)
    repeat_last_n: _Whole | None = Field(None, ge=-1, lt=_INT64)
    stop: Annotated[list[str], Field(fail_fast=True)] | None = None


class ToolCallFunction(RequestModel):
    """The function that was called, and its arguments."""

    extras = fields.OLLAMA_CALL

    name: str
    arguments: dict[str, Any]


class Call(RequestModel):
    """A call that the model made."""

    extras = fields.OLLAMA_CALL

    id: str | None = None
    function: ToolCallFunction


class OllamaMessage(RequestModel):
    """A turn of the conversation."""

    extras = fields.OLLAMA_MESSAGE

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None

    @classmethod
    def _read_history(cls, values: dict[str, Any], *, may_lose: bool) -> list[str]:
        """Leave out images that a tool returned, and say so in their place."""
        said = values.get("content", "")
        if values.get("role") != "tool" or not isinstance(said, str) or not may_lose:
            return []
        if not values.pop("images", None):
            return []
        values["content"] = readable([said, {"type": "image"}]).text
        return ["images"]


class OllamaRequest(RequestModel):
    """What both routes take."""

    extras = fields.OLLAMA

    model: str
    stream: bool | None = None  # absent: true
    format: str | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    keep_alive: str | float | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: _Whole | None = Field(None, ge=0, le=20)
    receipt: bool | None = None  # ours

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes in pieces."""
        return self.stream is not False


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat."""

    runs = ("function",)

    messages: list[OllamaMessage] = Field([], max_length=_MAX_MESSAGES, fail_fast=True)
    tools: Annotated[list[dict[str, Any]], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = (
        None
    )
    tool_choice: str | dict[str, Any] | None = None  # OpenAI's, like the next: Ollama has none
    parallel_tool_calls: bool | None = None


class GenerateRequest(OllamaRequest):
    """POST /api/generate."""

    extras = fields.OLLAMA_GENERATE

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None


class RawRequest(CompletionRequest):
    """A prompt that is continued as it stands; its answer tells of tokens as a chat's does."""

    lists_logprobs = False

    logprobs: int | None = Field(None, ge=0, le=20)


class NameRequest(RequestModel):
    """DELETE /api/delete, and what other routes that name a model have in common."""

    extras = fields.ANY

    model: str = ""
    name: str = ""  # its older name

    @model_validator(mode="after")
    def _names_one(self) -> Self:
        if not self.named:
            raise wrong("invalid_value", "model", "is missing")
        return self

    @property
    def named(self) -> str:
        """The name of the model."""
        return self.model or self.name


class ShowRequest(NameRequest):
    """POST /api/show."""

    extras = fields.OLLAMA_SHOW


class PullRequest(NameRequest):
    """POST /api/pull."""

    extras = fields.OLLAMA_PULL

    stream: bool | None = None  # absent: true


class CreateRequest(NameRequest):
    """POST /api/create."""

    extras = fields.OLLAMA_CREATE

    from_model: str = Field("", alias="from")
    system: str | None = None
    template: str | None = None
    parameters: OllamaOptions | None = None
    messages: list[OllamaMessage] | None = Field(None, max_length=_MAX_MESSAGES, fail_fast=True)
    stream: bool | None = None  # absent: true

    @model_validator(mode="after")
    def _has_a_base(self) -> Self:
        if not self.from_model:
            raise wrong("invalid_value", "from", "is missing: name a model that is here")
        return self


class CopyRequest(RequestModel):
    """POST /api/copy."""

    extras = fields.ANY

    source: str
    destination: str


class EmbedRequest(RequestModel):
    """POST /api/embed."""

    extras = fields.OLLAMA_EMBED

    model: str
    input: Annotated[
        Annotated[str, Tag("[text]")] | Annotated[list[str], EACH, Tag("[texts]")],
        Discriminator(kind_of_prompt),
    ] = ""
    dimensions: _Whole | None = Field(None, ge=1, lt=_INT64)
    truncate: bool | None = None  # absent: true

    @property
    def texts(self) -> list[str]:
        """The texts; none of an empty one alone, by which clients load a model."""
        return self.input if isinstance(self.input, list) else [self.input] * bool(self.input)

    @property
    def truncate_prompt_tokens(self) -> int | None:
        """As vLLM's field of this name."""
        return None if self.truncate is False else -1


class EmbeddingRequest(RequestModel):
    """POST /api/embeddings, the older route, for one text."""

    extras = fields.OLLAMA_EMBEDDING

    model: str
    prompt: str = ""
    truncate_prompt_tokens: ClassVar[int] = -1
