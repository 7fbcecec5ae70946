"""A step as flat arrays for the device. It needs only numpy, and knows nothing of requests.

Attention gets a work list for each kind of layer: an item of it is a run of queries of one
sequence, as many as a program has rows for. A single token whose context is long becomes several
items, one for each split of its keys, and a fold that adds up what they found. Splits are at
absolute positions, so how a step is cut decides which program computes what, but no bit of the
result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.cuda.sizes import MOST_SLOTS
from ridgeline.core.step import SeqId, Work

Ints = NDArray[np.int32]
Span = tuple[int, int, int]  # of an item: its first token in the step, its tokens, their position

ITEM = 6  # words of an item: table row, first token, queries, first position, split, slot
FOLD = 3  # words of a fold: token, first slot, splits


class Kind(NamedTuple):
    """What decides how a layer's attention is cut.

    Attributes:
        group: of its block table.
        shared: query heads of each key head.
        window: tokens that a token sees; 0 for all.
        is_wide: values are too wide for programs of many rows (``HeadSpec.is_wide``).
    """

    group: int
    shared: int
    window: int
    is_wide: bool = False


class WorkList(NamedTuple):
    """``items`` of attention ``[n, ITEM]``, and ``folds`` ``[n, FOLD]`` of partial results."""

    items: Ints
    folds: Ints


class Cut(NamedTuple):
    """How attention is cut: ``rows`` of queries in a program, ``split`` keys of a partial result,
    and how many of these there are at most.
    """

    rows: int
    split: int
    most_slots: int = MOST_SLOTS


@dataclass(frozen=True, slots=True)
class Batch:
    """One step: its tokens, and where each stands.

    Attributes:
        tokens: ids, ``[T]``.
        positions: of each in its text.
        table_rows: of each, the row of its item in the tables.
        spans: of each item.
        row_of: of each item, the row of its tables.
        lists: attention's work, by kind of layer.
        adapters: the numbers of those that items have; and ``slots``, of each token the place of
            its adapter among them, -1 if it has none.
    """

    tokens: Ints
    positions: Ints
    table_rows: Ints
    spans: list[Span]
    row_of: list[int]
    lists: Mapping[Kind, WorkList]
    adapters: list[int]
    slots: Ints


class Tables:
    """Block tables as one array ``[groups, rows, width]``, written where one has changed.

    A table is the same object as long as it does not grow, and a sequence's sampling all its life,
    so ``is`` finds what is new. It is a cache: ``forget`` costs only time.
    """

    def __init__(self, num_groups: int, num_rows: int, width: int) -> None:
        """Make room for the sequences of a step; ``width`` is the blocks of the longest."""
        self.array = np.zeros((num_groups, num_rows, width), np.int32)
        self._rows: dict[SeqId, int] = {}
        self._tables: list[tuple[tuple[int, ...], ...]] = [()] * num_rows
        self._sampling: list[object] = [None] * num_rows
        self._changed: list[Any] = []  # places in the flat array
        self.fresh: list[tuple[int, int]] = []  # items whose row is new to them, and their rows

    def forget(self) -> None:
        """Take all sequences for new: what a step wrote that failed may not have arrived."""
        self._rows = {}

    def take_changes(self) -> Any:
        """Return which places of the flat array were written since the last call."""
        changed = np.concatenate(self._changed) if self._changed else ()
        self._changed = []
        return changed

    def rows_of(self, work: Sequence[Work]) -> list[int]:
        """Return the row of each item, with its tables written into it."""
        rows = [self._rows.get(item.seq_id, -1) for item in work]
        if -1 in rows:
            self._give_rows(work, rows)
        self.fresh = []
        for i, (item, row) in enumerate(zip(work, rows, strict=True)):
            if self._sampling[row] is not item.sampling:
                self._sampling[row] = item.sampling
                self.fresh.append((i, row))
            tables = self._tables[row]
            if not tables or tables[0] is not item.table or tables[1:] != item.others:
                self._write(row, (item.table, *item.others))
        return rows

    def _write(self, row: int, tables: tuple[tuple[int, ...], ...]) -> None:
        """Write the tables of a row; of those that have only grown, the end."""
        old = self._tables[row] or ((),) * len(tables)
        self._tables[row] = tables
        _, num_rows, width = self.array.shape
        for group, (before, table) in enumerate(zip(old, tables, strict=True)):
            first = len(before) if table[: len(before)] == before else 0
            if first < len(table):
                self.array[group, row, first : len(table)] = table[first:]
                begin = (group * num_rows + row) * width
                self._changed.append(np.arange(begin + first, begin + len(table)))

    def _give_rows(self, work: Sequence[Work], rows: list[int]) -> None:
        """Give a row to each item that has none: those of sequences that are not in this step."""
        taken = set(rows)
        free = (row for row in range(len(self._tables)) if row not in taken)
        owners = {row: seq_id for seq_id, row in self._rows.items()}
        for i, row in enumerate(rows):
            if row < 0:
                row = rows[i] = next(free)
                if row in owners:
                    del self._rows[owners[row]]
                self._rows[work[i].seq_id] = row
                self._tables[row], self._sampling[row] = (), None


def arrange(work: Sequence[Work], tables: Tables, cuts: Mapping[Kind, Cut]) -> Batch:
    """Return a step's arrays; each kind of layers has a work list of its own."""
    counts = [len(item.tokens) for item in work]
    starts = [item.start for item in work]
    ends = np.cumsum(counts)
    row_of = tables.rows_of(work)
    num_tokens = int(ends[-1])
    firsts = ends - counts
    tokens = np.fromiter((token for item in work for token in item.tokens), np.int32, num_tokens)
    if num_tokens == len(work):  # single tokens, as when answers are written
        positions, table_rows = np.array(starts, np.int32), np.array(row_of, np.int32)
    else:
        table_rows = np.repeat(np.array(row_of, np.int32), counts)
        offsets = np.repeat(np.array(starts) - firsts, counts)
        positions = (np.arange(num_tokens) + offsets).astype(np.int32)
    spans = list(zip(firsts.tolist(), counts, starts, strict=True))
    lists = {kind: cut_items(spans, row_of, kind, cut) for kind, cut in cuts.items()}
    adapters = list(dict.fromkeys(item.adapter for item in work if item.adapter))
    place = {number: slot for slot, number in enumerate(adapters)} | {0: -1}
    slots = np.repeat(np.array([place[item.adapter] for item in work], np.int32), counts)
    return Batch(tokens, positions, table_rows, spans, row_of, lists, adapters, slots)


def cut_items(spans: Sequence[Span], row_of: Sequence[int], kind: Kind, cut: Cut) -> WorkList:
    """Cut items into runs of queries that a program has rows for, and share out long contexts.

    For single queries with several splits each split is an item, the longest queries first, as long
    as there are slots. Items are ordered by length, the longest first: programs stride over them.
    """
    span = np.array(spans, np.int64).reshape(-1, 3)
    most = cut.rows // kind.shared
    runs = -(-span[:, 1] // most)
    of_span = np.repeat(np.arange(len(span)), runs)
    low = (np.arange(len(of_span)) - np.repeat(np.cumsum(runs) - runs, runs)) * most
    token, position = span[of_span, 0] + low, span[of_span, 2] + low
    queries = np.minimum(span[of_span, 1] - low, most)
    last = position + queries - 1
    first_key = np.maximum(position - kind.window + 1, 0) if kind.window else np.zeros_like(last)
    first_split = first_key // cut.split
    splits = last // cut.split + 1 - first_split
    shares = (queries == 1) & (splits > 1)
    if splits[shares].sum() > cut.most_slots:
        longest = np.argsort(np.where(shares, -splits, 1), kind="stable")
        shares[longest[np.cumsum(splits[longest]) > cut.most_slots]] = False
    row = np.array(row_of, np.int64)[of_span]
    whole = np.stack([row, token, queries, position, first_split, np.full_like(row, -1)], axis=1)
    order = np.argsort(first_key[~shares] - last[~shares], kind="stable")
    times = splits[shares]
    slot = np.cumsum(times) - times
    shared = np.repeat(whole[shares], times, axis=0)
    shared[:, 5] = np.arange(len(shared))
    shared[:, 4] += shared[:, 5] - np.repeat(slot, times)
    items = np.concatenate([whole[~shares][order], shared])
    folds = np.stack([token[shares], slot, times], axis=1)
    return WorkList(items.astype(np.int32), folds.astype(np.int32))
