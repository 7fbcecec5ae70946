"""The shapes of Ollama's answers, and what is documented of its streams."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from ridgeline.serve.answer.schemas import ClosedDict, EndedBy, StageFields

LINES = "Lines of JSON; the last says that it is done, or has an error."


class CalledFunction(ClosedDict):
    """The function that is called, and its arguments."""

    name: str
    arguments: dict[str, Any]


class CalledTool(ClosedDict):
    """A call."""

    id: str
    function: CalledFunction


class SaidMessage(ClosedDict):
    """What the model says."""

    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[CalledTool]]


class RankedTokens(ClosedDict, total=False):
    """The tokens of an answer, each with the likeliest in its place."""

    logprobs: list[dict[str, Any]]


class Answered(EndedBy, StageFields, RankedTokens):
    """What all answers have; times in nanoseconds."""

    model: str
    created_at: str
    done: Literal[True]
    done_reason: Literal["stop", "length", "load", "unload"]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class ChatAnswered(Answered):
    """The answer of /api/chat."""

    message: SaidMessage


class SaidText(ClosedDict):
    """What continues a prompt."""

    response: str
    thinking: NotRequired[str]


class GenerateAnswered(Answered, SaidText):
    """The answer of /api/generate."""


class Embedded(ClosedDict):
    """The answer of /api/embed; times in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddedOne(ClosedDict):
    """The answer of /api/embeddings."""

    embedding: list[float]


class Progress(ClosedDict):
    """How far a model is."""

    status: str


class ModelDetails(ClosedDict):
    """What a model is."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ModelEntry(ClosedDict):
    """A model in a list."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: ModelDetails


class LoadedEntry(ModelEntry):
    """A model that is loaded."""

    size_vram: int
    context_length: int
    expires_at: str


class ModelList(ClosedDict):
    """The answer of /api/tags."""

    models: list[ModelEntry]


class LoadedList(ClosedDict):
    """The answer of /api/ps."""

    models: list[LoadedEntry]


class Shown(ClosedDict):
    """The answer of /api/show."""

    modelfile: str
    parameters: str
    template: str
    details: ModelDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str
    system: NotRequired[str]
