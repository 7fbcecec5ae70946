"""GGUF files, versions 2 and 3, read with nothing taken on trust.

Every count, length, offset, type and shape is compared with the bytes that are really there before
it is used, so a damaged or hostile file costs one clear ``ModelFileError`` and no memory. This
module knows the container only: it neither knows what a model is nor decodes a single weight.

    metadata, tensors = read_gguf(Path("model.gguf"))
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ridgeline.model.files.tensors import ModelFileError, Tensor, naming, refuse_pointer

MAGIC = b"GGUF"

# fmt: off
# Type number in the file -> name, elements per block, bytes per block. Spelled out although the
# gguf package has them: importing it is a tenth of a start that finds its weights packed.
_TENSOR_TYPES = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 8: ("Q8_0", 32, 34),
    2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24),
    10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210), 19: ("IQ1_S", 256, 50), 29: ("IQ1_M", 256, 56),
    16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 22: ("IQ2_S", 256, 82),
    18: ("IQ3_XXS", 256, 98), 21: ("IQ3_S", 256, 110), 20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136), 39: ("MXFP4", 32, 17),
}
TYPE_NUMBERS = {name: number for number, (name, _, _) in _TENSOR_TYPES.items()}
BLOCK_SIZES = {name: sizes for name, *sizes in _TENSOR_TYPES.values()}  # elements, bytes
# Type number of a metadata value -> its numpy type. Strings are 8, arrays 9.
_SCALAR_CODES = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?",
    10: "<u8", 11: "<i8", 12: "<f8",
}
# fmt: on
_SCALARS = {number: np.dtype(code) for number, code in _SCALAR_CODES.items()}
_STRING, _ARRAY = 8, 9

# A file may be large and still lie (a sparse terabyte of zeros holds any count), so what the
# header may cost is bounded as well: a few times what the largest published vocabularies need.
_MAX_HEADER_BYTES = 64 << 20
_MAX_ARRAY_ELEMENTS = 2 << 20  # of all arrays together
_MAX_RECORDS = 1 << 16  # keys, and tensors
_MAX_ALIGNMENT = 1 << 20
_BEGINNING_BYTES = 64  # that tell a pointer of git-lfs
_MIN_KEY_BYTES, _MIN_TENSOR_BYTES = 13, 32
# Strings are read together from this many bytes. If that fails, this many are read one by one
# before the next try, so a file that makes it fail gains nothing.
_WINDOW_BYTES, _MANY = 64 << 10, 256


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Map the file at ``path``; return its metadata and its tensors under the file's own names.

    Metadata values are Python scalars and strings, lists of strings, and numpy arrays. Tensors are
    read-only views of the map, which lives as long as they do.

    Raises:
        ModelFileError: damaged, hostile or not supported; the message names what and where.
    """
    if not path.is_file():
        raise ModelFileError(f"{path}: no such file")
    with naming(path), path.open("rb") as file:
        if path.stat().st_size == 0:
            raise ModelFileError(f"{path}: the file is empty; fetch it again")
        refuse_pointer(path, file.read(_BEGINNING_BYTES))
        return parse_gguf(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), str(path))


def parse_gguf(buffer: bytes | mmap.mmap, where: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Do what ``read_gguf`` does for a file whose bytes are ``buffer``; ``where`` names it."""
    header, num_tensors, num_keys = _beginning(buffer, where)
    metadata = {key: value for key, value, _ in _keys(header, num_keys)}
    return metadata, _tensors(header, num_tensors, metadata.get("general.alignment", 32))


def stored_keys(path: Path) -> dict[str, bytes]:
    """Return the metadata of a file as it stands there: of each key a type number and a value.

    Raises ModelFileError, as ``read_gguf`` does.
    """
    with naming(path), path.open("rb") as file:
        header, _, num_keys = _beginning(file.read(_MAX_HEADER_BYTES), str(path))
        return {key: header.buffer[slice(*at)] for key, _, at in _keys(header, num_keys)}


def _beginning(buffer: bytes | mmap.mmap, where: str) -> tuple[_Header, int, int]:
    """Return the header behind its counts, which are of tensors and of keys."""
    header = _Header(buffer, where)
    if header.chars(4, "the magic") != MAGIC:
        header.fail("this is not a GGUF file (it does not begin with GGUF)")
    version = header.scalar(4, "the version")
    if version in (2 << 24, 3 << 24):
        header.fail("a big-endian GGUF file; convert the model for little-endian machines")
    if version not in (2, 3):
        header.fail(f"GGUF version {version}, where 2 and 3 are supported; convert the model again")
    num_tensors = header.count("tensors", _MIN_TENSOR_BYTES)
    num_keys = header.count("metadata keys", _MIN_KEY_BYTES)
    return header, num_tensors, num_keys


def _keys(header: _Header, num_keys: int) -> Iterator[tuple[str, Any, tuple[int, int]]]:
    """Yield keys with their values, and where those begin and end, with their types."""
    keys = set[str]()
    for i in range(num_keys):
        key = header.strings(1, f"key {i}")[0]
        if key in keys:
            header.fail(f"metadata key {key!r} appears twice")
        keys.add(key)
        begin = header.position
        value = header.value(header.scalar(4, f"the type of {key!r}"), repr(key))
        yield key, value, (begin, header.position)


class _Header:
    """A position in the file's header that never moves past what is there."""

    def __init__(self, buffer: bytes | mmap.mmap, where: str) -> None:
        self.buffer = buffer
        self.size = len(buffer)
        self.position = 0
        self._where = where
        self._end = min(self.size, _MAX_HEADER_BYTES)
        self._elements_left = _MAX_ARRAY_ELEMENTS

    def fail(self, problem: str) -> NoReturn:
        raise ModelFileError(f"{self._where}: at byte {self.position}: {problem}")

    def take(self, num_bytes: int, name: str) -> int:
        """Move over ``num_bytes`` and return where they begin."""
        begin = self.position
        if num_bytes > self._end - begin:
            limit = "file" if self._end == self.size else f"{_MAX_HEADER_BYTES}-byte header limit"
            self.fail(f"{name} takes {num_bytes} bytes, which reaches past the end of the {limit}")
        self.position = begin + num_bytes
        return begin

    def chars(self, num_bytes: int, name: str) -> bytes:
        begin = self.take(num_bytes, name)
        return self.buffer[begin : self.position]

    def scalar(self, kind: int, name: str) -> Any:
        """Read one number; ``kind`` is a key of ``_SCALARS``."""
        dtype = _SCALARS[kind]
        return np.frombuffer(self.chars(dtype.itemsize, name), dtype)[0].item()

    def count(self, name: str, min_bytes: int) -> int:
        """Read how many records follow, each of which takes at least ``min_bytes``."""
        count: int = self.scalar(10, f"the number of {name}")
        if count > _MAX_RECORDS or count * min_bytes > self.size - self.position:
            self.fail(f"{count} {name} are claimed, more than the file can hold or is sane")
        return count

    def strings(self, count: int, name: str) -> list[str]:
        """Read ``count`` strings, each a 64-bit length and UTF-8."""
        texts: list[str] = []
        while (left := count - len(texts)) > 0:
            together = self._short_strings(left) if left >= _MANY else []
            texts += together or self._one_by_one(len(texts), min(left, _MANY), name)
        return texts

    def _short_strings(self, max_strings: int) -> list[str]:
        """Read the strings in the next bytes, if each has 1 to 255 bytes and none of them is zero.

        Then all zeros are the upper seven bytes of lengths, and the bytes can be cut at them;
        reading a vocabulary string by string took a sixth of a start. Otherwise nothing is read.
        """
        num_bytes = min(_WINDOW_BYTES, self._end - self.position)
        area = np.frombuffer(self.buffer, np.uint8, num_bytes, self.position).copy()
        zeros = np.flatnonzero(area == 0)
        lasts = zeros[6::7][:max_strings]
        begins = zeros[::7][: len(lasts)] - 1  # of lengths
        ends = begins + 8 + area[begins]
        if ends.size and ends[-1] > num_bytes:
            begins, ends, lasts = begins[:-1], ends[:-1], lasts[:-1]
        if not ends.size or begins[0] != 0 or (begins[1:] != ends[:-1]).any():
            return []
        if (lasts - begins != 7).any() or np.searchsorted(zeros, ends[-1]) != 7 * len(ends):
            return []
        area[begins] = 0
        try:
            text = area[: ends[-1]].tobytes().decode()
        except UnicodeDecodeError:
            return []
        self.position += int(ends[-1])
        return text.split("\0" * 8)[1:]

    def _one_by_one(self, first: int, count: int, name: str) -> list[str]:
        """Read ``count`` strings of any kind; the first has the index ``first`` in ``name``."""
        unpack, buffer, end, position = struct.Struct("<Q").unpack_from, self.buffer, self._end, 0
        position, texts = self.position, list[str]()
        for i in range(first, first + count):
            stop = position + 8
            if stop <= end:
                stop += unpack(buffer, position)[0]
            if stop > end:
                self.position = position
                self.fail(f"string {i} of {name} reaches past the end of the file or its header")
            try:
                texts.append(buffer[position + 8 : stop].decode())
            except UnicodeDecodeError:
                self.position = position
                self.fail(f"string {i} of {name} is not UTF-8")
            position = stop
        self.position = position
        return texts

    def value(self, kind: int, key: str) -> Any:
        """Read one metadata value of type number ``kind``."""
        if kind in _SCALARS:
            return self.scalar(kind, f"the value of {key}")
        if kind == _STRING:
            return self.strings(1, key)[0]
        if kind != _ARRAY:
            self.fail(f"{key} has type {kind}, which GGUF does not define")
        element = self.scalar(4, f"the element type of {key}")
        length: int = self.scalar(10, f"the length of {key}")
        if element not in _SCALARS and element != _STRING:
            nested = "an array of arrays" if element == _ARRAY else f"an array of type {element}"
            self.fail(f"{key} is {nested}, which is not supported")
        if length > self._elements_left:
            self.fail(f"{key} claims {length} elements, more than is sane")
        self._elements_left -= length
        if element == _STRING:
            return self.strings(length, key)
        dtype = _SCALARS[element]
        begin = self.take(length * dtype.itemsize, key)
        if dtype == np.bool_:  # a byte other than 0 and 1 is not a numpy bool
            return np.frombuffer(self.buffer, np.uint8, length, begin) != 0
        return np.frombuffer(self.buffer, dtype, length, begin)


def _tensors(header: _Header, num_tensors: int, alignment: Any) -> dict[str, Tensor]:
    """Read ``num_tensors`` descriptions and return views of the data after them."""
    if (
        type(alignment) is not int
        or not 8 <= alignment <= _MAX_ALIGNMENT
        or alignment & (alignment - 1)
    ):
        header.fail(f"general.alignment is {alignment!r}, not a power of two from 8 to 2**20")
    # name -> offset, bytes, type, shape
    entries: dict[str, tuple[int, int, str, tuple[int, ...]]] = {}
    for i in range(num_tensors):
        name = header.strings(1, f"tensor name {i}")[0]
        if name in entries:
            header.fail(f"tensor {name!r} appears twice")
        entries[name] = _describe(header, name, alignment)

    data_begin = -(-header.position // alignment) * alignment
    _check_extents(header, {name: entry[:2] for name, entry in entries.items()}, data_begin)
    raw: NDArray[np.uint8] = np.frombuffer(header.buffer, np.uint8)
    tensors: dict[str, Tensor] = {}
    for name, (offset, num_bytes, dtype, shape) in entries.items():
        begin = data_begin + offset
        # A vector has one row per element, so that Tensor.rows selects elements of it.
        rows = math.prod(shape[:-1]) if len(shape) > 1 else shape[0]
        data = raw[begin : begin + num_bytes].reshape(rows, num_bytes // rows)
        tensors[name] = Tensor(name, dtype, shape, data)
    return tensors


def _type_name(kind: int) -> str:
    import gguf  # slow to import, and needed for this message only

    names = [entry.name for entry in gguf.GGMLQuantizationType if entry == kind]
    return names[0] if names else f"number {kind}"


def _describe(header: _Header, name: str, alignment: int) -> tuple[int, int, str, tuple[int, ...]]:
    """Read one tensor's description: its offset and bytes, type name and shape, row-major."""
    num_dims = header.scalar(4, f"the dimensions of {name!r}")
    if not 1 <= num_dims <= 4:
        header.fail(f"tensor {name!r} has {num_dims} dimensions, not 1 to 4")
    lengths: list[int] = [header.scalar(10, f"a dimension of {name!r}") for _ in range(num_dims)]
    kind = header.scalar(4, f"the type of {name!r}")
    offset: int = header.scalar(10, f"the offset of {name!r}")
    if kind not in _TENSOR_TYPES:
        supported = ", ".join(entry[0] for entry in _TENSOR_TYPES.values())
        header.fail(f"tensor {name!r} has type {_type_name(kind)}; supported: {supported}")
    dtype, block_size, block_bytes = _TENSOR_TYPES[kind]
    shape = tuple(reversed(lengths))
    num_elements = math.prod(lengths)
    if num_elements == 0:
        header.fail(f"tensor {name!r} of shape {shape} is empty")
    if lengths[0] % block_size or (num_dims == 1 and block_size > 1):
        header.fail(f"tensor {name!r} of shape {shape} cannot be {dtype}: rows are whole blocks")
    if offset % alignment:
        header.fail(f"tensor {name!r} begins at {offset}, but the alignment is {alignment}")
    num_bytes = num_elements // block_size * block_bytes
    if num_bytes > header.size or offset > header.size:
        header.fail(
            f"tensor {name!r} of shape {shape} takes {num_bytes} bytes at offset {offset}, "
            f"but the file has {header.size}; it may be cut short: fetch it again"
        )
    return offset, num_bytes, dtype, shape


def _check_extents(header: _Header, extents: dict[str, tuple[int, int]], data_begin: int) -> None:
    """Refuse tensors that end outside the file or share bytes. Extents are (offset, bytes)."""
    previous, previous_end = "", 0
    for name, (offset, num_bytes) in sorted(extents.items(), key=lambda item: item[1]):
        if offset < previous_end:
            header.fail(f"tensors {previous!r} and {name!r} overlap")
        previous, previous_end = name, offset + num_bytes
        if data_begin + previous_end > header.size:
            header.fail(
                f"tensor {name!r} ends at byte {data_begin + previous_end}, but the file has "
                f"{header.size}; it was cut short: fetch it again"
            )
