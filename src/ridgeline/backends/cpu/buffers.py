"""Every array that a runner owns beside its weights, and the kernels' arguments that point to them.

Arrays that change with each step stay where they are: looking up an address is slow in Python.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.cpu.emit.threads import SYNC_BYTES
from ridgeline.backends.cpu.layout.arguments import EXACT_AT, MATRIX, PLAN, SHARE_BYTES
from ridgeline.backends.cpu.layout.arrays import address, aligned
from ridgeline.backends.cpu.layout.load import Weights, logits_stride, scores_stride
from ridgeline.backends.cpu.layout.shapes import SCREENED_ROWS, TOKENS, Sizes
from ridgeline.physics.arch import ModelArch

_WORD = {name: i for i, name in enumerate(PLAN)}
_BEST = np.dtype([("value", "<f4"), ("poison", "<f4"), ("place", "<i8")])  # see ``emit.argmax``
NOTHING_YET = np.array((-np.inf, 0, 0), _BEST)


class Buffers:
    """Arrays for steps up to a number of rows, on a number of threads.

    Attributes:
        cache: the paged cache, ``[blocks, parts, layers, bytes]``. All layers of a block lie
            together: a short text touches few pages, which are zeroed then.
        x: the rows' hidden states, ``[rows, hidden]``, f32.
        poison: 1 where a row's keys or values are not finite, f32.
        logits: rows of logits, f32; as many as a step needed so far.
        by_row: a step's facts about its rows, and the head's results for rows with an output.
        scratch: memory that only kernels read.
        exact: by layer and thread, tiles of the head that were computed after screening.
        plan: the kernels' arguments, by the names of ``layout.arguments.PLAN``, i64.
    """

    def __init__(
        self,
        arch: ModelArch,
        sizes: Sizes,
        weights: Weights,
        *,
        num_blocks: int,
        block_size: int,
        max_model_len: int,
        rows: int,
        num_threads: int,
    ) -> None:
        """Reserve memory, and point the arguments to it and to the weights."""
        heads, stride = sizes.heads, scores_stride(max_model_len)
        record_bytes = heads.num_kv_heads * heads.record_bytes
        shape = (num_blocks, block_size // TOKENS, arch.num_layers, record_bytes)
        self.cache = aligned(shape, np.uint8)
        self.x = aligned((rows, sizes.hidden), np.float32)
        self.poison = np.zeros(rows, np.float32)
        self.logits = np.zeros((0, 1), np.float32)
        self._logits_stride = logits_stride(sizes.vocab_size)
        self._tables = np.zeros(0, np.int32)
        self.by_row: dict[str, NDArray[np.generic]] = {
            "positions": np.zeros(rows, np.int32),
            "sequences": np.zeros(rows, np.int32),
            "items": np.zeros((rows, 2), np.int32),
            "blocks": np.zeros((rows + 1, 2), np.int32),
            "block_bounds": np.zeros(num_threads + 1, np.int32),
            "asked": np.zeros(num_threads, np.int32),
            "head_rows": np.zeros(rows, np.int32),
            "logits_rows": np.zeros(rows, np.int32),
            "best": np.zeros(rows * num_threads, _BEST),
            "guesses": np.zeros(SCREENED_ROWS * num_threads, _BEST),
            "lengths": np.zeros(SCREENED_ROWS, np.float32),
        }
        self.scratch = scratch = {
            "sync": aligned(SYNC_BYTES, np.uint8),
            "shares": aligned((arch.num_layers + 1, num_threads, SHARE_BYTES), np.uint8),
            "queries": aligned((rows, heads.query_bytes), np.uint8),
            "private": aligned((num_threads, sizes.private_bytes(stride)), np.uint8),
            "head_x": aligned((rows, sizes.head_x_stride), np.uint8),
            "head_entries": aligned((rows, sizes.head_entry_stride), np.uint8),
            "rough": aligned((SCREENED_ROWS, sizes.rough_stride), np.uint8),
        }
        counters = scratch["shares"].view(np.int32).reshape(-1, SHARE_BYTES // 4)
        self.exact = counters[:, EXACT_AT // 4]
        self.plan = np.zeros(len(PLAN), np.int64)
        self.put(
            num_threads=num_threads,
            layers=address(weights.layers),
            x=address(self.x),
            cache=address(self.cache),
            layer_stride=record_bytes,
            records_stride=self.cache[0, 0].nbytes,
            table_stride=4,
            poison=address(self.poison),
            cos=address(weights.cos),
            sin=address(weights.sin),
            turns=address(weights.turns),
            turns_stride=weights.turns.strides[1],
            scores_stride=stride,
            private_stride=scratch["private"][0].nbytes,
            final_norm=address(weights.final_norm),
            distances=address(weights.distances),
            logits_stride=self._logits_stride,
            **{name: address(array) for name, array in (scratch | self.by_row).items()},
        )
        for name, matrix in (("head", weights.head), ("sketch", weights.sketch)):
            if matrix is not None:
                facts = (address(matrix.data), *matrix.words)
                parts = [f"{name}_{part}" for part in MATRIX]
                self.put(**dict(zip(parts, facts, strict=True)))

    def put(self, **words: int) -> None:
        """Set arguments."""
        for name, value in words.items():
            self.plan[_WORD[name]] = value

    def get(self, word: str) -> int:
        """Return an argument."""
        return int(self.plan[_WORD[word]])

    def put_tables(self, tables: Sequence[int]) -> None:
        """Set the block tables of a step, in memory that grows as it is needed."""
        if len(self._tables) < len(tables):
            self._tables = np.zeros(2 * len(tables), np.int32)
            self.put(tables=address(self._tables))
        self._tables[: len(tables)] = tables

    def hold_logits(self, num_rows: int) -> None:
        """Make room for ``num_rows`` rows of logits; the old ones are lost if it has to grow."""
        if len(self.logits) < num_rows:
            self.logits = aligned((num_rows, self._logits_stride // 4), np.float32)
            self.put(logits=address(self.logits))
