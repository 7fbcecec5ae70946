"""A thread's view of the kernels' arguments, for code under construction.

``Thread`` adds the thread's private memory and how activations are laid out to the words of the
plan. It decides no order and no shares: that is ``step``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ridgeline.backends.cpu.emit.attention import ROPE
from ridgeline.backends.cpu.emit.gemm import GEMV_TILES, MATMUL
from ridgeline.backends.cpu.emit.ir import I32, I64, Function, Value, maximum, select
from ridgeline.backends.cpu.emit.kernel import Kernel, Words
from ridgeline.backends.cpu.emit.rows import NORM, quantise
from ridgeline.backends.cpu.emit.threads import BARRIER, fetch_add
from ridgeline.backends.cpu.layout.arguments import LAYER, PLAN, SHARE_BYTES, SHARED
from ridgeline.backends.cpu.layout.formats import ENTRY_BYTES, TILE, VALUE_BYTES
from ridgeline.backends.cpu.layout.shapes import TOKENS, Sizes

_PIECES = 8  # that a thread's share of a product is taken in
_MOST_HELPED = 4  # threads whose work a thread looks at, its own first


# ``step`` emits it, from a ``Thread``.
ATTEND = Kernel(
    "attend",
    ("plan", "thread", "window", "pairs", "records", "first", "count", "kv_head", "out"),
)


class Thread:
    """What one thread sees of a step: the plan, its private memory, and short names for both."""

    def __init__(self, fn: Function, sizes: Sizes) -> None:
        self.fn = fn
        self.sizes = sizes
        self.plan_address, self.number = fn.args[:2]
        self.plan = Words(fn, self.plan_address, PLAN)
        self._offsets = sizes.private()
        self._private = self.plan["private"]

    def pieces(
        self, layer: Value, name: str, num_tiles: Value, size: Value | None = None
    ) -> AbstractContextManager[tuple[Value, Value]]:
        """Loop over pieces of some tiles, first and end: this thread's share, then others' rests.

        Two cores seldom read memory equally fast, and a core that somebody else uses as well is
        slower still; who is done early helps. A lone row takes tiles in groups: see ``linear``.
        """
        fn, num_threads = self.fn, self.plan["num_threads"]
        least = select(self.plan["num_rows"].equals(1), fn.i64(GEMV_TILES), fn.i64(1))
        size = size or maximum(num_tiles // (num_threads * _PIECES * least), 1) * least

        def share(i: Value) -> tuple[Value, Value]:
            return self.first_tile(num_tiles, i), self.first_tile(num_tiles, i + 1)

        return self._taken(layer, name, size, share)

    def first_tile(self, num_tiles: Value, number: Value) -> Value:
        """Return the first tile of a thread's share."""
        return num_tiles * number // self.plan["num_threads"]

    def tile(self, layer: Words, matrix: str, tile: Value) -> Value:
        """Return the address of a tile."""
        return layer[f"{matrix}_tiles"] + tile * layer[f"{matrix}_tile_bytes"]

    def blocks(self, layer: Value, begins: Value) -> AbstractContextManager[tuple[Value, Value]]:
        """Loop over blocks of rows, each and the next: this thread's, then others' rests.

        ``begins`` is where the first block of each thread (i32) is found.
        """
        ends, one = self.plan["block_bounds"] + 4, self.fn.i64(1)
        return self._taken(
            layer, "blocks", one, lambda i: (self.index(begins + i * 4), self.index(ends + i * 4))
        )

    @contextmanager
    def _taken(
        self, layer: Value, name: str, size: Value, share: Callable[[Value], tuple[Value, ...]]
    ) -> Iterator[tuple[Value, Value]]:
        """Loop over what this thread gets of some threads' shares, ``size`` at a time."""
        fn, num_threads = self.fn, self.plan["num_threads"]
        counters = self.plan["shares"] + layer * num_threads * SHARE_BYTES + 4 * SHARED.index(name)
        with fn.loop(fn.lower(num_threads, _MOST_HELPED)) as i:
            owner = (self.number + i) % num_threads
            counter = counters + owner * SHARE_BYTES
            begin, end = share(owner)

            piece = fn.var(fetch_add(fn, counter, 1).signed(I64))
            with fn.loop_while(lambda: begin + piece.get() * size < end):
                first = begin + piece.get() * size
                yield first, fn.lower(first + size, end)
                piece.set(fetch_add(fn, counter, 1).signed(I64))

    def index(self, address: Value) -> Value:
        """Return a number of 32 bits that is kept there."""
        return self.fn.load(address, I32, 4).signed(I64)

    def mine(self, name: str) -> Value:
        """Return the address of a private buffer."""
        return self._private + self.number * self.plan["private_stride"] + self._offsets[name]

    def shared(self, name: str) -> Value:
        """Return the address of thread 0's buffer, which all use where columns are shared."""
        return self._private + self._offsets[name]

    def barrier(self, owner: str = "shared") -> None:
        """Wait for the other threads, unless activations are ``mine``."""
        if owner == "shared":
            plan = self.plan
            BARRIER.call(self.fn, sync=plan["sync"], num_threads=plan["num_threads"])

    @contextmanager
    def layers(self) -> Iterator[tuple[Value, Words, Value]]:
        """Loop over the layers: number, words, and where a layer's part of the cache begins."""
        with self.fn.loop(self.sizes.num_layers) as i:
            yield i, *self.layer(i)

    def layer(self, i: Value) -> tuple[Words, Value]:
        """Return the words of a layer, and where its part of the cache begins."""
        words = Words(self.fn, self.plan["layers"] + i * (8 * len(LAYER)), LAYER)
        return words, self.plan["cache"] + i * self.plan["layer_stride"]

    def floats(self, group: str, row: Value, owner: str = "mine") -> Value:
        """Return the address of a row of float activations; ``group`` is ``in`` or ``gated``.

        Where rows are quantised it is one's own room for one row, whoever owns the others.
        """
        keeps = self.sizes.activations == "floats"
        base: Value = getattr(self, owner if keeps else "mine")(f"{group}_floats")
        return base + row * self.sizes.float_stride

    def norm(self, x: Value, weight: Value, row: Value, owner: str = "mine") -> None:
        """Norm a row of x into row ``row`` of the activations."""
        floats = self.floats("in", row, owner)
        NORM.call(self.fn, x=x, weight=weight, out=floats, size=self.sizes.hidden)
        self.quantise("in", floats, row, self.sizes.hidden, owner=owner)

    def quantise(
        self, group: str, source: Value, row: Value, size: Any, at: Any = 0, owner: str = "mine"
    ) -> None:
        """Quantise ``size`` floats into a row of activations, from channel ``at`` on.

        Where products take floats there is nothing to do: ``source`` is the row itself.
        """
        form = self.sizes.activations
        if form != "floats":
            memory = getattr(self, owner)
            target = memory(f"{group}_values") + row * self.sizes.value_stride
            entries = memory(f"{group}_entries") + row * self.sizes.entry_stride
            quantise(form).call(
                self.fn, x=source, out=target + at * VALUE_BYTES[form],
                entries=entries + at // TILE * ENTRY_BYTES, size=size, scratch=self.mine("turned"),
            )  # fmt: skip

    def product(
        self,
        layer: Words,
        matrix: str,
        tiles: tuple[Any, Any],
        num_rows: Value,
        y: Value,
        y_stride: Any,
        next_address: Value,
        group: str = "in",
        owner: str = "mine",
    ) -> None:
        """Multiply activations by tiles of a matrix, first and end; then read ``next_address``."""
        sizes, memory = self.sizes, getattr(self, owner)
        if sizes.activations == "floats":
            x, x_stride = memory(f"{group}_floats"), sizes.float_stride
        else:
            x, x_stride = memory(f"{group}_values"), sizes.value_stride
        first, last = tiles
        MATMUL.call(
            self.fn, matrix=layer.address(f"{matrix}_tiles"), first=first, last=last,
            num_rows=num_rows, x=x, x_stride=x_stride, entries=memory(f"{group}_entries"),
            entry_stride=sizes.entry_stride, y=y, y_stride=y_stride, next_address=next_address,
        )  # fmt: skip

    def qkv(self) -> Iterator[tuple[str, int]]:
        """Yield the matrices of queries, keys and values, and where in a row their results go."""
        heads, column = self.sizes.heads, 0
        for matrix, count in (
            ("q", heads.num_heads), ("k", heads.num_kv_heads), ("v", heads.num_kv_heads),
        ):  # fmt: skip
            yield matrix, column
            column += count * heads.size * 4

    def rope(self, layer: Words, cache: Value, row: Value, qkv: Value, kv_head: Value) -> None:
        """Turn and store one K/V head of the row that has number ``row`` in the step."""
        plan, heads = self.plan, self.sizes.heads
        position = self.index(plan["positions"] + row * 4)
        block = self.index(self.table(row) + (position >> 4) * 4)
        record = cache + block * plan["records_stride"] + kv_head * heads.record_bytes
        turn = position * (heads.half * 4)
        key_bias = layer["key_bias"] + kv_head * (heads.half * 8)
        ROPE.call(
            self.fn, row=qkv, bias=layer["qkv_bias"], key_bias=key_bias, cos=plan["cos"] + turn,
            sin=plan["sin"] + turn, norms=layer["qk_norms"],
            query=plan["queries"] + row * heads.query_bytes, record=record,
            token=position & (TOKENS - 1), kv_head=kv_head, non_finite=plan["poison"] + row * 4,
        )  # fmt: skip

    def table(self, row: Value) -> Value:
        """Return the address of the block table of a row's sequence."""
        sequence = self.index(self.plan["sequences"] + row * 4)
        return self.plan["tables"] + sequence * self.plan["table_stride"]

    def attend(
        self, layer: Words, cache: Value, item: tuple[Value, Value], kv_head: Value, out: Value
    ) -> None:
        """Let ``item``, a first row and 1 or a tile of queries, look at its context."""
        (first, count), heads = item, self.sizes.heads
        ATTEND.call(
            self.fn, plan=self.plan_address, thread=self.number, window=layer["window"],
            pairs=layer["key_bias_pairs"] + kv_head * (4 + heads.half * 4),
            records=cache + kv_head * heads.record_bytes, first=first, count=count, kv_head=kv_head,
            out=out + kv_head * (heads.group * heads.size * 4),
        )  # fmt: skip
