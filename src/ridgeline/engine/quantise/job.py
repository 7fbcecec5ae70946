"""A GGUF file written again in fewer bits, a matrix at a time.

Without a text each tensor is decoded, quantised and written in pieces, on all threads. With one the
engine computes it layer by layer, and each matrix is quantised when the text's rows reach it: their
spread decides what an error costs, and the layers after it read what the quantised one makes. No
more than a layer is in memory either way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.reference import run_observed
from ridgeline.engine.quantise.feedback import quantised, shares_of, weight_of
from ridgeline.engine.quantise.grids import FORMS, Form
from ridgeline.engine.quantise.source import Added, SourceFile
from ridgeline.engine.quantise.targets import TARGETS, main_type, mix_of_file, types_of
from ridgeline.model.files.gguf.blocks import BLOCK, SUPER
from ridgeline.model.files.gguf.file import BLOCK_SIZES
from ridgeline.model.files.gguf.write import GGUFOut, TensorRoom, number
from ridgeline.model.files.tensors import ModelFileError, Tensor
from ridgeline.system.machine import write_whole

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Report = Callable[[int, int], None]

_AT_ONCE = 1 << 18  # weights in a piece: they stay in the second-level cache
_QUANTISATION_VERSION = 2


class QuantiseOptions(NamedTuple):
    """What a file is to become.

    Attributes:
        target: a name of ``targets.TARGETS``.
        windows: token ids of a text to calibrate with; none does without.
        importance: of inputs, by names of tensors, from a file.
        added: what an adapter adds, by names of tensors.
        threads: that compute.
    """

    target: str
    windows: Sequence[Sequence[int]]
    importance: Mapping[str, Floats]
    added: Mapping[str, Sequence[Added]]
    threads: int


class QuantisedFile(NamedTuple):
    """What was written.

    Attributes:
        num_bytes: of the file.
        num_weights: of all tensors.
        types: how many weights became which type.
        instead: how many tensors got a wider type than the name means, as their rows are no whole
            blocks of 256.
        calibrated: how many weights had a text's or a file's importance.
        spreads: mean squares of inputs that a text showed, by names of tensors.
    """

    num_bytes: int
    num_weights: int
    types: Mapping[str, int]
    instead: int
    calibrated: int
    spreads: Mapping[str, Floats]


def quantise_file(
    source: SourceFile, out: Path, options: QuantiseOptions, report: Report
) -> QuantisedFile:
    """Write ``out``, whole or not at all; ``report`` is told how many of how many weights are done.

    Raises:
        ValueError: a tensor's weights are not finite, or the disk has no room for the file.
        OSError: it cannot be written, as where the disk is full.
    """
    mix = mix_of_file(options.target, source.raw, source.checkpoint.arch)
    types = types_of(mix, source.raw)
    work = Requantiser(source, options, types, FORMS, report)
    metadata = {
        **source.metadata,
        "general.file_type": number("u32", TARGETS[options.target]),
        "general.quantization_version": number("u32", _QUANTISATION_VERSION),
    }
    rooms = {name: TensorRoom(types[name], tensor.shape) for name, tensor in source.raw.items()}
    num_bytes = sum(room.num_bytes for room in rooms.values())
    write_whole(
        out,
        lambda file: work.write(partial(GGUFOut, file, metadata, rooms)),
        is_private=False,
        least_bytes=num_bytes,
    )
    has_super = BLOCK_SIZES[main_type(options.target)][0] == SUPER
    ragged = [name for name, tensor in source.raw.items() if tensor.shape[-1] % SUPER]
    return work.done(sum(has_super and BLOCK_SIZES[types[name]][0] == BLOCK for name in ragged))


class TensorSink(Protocol):
    """A file that is being written, whose tensors may come in any order."""

    num_bytes: int

    def put(self, name: str, rows: Bytes, begin_bytes: int = 0) -> None:
        """Write bytes of a tensor, which begin ``begin_bytes`` after its first."""


class Requantiser:
    """A model's tensors on their way into a file."""

    def __init__(
        self,
        source: SourceFile,
        options: QuantiseOptions,
        types: Mapping[str, str],
        forms: Mapping[str, Form],
        report: Report,
    ) -> None:
        """Take the type of each tensor, and how the types that are searched for are made."""
        self._source, self._options, self._report = source, options, report
        self._types, self._forms = types, forms
        self._total = sum(int(np.prod(tensor.shape)) for tensor in source.raw.values())
        self._written: set[str] = set()
        self._num_done = self._calibrated = self._num_bytes = 0
        self._spreads: dict[str, Floats] = {}

    def write(self, begin: Callable[[], TensorSink]) -> None:
        """Write all tensors into what ``begin`` returns."""
        self._out = begin()
        self._num_bytes = self._out.num_bytes
        with ThreadPoolExecutor(self._options.threads) as self._pool:
            if self._options.windows:
                windows, threads = self._options.windows, self._options.threads
                run_observed(self._source.checkpoint, windows, threads, self._observe)
            for name in self._source.raw:
                if name not in self._written:
                    self._convert(name)

    def done(self, instead: int) -> QuantisedFile:
        """Return what was written."""
        types: dict[str, int] = {}
        for name, dtype in self._types.items():
            types[dtype] = types.get(dtype, 0) + int(np.prod(self._source.raw[name].shape))
        return QuantisedFile(
            self._num_bytes, self._total, types, instead, self._calibrated, self._spreads
        )

    # --- without a text ------------------------------------------------------------------------

    def _convert(self, name: str) -> None:
        """Quantise a tensor in pieces, and write it."""
        tensor, dtype = self._source.raw[name], self._types[name]
        importance = self._options.importance.get(name)
        if importance is not None and dtype in self._forms:
            self._calibrated += int(np.prod(tensor.shape))

        def piece(rows: slice) -> Bytes:
            if not self._is_changed(name):
                return np.ascontiguousarray(tensor.data[rows])
            return self._encoded(self._weights(name, rows), dtype, importance)

        begin = 0
        pieces = list(_pieces(tensor, whole=dtype in self._forms and dtype not in FORMS))
        for rows, encoded in zip(pieces, self._pool.map(piece, pieces), strict=True):
            self._out.put(name, encoded, begin)
            begin += encoded.nbytes
            self._note((rows.stop - rows.start) * tensor.shape[-1])
        self._written.add(name)

    def _weights(self, name: str, rows: slice) -> Floats:
        """Return rows of a tensor with what is added to them. Raises ValueError: not finite."""
        tensor = self._source.raw[name]
        with np.errstate(all="ignore"):  # said below
            values = tensor.rows(rows).to_f32().reshape(-1, tensor.shape[-1])
        for added in self._options.added.get(name, ()):
            own = np.flatnonzero((added.rows >= rows.start) & (added.rows < rows.stop))
            values[added.rows[own] - rows.start] += added.b[own] @ added.a
        if not np.isfinite(values).all():
            raise ModelFileError(f"tensor {name!r} has weights that are not finite")
        return values

    def _is_changed(self, name: str) -> bool:
        tensor = self._source.raw[name]
        return self._types[name] != tensor.dtype or name in self._options.added

    def _note(self, count: int) -> None:
        self._num_done += count
        self._report(self._num_done, self._total)

    # --- with a text ---------------------------------------------------------------------------

    def _observe(self, layer: int, weight: Floats, rows: Floats, *names: str) -> Floats:
        """Quantise the matrices that these rows meet; return what became of ``weight``."""
        canonical = [f"layers.{layer}.{name}" for name in names]
        places = {name: self._source.places.get(name) for name in canonical}
        in_file = dict.fromkeys(place.name for place in places.values() if place is not None)
        searched = [name for name in in_file if self._types[name] in self._forms]
        shares = shares_of(rows) if searched else []
        squares = np.einsum("ti,ti->i", rows, rows) / np.float32(len(rows))
        importance = squares + np.float32(1e-6) * squares.mean()
        changes = {}
        for name in in_file:
            if name in searched:
                self._spreads[name] = squares
                self._calibrated += int(np.prod(self._source.raw[name].shape))
                changes[name] = self._fed_back(name, importance, shares)
            elif self._is_changed(name):
                changes[name] = self._changed(name)
        begin, out = 0, weight.copy()
        shapes = self._source.checkpoint.arch.layers[layer].shapes(rows.shape[1], norm_bias=False)
        for short, name in zip(names, canonical, strict=True):
            end, place = begin + shapes[short][0], places[name]
            if place is not None and place.name in changes:
                out[begin:end] += changes[place.name][place.rows]
            begin = end
        return out

    def _fed_back(self, name: str, importance: Floats, shares: Sequence[Floats]) -> Floats:
        """Quantise a matrix with error feedback and write it; return by how much it changed."""
        tensor, form = self._source.raw[name], self._forms[self._types[name]]

        weights = self._weights(name, slice(0, tensor.shape[0]))
        q, grid = quantised(weights, importance, shares, form)
        self._put_whole(name, form.rows(q, grid.numbers))
        return form.values(q, grid) - tensor.to_f32()

    def _changed(self, name: str) -> Floats:
        """Quantise a matrix as it is without a text, write it; return by how much it changed."""
        tensor = self._source.raw[name]
        everything = slice(0, tensor.shape[0])
        encoded = self._encoded(self._weights(name, everything), self._types[name], None)
        self._put_whole(name, encoded)
        stored = Tensor(name, self._types[name], tensor.shape, encoded)
        out: Floats = stored.to_f32() - tensor.to_f32()
        return out

    def _encoded(self, weights: Floats, dtype: str, importance: Floats | None) -> Bytes:
        """Return the file's rows of ``[rows, inputs]``.

        Without importance Q8_0 and Q4_0 are those of everybody's tools, bit for bit.
        """
        if dtype not in self._forms or (dtype == "Q4_0" and importance is None):
            import gguf  # slow to import

            out: Bytes = gguf.quants.quantize(weights, gguf.GGMLQuantizationType[dtype])
            return out.view(np.uint8).reshape(len(weights), -1)
        form = self._forms[dtype]
        weight = weight_of(weights, 1.0 if importance is None else importance, form.span)
        grid = form.fit(weights, weight)
        return form.rows(form.rounded(weights, grid), grid.numbers)

    def _put_whole(self, name: str, encoded: Bytes) -> None:
        self._out.put(name, encoded)
        self._note(int(np.prod(self._source.raw[name].shape)))
        self._written.add(name)


def _pieces(tensor: Tensor, *, whole: bool) -> Iterator[slice]:
    """Yield ranges of the rows of a tensor, all of its axes but the last taken together."""
    is_vector = len(tensor.shape) < 2
    num_rows = int(np.prod(tensor.shape if is_vector else tensor.shape[:-1]))
    at_once = num_rows if whole or is_vector else max(1, _AT_ONCE // tensor.shape[-1])
    for low in range(0, num_rows, at_once):
        yield slice(low, min(low + at_once, num_rows))
