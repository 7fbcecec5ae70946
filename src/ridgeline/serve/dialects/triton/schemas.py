"""The shapes of answers under /v2, and what is documented of their streams."""

from __future__ import annotations

from typing import Any, NotRequired

from ridgeline.serve.answer.schemas import ClosedDict
from ridgeline.serve.observe.statistics import OneModelStatistics

EVENTS = "Server-sent events, each with a piece of the text; the last may be an error."


class ServerMetadata(ClosedDict):
    """What a server is."""

    name: str
    version: str
    extensions: list[str]


class IndexEntry(ClosedDict):
    """A model in the repository's index."""

    name: str
    version: str
    state: str
    reason: str


class TensorMetadata(ClosedDict):
    """An input or an output; a dimension of -1 may have any length."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(ClosedDict):
    """Which inputs and outputs a model has."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ConfiguredTensor(ClosedDict):
    """An input or an output, as Triton configures it."""

    name: str
    data_type: str
    dims: list[int]
    optional: NotRequired[bool]


class ModelConfig(ClosedDict):
    """A model's configuration."""

    name: str
    platform: str
    backend: str
    max_batch_size: int
    input: list[ConfiguredTensor]
    output: list[ConfiguredTensor]
    model_transaction_policy: dict[str, bool]


class ModelStatistics(ClosedDict):
    """How many requests models have had."""

    model_stats: list[OneModelStatistics]


class Generated(ClosedDict):
    """The answer of generate; an output of several elements is a list of them."""

    model_name: str
    model_version: str
    text_output: str | list[str]
    finish_reason: NotRequired[str | list[str]]
    num_input_tokens: NotRequired[int]
    num_output_tokens: NotRequired[int]


class OutputTensor(ClosedDict):
    """An output: its elements, or how many bytes behind the JSON they take."""

    name: str
    datatype: str
    shape: list[int]
    data: NotRequired[list[Any]]
    parameters: NotRequired[dict[str, Any]]


class Inferred(ClosedDict):
    """The answer of infer."""

    model_name: str
    model_version: str
    id: NotRequired[str]
    outputs: list[OutputTensor]
