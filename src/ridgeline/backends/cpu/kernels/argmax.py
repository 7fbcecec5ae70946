"""After the last layer: the likeliest token of each row, without keeping all its logits.

Rows that are sampled, or ranked, keep them, and are drawn from at the end (``draw``).

With few rows, where nearly all of the time goes to reading weights, most of the head is not read:
bound pruning. A low-precision proxy of it in 5 bits (``layout.model_weights``) gives proxy logits,
and with each of them a bound: the output's distance from its proxy, times the length of the
activations (Cauchy-Schwarz). Exact logits are computed of the likeliest, then of the candidates,
whose bound does not exclude that they are likelier still: a few tiles in a hundred. The token found
is the same as without the proxy, and so is its logit. This is how search for the largest inner
product has long been done (Ram & Gray, 2012).

A lone row is drawn from in the same way where few of the likeliest tokens matter (top-k, min-p,
greedy after penalties): from a row of logits that are exact where bounds reach a ceiling, and minus
infinity elsewhere. A draw says how low a logit must be not to matter. The ceiling is lowered to
that, until it is no lower. Penalties only lower logits here, so bounds stay bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from ridgeline.backends.cpu.kernels.activations import softcapped
from ridgeline.backends.cpu.kernels.candidates import KTH
from ridgeline.backends.cpu.kernels.draw import DRAW
from ridgeline.backends.cpu.kernels.gemm import MATMUL
from ridgeline.backends.cpu.kernels.ir import (
    F32,
    I16,
    I32,
    I64,
    Value,
    fma,
    maximum,
    select,
    sqrt,
)
from ridgeline.backends.cpu.kernels.kernel import Kernel, Words
from ridgeline.backends.cpu.kernels.rows import ADD_BIAS, COPY, FLOATS, NORM, quantise
from ridgeline.backends.cpu.kernels.step_emitter import StepEmitter
from ridgeline.backends.cpu.kernels.threads import fetch_add
from ridgeline.backends.cpu.layout.arguments import EXACT_AT, SHARE_BYTES
from ridgeline.backends.cpu.layout.formats import TILE
from ridgeline.backends.cpu.layout.sampling_table import ENTRY, ENTRY_BYTES, scratch_bytes
from ridgeline.backends.cpu.layout.shapes import HEAD_TILES, ROW_BLOCK

# A row's argmax so far: value f32, non-finite flag f32, place i64: ~index, or 0 while there is
# none. Of two the greater one wins, as tuples are compared: of equal logits the lowest index. The
# flag is 0, or NaN if a logit is not finite; then value is infinite, so that it wins.
ARGMAX_BYTES = 16
_NOWHERE = (1 << 31) - 1
# Bytes are within scale / 2 of what they stand for, scale is largest / 127, and 16 share one: so
# a row is longer than before it was quantised by at most 4 / 254.
_LONGER = 1.02
GREEDY, DRAWN = 1, 2  # how a step prunes; 0 is not at all
_MOST_EXACT = 0.3  # of the head; the proxy itself is 0.65
_PAUSE = 64  # steps until pruning is tried again
# Rows of other lengths get all logits: what is not a number, what could overflow, and what is so
# short that squares of it vanish, and with them the bound.
_SHORTEST, _LONGEST = 1e-12, 1e18

_ARGMAX = Kernel("argmax", ("logits", "size", "first_id", "argmax"))
_SOFTCAP = Kernel("softcap", ("x", "size"))
_LENGTH = Kernel("length", ("x", "size", "out"))
_Tiles = tuple[Value, Value, Value]  # of a product: the first, the end, and which is read next


class BoundPruning:
    """Whether pruning pays: not where many candidates stay. No answer changes."""

    def __init__(self) -> None:
        """Start with pruning enabled."""
        self._share, self._pause = 0.0, 0

    def is_due(self) -> bool:
        """Return whether the next step should be pruned."""
        self._pause = max(self._pause - 1, 0)
        return self._pause == 0

    def note(self, exact_share: float) -> None:
        """Say what share of the head a pruned step had to read after all."""
        self._share += (exact_share - self._share) / 8
        if self._share > _MOST_EXACT:
            self._share, self._pause = 0.0, _PAUSE


def emit_head(module: object, logit_softcap: float) -> None:
    """Emit what the head is made of, besides products: argmax, ``length`` and ``softcap``."""
    _emit_best(module)
    _emit_length(module)
    if logit_softcap:
        fn = _SOFTCAP.begin(module)
        x, size = fn.args
        with fn.loop(size * 4, step=64) as at:
            fn.store(softcapped(fn.load(x + at, FLOATS, 4), logit_softcap), x + at, 4)
        fn.finish()


def _emit_length(module: object) -> None:
    """``length``: the length of a row of floats, and what quantising may add."""
    fn = _LENGTH.begin(module)
    x, size, out = fn.args
    squares = fn.var(fn.lanes(F32, [0.0] * 16))
    with fn.loop(size * 4, step=64) as at:
        value = fn.load(x + at, FLOATS, 4)
        squares.set(fma(value, value, squares.get()))
    fn.store(sqrt(squares.get().reduce(lambda a, b: a + b)) * _LONGER, out, 4)
    fn.finish()


def _emit_best(module: object) -> None:
    """``argmax``: fold ``size`` logits into the entry at ``argmax``.

    They are of ids from ``first_id`` on; the last vector is read whole, its surplus ignored. Of
    equal logits the lowest id wins, in whatever order they come.
    """
    fn = _ARGMAX.begin(module)
    logits, size, first_id, argmax = fn.args
    lanes = fn.lanes(I32, list(range(16)))
    end = size.signed(I32).splat(16)
    top = fn.var(fn.lanes(F32, [-math.inf] * 16))
    place = fn.var(fn.lanes(I32, [_NOWHERE] * 16))
    non_finite = fn.var(fn.lanes(F32, [0.0] * 16))
    with fn.loop(size, step=16) as at:
        value, index = fn.load(logits + at * 4, FLOATS, 4), lanes + at.signed(I32).splat(16)
        better = (value > top.get()) & (index < end)
        place.set(select(better, index, place.get()))
        top.set(select(better, value, top.get()))
        non_finite.set(fma(value, 0.0, non_finite.get()))
    highest = top.get().reduce(maximum)
    among = select(top.get().equals(highest.splat(16)), place.get(), _NOWHERE)
    first = among.reduce(lambda a, b: select(a < b, a, b))
    so_far, its_place = fn.load(argmax, F32, 4), fn.load(argmax + 8, I64, 8)
    negated_id = -1 - (first.signed(I64) + first_id)
    is_first = highest.equals(so_far) & (negated_id > its_place)
    with fn.when((first < _NOWHERE) & ((highest > so_far) | is_first)):
        fn.store(highest, argmax, 4)
        fn.store(negated_id, argmax + 8, 8)
    flagged = non_finite.get().reduce(lambda a, b: a + b) + fn.load(argmax + 4, F32, 4)
    fn.store(flagged, argmax + 4, 4)
    with fn.when(flagged.equals(0.0).equals(0)):
        fn.store(fn.value(math.inf, F32), argmax, 4)
    fn.finish()


def head(thread: StepEmitter) -> None:
    """Norm the rows that want a token, then find the likeliest, and logits where they are wanted.

    ``prunes`` is ``GREEDY`` only if no logits are wanted, there is a proxy, and rows are few;
    ``DRAWN`` only if there is a single row, with a single draw, and a proxy.
    """
    fn, args, sizes = thread.fn, thread.args, thread.sizes
    form, act_scales_stride = sizes.activations, sizes.head_act_scales_stride
    with fn.loop(args["num_head_rows"], start=thread.number, step=args["threads"]) as j:
        row = fn.load(args["head_rows"] + j * 4, I32, 4).signed(I64)
        target = args["head_x"] + j * sizes.head_x_stride
        out = target if form == "floats" else thread.floats("in", fn.i64(0))
        x = args["x"] + row * (sizes.hidden * 4)
        NORM.call(
            fn, x=x, weight=args["final_norm"], bias=args["final_norm_bias"], out=out,
            size=sizes.hidden,
        )  # fmt: skip
        if form != "floats":
            act_scales = args["head_act_scales"] + j * act_scales_stride
            rotated = thread.local("rotated")
            quantise(form).call(
                fn, x=out, out=target, act_scales=act_scales, size=sizes.hidden, scratch=rotated
            )
        with fn.when(args["prunes"] > 0):
            _LENGTH.call(fn, x=out, size=sizes.hidden, out=args["lengths"] + j * 4)
    thread.barrier()
    prunes = fn.var(args["prunes"])
    with fn.when(args["prunes"] > 0), fn.loop(args["num_head_rows"]) as j:
        length = fn.load(args["lengths"] + j * 4, F32, 4)
        is_sane = (length > _SHORTEST) & (length < _LONGEST)
        prunes.set(select(is_sane, prunes.get(), 0))
    with fn.when(prunes.get().equals(GREEDY)):
        _pruned(thread)
    with fn.when(prunes.get().equals(DRAWN)):
        _pruned_draw(thread)
    with fn.when(prunes.get().equals(0)):
        _all_logits(thread)
    with fn.when((args["num_drawn_rows"] > 0) & (prunes.get() < DRAWN)):
        thread.barrier()
        _draws(thread)


def _draws(thread: StepEmitter) -> None:
    """Draw from rows of logits, and rank, with work stealing."""
    fn, args = thread.fn, thread.args
    layer, one = fn.i64(thread.sizes.num_layers), fn.i64(1)
    with thread.pieces(layer, "draws", args["num_drawn_rows"], one) as (row, _):
        at = args["draw_firsts"] + row * 4
        with fn.loop(thread.index(at + 4), start=thread.index(at)) as i:
            _draw(thread, args["draws"] + i * ENTRY_BYTES)


def _draw(thread: StepEmitter, entry: Value) -> None:
    buffers = {name: thread.local(name) for name in scratch_bytes(thread.sizes.vocab_size)}
    logits, stride = thread.args["logits"], thread.args["logits_stride"]
    DRAW.call(thread.fn, entry=entry, logits=logits, logits_stride=stride, **buffers)


def _all_logits(thread: StepEmitter) -> None:
    """Compute all logits, a few tiles at a time, while they are in the nearest cache."""
    fn, args, sizes = thread.fn, thread.args, thread.sizes
    num_rows, stride, logits = args["num_head_rows"], HEAD_TILES * TILE * 4, thread.local("logits")
    with (
        _pieces(thread, "head_num_tiles") as (t, until),
        fn.loop(num_rows, step=ROW_BLOCK * 4) as low,
    ):
        count = fn.lower(num_rows - low, fn.i64(ROW_BLOCK * 4))
        _matmul(thread, "head", (t, until, until), (low, count), logits - t * (TILE * 4), stride)
        size = fn.lower((until - t) * TILE, sizes.vocab_size - t * TILE)
        with fn.loop(count) as j:
            row, source = low + j, logits + j * stride
            if sizes.head_bias:
                biases = args["head_bias"] + t * (TILE * 4)
                ADD_BIAS.call(fn, x=source, y=biases, size=(until - t) * TILE)
            _ARGMAX.call(
                fn, logits=source, size=size, first_id=t * TILE,
                argmax=_entry(thread, "argmax", row),
            )  # fmt: skip
            place = fn.load(args["logits_rows"] + row * 4, I32, 4).signed(I64)
            with fn.when(place >= 0):
                if sizes.logit_softcap:  # which changes nothing of their order
                    _SOFTCAP.call(fn, x=source, size=(until - t) * TILE)
                target = args["logits"] + place * args["logits_stride"] + t * (TILE * 4)
                COPY.call(fn, x=target, y=source, size=(until - t) * TILE)


def _pruned(thread: StepEmitter) -> None:
    """Compute proxy logits, then exact ones of what might be the likeliest."""
    fn, args, sizes = thread.fn, thread.args, thread.sizes
    num_rows, num_tiles = args["num_head_rows"], args["head_num_tiles"]
    proxy_logits, stride = args["proxy_logits"], sizes.proxy_stride
    with _pieces(thread, "proxy_num_tiles") as (t, until):
        _matmul(thread, "proxy", (t, until, until), (fn.i64(0), num_rows), proxy_logits, stride)
        size = fn.lower((until - t) * TILE, sizes.vocab_size - t * TILE)
        with fn.loop(num_rows) as j:
            logits = proxy_logits + j * stride + t * (TILE * 4)
            _ARGMAX.call(
                fn, logits=logits, size=size, first_id=t * TILE,
                argmax=_entry(thread, "proxy_argmax", j),
            )  # fmt: skip
    with fn.loop(num_rows) as j:
        candidate_id = -1 - fn.load(_entry(thread, "proxy_argmax", j) + 8, I64, 8)
        with fn.when(candidate_id >= 0):  # others may have left nothing to this thread
            _exact(thread, candidate_id // TILE, candidate_id // TILE)
    thread.barrier()
    # Other threads may still raise their maxima. Any exact logit is a valid lower bound, so the
    # race is harmless.
    with fn.loop(num_rows) as j:
        highest = fn.var(fn.value(-math.inf, F32))
        with fn.loop(args["threads"]) as owner:
            so_far = fn.load(_entry(thread, "argmax", j, owner), F32, 4)
            highest.set(maximum(highest.get(), so_far))
        common = fn.load(proxy_logits + j * stride + num_tiles * (TILE * 4), F32, 4)
        fn.store(highest.get() - common, thread.local("floors") + j * 4, 4)

    def is_candidate(t: Value) -> Value:
        hits = fn.var(fn.i64(0))
        with fn.loop(num_rows) as j:
            length, floor = (
                fn.load(at + j * 4, F32, 4).splat(16)
                for at in (args["lengths"], thread.local("floors"))
            )
            for place in (t * (TILE * 4), t * (TILE * 4) + 64):
                distance = fn.load(args["distances"] + place, FLOATS, 64)
                bound = fma(
                    distance, length, fn.load(proxy_logits + j * stride + place, FLOATS, 64)
                )
                hits.set(hits.get() | (bound >= floor).bits(I16).unsigned(I64))
        return hits.get() > 0

    _each_candidate(thread, is_candidate, partial(_exact, thread))


def _each_candidate(
    thread: StepEmitter,
    is_candidate: Callable[[Value], Value],
    read: Callable[[Value, Value], None],
) -> None:
    """Read this thread's candidates. Each prefetches the next, or memory would idle between."""
    fn, args = thread.fn, thread.args
    candidate = fn.var(fn.i64(-1))
    with (
        fn.loop(args["head_num_tiles"], start=thread.number, step=args["threads"]) as t,
        fn.when(is_candidate(t)),
    ):
        with fn.when(candidate.get() >= 0):
            read(candidate.get(), t)
        candidate.set(t)
    with fn.when(candidate.get() >= 0):
        read(candidate.get(), candidate.get())


def _pruned_draw(thread: StepEmitter) -> None:
    """Draw from a lone row, of which logits are exact where they may matter."""
    fn, args, stride = thread.fn, thread.args, thread.sizes.proxy_stride
    row, num_tiles, ceiling = args["logits"], args["head_num_tiles"], thread.shared("floors")
    proxy_logits = args["proxy_logits"]
    # The rows of other streams hold, for each tile, the greatest bound and proxy logit.
    bounds, peaks = proxy_logits + stride, proxy_logits + 2 * stride
    length, lowest = (fn.load(args["lengths"], F32, 4).splat(16), fn.lanes(F32, [-math.inf] * 16))
    with _pieces(thread, "proxy_num_tiles") as (first, until):
        one_row = fn.i64(0), fn.i64(1)
        _matmul(thread, "proxy", (first, until, until), one_row, proxy_logits, stride)
        with fn.loop(fn.lower(until, num_tiles), start=first) as t:
            tops = [lowest, lowest]
            for place in (t * (TILE * 4), t * (TILE * 4) + 64):
                distance = fn.load(args["distances"] + place, FLOATS, 64)
                value = fn.load(proxy_logits + place, FLOATS, 64)
                tops = [maximum(tops[0], fma(distance, length, value)), maximum(tops[1], value)]
                fn.store(lowest, row + place, 4)
            for array, top in zip((bounds, peaks), tops, strict=True):
                fn.store(top.reduce(maximum), array + t * 4, 4)
    thread.barrier()
    common = fn.load(proxy_logits + num_tiles * (TILE * 4), F32, 4)
    entry = Words(fn, args["draws"], ENTRY)
    with fn.when(thread.number.equals(0)):
        fn.store(lowest, peaks + num_tiles * 4, 4)
        wanted, cell = maximum(entry["top_k"], 1), thread.local("draw_cells")
        KTH.call(fn, values=peaks, count=num_tiles, wanted=wanted, out=cell)
        depth = select(entry["top_k"].equals(0), entry.double("depth"), 0.0)
        guess = fn.load(cell, F32, 4) + common  # any value will do: a draw says if it is too high
        fn.store(guess - depth.signed(F32), ceiling, 4)
    thread.barrier()

    def read(tile: Value, next_tile: Value) -> None:
        _exact(thread, tile, next_tile, row + tile * (TILE * 4))
        fn.store(fn.value(math.nan, F32), bounds + tile * 4, 4)  # no candidate any more

    is_open = fn.var(fn.i64(1))
    with fn.loop_while(lambda: is_open.get() > 0):
        floor = fn.load(ceiling, F32, 4) - common
        _each_candidate(thread, lambda t: fn.load(bounds + t * 4, F32, 4) >= floor, read)
        thread.barrier()
        with fn.when(thread.number.equals(0)):
            _draw(thread, args["draws"])
            wanted = entry.double("lowest").signed(F32)
            is_lower = wanted < fn.load(ceiling, F32, 4)
            fn.store(select(is_lower, wanted, math.inf), ceiling, 4)
        thread.barrier()
        is_open.set((fn.load(ceiling, F32, 4) < math.inf).unsigned(I64))


def _exact(thread: StepEmitter, tile: Value, next_tile: Value, logits: Value | None = None) -> None:
    """Compute a tile's logits of all rows, and fold them into argmax; prefetch ``next_tile``.

    They are kept at ``logits`` if it is given.
    """
    fn, args = thread.fn, thread.args
    logits = thread.local("logits") if logits is None else logits
    num_rows, first = args["num_head_rows"], tile * TILE
    counters = args["shares"] + thread.sizes.num_layers * args["threads"] * SHARE_BYTES
    fetch_add(fn, counters + thread.number * SHARE_BYTES + EXACT_AT, 1)
    tiles, rows = (tile, tile + 1, next_tile), (fn.i64(0), num_rows)
    _matmul(thread, "head", tiles, rows, logits - first * 4, TILE * 4)
    size = fn.lower(fn.i64(TILE), thread.sizes.vocab_size - first)
    with fn.loop(num_rows) as j:
        _ARGMAX.call(
            fn, logits=logits + j * (TILE * 4), size=size, first_id=first,
            argmax=_entry(thread, "argmax", j),
        )  # fmt: skip


def _pieces(thread: StepEmitter, num_tiles: str) -> AbstractContextManager[tuple[Value, Value]]:
    """Loop over pieces of the head's tiles, or of its proxy's."""
    fn = thread.fn
    layer, size = fn.i64(thread.sizes.num_layers), fn.i64(HEAD_TILES)
    return thread.pieces(layer, "head", thread.args[num_tiles], size)


def _matmul(
    thread: StepEmitter,
    matrix: str,
    tiles: _Tiles,
    rows: tuple[Value, Value],
    y: Value,
    y_stride: int,
) -> None:
    """Multiply rows, first and number, by tiles of the head or its proxy."""
    args, sizes = thread.args, thread.sizes
    x_stride, act_scales_stride = sizes.head_x_stride, sizes.head_act_scales_stride
    next_address = thread.tile(args, matrix, tiles[2])
    MATMUL.call(
        thread.fn, matrix=args.address(f"{matrix}_tiles"), first=tiles[0], last=tiles[1],
        num_rows=rows[1], x=args["head_x"] + rows[0] * x_stride, x_stride=x_stride,
        act_scales=args["head_act_scales"] + rows[0] * act_scales_stride,
        act_scales_stride=act_scales_stride, y=y, y_stride=y_stride, next_address=next_address,
    )  # fmt: skip


def _entry(thread: StepEmitter, word: str, row: Value, owner: Value | None = None) -> Value:
    """Return where a thread, this one if none is named, keeps what it found in a row."""
    args = thread.args
    number = thread.number if owner is None else owner
    return args[word] + (row * args["threads"] + number) * ARGMAX_BYTES
