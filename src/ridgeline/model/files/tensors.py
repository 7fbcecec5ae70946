"""The vocabulary of ``models``: a tensor as its file stores it, and a checkpoint.

Quantised blocks stay quantised here; a backend decides what to do with them. This module opens no
file and of formats it knows only the names of the block types.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.model.files import encodings
from ridgeline.model.files.identity.digests import FileDigests
from ridgeline.model.shape.model import ModelArch

_MOST_MESSAGE_CHARS = 2000
_POINTER = b"version https://git-lfs.github.com/spec/"
_ROWS_AT_ONCE = 1024  # that are compared: most differ in the first


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let errors of the system name this file; those of an open file do not by themselves."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


class ModelFileError(ValueError):
    """A model file is damaged, hostile or not supported. The message names what and where.

    It may quote the file, whose words may be long or have several lines: it is cut in the middle,
    and is one line.
    """

    def __init__(self, message: str) -> None:
        message = r"\n".join(message.splitlines())
        most = _MOST_MESSAGE_CHARS // 2
        is_long = len(message) > _MOST_MESSAGE_CHARS
        super().__init__(f"{message[:most]} ... {message[-most:]}" if is_long else message)


def refuse_pointer(path: Path, beginning: bytes) -> None:
    """Raise ModelFileError if a file's beginning is that of what git without git-lfs leaves."""
    if beginning.startswith(_POINTER):
        raise ModelFileError(
            f"{path}: a git-lfs pointer, not the file itself: run `git lfs pull` in its folder, or "
            "fetch it again"
        )


@dataclass(frozen=True, eq=False, slots=True)
class Tensor:
    """A matrix (or vector) in its file's own encoding.

    Attributes:
        name: as the file spells it, for messages.
        dtype: GGML type name: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K..Q6_K, IQ*, MXFP4;
            or one of ``encodings``.
        shape: logical shape, row-major: ``(out, in)`` or ``(n,)``.
        stored: uint8 ``[rows, row_bytes]``; usually a read-only view of the mapped file.
        order: which of the stored rows stands where; None for all as they are.
        parts: of a stack, in place of ``stored``.
        make: of a tensor that is converted: makes the rows each time they are asked for. ``stored``
            has no content then, only as many rows and bytes as the file has.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stored: NDArray[np.uint8]
    order: NDArray[np.intp] | None = None
    parts: tuple[Tensor, ...] = ()
    make: Callable[[], NDArray[np.uint8]] | None = None

    @classmethod
    def converted(
        cls,
        name: str,
        dtype: str,
        shape: tuple[int, ...],
        file_bytes: int,
        make: Callable[[], NDArray[np.uint8]],
    ) -> Tensor:
        """Return a tensor whose encoded rows ``make`` returns; nothing is read yet."""
        rows = math.prod(shape[:-1])
        return cls(name, dtype, shape, _room(rows, file_bytes // rows), make=make)

    @classmethod
    def stacked(cls, name: str, parts: Sequence[Tensor]) -> Tensor:
        """Return tensors of one type, one below the other; nothing is read yet."""
        first = parts[0]
        if any((p.dtype, p.shape[1:]) != (first.dtype, first.shape[1:]) for p in parts):
            raise ModelFileError(f"the tensors {name!r} differ in type or width")
        shape = (sum(part.shape[0] for part in parts), *first.shape[1:])
        return cls(name, first.dtype, shape, np.zeros((0, 0), np.uint8), parts=tuple(parts))

    @property
    def data(self) -> NDArray[np.uint8]:
        """The rows in order. Copied each time where they have one: packed weights need none."""
        if self.parts:
            return np.concatenate([part.data for part in self.parts])
        stored = self.stored if self.make is None else self.make()
        return stored if self.order is None else stored[self.order]

    @property
    def nbytes(self) -> int:
        """Bytes of the encoded tensor."""
        return sum(part.nbytes for part in self.parts) or int(self.stored.nbytes)

    def rows(self, index: slice | NDArray[np.intp], name: str = "") -> Tensor:
        """Return the rows that ``index`` selects, still encoded (rows are whole blocks)."""
        if self.make is not None:
            order = np.arange(len(self.stored)) if self.order is None else self.order
            order = order[index]
            shape, room = (len(order), *self.shape[1:]), _room(len(order), self.stored.shape[1])
            return replace(self, name=name or self.name, shape=shape, stored=room, order=order)
        if isinstance(index, slice) and self.parts and self.order is None:
            return Tensor.stacked(name or self.name, self._within(index))
        if self.order is not None and not self.parts:  # of all rows no more than these are copied
            data = self.stored[self.order[index]]
        else:
            data = self.data[index]
        shape = (len(data), *self.shape[-1:]) if len(self.shape) > 1 else (len(data),)
        return Tensor(name or self.name, self.dtype, shape, data)

    def _within(self, index: slice) -> list[Tensor]:
        """Return what a range of rows has of each part of a stack."""
        lengths = [part.shape[0] for part in self.parts]
        low, high, step = index.indices(sum(lengths))
        ranges, begin = [], 0
        for part, length in zip(self.parts, lengths, strict=True):
            own = slice(max(low - begin, 0), min(high - begin, length), step)
            if own.start < own.stop:
                ranges.append(part.rows(own))
            begin += length
        return ranges

    def reordered(self, order: NDArray[np.intp]) -> Tensor:
        """Return the same with its rows in another order; nothing is read yet."""
        return replace(self, order=order if self.order is None else self.order[order])

    def to_f32(self) -> NDArray[np.float32]:
        """Decode to float32 of ``shape``. Always a fresh array."""
        if self.dtype == "F32":
            return self.data.view(np.float32).reshape(self.shape).copy()
        if self.dtype == "F16":
            return self.data.view(np.float16).reshape(self.shape).astype(np.float32)
        if self.dtype == "BF16":
            wide = self.data.view(np.uint16).astype(np.uint32) << 16
            return wide.view(np.float32).reshape(self.shape)
        if self.dtype in encodings.ENCODINGS:
            return encodings.decode(self.dtype, self.data).reshape(self.shape)
        import gguf  # here: a tenth of a start whose weights are packed already

        kind = gguf.GGMLQuantizationType[self.dtype]
        out: NDArray[np.float32] = gguf.quants.dequantize(self.data, kind)
        return np.ascontiguousarray(out, dtype=np.float32).reshape(self.shape)


def same_bytes(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are stored alike, byte for byte; those to be made never are."""
    first, second = one.stored, other.stored
    if (one.dtype, one.shape, first.shape) != (other.dtype, other.shape, second.shape):
        return False
    if any(t.make is not None or t.order is not None or t.parts for t in (one, other)):
        return False
    pieces = (slice(i, i + _ROWS_AT_ONCE) for i in range(0, len(first), _ROWS_AT_ONCE))
    return all(np.array_equal(first[piece], second[piece]) for piece in pieces)


def _room(rows: int, row_bytes: int) -> NDArray[np.uint8]:
    """Return rows without content, which take no memory."""
    return np.broadcast_to(np.zeros(1, np.uint8), (rows, row_bytes))


class Dense(NamedTuple):
    """What a vector goes through: a matrix ``[out, in]``, a bias, and tanh if it squashes."""

    weight: Tensor
    bias: Tensor | None = None
    squashes: bool = False


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model as found on disk.

    Attributes:
        path: file or directory it came from.
        arch: its structural facts.
        tensors: canonical name (``ModelArch.matrix_shapes``) to tensor; shapes are checked.
        eos_ids: tokens that end an answer.
        bos_id: token that begins a text, None where the model has none.
        begin_ids: what a plain prompt gets in front: ``bos_id``, some models more, or nothing.
        end_ids: what a plain prompt gets behind it, None where tokenizer.json says it.
        chat_template: jinja2 source, None where the file has none.
        tool_template: that of conversations with tools, where they have one of their own.
        generation_defaults: the file's own sampling defaults (temperature, top_p, top_k, ...).
        quantization: how its weights were quantised, in words; "" where the types say it.
        tokenizer: what ``tokenizer.load_tokenizer`` needs: a path to tokenizer.json, or
            GGUF metadata (``general.architecture``, and keys that begin with ``tokenizer.``).
        family: the file's name of its family.
        between_ids: what stands between two texts that are read together.
        normalises: vectors of texts are scaled to length 1.
        dense: what they go through before that, in order.
        contents: of the files that all this was read from; of none if it was made in memory.
        part: names which of the files' layers these are, "" for all.
        notes: what the files say that is not gone by, a line each.
    """

    path: Path
    arch: ModelArch
    tensors: Mapping[str, Tensor]
    eos_ids: tuple[int, ...]
    bos_id: int | None
    begin_ids: tuple[int, ...]
    chat_template: str | None
    tokenizer: Path | Mapping[str, Any]
    generation_defaults: Mapping[str, float | int] = field(default_factory=dict)
    end_ids: tuple[int, ...] | None = None
    quantization: str = ""
    family: str = ""
    between_ids: tuple[int, ...] = ()
    normalises: bool = True
    dense: tuple[Dense, ...] = ()
    contents: FileDigests = field(default_factory=lambda: FileDigests({}))
    part: str = ""
    tool_template: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def can_chat(self) -> bool:
        """Whether it has a chat template, if only for conversations with tools."""
        return self.chat_template is not None or self.tool_template is not None

    @property
    def vector_size(self) -> int:
        """Dimensions of a text's vector."""
        return self.dense[-1].weight.shape[0] if self.dense else self.arch.hidden_size

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in the file's encoding, the shared embedding counted once."""
        return sum({id(t.stored): t.nbytes for t in self.tensors.values()}.values())
