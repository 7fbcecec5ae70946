"""A request of tensors as one of named fields: each input is a field of the same name."""

from __future__ import annotations

import math
from typing import Any

from pydantic import ValidationError

from ridgeline.serve.dialects.dialect import Dialect
from ridgeline.serve.dialects.triton.protocol import InferRequest, InputTensor, TritonRequest
from ridgeline.serve.dialects.triton.tensors import check_shape, checked, unpack
from ridgeline.serve.http.errors import ApiError, validation_error
from ridgeline.serve.http.json_body import MAX_PARTS, MAX_VALUES
from ridgeline.serve.http.request_model import STRICT, bad_value

TRITON = Dialect(names={"prompt": "text_input"})
_TEXT_VALUES = MAX_VALUES // MAX_PARTS  # as many numbers as a text counts for
_BINARY = "binary_data_output"  # of a request's parameters: how all outputs are sent


def request_of(body: InferRequest, behind: bytes, *, is_strict: bool) -> TritonRequest:
    """Return the request that tensors and parameters describe.

    ``behind`` are the bytes behind the JSON, of the tensors that stand there in this order. They
    may have as many elements as a body in JSON may have values. Raises ApiError.
    """
    room = MAX_VALUES
    given = {name: value for name, value in (body.parameters or {}).items() if name != _BINARY}
    for tensor in body.inputs:
        weight = _TEXT_VALUES if tensor.datatype == "BYTES" else 1
        values, behind = _values(tensor, behind, room // weight)
        room -= weight * len(values)
        values = _row_of(tensor, values) if tensor.name != "text_input" else values
        known = TritonRequest.model_fields.keys() - set(TritonRequest.absent)
        if tensor.name not in known | fields_of_others():
            raise bad_value("inputs", f"there is no input {tensor.name[:80]!r} here")
        given[tensor.name] = values[0] if len(values) == 1 else values
    if behind:
        raise bad_value("inputs", f"{len(behind)} bytes behind the JSON belong to no tensor")
    given["id"] = body.id
    try:
        return TritonRequest.model_validate(given, context=STRICT if is_strict else None)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)) from None


def _row_of(tensor: InputTensor, values: list[Any]) -> list[Any]:
    """Return a setting that has a row for each text, as TensorRT-LLM's clients send it.

    One request has one setting. Raises ApiError unless the rows are equal.
    """
    if len(tensor.shape) < 2 or tensor.shape[0] < 2 or not values:
        return values
    width = len(values) // tensor.shape[0]
    first = values[:width]
    if values != first * tensor.shape[0]:
        why = f"the rows of {tensor.name[:80]!r} differ: send a request for each text"
        raise bad_value("inputs", why)
    return first


def fields_of_others() -> frozenset[str]:
    """Return the names in the table that says what becomes of each."""
    return frozenset(TritonRequest.extras or ())


def wants_bytes(body: InferRequest, name: str) -> bool:
    """Whether an output is to be sent as bytes. ``name`` is the output's."""
    by_default = (body.parameters or {}).get(_BINARY) is True
    for one in body.outputs or ():
        if one.name == name and one.parameters and one.parameters.binary_data is not None:
            return one.parameters.binary_data
    return by_default


def _values(tensor: InputTensor, behind: bytes, most: int) -> tuple[list[Any], bytes]:
    """Return a tensor's elements, of bytes at most ``most``, and what is left. Raises ApiError."""
    size = tensor.parameters.binary_data_size if tensor.parameters else None
    where = f"the input {tensor.name[:80]!r}"
    try:
        if size is not None and tensor.data is not None:
            raise ValueError("it has both data and binary_data_size")
        if size is not None and size > len(behind):
            raise ValueError(f"binary_data_size is {size}, but {len(behind)} bytes are left")
        if size is not None:
            values, behind = unpack(tensor.datatype, behind[:size], most), behind[size:]
        else:
            values = checked(tensor.datatype, tensor.data or [])
        check_shape(tensor.shape, len(values))
    except UnicodeDecodeError:
        raise bad_value("inputs", f"{where} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise bad_value("inputs", f"{where}: {error}") from None
    if any(isinstance(value, float) and not math.isfinite(value) for value in values):
        raise bad_value("inputs", f"{where} has a number that is not finite")
    return values, behind


def parted(data: bytes, length: str | None) -> tuple[bytes, bytes]:
    """Return the JSON of a body and the tensors behind it; ``length`` is the header's value.

    Raises ApiError.
    """
    if length is None:
        return data, b""
    if not (length.isascii() and length.isdigit() and len(length) < 20) or int(length) > len(data):
        name = "Inference-Header-Content-Length"
        raise ApiError(400, f"{name} is {length[:20]!r}, but the body has {len(data)} bytes")
    return data[: int(length)], data[int(length) :]
