"""A thread's view of the kernels' arguments, for code under construction.

``StepEmitter`` adds the thread's local memory and how activations are laid out to the kernels'
arguments. It decides no order and no shares: that is ``step``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from ridgeline.backends.cpu.kernels.ir import I32, I64, Function, Value, maximum, select
from ridgeline.backends.cpu.kernels.kernel import Kernel, Words
from ridgeline.backends.cpu.kernels.threads import BARRIER, fetch_add
from ridgeline.backends.cpu.layout.arguments import ARGUMENTS, LAYER, SHARE_BYTES, STOLEN
from ridgeline.backends.cpu.layout.formats import GEMV_TILES
from ridgeline.backends.cpu.layout.shapes import KernelConfig

_PIECES = 8  # that a thread's share of a product is taken in
_MOST_VISITED = 4  # threads whose shares a thread takes from, its own first


class StepEmitter:
    """What one thread sees of a step: arguments, thread-local memory, and short names for both.

    Attributes:
        first_row: the step's row that is row 0 of activations.
        kind: of the layer whose code is emitted.
        owns_rows: whether its rows are its own, and what belongs to them in thread-local memory.
        shares_ranks: whether all threads have the same rows and share what adapters compute.
    """

    def __init__(self, fn: Function, sizes: KernelConfig) -> None:
        self.fn = fn
        self.sizes, self.kind = sizes, sizes.kinds[0]
        self.args_address, self.number = fn.args[:2]
        self.args = Words(fn, self.args_address, ARGUMENTS)
        self._offsets = sizes.local_offsets()
        self._local_memory = self.args["local_memory"]
        self.first_row = fn.i64(0)
        self.owns_rows = self.shares_ranks = False

    def pieces(
        self, layer: Value, name: str, num_tiles: Value, size: Value | None = None
    ) -> AbstractContextManager[tuple[Value, Value]]:
        """Loop over pieces of some tiles, first and end, with work stealing.

        Two cores seldom read memory equally fast, and a core that another process uses as well is
        slower still. A GEMV takes tiles in groups: see ``gemm``.
        """
        fn, threads = self.fn, self.args["threads"]
        multiple = select(self.args["num_rows"].equals(1), fn.i64(GEMV_TILES), fn.i64(1))
        size = size or maximum(num_tiles // (threads * _PIECES * multiple), 1) * multiple

        def share(i: Value) -> tuple[Value, Value]:
            return self.first_tile(num_tiles, i), self.first_tile(num_tiles, i + 1)

        return self._stealing(layer, name, size, share)

    def first_tile(self, num_tiles: Value, number: Value) -> Value:
        """Return the first tile of a thread's share."""
        return num_tiles * number // self.args["threads"]

    def tile(self, layer: Words, matrix: str, tile: Value) -> Value:
        """Return the address of a tile."""
        return layer[f"{matrix}_tiles"] + tile * layer[f"{matrix}_tile_bytes"]

    def blocks(self, layer: Value, begins: Value) -> AbstractContextManager[tuple[Value, Value]]:
        """Loop over blocks of rows, each and the next, with work stealing.

        ``begins`` is where the first block of each thread (i32) is found.
        """
        ends, one = self.args["block_bounds"] + 4, self.fn.i64(1)
        return self._stealing(
            layer, "blocks", one, lambda i: (self.index(begins + i * 4), self.index(ends + i * 4))
        )

    @contextmanager
    def _stealing(
        self, layer: Value, name: str, size: Value, share: Callable[[Value], tuple[Value, ...]]
    ) -> Iterator[tuple[Value, Value]]:
        """Loop over this thread's share, then over what is left of others', ``size`` at a time."""
        fn, threads = self.fn, self.args["threads"]
        counters = self.args["shares"] + layer * threads * SHARE_BYTES + 4 * STOLEN.index(name)
        with fn.loop(fn.lower(threads, _MOST_VISITED)) as i:
            owner = (self.number + i) % threads
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

    def local(self, name: str) -> Value:
        """Return the address of a thread-local buffer."""
        return self._local_memory + self.number * self.args["local_stride"] + self._offsets[name]

    def shared(self, name: str) -> Value:
        """Return the address of thread 0's buffer, which all use where outputs are split."""
        return self._local_memory + self._offsets[name]

    def barrier(self, scope: str = "shared") -> None:
        """Wait for the other threads, unless activations are ``local``."""
        if scope == "shared":
            args = self.args
            BARRIER.call(self.fn, sync=args["sync"], threads=args["threads"])

    @contextmanager
    def layers(self) -> Iterator[tuple[Value, Words, Value]]:
        """Loop over the layers: number, words, and where a layer's part of the cache begins."""
        with self.fn.loop(self.sizes.num_layers) as i:
            yield i, *self.layer(i)

    def layer(self, i: Value) -> tuple[Words, Value]:
        """Return the words of a layer, and where its part of the cache begins."""
        words = Words(self.fn, self.args["layers"] + i * (8 * len(LAYER)), LAYER)
        return words, self.args["cache"] + words["cache_at"]

    def each_kind(self, layer: Words) -> Iterator[None]:
        """Let the body emit code for each kind of layer; ``layer`` runs that of its own.

        Where all layers are of one kind nothing is asked.
        """
        kinds = self.sizes.kinds
        for number, kind in enumerate(kinds):
            self.kind = kind
            if len(kinds) == 1:
                yield
            else:
                with self.fn.when(layer["kind"].equals(number)):
                    yield

    def of_heads(self, kernel: Kernel) -> Kernel:
        """Return the kernel for the heads of this kind of layer."""
        return kernel.of(self.sizes.all_heads.index(self.kind.heads))

    def of_ffn(self, kernel: Kernel) -> Kernel:
        """Return the kernel for the feed-forward network of this kind of layer."""
        return kernel.of(self.sizes.all_ffns.index(self.kind.ffn))

    def floats(self, group: str, row: Value, scope: str = "local") -> Value:
        """Return the address of a row of float activations; ``group`` is ``in`` or ``gated``.

        Where rows are quantised it is thread-local room for one row, wherever the others are.
        """
        keeps = self.sizes.activations == "floats"
        base: Value = getattr(self, scope if keeps else "local")(f"{group}_floats")
        return base + row * self.sizes.float_stride

    def qkv(self) -> Iterator[tuple[str, int]]:
        """Yield the matrices of queries, keys and values, and where in a row their results go."""
        heads, column = self.kind.heads, 0
        if heads.latent:
            columns = heads.latent.columns(heads.num_heads)
            yield from ((matrix, columns[matrix] * 4) for matrix in heads.projections)
            return
        for matrix in heads.projections:
            yield matrix, column
            count = heads.num_heads if matrix == "q" else heads.num_kv_heads
            column += count * heads.size * 4

    def place(self, layer: Words, cache: Value, row: Value) -> tuple[Value, Value]:
        """Return a row's position, and where the records of its 16 tokens are."""
        position = self.index(self.args["positions"] + row * 4)
        block = self.index(self.table(self.sequences(layer), row) + (position >> 4) * 4)
        return position, cache + block * self.args["records_stride"]

    def sequences(self, layer: Words) -> Value:
        """Return where it is said at which place each row's table begins, for a layer's group."""
        return self.args["sequences"] + layer["group"] * self.args["sequences_stride"]

    def table(self, sequences: Value, row: Value) -> Value:
        """Return the address of the block table of a row's sequence."""
        sequence = self.index(sequences + row * 4)
        return self.args["tables"] + sequence * self.args["table_stride"]
