"""What clients may ask of /api/chat and /api/generate: every field, honoured or refused by name.

``server.dialects.ollama.request`` makes a request of OpenAI's kind of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, LiteralString

from pydantic import Discriminator, Field, Tag

from ridgeline.server.dialects.openai import samplers
from ridgeline.server.dialects.openai.protocol import EACH, kind_of_prompt
from ridgeline.server.http.request_model import Strict

_INT64 = 1 << 63
_MAX_MESSAGES = 1 << 13
_MAX_TOOLS = 128
_ONLY_TEXT: LiteralString = "is not supported: this model reads only text"


class Options(samplers.WithSamplers):
    """Sampling, and hints about the machine, which cannot change an answer and are dropped.

    A prompt is never cut, so ``num_ctx`` changes nothing.
    """

    droppable = (
        *("draft_num_predict", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch"),
        *("num_ctx", "num_gpu", "num_keep", "num_thread", "numa", "penalize_newline"),
        *("use_mlock", "use_mmap", "vocab_only"),
    )
    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {"tfs_z": (1, 1.0)}

    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    num_predict: int | None = Field(None, ge=-2, lt=_INT64)  # below 0: as many as there is room for
    temperature: float | None = Field(None, ge=0, le=2)
    top_k: int | None = Field(None, ge=-1, lt=_INT64)
    top_p: float | None = Field(None, ge=0, le=1)
    min_p: float | None = Field(None, ge=0, le=1)
    typical_p: samplers.Share | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repeat_penalty: float | None = Field(None, gt=0, le=100)
    repeat_last_n: int | None = Field(None, ge=-1, lt=_INT64)
    stop: Annotated[list[str], Field(fail_fast=True)] | None = None


class Function(Strict):
    """What was called, with what."""

    droppable = ("index", "description")

    name: str
    arguments: dict[str, Any]


class Call(Strict):
    """A call that the model made."""

    droppable = ("type",)

    id: str | None = None
    function: Function


class Message(Strict):
    """A turn of the conversation."""

    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {"images": ([],)}
    instead: ClassVar[Mapping[str, LiteralString]] = {"images": _ONLY_TEXT}

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: Annotated[list[Call], Field(fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class Asked(Strict):
    """What both routes take."""

    droppable = ("shift", "truncate")

    model: str
    stream: bool | None = None  # absent: true
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    keep_alive: str | float | None = None
    think: bool | str | None = None

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes in pieces."""
        return self.stream is not False

    def ignored(self) -> list[str]:
        """Return the names of what was dropped, each once."""
        inside = self.options.ignored() if self.options else []
        return [*self._dropped, *(f"options.{name}" for name in inside)]


class ChatAsked(Asked):
    """POST /api/chat."""

    messages: list[Message] = Field([], max_length=_MAX_MESSAGES, fail_fast=True)
    tools: Annotated[list[dict[str, Any]], Field(max_length=_MAX_TOOLS, fail_fast=True)] | None = (
        None
    )
    tool_choice: str | dict[str, Any] | None = None  # Ollama has none; OpenAI's
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)


class GenerateAsked(Asked):
    """POST /api/generate."""

    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "context": ([],),
        "images": ([],),
        "logprobs": (False,),
        "template": ("",),
        "top_logprobs": (0,),
    }
    instead: ClassVar[Mapping[str, LiteralString]] = {
        "context": "is not supported: send the conversation to /api/chat",
        "images": _ONLY_TEXT,
        "logprobs": "is not supported here: send the conversation to /api/chat",
        "template": "is not supported: the model's own is used, or none with raw: true",
    }

    prompt: str = ""
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None


class ShowAsked(Strict):
    """POST /api/show."""

    droppable = ("name", "verbose")

    model: str


class EmbedAsked(Strict):
    """POST /api/embed."""

    droppable = ("keep_alive", "options")

    model: str
    input: Annotated[
        Annotated[str, Tag("[text]")] | Annotated[list[str], EACH, Tag("[texts]")],
        Discriminator(kind_of_prompt),
    ] = ""
    dimensions: int | None = Field(None, ge=1, lt=_INT64)
    truncate: bool | None = None  # absent: true

    @property
    def texts(self) -> list[str]:
        """The texts; none of an empty input, by which clients load a model."""
        inputs = [self.input] if isinstance(self.input, str) else self.input
        return [] if inputs == [""] else inputs

    @property
    def truncate_prompt_tokens(self) -> int | None:
        """As vLLM's field of this name."""
        return None if self.truncate is False else -1


class EmbeddingAsked(Strict):
    """POST /api/embeddings, the older route, for one text."""

    droppable = ("keep_alive", "options", "truncate")

    model: str
    prompt: str = ""
    truncate_prompt_tokens: ClassVar[int] = -1
