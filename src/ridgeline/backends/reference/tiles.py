"""How the reference backend cuts attention: items of equal length are attended as one array.

Shapes are named as in ``reference``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ridgeline.core.step import Work
from ridgeline.model.shape.model import Attention

Ints = NDArray[np.intp]

# Bounds on what attention holds at once, for any length of contexts and size of batch.
_QUERY_TILE = 256  # tokens of one prompt
SCORES = 1 << 21  # per head: tokens times positions that they look at
POSITIONS = 1 << 15  # gathered keys; more only where one sequence alone has more

_Tile = tuple[tuple[int, ...], int, int, int]  # blocks, first row, first position, text's length


@dataclass(frozen=True, eq=False, slots=True)
class Tiles:
    """Items (or tiles of them) with equally many tokens, attended as one array."""

    rows_BN: Ints  # where their tokens are in the flat batch
    positions_BN: Ints
    tables: Ints  # [B, blocks], padded with each sequence's own first block
    lengths_B: Ints  # of their sequences, with all tokens of the step

    def mask_BNL(self, block_size: int, mixer: Attention) -> NDArray[np.bool_]:
        """True where a token may not look: the future, padding, and positions beyond the window.

        Where tokens see what follows them, only what is behind the text is padding.
        """
        keys, window = np.arange(self.tables.shape[1] * block_size), mixer.window
        queries = self.positions_BN[:, :, None]
        hidden: NDArray[np.bool_] = keys > queries
        if not mixer.causal:
            hidden = np.broadcast_to(keys >= self.lengths_B[:, None, None], hidden.shape)
            if window is not None:
                hidden = hidden | (keys >= queries + window)
        return hidden if window is None else hidden | (keys <= queries - window)

    def distance_BNL(self, num_keys: int) -> NDArray[np.float32]:
        """Return how many positions each key is before each token."""
        distance = self.positions_BN[:, :, None] - np.arange(num_keys)
        return distance.astype(np.float32)

    def biases_BHNL(self, biases: NDArray[np.float32], num_keys: int) -> NDArray[np.float32]:
        """Return what heads add to scores; see ``backends.inputs``.

        Beyond the longest text they are any.
        """
        half = biases.shape[1] // 2
        distance = np.arange(num_keys) - self.positions_BN[:, :, None]
        by_key: NDArray[np.float32] = biases[:, np.clip(distance, -half, half - 1) + half]
        return by_key.swapaxes(0, 1)


def tiled(
    items: tuple[Work, ...], tables: Sequence[tuple[int, ...]], block_size: int, is_causal: bool
) -> Iterator[Tiles]:
    """Cut long items into tiles; put tiles of equal length and like context together."""
    tiles: dict[int, list[_Tile]] = {}
    row = 0
    for work, table in zip(items, tables, strict=True):
        tile = max(1, min(_QUERY_TILE, SCORES // (work.start + len(work.tokens))))
        for low in range(0, len(work.tokens), tile):
            size, start = min(tile, len(work.tokens) - low), work.start + low
            end, length = start + size, work.start + len(work.tokens)
            blocks = table[: -(-(end if is_causal else length) // block_size)]
            tiles.setdefault(size, []).append((blocks, row + low, start, length))
        row += len(work.tokens)
    for size, members in tiles.items():
        members.sort(key=lambda member: len(member[0]))  # the longest pads the others
        limit = min(SCORES // size, POSITIONS)
        first = 0
        for end in range(1, len(members) + 1):
            if end == len(members) or (end + 1 - first) * len(members[end][0]) * block_size > limit:
                yield _joined(members[first:end], size)
                first = end


def _joined(members: list[_Tile], size: int) -> Tiles:
    tables, rows, starts, lengths = zip(*members, strict=True)
    longest = len(tables[-1])
    return Tiles(
        np.array(rows)[:, None] + np.arange(size),
        np.array(starts)[:, None] + np.arange(size),
        np.array([table + table[:1] * (longest - len(table)) for table in tables]),
        np.array(lengths),
    )
