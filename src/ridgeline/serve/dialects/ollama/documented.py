"""The shapes of Ollama's answers, for the OpenAPI document; tests hold real answers to them."""

from __future__ import annotations

from typing import Any, Literal

from ridgeline.serve.dialects.documented import Shaped

LINES = "Lines of JSON; the last says that it is done, or has an error."


class CalledFunction(Shaped):
    """The function that is called, and its arguments."""

    name: str
    arguments: dict[str, Any]


class CalledTool(Shaped):
    """A call."""

    id: str
    function: CalledFunction


class SaidMessage(Shaped):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[CalledTool] | None = None


class Answered(Shaped):
    """What all answers have; times in nanoseconds."""

    model: str
    created_at: str
    done: Literal[True]
    done_reason: Literal["stop", "length", "load", "unload"]
    ended_by: str | None = None
    total_duration: int | None = None
    load_duration: int | None = None
    prompt_eval_count: int | None = None
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[dict[str, Any]] | None = None
    receipt: dict[str, Any] | None = None


class ChatAnswered(Answered):
    """The answer of /api/chat."""

    message: SaidMessage


class GenerateAnswered(Answered):
    """The answer of /api/generate."""

    response: str
    thinking: str | None = None


class Embedded(Shaped):
    """The answer of /api/embed; times in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddedOne(Shaped):
    """The answer of /api/embeddings."""

    embedding: list[float]


class Progress(Shaped):
    """How far a model is."""

    status: str


class ModelDetails(Shaped):
    """What a model is."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ModelEntry(Shaped):
    """A model in a list."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class LoadedEntry(ModelEntry):
    """A model that is loaded."""

    expires_at: str
    size_vram: int
    context_length: int


class ModelList(Shaped):
    """The answer of /api/tags."""

    models: list[ModelEntry]


class LoadedList(Shaped):
    """The answer of /api/ps."""

    models: list[LoadedEntry]


class Shown(Shaped):
    """The answer of /api/show."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    system: str | None = None
