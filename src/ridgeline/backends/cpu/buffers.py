"""Every array that a runner owns beside its weights, and the kernels' arguments that point to them.

Arrays that change with each step stay where they are: looking up an address is slow in Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.arrays import address, aligned
from ridgeline.backends.cpu.kernels.threads import SYNC_BYTES
from ridgeline.backends.cpu.layout.arguments import ARGUMENTS, EXACT_AT, MATRIX, SHARE_BYTES
from ridgeline.backends.cpu.layout.model_sizes import part_bytes, put_places
from ridgeline.backends.cpu.layout.model_weights import Weights, logits_stride, scores_stride
from ridgeline.backends.cpu.layout.shapes import PRUNED_ROWS, TOKENS, KernelConfig
from ridgeline.backends.interface import Setup
from ridgeline.model.shape.model import ModelArch

_WORD = {name: i for i, name in enumerate(ARGUMENTS)}
# See ``emit.argmax``.
_ARGMAX = np.dtype([("value", "<f4"), ("non_finite", "<f4"), ("place", "<i8")])
NOTHING_YET = np.array((-np.inf, 0, 0), _ARGMAX)


class HiddenRows(NamedTuple):
    """What a stage gives the next: rows of the residual stream, in the order of a part's tokens.

    Attributes:
        x: ``[tokens, hidden]``, f32.
        non_finite: 1 where a row's keys or values are not finite, ``[tokens]``, f32.
    """

    x: NDArray[np.float32]
    non_finite: NDArray[np.float32]


class Buffers:
    """Arrays for steps up to a number of rows, on a number of threads.

    Attributes:
        cache: the paged cache, ``[blocks, parts, bytes]``. All layers of a block's group lie
            together: a short text touches few pages, which are zeroed then.
        sequences: where each row's table begins in the tables, ``[groups, rows]``, i32.
        inputs: layers' own inputs of the rows' tokens, ``[rows, layers * channels]``, f32;
            empty where they read nothing.
        x: the rows' hidden states, ``[rows, hidden]``, f32.
        non_finite: 1 where a row's keys or values are not finite, f32.
        logits: rows of logits, f32; as many as a step needed so far.
        by_row: what a step says of its rows, and the head of those it was asked for.
        scratch: what only kernels read.
        exact: by layer and thread, tiles of the head that were computed after pruning.
        args: the kernels' arguments, by the names of ``layout.arguments.ARGUMENTS``, i64.
    """

    def __init__(
        self,
        arch: ModelArch,
        sizes: KernelConfig,
        weights: Weights,
        setup: Setup,
    ) -> None:
        """Reserve memory, and point the arguments to it and to the weights."""
        stride = scores_stride(setup.max_model_len)
        max_num_batched_tokens = setup.max_num_batched_tokens
        threads, groups = setup.threads, setup.groups
        put_places(weights.layers, arch, sizes, groups)
        shape = setup.num_blocks, setup.block_size // TOKENS, part_bytes(sizes, groups)
        self.cache = aligned(shape, np.uint8)
        self.x = aligned((max_num_batched_tokens, sizes.hidden), np.float32)
        self.non_finite = np.zeros(max_num_batched_tokens, np.float32)
        self.logits = np.zeros((0, 1), np.float32)
        self._logits_stride = logits_stride(sizes.vocab_size)
        self._tables = np.zeros(0, np.int32)
        self.by_row = _by_row(
            max_num_batched_tokens, threads, keeps_states=sizes.recurrence is not None
        )
        self.sequences = np.zeros((len(groups), max_num_batched_tokens), np.int32)
        self._segments = np.zeros((0, 4), np.int32)
        num_pruned = PRUNED_ROWS if weights.proxy is not None else 0
        self.scratch = scratch = {
            "sync": aligned(SYNC_BYTES, np.uint8),
            "shares": aligned((arch.num_layers + 1, threads, SHARE_BYTES), np.uint8),
            "queries": aligned((max_num_batched_tokens, sizes.query_bytes), np.uint8),
            "local_memory": aligned((threads, sizes.local_bytes(stride)), np.uint8),
            "head_x": aligned((max_num_batched_tokens, sizes.head_x_stride), np.uint8),
            "head_act_scales": aligned(
                (max_num_batched_tokens, sizes.head_act_scales_stride), np.uint8
            ),
            "proxy_logits": aligned((num_pruned, sizes.proxy_stride), np.uint8),
            "mixed": aligned((max_num_batched_tokens, sizes.mixed_stride), np.uint8),
        }
        self.inputs = aligned((max_num_batched_tokens, sizes.inputs_stride // 4), np.float32)
        if sizes.inputs:
            products = aligned(self.inputs.nbytes, np.uint8)
            scratch |= {"inputs": self.inputs.view(np.uint8), "input_products": products}
        counters = scratch["shares"].view(np.int32).reshape(-1, SHARE_BYTES // 4)
        self.exact = counters[:, EXACT_AT // 4]
        self.args = np.zeros(len(ARGUMENTS), np.int64)
        self.put(
            threads=threads,
            layers=address(weights.layers),
            x=address(self.x),
            cache=address(self.cache),
            records_stride=self.cache[0, 0].nbytes,
            table_stride=4,
            sequences=address(self.sequences),
            sequences_stride=self.sequences.strides[0],
            non_finite=address(self.non_finite),
            rope_by_pair=address(weights.rope_by_pair),
            rope_by_pair_stride=weights.rope_by_pair.strides[1],
            relative_bias=address(weights.relative_bias)
            + weights.relative_bias.shape[1] // 2 * weights.relative_bias.itemsize,
            relative_bias_stride=weights.relative_bias.strides[0],
            scores_stride=stride,
            local_stride=scratch["local_memory"][0].nbytes,
            final_norm=address(weights.final_norm),
            final_norm_bias=address(weights.final_norm_bias),
            head_bias=address(weights.head_bias),
            inputs_norm=address(weights.inputs_norm),
            distances=address(weights.distances),
            logits_stride=self._logits_stride,
            **{name: address(array) for name, array in (scratch | self.by_row).items()},
        )
        for name, matrix in (
            ("head", weights.head), ("proxy", weights.proxy), ("inputs", weights.inputs),
        ):  # fmt: skip
            if matrix is not None:
                facts = (address(matrix.data), *matrix.words)
                parts = [f"{name}_{part}" for part in MATRIX]
                self.put(**dict(zip(parts, facts, strict=True)))

    def arrays(self) -> dict[str, list[NDArray[Any]]]:
        """Return all arrays by name; those that are small together."""
        small: list[NDArray[Any]] = [self.non_finite, self.args, self._tables, self._segments]
        small.append(self.sequences)
        small += self.by_row.values()
        scratch: dict[str, list[NDArray[Any]]] = {
            "x": [self.x],
            "logits": [self.logits],
            "rows": small,
        }
        scratch |= {name: [array] for name, array in self.scratch.items()}
        return {"kv_cache": [self.cache]} | {f"scratch.{k}": v for k, v in scratch.items()}

    def lasting_a_step(self) -> list[NDArray[Any]]:
        """Return the arrays of which a step needs nothing that was there before it."""
        scratch = [array for name, array in self.scratch.items() if name != "sync"]
        return [self.x, self.logits, *scratch]

    def put(self, **words: int) -> None:
        """Set arguments."""
        for name, value in words.items():
            self.args[_WORD[name]] = value

    def get(self, word: str) -> int:
        """Return an argument."""
        return int(self.args[_WORD[word]])

    def put_tables(self, tables: Sequence[int]) -> None:
        """Set the block tables of a step, in memory that grows as it is needed."""
        if len(self._tables) < len(tables):
            self._tables = np.zeros(2 * len(tables), np.int32)
            self.put(tables=address(self._tables))
        self._tables[: len(tables)] = tables

    def put_segments(self, segments: Sequence[tuple[int, int, int, int]]) -> None:
        """Set what a step does with states, in memory that grows as it is needed."""
        if len(self._segments) < len(segments):
            self._segments = np.zeros((2 * len(segments), 4), np.int32)
            self.put(segments=address(self._segments))
        self._segments[: len(segments)] = segments
        self.put(num_segments=len(segments))

    def hold_logits(self, num_rows: int) -> None:
        """Make room for ``num_rows`` rows of logits; the old ones are lost if it has to grow."""
        if len(self.logits) < num_rows:
            self.logits = aligned((num_rows, self._logits_stride // 4), np.float32)
            self.put(logits=address(self.logits))


def _by_row(
    max_num_batched_tokens: int, threads: int, *, keeps_states: bool
) -> dict[str, NDArray[np.generic]]:
    return {
        "positions": np.zeros(max_num_batched_tokens, np.int32),
        "adapters": np.zeros(max_num_batched_tokens, np.int64),
        "text_lengths": np.zeros(max_num_batched_tokens, np.int32),
        "items": np.zeros((max_num_batched_tokens, 2), np.int32),
        "blocks": np.zeros((max_num_batched_tokens + 1, 2), np.int32),
        "block_bounds": np.zeros(threads + 1, np.int32),
        "output_begins": np.zeros(threads, np.int32),
        "head_rows": np.zeros(max_num_batched_tokens, np.int32),
        "logits_rows": np.zeros(max_num_batched_tokens, np.int32),
        "argmax": np.zeros(max_num_batched_tokens * threads, _ARGMAX),
        "proxy_argmax": np.zeros(PRUNED_ROWS * threads, _ARGMAX),
        "lengths": np.zeros(PRUNED_ROWS, np.float32),
        "order": np.zeros(max_num_batched_tokens if keeps_states else 0, np.int32),
    }
