"""What clients may ask of /v2/models/{model}/generate and /infer: the fields that are honoured.

A request is a completion of OpenAI's under another name for its prompt, and its parameters are that
completion's fields. ``request_of`` in ``routes`` makes one of tensors.
"""

from __future__ import annotations

import json
from types import UnionType
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    model_validator,
)

from ridgeline.serve.answer import fields
from ridgeline.serve.answer.protocol import EACH, CompletionRequest, kind_of_prompt
from ridgeline.serve.answer.samplers import Words
from ridgeline.serve.http.request_body import RequestModel, contradiction, wrong

_Flag = Literal["BYTES", "BOOL"]
_Number = Literal["FP16", "FP32", "FP64", "INT8", "INT16", "INT32", "INT64"]
_Unsigned = Literal["UINT8", "UINT16", "UINT32", "UINT64"]
Datatype = Literal[_Flag, _Number, _Unsigned]
MAX_TENSORS = 256
MAX_DIMENSIONS = 32  # of one
_NESTED = ("parameters", "sampling_parameters")
# These names mean nothing here: the route says what is asked, and one text is answered.
_ABSENT = (
    *("echo", "include_timings", "logprobs", "model", "prompt", "prompt_logprobs"),
    *("return_token_ids", "return_tokens_as_token_ids", "stream_options", "timings_per_token"),
    *("receipt", "return_progress", "verbose"),
)


def _as_list(words: Any) -> Any:
    return [words] * bool(words) if isinstance(words, str) else words


class TritonRequest(CompletionRequest):
    """POST /v2/models/{model}/generate."""

    extras = fields.TRITON
    absent = _ABSENT

    text_input: Annotated[
        Annotated[str, Tag("[text]")] | Annotated[list[str], EACH, Tag("[texts]")],
        Discriminator(kind_of_prompt),
    ]
    id: str | int | None = None
    prompt: str = ""  # text_input
    # TensorRT-LLM's clients send one as a text, and an empty one for none.
    bad_words: Annotated[Words | None, BeforeValidator(_as_list)] = None
    exclude_input_in_output: bool | None = None  # absent: true
    return_finish_reason: bool | None = None
    return_num_input_tokens: bool | None = None
    return_num_output_tokens: bool | None = None
    parameters: dict[str, Any] | None = None  # fields may be in here, or beside it
    sampling_parameters: str | None = None  # or in here, as JSON; numbers may be texts

    @classmethod
    def _flat(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Return the fields with the parameters among them; what stands beside those stays."""
        if isinstance(inner := data.get("parameters"), dict):
            data = {**inner, **{name: value for name, value in data.items() if value is not inner}}
        if isinstance(text := data.get("sampling_parameters"), str):
            data = {**_read(text), **data}
            del data["sampling_parameters"]
        return data

    @model_validator(mode="after")
    def _repeats_input(self) -> Self:
        if self.exclude_input_in_output is False:
            self.echo = True
        return self

    def streamed(self) -> Self:
        """Return this request as one for a stream. Raises ApiError if its answers are several."""
        if (self.n or 1) > 1:
            raise contradiction("n", "a stream has one answer")
        if len(self.prompts) > 1:
            raise contradiction("text_input", "a stream answers one text")
        self.stream = True
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The texts, also where one stands alone."""
        return [self.text_input] if isinstance(self.text_input, str) else self.text_input


def _read(text: str) -> dict[str, Any]:
    """Return the fields of a JSON object; what should be a number may be written as a text."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise wrong("invalid_value", "sampling_parameters", "is wrong: write a JSON object")
    return {
        name: _number(value) if name in _NUMBERS else value
        for name, value in values.items()
        if name not in _NESTED
    }


def _number(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except ValueError:
        return value  # the field says that it is none


def _kinds(annotation: Any) -> set[Any]:
    """Return the plain types of an annotation."""
    if isinstance(annotation, type | UnionType) and not get_args(annotation):
        return {annotation}
    return set[Any]().union(*(_kinds(one) for one in get_args(annotation)))


_NUMBERS = frozenset(
    name
    for name, field in TritonRequest.model_fields.items()
    if (kinds := _kinds(field.annotation)) & {int, float, bool} and not kinds & {str}
)


class TensorParameters(RequestModel):
    """What is said of an input."""

    extras = fields.TRITON_TENSOR

    binary_data_size: int | None = Field(None, ge=0)


class InputTensor(RequestModel):
    """An input: a field of the request, as a tensor."""

    extras = fields.ANY

    name: str
    datatype: Datatype
    shape: list[Annotated[int, Field(ge=0)]] = Field(max_length=MAX_DIMENSIONS, fail_fast=True)
    parameters: TensorParameters | None = None
    data: list[Any] | None = Field(None, fail_fast=True)


class OutputParameters(RequestModel):
    """What is said of an output."""

    extras = fields.TRITON_TENSOR

    binary_data: bool | None = None


class RequestedOutput(RequestModel):
    """An output that is asked for."""

    extras = fields.ANY

    name: str
    parameters: OutputParameters | None = None


class InferRequest(RequestModel):
    """POST /v2/models/{model}/infer."""

    extras = fields.ANY

    id: str | int | None = None
    inputs: list[InputTensor] = Field(min_length=1, max_length=MAX_TENSORS, fail_fast=True)
    outputs: list[RequestedOutput] | None = Field(None, max_length=MAX_TENSORS, fail_fast=True)
    parameters: dict[str, Any] | None = None
