"""GGUF files, version 3, written: the header first, then each tensor into its room, in any order.

What a file will hold is known before a weight is: so its whole length is taken from the disk at
once, and a disk that is too small says so before the work.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.model.files.gguf.file import BLOCK_SIZES, MAGIC, TYPE_NUMBERS

ALIGNMENT = 32
_VERSION = 3
_U32, _F32, _BOOL, _STRING, _ARRAY = 4, 6, 7, 8, 9
_FORMS = {"u32": (_U32, "<I"), "i32": (5, "<i"), "f32": (_F32, "<f"), "bool": (_BOOL, "<?")}

Value = tuple[str, "int | float | bool"]


class TensorRoom(NamedTuple):
    """What a tensor will be: a GGML type's name, and its shape, row-major."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the encoded tensor."""
        size, block_bytes = BLOCK_SIZES[self.dtype]
        return int(np.prod(self.shape)) // size * block_bytes


def stored(value: Any) -> bytes:
    """Return a value of metadata, in the form that its type suggests: whole numbers are u32."""
    match value:
        case bool():
            return number("bool", value)
        case int():
            return number("u32", value)
        case float():
            return number("f32", value)
        case str():
            return string(value)
        case np.ndarray():
            return numbers("f32" if value.dtype == np.float32 else "i32", value)
    is_flags = {*map(type, value)} == {bool}
    return _flags(value) if is_flags else strings(value)


def number(form: str, value: float) -> bytes:
    """Return a value of metadata: ``form`` is u32, i32, f32 or bool."""
    kind, packed = _FORMS[form]
    return struct.pack("<I", kind) + struct.pack(packed, value)


def string(text: str) -> bytes:
    """Return a string as a value of metadata."""
    return struct.pack("<I", _STRING) + _text(text)


def strings(texts: list[str]) -> bytes:
    """Return an array of strings as a value of metadata."""
    return struct.pack("<IIQ", _ARRAY, _STRING, len(texts)) + b"".join(map(_text, texts))


def numbers(form: str, values: NDArray[np.int32] | NDArray[np.float32]) -> bytes:
    """Return an array of i32 or f32 as a value of metadata."""
    return struct.pack("<IIQ", _ARRAY, _FORMS[form][0], len(values)) + values.tobytes()


def _flags(values: list[bool]) -> bytes:
    return struct.pack("<IIQ", _ARRAY, _BOOL, len(values)) + bytes(values)


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


class GGUFOut:
    """A file that is being written: each of its tensors may come when it is ready."""

    def __init__(
        self, file: IO[bytes], metadata: Mapping[str, bytes], rooms: Mapping[str, TensorRoom]
    ) -> None:
        """Write the header and take the whole file's room. Raises OSError: the disk is full.

        ``metadata`` has values as ``gguf.file.stored_keys`` returns them.
        """
        self._file = file
        head = [MAGIC, struct.pack("<IQQ", _VERSION, len(rooms), len(metadata))]
        head += [_text(key) + value for key, value in metadata.items()]
        offset, self._offsets = 0, dict[str, int]()
        for name, room in rooms.items():
            lengths = struct.pack(f"<{len(room.shape)}Q", *reversed(room.shape))
            kind = struct.pack("<IQ", TYPE_NUMBERS[room.dtype], offset)
            head += [_text(name), struct.pack("<I", len(room.shape)), lengths, kind]
            self._offsets[name] = offset
            offset += _aligned(room.num_bytes)
        header = b"".join(head)
        self._data_begin = _aligned(len(header))
        self.num_bytes = self._data_begin + offset
        os.posix_fallocate(file.fileno(), 0, self.num_bytes)
        file.write(header)

    def put(self, name: str, rows: NDArray[np.uint8], begin_bytes: int = 0) -> None:
        """Write encoded rows of a tensor, which begin ``begin_bytes`` after its first."""
        self._file.seek(self._data_begin + self._offsets[name] + begin_bytes)
        self._file.write(np.ascontiguousarray(rows).data)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
