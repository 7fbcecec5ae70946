"""Tensors of the Open Inference Protocol: their elements, as JSON and as bytes.

The binary form is that of the protocol's extension: little-endian, in order of rows; each element
of a BYTES tensor stands behind its length in four bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

FORMATS = {  # of struct, by type; BYTES has none, and BF16 is nowhere
    "BOOL": "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP16": "e",
    "FP32": "f",
    "FP64": "d",
}
_LENGTH = struct.Struct("<I")


def unpack(datatype: str, data: bytes, most: int) -> list[Any]:
    """Return the elements of a tensor that is given as bytes; those of BYTES as text.

    Raises ValueError if the bytes are no such tensor, or if it has more than ``most`` elements.
    """
    if datatype == "BYTES":
        texts = list(islice(_texts(data), most + 1))
        _check_number(len(texts), most)
        return texts
    kind = FORMATS[datatype]
    size = struct.calcsize(f"<{kind}")
    if len(data) % size:
        raise ValueError(f"its {len(data)} bytes are no whole number of elements of {size}")
    _check_number(len(data) // size, most)
    return list(struct.unpack(f"<{len(data) // size}{kind}", data))


def _check_number(num_elements: int, most: int) -> None:
    if num_elements > most:
        raise ValueError(f"it has more than the {most} elements that there is room for")


def _texts(data: bytes) -> Iterator[str]:
    start = 0
    while start < len(data):
        begin = start + _LENGTH.size
        end = begin + int.from_bytes(data[start:begin], "little")
        if end > len(data):
            raise ValueError("it ends within an element")
        yield data[begin:end].decode()  # UnicodeDecodeError is a ValueError
        start = end


def pack(datatype: str, values: Sequence[Any]) -> bytes:
    """Return the bytes of a tensor with these elements."""
    if datatype == "BYTES":
        texts = [value.encode() for value in values]
        return b"".join(_LENGTH.pack(len(text)) + text for text in texts)
    return struct.pack(f"<{len(values)}{FORMATS[datatype]}", *values)


def checked(datatype: str, values: Sequence[Any]) -> list[Any]:
    """Return the elements of a tensor that is given in JSON, flat or nested.

    Raises ValueError if one has another type.
    """
    flat = list(_flat(values))
    is_whole = datatype.startswith(("INT", "UINT"))
    kinds = {"BYTES": (str,), "BOOL": (bool,)}.get(datatype, (int,) if is_whole else (int, float))
    if any(type(value) not in kinds for value in flat):
        raise ValueError(f"an element is not {datatype}")
    return flat


def _flat(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list):
            yield from _flat(value)
        else:
            yield value


def check_shape(shape: Sequence[int], num_elements: int) -> None:
    """Raise ValueError unless a tensor of this shape has this number of elements."""
    if math.prod(shape) != num_elements:
        shown = ", ".join(map(str, shape[:8]))
        raise ValueError(f"its shape is [{shown}], but it has {num_elements} elements")
