"""How many parts a message has, told by its bytes before it is parsed.

Two bytes of a message are a tensor, which takes 80 of memory: 8 MB would be 340 MB, and would stop
the event loop while they are made. The format is that of protobuf.dev/programming-guides/encoding.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import DecodeError

from ridgeline.serve.dialects.triton.protocol import MAX_TENSORS
from ridgeline.serve.http.json_body import MAX_PARTS, MAX_VALUES
from ridgeline.serve.triton_grpc.messages import CLASSES

_MOST_FIELDS = MAX_PARTS + 8 * MAX_TENSORS  # texts and parameters, and what tensors have besides
_FIXED_BYTES = {Field.CPPTYPE_FLOAT: 4, Field.CPPTYPE_DOUBLE: 8}
_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5  # what follows a field's number
_ENDLESS = bytes(range(128, 256))  # bytes of a number that goes on


def check_parts(kind: str, data: bytes) -> None:
    """Check that a message of this kind has no more parts than a request in JSON may have.

    Raises ValueError if it has more, and DecodeError if it is no message.
    """
    num_fields = num_elements = 0
    to_read = [(_layout(CLASSES[kind].DESCRIPTOR), 0, len(data))]
    while to_read:
        layout, at, end = to_read.pop()
        while at < end:
            num_fields += 1
            if num_fields > _MOST_FIELDS:
                raise _too_many()
            tag, at = _varint(data, at)
            number, follows = tag >> 3, tag & 7
            if follows == _LENGTH:
                size, at = _varint(data, at)
                inside = layout.get(number)
                if isinstance(inside, dict):
                    to_read.append((inside, at, at + size))
                elif inside is not None:
                    num_elements += _num_elements(inside, data[at : at + size])
                at += size
            elif follows == _VARINT:
                _, at = _varint(data, at)
            elif follows in (_EIGHT_BYTES, _FOUR_BYTES):
                at += 8 if follows == _EIGHT_BYTES else 4
            else:
                raise DecodeError("groups are not read")
        if at != end:
            raise DecodeError("a field is longer than its message")
    if num_elements > MAX_VALUES:
        raise _too_many()


def _too_many() -> ValueError:
    return ValueError(
        f"a request may have at most {MAX_VALUES} elements and parameters, of which at most "
        f"{MAX_PARTS} are texts or parameters"
    )


@cache
def _layout(message: Any) -> dict[int, Any]:
    """Return what holds parts, by number: the same of a message, or the bytes of an element.

    Elements that take as many as they need have 0. A map's entries are counted, but not read: what
    stands in them more than once takes no memory.
    """
    found: dict[int, Any] = {}
    for field in message.fields:
        inside = field.message_type
        if inside is None and field.is_repeated and field.cpp_type != Field.CPPTYPE_STRING:
            found[field.number] = _FIXED_BYTES.get(field.cpp_type, 0)
        elif inside is not None and not inside.GetOptions().map_entry:
            found[field.number] = _layout(inside)
    return found


def _num_elements(element_bytes: int, data: bytes) -> int:
    if element_bytes:
        return len(data) // element_bytes
    return len(data.translate(None, _ENDLESS))


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at a place, and where it ends. Raises DecodeError."""
    number = shift = 0
    for byte in data[at : at + 10]:
        at += 1
        number |= (byte & 127) << shift
        if byte < 128:
            return number, at
        shift += 7
    raise DecodeError("a number does not end")
