"""Messages of Triton's gRPC service with a field at its extremes, and who sends them.

They are written as bytes, by the numbers of the service's own classes: as objects, those that fill
a message would take gigabytes here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import count
from multiprocessing.synchronize import Event
from typing import Any, NamedTuple

import grpc
from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message_factory import GetMessageClass

from ridgeline.serve.dialects.triton.tensors import pack
from ridgeline.serve.triton_grpc.messages import CLASSES, SERVICE

STREAM = "ModelStreamInfer"
METHODS = (STREAM, *(name.removesuffix("Request") for name in CLASSES if name.endswith("Request")))
_LONG = 1_000_000
_FULL = "full"
_WHOLE = (-(2**63), -(2**31), -1, 0, 1, 128, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1)
_VALUES: dict[int, Sequence[Any]] = {
    Field.CPPTYPE_BOOL: (False, True),
    Field.CPPTYPE_STRING: ("", "\0", "../x", "a" * _LONG, "'" * _LONG, "\u20ac" * (_LONG // 3)),
    **dict.fromkeys((Field.CPPTYPE_FLOAT, Field.CPPTYPE_DOUBLE), (-1.0, 1e38, 2.5, float("nan"))),
    **dict.fromkeys(
        (Field.CPPTYPE_INT32, Field.CPPTYPE_INT64, Field.CPPTYPE_UINT32, Field.CPPTYPE_UINT64),
        _WHOLE,
    ),
}
_FIXED_BYTES = {Field.CPPTYPE_FLOAT: 4, Field.CPPTYPE_DOUBLE: 8}
# What a status of gRPC is among those of HTTP, for the oracle that both have.
_STATUSES = {
    grpc.StatusCode.OK: 200,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.INTERNAL: 500,
    grpc.StatusCode.UNKNOWN: 500,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}


class Message(NamedTuple):
    """A message to a method: what is extreme of it, and what makes its bytes."""

    method: str
    field: str
    how: str
    make: Callable[[], bytes]


def call(channel: grpc.Channel, message: Message, **metadata: str) -> tuple[int, bytes]:
    """Send a message; return a status as of HTTP, and what was said of an error, as JSON."""
    path, given = f"/{SERVICE}/{message.method}", tuple(metadata.items())
    try:
        if message.method == STREAM:
            made = CLASSES["ModelStreamInferResponse"].FromString
            stream = channel.stream_stream(path, response_deserializer=made)
            answers = stream(iter([message.make()]), timeout=300, metadata=given)
            errors = [one.error_message for one in answers if one.error_message]
            return (400, _said(errors[0])) if errors else (200, b"")
        channel.unary_unary(path)(message.make(), timeout=300, metadata=given)
    except grpc.RpcError as error:
        return _STATUSES.get(error.code(), 400), _said(error.details())
    return 200, b""


def flood(port: int, key: str, model: str, full_bytes: int, begun: Event) -> None:
    """Send all messages that are full again and again, on eight connections, without an end."""
    made = [one for one in extremes(model, full_bytes) if one.how == _FULL]
    full = [one._replace(make=partial(bytes, one.make())) for one in made]
    alone = (("grpc.use_local_subchannel_pool", 1),)

    def send(first: int) -> None:
        with grpc.insecure_channel(f"127.0.0.1:{port}", alone) as channel:
            for number in count(first):
                call(channel, full[number % len(full)], authorization=f"Bearer {key}")

    begun.set()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(send, range(0, len(full), max(1, len(full) // 8))))


def _said(words: str) -> bytes:
    return json.dumps({"error": words}).encode()


def good(method: str, model: str) -> bytes:
    """Return a message that is answered."""
    made = CLASSES[_kind(method)]
    if _kind(method) != "ModelInferRequest":
        names = {field.name for field in made.DESCRIPTOR.fields} & {"name", "model_name"}
        return bytes(made(**dict.fromkeys(names, model)).SerializeToString())
    request = made(model_name=model)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
    request.raw_input_contents.append(pack("BYTES", ["a"]))
    request.parameters["max_tokens"].int64_param = 2
    return bytes(request.SerializeToString())


def extremes(model: str, full_bytes: int) -> Iterator[Message]:
    """Yield messages that are good but for one field, at any depth.

    What may be repeated is so until the message has about ``full_bytes``.
    """
    for method in METHODS:
        yield Message(method, "", "nothing", bytes)
        yield Message(method, "", "no message", lambda: b"\xff" * 100)
        for path in _paths(CLASSES[_kind(method)].DESCRIPTOR.fields):
            name = ".".join(field.name for field in path)
            for how, inside in _extremes_of(path[-1], full_bytes):
                yield Message(method, name, how, partial(_wrapped, method, model, path, inside))


def _wrapped(
    method: str, model: str, path: tuple[Field, ...], inside: Callable[[], bytes]
) -> bytes:
    """Return a good message with the last field of a path besides, in the fields before it."""
    data = inside()
    for outer in reversed(path[:-1]):
        data = _chunk(outer.number, data)
    return good(method, model) + data


def _kind(method: str) -> str:
    return "ModelInferRequest" if method == STREAM else f"{method}Request"


def _paths(fields: Iterable[Field]) -> Iterator[tuple[Field, ...]]:
    for field in fields:
        yield (field,)
        if field.message_type is not None:
            yield from ((field, *path) for path in _paths(field.message_type.fields))


def _extremes_of(field: Field, full_bytes: int) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield what a field may be, and what makes the bytes of it alone."""
    if field.is_repeated:
        yield _FULL, partial(_full, field, full_bytes)
    elif field.message_type is None:
        for value in _VALUES[field.cpp_type]:
            shown = value[:4] if isinstance(value, str) else value
            yield f"{shown!r}", partial(_scalar, field, value)
        if field.cpp_type == Field.CPPTYPE_STRING:
            yield "no UTF-8", partial(_chunk, field.number, b"\xff")


def _full(field: Field, full_bytes: int) -> bytes:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        keys = (b"%d" % i for i in range(full_bytes // 12))
        return b"".join(_chunk(field.number, _chunk(1, key)) for key in keys)
    if field.cpp_type in (Field.CPPTYPE_STRING, Field.CPPTYPE_MESSAGE):
        return _chunk(field.number, b"") * (full_bytes // 2)
    size = _FIXED_BYTES.get(field.cpp_type, 1)
    return _chunk(field.number, b"\1" * (full_bytes // size * size))


def _scalar(field: Field, value: Any) -> bytes:
    """Return a field with a value; nothing where it is larger than its kind of number."""
    made = GetMessageClass(field.containing_type)()
    with suppress(ValueError):
        setattr(made, field.name, value.encode() if field.type == Field.TYPE_BYTES else value)
    return bytes(made.SerializeToString())


def _chunk(number: int, data: bytes) -> bytes:
    """Return a field that has a length, by its number."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    found = bytearray()
    while number > 127:
        found.append(number & 127 | 128)
        number >>= 7
    return bytes([*found, number])
