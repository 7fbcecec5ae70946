"""The shapes of answers under /v2, for the OpenAPI document; tests hold real answers to them."""

from __future__ import annotations

from typing import Any

from ridgeline.serve.dialects.documented import Shaped

EVENTS = "Server-sent events, each with a piece of the text; the last may be an error."


class ServerMetadata(Shaped):
    """What a server is."""

    name: str
    version: str
    extensions: list[str]


class IndexEntry(Shaped):
    """A model in the repository's index."""

    name: str
    version: str
    state: str
    reason: str


class TensorMetadata(Shaped):
    """An input or an output; a dimension of -1 may have any length."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(Shaped):
    """Which inputs and outputs a model has."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class ConfiguredTensor(Shaped):
    """An input or an output, as Triton configures it."""

    name: str
    data_type: str
    dims: list[int]
    optional: bool | None = None


class ModelConfig(Shaped):
    """A model's configuration."""

    name: str
    platform: str
    backend: str
    max_batch_size: int
    input: list[ConfiguredTensor]
    output: list[ConfiguredTensor]
    model_transaction_policy: dict[str, bool]


class Durations(Shaped):
    """How many there were, and how long all took together, in nanoseconds."""

    count: int
    ns: int


class InferenceStatistics(Shaped):
    """What became of requests, and where their time went."""

    success: Durations
    fail: Durations
    queue: Durations
    compute_input: Durations
    compute_infer: Durations
    compute_output: Durations
    cache_hit: Durations
    cache_miss: Durations


class BatchStatistics(Shaped):
    """Steps with this many sequences."""

    batch_size: int
    compute_input: Durations
    compute_infer: Durations
    compute_output: Durations


class OneModelStatistics(Shaped):
    """A model; the last inference in milliseconds since 1970, 0 for none."""

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferenceStatistics
    batch_stats: list[BatchStatistics]


class ModelStatistics(Shaped):
    """How many requests models have had."""

    model_stats: list[OneModelStatistics]


class Generated(Shaped):
    """The answer of generate; an output of several elements is a list of them."""

    model_name: str
    model_version: str
    text_output: str | list[str]
    finish_reason: str | list[str] | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None


class OutputTensor(Shaped):
    """An output: its elements, or how many bytes behind the JSON they take."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] | None = None
    parameters: dict[str, Any] | None = None


class Inferred(Shaped):
    """The answer of infer."""

    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]
