"""What the methods of quantisation have in common: packed words, groups, and their encoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.encodings import BLOCK, Bytes, Floats, encode, nibbles
from ridgeline.model.files.tensors import Tensor

Parts = Mapping[str, Tensor]  # a matrix's tensors, by the end of their names
_DTYPES = {"I32": "<i4", "I64": "<i8", "U8": "u1", "I8": "i1", "F8_E4M3": "u1", "F16": "<f2",
           "BF16": "<u2", "F32": "<f4"}  # fmt: skip


class Method(NamedTuple):
    """A way to store quantised matrices.

    Attributes:
        description: for messages.
        ends: of names; a tensor with one of them belongs to a quantised matrix.
        parts: ends of names of all that may belong to it.
        convert: makes a tensor of a module's name and its parts.
    """

    description: str
    ends: tuple[str, ...]
    parts: tuple[str, ...]
    convert: Callable[[str, Parts, ConfigReader], Tensor]


def array(tensor: Tensor) -> NDArray[Any]:
    """Return what a tensor of the file stores, in its shape; bf16 and fp8 as bits."""
    return tensor.data.view(_DTYPES[tensor.dtype]).reshape(tensor.shape)


def part(
    parts: Parts, end: str, module: str, config: ConfigReader, shape: tuple[int, ...], *dtypes: str
) -> Tensor:
    """Return a part of a matrix. It must be there, have this shape, and one of these types."""
    tensor = parts.get(end)
    if tensor is None:
        config.fail(f"tensor {module + end!r} is missing")
    if tensor.dtype not in dtypes:
        config.fail(
            f"tensor {module + end!r} has type {tensor.dtype}, wanted {' or '.join(dtypes)}"
        )
    if tensor.shape != shape:
        config.fail(f"tensor {module + end!r} has shape {tensor.shape}, wanted {shape}")
    return tensor


def number_of_bits(config: ConfigReader, bits: int, *supported: int) -> int:
    """Return ``bits``, which must be one of ``supported``."""
    if bits not in supported:
        names = " and ".join(map(str, supported))
        config.fail(f"{bits} bits are not supported; supported: {names}")
    return bits


def in_groups(size: int) -> str:
    """Return words for groups of ``size`` inputs; -1 is all of them."""
    return "one group per output" if size == -1 else f"groups of {size}"


def unpacked(words: NDArray[Any], bits: int) -> Bytes:
    """Return the values of 32-bit words, ``[rows, values]``: in each the lowest bits first."""
    each = np.ascontiguousarray(words).view(np.uint8).reshape(len(words), -1)
    if bits == 8:
        return each
    return np.stack([each & 15, each >> 4], axis=2).reshape(len(words), -1)


class Integers(NamedTuple):
    """Weights ``scale (q - zero)``.

    Attributes:
        q: ``[outputs, inputs]``, a byte each.
        scale: ``[outputs, groups]``.
        zero: ``[outputs, groups]``, or one for all.
    """

    q: Bytes
    scale: Floats
    zero: Floats | float


def integers(
    name: str,
    dtype: str,
    shape: tuple[int, int],
    parts: Parts,
    read: Callable[[], Integers],
    group_of: NDArray[Any] | None = None,
) -> Tensor:
    """Return the matrix that ``read`` finds in ``parts``, in the blocks that ``dtype`` names.

    ``group_of`` gives the group of each input, where groups are not neighbours.
    """
    outputs, inputs = shape

    def make() -> Bytes:
        q, scale, zero = read()
        zeros = np.broadcast_to(np.asarray(zero, np.float32), scale.shape)
        if group_of is not None:
            which = group_of.astype(np.intp)
            weights = (q.astype(np.float32) - zeros[:, which]) * scale[:, which]
            return weights.view(np.uint8)
        times = inputs // BLOCK // scale.shape[1]
        blocks = q.reshape(outputs, -1, BLOCK) if dtype.startswith("INT8") else nibbles(q)
        return encode(np.repeat(scale, times, axis=1), np.repeat(zeros, times, axis=1), blocks)

    return Tensor.converted(name, dtype, shape, file_bytes(parts), make)


def file_bytes(parts: Parts) -> int:
    """Return the bytes of a matrix in the file."""
    return sum(tensor.nbytes for tensor in parts.values())


def check_groups(
    config: ConfigReader, module: str, inputs: int, groups: int, size: int | None
) -> None:
    """Refuse groups that are not whole blocks, or not of ``size`` inputs; -1 is all of them."""
    group_size = inputs // groups if groups and inputs % groups == 0 else 0
    wanted = inputs if size == -1 else size or group_size
    if group_size != wanted:
        config.fail(f"{module!r} has {groups} groups of {inputs} inputs, not {in_groups(wanted)}")
    if group_size == 0 or group_size % BLOCK:
        config.fail(
            f"{module!r} has {groups} groups of {inputs} inputs; supported: multiples of {BLOCK} "
            f"inputs"
        )


def is_every(tensor: Tensor, add: int, wanted: int) -> bool:
    """Return whether each 32-bit word of a tensor, plus ``add``, is ``wanted``."""
    words = array(tensor).view(np.uint32)
    return bool((words + np.uint32(add) == np.uint32(wanted)).all())


def matrix_shape(parts: Parts, end: str, module: str, config: ConfigReader) -> tuple[int, int]:
    """Return the shape of a part that must be a matrix."""
    tensor = parts.get(end)
    if tensor is None:
        config.fail(f"tensor {module + end!r} is missing")
    if len(tensor.shape) != 2:
        config.fail(f"tensor {module + end!r} has shape {tensor.shape}, not that of a matrix")
    return tensor.shape[0], tensor.shape[1]
