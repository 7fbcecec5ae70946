"""A step's work as flat arrays: rows assigned to threads, and what attends together.

Rows are tokens. They are assigned to the threads, some of one sequence at a time, so that the later
rows of a long prompt, which have more to look at, are shared evenly, and lie in blocks, which a
thread takes through a layer one after the other. Rows with an output come last: nothing else goes
through the last layer once its keys and values are cached. Everything here is plain lists, not
arrays: between two steps the caches hold weights, and every numpy function that has to be fetched
again costs more than the loops. It knows nothing of addresses and kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate

from ridgeline.backends.cpu.layout.shapes import MIXED_ROWS, ROW_BLOCK, TOKENS
from ridgeline.core.step import Work, sampled_from

Chunk = tuple[int, int, int]  # tokens that go to one thread together: item, first and end


@dataclass(frozen=True, eq=False, slots=True)
class Batch:
    """One step, by rows."""

    tokens: list[int]
    positions: list[int]
    sequences: list[list[int]]  # by group: where the row's block table begins in ``tables``
    text_lengths: list[int]  # of the row's sequence, with all its tokens in this step
    tables: list[int]  # of all sequences and groups, one after another, from what is seen on
    items: list[tuple[int, int]]  # first row, and how many attend together
    blocks: list[tuple[int, int]]  # first row and item of each; last the end; none of few rows
    block_bounds: list[int]  # thread t has blocks block_bounds[t] .. block_bounds[t + 1]
    output_begins: list[int]  # by thread: its first block of rows with an output, or its end
    row_of_token: list[int]  # row of the i-th token, in the order of the work
    adapters: list[int]  # number of each row's
    ends: list[int]  # index behind each work item's last token, in that order


def arrange(
    work: tuple[Work, ...],
    threads: int,
    together: tuple[int, int],
    records_per_block: int,
    windows: tuple[int | None, ...] = (None,),
    row_block: int = ROW_BLOCK,
    mixed_rows: int = MIXED_ROWS,
) -> Batch:
    """Assign a step's tokens to ``threads``; they attend one by one or ``together``.

    That is the smallest and the largest number of consecutive ones.

    A block of the cache is ``records_per_block`` records, which tables name one by one. ``windows``
    are those of the groups of layers. A block of rows has at most ``row_block``; up to
    ``mixed_rows`` belong to no thread, and lie in no block.
    """
    ends = list(accumulate(len(item.tokens) for item in work))
    rows = _RowLists(work, ends, together, row_block, [0] * ends[-1])
    bounds, begins = list[int](), list[int]()
    if ends[-1] <= mixed_rows:
        for index, item in enumerate(work):
            rows.append(index, 0, len(item.tokens))
    else:
        for without_output, with_output in _assigned(work, threads, together[1]):
            bounds.append(len(rows.blocks))
            last = len(rows.tokens) + sum(
                high - low for _, low, high in without_output + with_output
            )
            rows.add(without_output, last)
            begins.append(len(rows.blocks))
            rows.add(with_output, last)
        bounds.append(len(rows.blocks))
        rows.blocks.append((len(rows.tokens), len(rows.items)))
    tables, table_begins = _tables(work, records_per_block, windows)
    sequences = [[begins[i] for i in rows.sequences] for begins in table_begins]
    return Batch(
        tokens=rows.tokens,
        positions=rows.positions,
        sequences=sequences,
        text_lengths=rows.text_lengths,
        tables=tables,
        items=rows.items,
        blocks=rows.blocks,
        block_bounds=bounds,
        output_begins=begins,
        row_of_token=rows.row_of_token,
        adapters=rows.adapters,
        ends=ends,
    )


@dataclass(slots=True)
class _RowLists:
    """Rows as they are assigned."""

    work: tuple[Work, ...]
    ends: list[int]
    together: tuple[int, int]
    row_block: int
    row_of_token: list[int]
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    adapters: list[int] = field(default_factory=list)
    text_lengths: list[int] = field(default_factory=list)
    items: list[tuple[int, int]] = field(default_factory=list)
    blocks: list[tuple[int, int]] = field(default_factory=list)

    def add(self, chunks: list[Chunk], last: int) -> None:
        """Append chunks in blocks, smaller towards the thread's ``last`` row: others may help."""
        end = len(self.tokens)
        for index, low, high in chunks:
            begin = len(self.tokens)
            if begin + high - low > end:
                left = last - begin
                end = begin + (left if left < self.row_block else min(left // 2, self.row_block))
                self.blocks.append((begin, len(self.items)))
            self.append(index, low, high)

    def append(self, index: int, low: int, high: int) -> None:
        """Append a chunk of tokens, which attend together or one by one."""
        item, first = self.work[index], len(self.tokens)
        begin, end = self.ends[index] - len(item.tokens), first + high - low
        self.row_of_token[begin + low : begin + high] = range(first, end)
        self.tokens += item.tokens[low:high]
        self.positions += range(item.start + low, item.start + high)
        self.sequences += [index] * (high - low)
        self.adapters += [item.adapter] * (high - low)
        self.text_lengths += [item.start + len(item.tokens)] * (high - low)
        fewest, most = self.together
        for row in range(first, end, most):
            count = min(most, end - row)
            if count >= fewest:
                self.items.append((row, count))
            else:
                self.items += [(single, 1) for single in range(row, end)]


def _assigned(
    work: tuple[Work, ...], threads: int, tile: int
) -> list[tuple[list[Chunk], list[Chunk]]]:
    """Assign chunks to the least loaded thread: first those without outputs, then those with.

    With many rows a chunk fills a record of the cache: two threads that write to the same lines of
    memory slow each other down.
    """
    is_many = sum(len(item.tokens) for item in work) >= threads * ROW_BLOCK
    size = TOKENS if is_many else tile * max(1, 8 // tile)
    chunks: tuple[list[Chunk], list[Chunk]] = [], []
    for i, item in enumerate(work):
        count = len(item.tokens)
        for begin in range(-(item.start % size), count, size):
            low, high = max(begin, 0), min(begin + size, count)
            has_output = item.targets or item.similar or high > sampled_from(item)
            has_output = has_output or item.pool not in ("", "last")
            chunks[bool(has_output)].append((i, low, high))
    assigned: list[tuple[list[Chunk], list[Chunk]]] = [([], []) for _ in range(threads)]
    loads = [0] * threads
    for kind, of_kind in enumerate(chunks):
        for chunk in of_kind:
            thread = loads.index(min(loads))
            assigned[thread][kind].append(chunk)
            loads[thread] += chunk[2] - chunk[1]
    return assigned


def _tables(
    work: tuple[Work, ...], records_per_block: int, windows: tuple[int | None, ...]
) -> tuple[list[int], list[list[int]]]:
    """Return all block tables by records, and by group where each sequence's begins.

    Of a group with a window a table is left out as far as no token of the step sees it. It begins
    where it would if it were there: before the first table there is room for that.
    """
    longest = max(len(table) for item in work for table in (item.table, *item.others))
    is_cut = any(window is not None for window in windows)
    tables = [0] * longest if is_cut else []
    begins: list[list[int]] = [[] for _ in windows]
    for group, window in enumerate(windows):
        for item in work:
            table = item.others[group - 1] if group else item.table
            first = 0
            if window is not None:
                first = max(0, item.start - window + 1) // (TOKENS * records_per_block)
            begins[group].append((len(tables) - first) * records_per_block)
            tables += table[first:] if first else table
    # Kernels look ahead past a row's blocks into the next row's table, which may be shorter.
    tables += [0] * longest
    if records_per_block > 1:
        parts = range(records_per_block)
        tables = [block * records_per_block + part for block in tables for part in parts]
    return tables, begins
