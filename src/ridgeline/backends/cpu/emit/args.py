"""A thread's view of the kernels' arguments, for code under construction.

``Thread`` adds the thread's local memory and how activations are laid out to the kernels'
arguments. It decides no order and no shares: that is ``step``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from ridgeline.backends.cpu.emit.attention import ROPE
from ridgeline.backends.cpu.emit.experts import routed
from ridgeline.backends.cpu.emit.gemm import GEMV_TILES, MATMUL
from ridgeline.backends.cpu.emit.ir import I32, I64, Function, Value, maximum, select
from ridgeline.backends.cpu.emit.kernel import Kernel, Words
from ridgeline.backends.cpu.emit.latent import expand_latents, latent_rope
from ridgeline.backends.cpu.emit.lora import expand, shrink
from ridgeline.backends.cpu.emit.rows import ADD, COPY, GATE, NORM, quantise
from ridgeline.backends.cpu.emit.threads import BARRIER, fetch_add
from ridgeline.backends.cpu.layout.arguments import ARGUMENTS, LAYER, SHARE_BYTES, STOLEN
from ridgeline.backends.cpu.layout.formats import ACT_SCALES_BYTES, TILE, VALUE_BYTES
from ridgeline.backends.cpu.layout.networks import FeedForward
from ridgeline.backends.cpu.layout.shapes import TOKENS, Sizes

_PIECES = 8  # that a thread's share of a product is taken in
_MOST_VISITED = 4  # threads whose shares a thread takes from, its own first


# ``step`` emits it, from a ``Thread``.
ATTEND = Kernel(
    "attend",
    (
        *("args", "thread", "window", "pairs", "sinks", "records", "sequences"),
        *("first", "count", "kv_head", "out"),
    ),
)


class Thread:
    """What one thread sees of a step: arguments, thread-local memory, and short names for both.

    Attributes:
        first_row: the step's row that is row 0 of activations.
        kind: of the layer whose code is emitted.
        owns_rows: whether its rows are its own, and what belongs to them in thread-local memory.
        shares_ranks: whether all threads have the same rows and share what adapters compute.
    """

    def __init__(self, fn: Function, sizes: Sizes) -> None:
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
        fn, num_threads = self.fn, self.args["num_threads"]
        multiple = select(self.args["num_rows"].equals(1), fn.i64(GEMV_TILES), fn.i64(1))
        size = size or maximum(num_tiles // (num_threads * _PIECES * multiple), 1) * multiple

        def share(i: Value) -> tuple[Value, Value]:
            return self.first_tile(num_tiles, i), self.first_tile(num_tiles, i + 1)

        return self._stealing(layer, name, size, share)

    def first_tile(self, num_tiles: Value, number: Value) -> Value:
        """Return the first tile of a thread's share."""
        return num_tiles * number // self.args["num_threads"]

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
        fn, num_threads = self.fn, self.args["num_threads"]
        counters = self.args["shares"] + layer * num_threads * SHARE_BYTES + 4 * STOLEN.index(name)
        with fn.loop(fn.lower(num_threads, _MOST_VISITED)) as i:
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
            BARRIER.call(self.fn, sync=args["sync"], num_threads=args["num_threads"])

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

    def norm(
        self,
        layer: Words,
        name: str,
        x: Value,
        row: Value,
        scope: str,
        readers: tuple[str, ...],
        group: str = "in",
    ) -> None:
        """Take a row of x, after this norm if the model has it, into row ``row`` of activations.

        ``readers`` are the matrices that read it. Where norms replace the residual stream, it is x
        from then on.
        """
        floats = self.floats(group, row, scope)
        if name in self.kind.norm_names:
            self.only_norm(layer, name, x, floats)
        else:
            COPY.call(self.fn, x=floats, y=x, size=self.sizes.hidden)
        shrink(self, layer, readers, floats, row)
        if self.kind.norms_replace:
            COPY.call(self.fn, x=x, y=floats, size=self.sizes.hidden)
        self.quantise(group, floats, row, self.sizes.hidden, scope=scope)

    def only_norm(self, layer: Words, name: str, x: Value, out: Value) -> None:
        """Put a row of x after this norm at ``out``."""
        NORM.call(
            self.fn, x=x, weight=layer[name], bias=layer[f"{name}_bias"], out=out,
            size=self.sizes.hidden,
        )  # fmt: skip

    def add(self, layer: Words, part: str, x: Value, y: Value) -> None:
        """Add to a row of x what "attn", "mlp" or "input" made, after its norm if any."""
        fn, sizes, post_norm = self.fn, self.sizes, f"{part}_post_norm"
        if post_norm in self.kind.norm_names:
            y, made = self.local("rotated"), y
            self.only_norm(layer, post_norm, made, y)
        ADD.call(fn, x=x, y=y, size=sizes.hidden)
        ffn = self.kind.ffn
        of_ffn = part == "mlp" and ffn.bias and not ffn.experts
        has_bias = self.kind.o_bias if part == "attn" else of_ffn
        if has_bias:
            bias = layer["o_bias" if part == "attn" else "down_bias"]
            ADD.call(fn, x=x, y=bias, size=sizes.hidden)

    def after_attention(self, layer: Words, x: Value, y: Value, row: Value, scope: str) -> None:
        """Add what attention made to a row of x; leave what the feed-forward network reads."""
        readers = () if self.kind.ffn.experts else self.kind.ffn.inner
        if self.kind.is_parallel:  # of x as it is before
            names = self.kind.norm_names
            name = "mlp_norm" if "mlp_norm" in names else "attn_norm"
            self.norm(layer, name, x, row, scope, readers)
        self.add(layer, "attn", x, y)
        if not self.kind.ffn.size:
            return
        experts = self.kind.ffn.experts
        if not self.kind.is_parallel:
            group = "dense" if experts and experts.dense_apart else "in"
            self.norm(layer, "mlp_norm", x, row, scope, readers, group)
        if experts:
            routed(self, layer, experts, x, row, scope)

    def gate(
        self,
        layer: Words,
        channel: Any,
        gate: Value,
        up: Value,
        out: Value,
        size: Any,
        ffn: FeedForward,
    ) -> None:
        """Make inner values of a row, from this channel on, of its gates and ups."""
        at = channel * 4
        GATE.of(self.sizes.all_ffns.index(ffn)).call(
            self.fn, gate=gate, up=up, gate_bias=layer["gate_bias"] + at,
            up_bias=layer["up_bias"] + at, out=out, size=size,
        )  # fmt: skip

    def quantise(
        self, group: str, source: Value, row: Value, size: Any, at: Any = 0, scope: str = "local"
    ) -> None:
        """Quantise ``size`` floats into a row of activations, from channel ``at`` on.

        Where products take floats there is nothing to do: ``source`` is the row itself.
        """
        form = self.sizes.activations
        if form != "floats":
            memory = getattr(self, scope)
            target = memory(f"{group}_values") + row * self.sizes.value_stride
            act_scales = memory(f"{group}_act_scales") + row * self.sizes.act_scales_stride
            quantise(form).call(
                self.fn, x=source, out=target + at * VALUE_BYTES[form],
                act_scales=act_scales + at // TILE * ACT_SCALES_BYTES, size=size,
                scratch=self.local("rotated"),
            )  # fmt: skip

    def matmul(
        self,
        layer: Words,
        matrix: str,
        tiles: tuple[Any, Any],
        num_rows: Value,
        y: Value,
        y_stride: Any,
        next_address: Value,
        group: str = "in",
        scope: str = "local",
    ) -> None:
        """Multiply activations by tiles of a matrix, first and end; then read ``next_address``."""
        sizes, memory = self.sizes, getattr(self, scope)
        if sizes.activations == "floats":
            x, x_stride = memory(f"{group}_floats"), sizes.float_stride
        else:
            x, x_stride = memory(f"{group}_values"), sizes.value_stride
        first, last = tiles
        MATMUL.call(
            self.fn, matrix=layer.address(f"{matrix}_tiles"), first=first, last=last,
            num_rows=num_rows, x=x, x_stride=x_stride, act_scales=memory(f"{group}_act_scales"),
            act_scales_stride=sizes.act_scales_stride, y=y, y_stride=y_stride,
            next_address=next_address,
        )  # fmt: skip
        expand(self, layer, matrix, tiles, num_rows, y, y_stride)

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

    def rope(self, layer: Words, cache: Value, row: Value, qkv: Value, kv_head: Value) -> None:
        """Rotate and store one K/V head of the row that has number ``row`` in the step."""
        args, heads = self.args, self.kind.heads
        if heads.latent:
            latent_rope(self, layer, cache, row, qkv, kv_head)
            return
        position, record = self.place(layer, cache, row)
        record = record + kv_head * heads.record_bytes
        angle = position * (heads.half * 4)
        key_bias = layer["key_bias"] + kv_head * (heads.half * 8)
        self.of_heads(ROPE).call(
            self.fn, row=qkv, bias=layer["qkv_bias"], key_bias=key_bias, cos=layer["cos"] + angle,
            sin=layer["sin"] + angle, query_scale=layer["query_scales"] + position * 4,
            norms=layer["qk_norms"], query=args["queries"] + row * heads.query_bytes, record=record,
            token=position & (TOKENS - 1), kv_head=kv_head, non_finite=args["non_finite"] + row * 4,
        )  # fmt: skip

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

    def attend(
        self, layer: Words, cache: Value, item: tuple[Value, Value], kv_head: Value, out: Value
    ) -> None:
        """Let ``item``, a first row and 1 or a tile of queries, look at its context."""
        (first, count), heads = item, self.kind.heads
        out = out + kv_head * (heads.group * heads.out_size * 4)
        self.of_heads(ATTEND).call(
            self.fn, args=self.args_address, thread=self.number, window=layer["window"],
            pairs=layer["key_bias_pairs"] + kv_head * (4 + heads.half * 4),
            sinks=layer["sinks"] + kv_head * (heads.group * 4),
            records=cache + kv_head * heads.record_step, sequences=self.sequences(layer),
            first=first, count=count, kv_head=kv_head,
            out=self.local("latents") if heads.latent else out,
        )  # fmt: skip
        if heads.latent:
            expand_latents(self, layer, count, kv_head, out)
