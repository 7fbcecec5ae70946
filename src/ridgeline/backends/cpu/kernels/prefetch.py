"""Software prefetch: while a thread computes, memory fetches what it reads next.

The policy is all here; measurements are in docs/results.md#kernels.

* **GEMV** (one row) is paced by memory: ``_AHEAD_BYTES`` ahead in its own tiles, then at the next
  address.
* **Few rows** prefetch the next tile, spread over the groups of rows that pass this one, in several
  pages at once, as processors read ahead within a page by themselves. **Many rows** are paced by
  arithmetic: the same in one place.
* **The next address** behind a thread's share of a matrix is its share of the next matrix, wherever
  that is: what follows in memory is work of other threads.
* **Attention** prefetches keys some blocks ahead and the values of the block at hand; before a
  row's softmax, the keys and scales of the next head.

No result depends on it, and an address where nothing is does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.backends.cpu.kernels.ir import Function, Value, maximum, select
from ridgeline.backends.cpu.kernels.isa import Processor, prefetch
from ridgeline.backends.cpu.kernels.kernel import Kernel, Words
from ridgeline.backends.cpu.kernels.records import WALK, record_at
from ridgeline.backends.cpu.kernels.step_emitter import StepEmitter
from ridgeline.backends.cpu.layout.formats import WeightFormat
from ridgeline.backends.cpu.layout.shapes import AttentionLayout

_AHEAD_BYTES = 8192  # of a GEMV in all its tiles, at least
_PAGES_AT_ONCE, _PAGE_BYTES = 4, 4096
_SECOND_CACHE = 2  # locality of what is not needed at once; 3 is the nearest
BLOCKS_AHEAD = 3  # from the block of the cache at hand to the one whose keys are prefetched
_NEXT_HEAD = Kernel("prefetch_next_head", WALK)


def _prefetch_lines(fn: Function, address: Value, num_bytes: int, locality: int) -> None:
    for offset in range(0, num_bytes, 64):
        prefetch(fn, address + offset, locality)


# --- weights -----------------------------------------------------------------------------------


class TilePrefetch:
    """The prefetch of a tile, spread over the groups of rows that pass the tile before it.

    If the first group issued all of it, memory would idle afterwards.
    """

    def __init__(self, fn: Function, packed: WeightFormat, num_groups: Value) -> None:
        """Share out the bytes of each record among ``num_groups`` groups of rows."""
        self._fn = fn
        self._share_bytes = fn.i64(packed.record_bytes) // maximum(num_groups, 1)

    def begin(self, next_tile: Value) -> None:
        """Begin with the first group; ``next_tile`` is the address of what is read next."""
        self._next_tile, self._target = next_tile, self._fn.var(next_tile)

    def step(self, halves: int) -> Value:
        """Return how many bytes a group prefetches per record, for each call of its kernel."""
        return self._share_bytes * halves >> 1

    def arguments(self, rows: int, step: Value) -> dict[str, Value]:
        """Return the arguments of the kernel that multiplies this many rows."""
        at = self._target.get() if rows > 1 else self._next_tile
        return {"prefetch_at": at, "prefetch_step": step}

    def advance(self, num_records: Value, step: Value) -> None:
        """Go on behind what a call prefetched."""
        self._target.set(self._target.get() + num_records * step)


@dataclass(frozen=True, slots=True)
class RecordPrefetch:
    """What the kernel of a tile prefetches with each record that it multiplies.

    ``at`` is the next address, ``step`` the bytes per record (of several rows). The tile begins at
    ``weights``, the one beside it ``stride`` bytes behind.
    """

    fn: Function
    processor: Processor
    packed: WeightFormat
    shape: tuple[int, int]  # rows and halves
    weights: Value
    stride: Value
    half: Value
    at: Value
    step: Value

    def record(self, k: Value) -> None:
        """Prefetch what belongs to record ``k``."""
        rows, halves = self.shape
        num_bytes = self.packed.record_bytes * min(halves, 2) // 2
        if rows > 1:
            self._share(k, num_bytes, int(rows <= 4 or self.packed.activations == "rows"))
        else:
            self._ahead(k, num_bytes, (halves + 1) // 2)

    def _ahead(self, k: Value, num_bytes: int, num_tiles: int) -> None:
        """Prefetch ahead in the tiles at hand; from their ends on, at the next address."""
        processor, record_bytes = self.processor, self.packed.record_bytes
        records_ahead = -(-_AHEAD_BYTES // processor.streams // record_bytes)
        ahead = (k + records_ahead) * record_bytes
        begin = select(ahead < self.stride, self.weights, self.at - self.stride)
        target = begin + ahead + self.half * num_bytes
        for number in range(num_tiles):
            _prefetch_lines(self.fn, target + self.stride * number, num_bytes, processor.nearest)

    def _share(self, k: Value, num_bytes: int, is_few_rows: int) -> None:
        """Prefetch part of the next tile, in one place or several; the parts add up to all."""
        fn = self.fn
        is_paced_by_memory = (self.step * 2 >= num_bytes) & is_few_rows
        target = self.at + k * self.step
        with fn.when(is_paced_by_memory):
            inside = target & (_PAGES_AT_ONCE * _PAGE_BYTES - 1)
            for page in range(_PAGES_AT_ONCE):
                at = target - inside + inside // _PAGES_AT_ONCE + page * _PAGE_BYTES
                _prefetch_lines(fn, at, -(-num_bytes // _PAGES_AT_ONCE), _SECOND_CACHE)
        with fn.when(is_paced_by_memory.equals(0)):
            _prefetch_lines(fn, target, num_bytes, _SECOND_CACHE)


def next_share(thread: StepEmitter, i: Value, layer: Words, matrix: str) -> Value:
    """Return the address of this thread's share of the matrix that follows layer i's ``matrix``."""
    order = thread.kind.matrices
    if matrix == order[-1]:
        last = thread.fn.i64(thread.sizes.num_layers - 1)
        layer, _ = thread.layer(thread.fn.lower(i + 1, last))
    following = order[(order.index(matrix) + 1) % len(order)]
    first = thread.first_tile(layer[f"{following}_num_tiles"], thread.number)
    return thread.tile(layer, following, first)


def next_address(thread: StepEmitter, layer: Words, matrix: str, end: Value, share: Value) -> Value:
    """Return what this thread reads behind tiles up to ``end``: ``share`` if they are its last."""
    last_tile = thread.first_tile(layer[f"{matrix}_num_tiles"], thread.number + 1)
    return select(end.equals(last_tile), share, thread.tile(layer, matrix, end))


# --- keys and values ---------------------------------------------------------------------------


def prefetch_keys_and_values(
    fn: Function, heads: AttentionLayout, quad: int, records: list[Value], ahead: list[Value]
) -> None:
    """Prefetch a line of the values in ``records``, and of the keys in those ``ahead`` of them."""
    for record, later in zip(records, ahead, strict=False):
        prefetch(fn, later + quad * 64)
        line = heads.values_at + quad * 64
        if not heads.latent and line < heads.scales_at:  # a latent's values are keys
            prefetch(fn, record + line, _SECOND_CACHE)


def emit_prefetch_next_head(module: object, heads: AttentionLayout, number: int = 0) -> None:
    """``prefetch_next_head``: prefetch the keys and scales of some records.

    While one head's softmax and weighted sum are computed memory would idle.
    """
    fn = _NEXT_HEAD.of(number).begin(module)
    records, stride, table, count = fn.args
    with fn.loop(count) as block:
        record = record_at(fn, records, stride, table, block)
        with fn.loop(heads.values_at, step=64) as line:
            prefetch(fn, record + line, _SECOND_CACHE)
        for offset in range(heads.scales_at, heads.record_bytes, 64):
            prefetch(fn, record + offset, _SECOND_CACHE)
    fn.finish()


def prefetch_next_head(
    thread: StepEmitter,
    walk: dict[str, Value],
    sequences: Value,
    row: Value,
    kv_head: Value,
    start: Value,
) -> None:
    """Prefetch what the row's next head reads, or after its last the first of the next row.

    ``walk`` is over the head at hand, from position ``start`` on.
    """
    fn, heads, records = thread.fn, thread.kind.heads, walk["records"]
    is_last = (kv_head + 1).equals(heads.num_kv_heads)
    next_row = fn.lower(row + 1, thread.args["num_rows"] - 1)
    back = heads.record_step * (heads.num_kv_heads - 1)
    next_records = select(is_last, records - back, records + heads.record_step)
    next_table = select(is_last, thread.table(sequences, next_row) + (start >> 2), walk["table"])
    thread.of_heads(_NEXT_HEAD).call(fn, **walk | {"records": next_records, "table": next_table})
