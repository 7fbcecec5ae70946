"""A whole step as one compiled function, ``step(args, thread)``, which every thread runs.

Work is split between threads in one of three ways, by how many rows (tokens) the step has:

* **by output features**, up to 6 rows: every thread computes its share of each product's outputs
  for all rows, then steals some of what another has left; they wait for each other five times a
  layer. What is cheap - norms, quantising - each does for itself.
* **mixed**, up to 16 rows, more with matrix tiles (``layout.shapes``): products by output
features, all else by tokens, so they wait three or four times more. Each weight is still read once.
* **by tokens**, beyond: a thread takes blocks of rows through a whole layer, its own, then
steals what is left of others', and they wait for each other once a layer, when keys and values are
in the cache.

Through a mixer that keeps a state threads take channels and heads of all rows, in the order of each
sequence, and wait once or twice more.

All call the same kernels in the same order for a row, so they give the same bits. Each has code
for each kind of layer (``layout.shapes.LayerVariant``), which a word of the layer chooses. This
module allocates nothing and knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ridgeline.backends.cpu.kernels import row_parts
from ridgeline.backends.cpu.kernels.argmax import head
from ridgeline.backends.cpu.kernels.attention import ADD_KEY_BIAS, ROPE, SOFTMAX
from ridgeline.backends.cpu.kernels.clock import TimedFunction, emit_clock
from ridgeline.backends.cpu.kernels.experts import add_dense, route, routed_experts
from ridgeline.backends.cpu.kernels.feed_forward import (
    gated_mlp,
    networks,
    share_of_matmul,
    whole_matmul,
    whole_mlp,
)
from ridgeline.backends.cpu.kernels.gemm import emit_matmul
from ridgeline.backends.cpu.kernels.inputs import make_inputs
from ridgeline.backends.cpu.kernels.ir import Function, Value, maximum, select
from ridgeline.backends.cpu.kernels.kernel import Kernel, Words
from ridgeline.backends.cpu.kernels.latent import COMPRESSED_NORM, expand_latents, latent_rope
from ridgeline.backends.cpu.kernels.lora import adapter_barrier, shrink
from ridgeline.backends.cpu.kernels.prefetch import prefetch_next_head
from ridgeline.backends.cpu.kernels.records import scores, weighted_values
from ridgeline.backends.cpu.kernels.recurrent_step import (
    output_to_activations,
    recur,
    share_of_projections,
    whole_projections,
)
from ridgeline.backends.cpu.kernels.row_parts import add, norm
from ridgeline.backends.cpu.kernels.rows import ADD, COPY, GATE_ATTENDED, SCALE
from ridgeline.backends.cpu.kernels.step_emitter import StepEmitter
from ridgeline.backends.cpu.kernels.threads import BARRIER, STEP
from ridgeline.backends.cpu.kernels.tile_attention import TILE_SCORES, TILE_VALUES
from ridgeline.backends.cpu.layout.arguments import ARGUMENTS
from ridgeline.backends.cpu.layout.latent import LatentHeads
from ridgeline.backends.cpu.layout.shapes import (
    OUTPUT_SPLIT_ROWS,
    TOKENS,
    KernelConfig,
    LayerVariant,
)

_BY_OUTPUTS, _MIXED, _BY_TOKENS, _HEAD, _INPUTS = (
    Kernel(name, STEP.parameters) for name in ("by_outputs", "mixed", "by_tokens", "head", "inputs")
)
ATTEND = Kernel(
    "attend",
    (
        *("args", "thread", "window", "pairs", "sinks", "records", "sequences"),
        *("first", "count", "kv_head", "out"),
    ),
)


def emit_step(module: object, sizes: KernelConfig, kinds: Sequence[str]) -> None:
    """Emit ``step`` for the kinds of weights that occur."""
    emit_matmul(module, kinds)
    for kind in {kind.heads: kind for kind in sizes.kinds if kind.heads.num_heads}.values():
        _emit_attend(module, sizes, kind)
    if sizes.profiled:
        emit_clock(module)
    new = TimedFunction if sizes.profiled else Function
    bodies: dict[Kernel, Callable[[StepEmitter], None]] = {
        _BY_OUTPUTS: partial(_by_outputs, scope="local"),
        _MIXED: partial(_by_outputs, scope="shared"),
        _BY_TOKENS: _by_tokens,
        _HEAD: head,
    }
    if sizes.inputs:
        bodies[_INPUTS] = make_inputs
    for kernel, body in bodies.items():
        fn = kernel.begin(module, new)
        body(StepEmitter(fn, sizes))
        fn.finish()
    fn = STEP.begin(module, new)
    args, thread = fn.args
    words = Words(fn, args, ARGUMENTS)
    with fn.when(words["does_layers"] > 0):
        if sizes.inputs:
            _INPUTS.call(fn, args=args, thread=thread)
        num_rows = words["num_rows"]
        with fn.when(num_rows <= OUTPUT_SPLIT_ROWS):
            _BY_OUTPUTS.call(fn, args=args, thread=thread)
        with fn.when((num_rows > OUTPUT_SPLIT_ROWS) & (num_rows <= sizes.mixed_rows)):
            _MIXED.call(fn, args=args, thread=thread)
        with fn.when(num_rows > sizes.mixed_rows):
            _BY_TOKENS.call(fn, args=args, thread=thread)
        BARRIER.call(fn, sync=words["sync"], threads=words["threads"])
    _HEAD.call(fn, args=args, thread=thread)
    BARRIER.call(fn, sync=words["sync"], threads=words["threads"])
    fn.finish()


def _emit_attend(module: object, sizes: KernelConfig, kind: LayerVariant) -> None:
    """``attend``, for this kind of layer: see ``attend``."""
    fn = ATTEND.of(sizes.all_heads.index(kind.heads)).begin(module)
    _, _, window, pairs, sinks, records, sequences, first, count, kv_head, out = fn.args
    thread = StepEmitter(fn, sizes)
    thread.kind = kind
    args, heads, of_heads = thread.args, kind.heads, thread.of_heads
    position = thread.index(args["positions"] + first * 4)
    reach = select(window > 0, window, fn.i64(1 << 40))
    start = maximum(position - reach + 1, 0) >> 4 << 4  # of the first visible block
    end = position + count  # behind the last visible token of all
    if not heads.attention.causal:
        length = thread.index(args["text_lengths"] + first * 4)
        end = fn.lower(length, position + count - 1 + reach)
    num_blocks = (end - start + TOKENS - 1) >> 4
    table = thread.table(sequences, first) + (start >> 2)
    stride, query = args["records_stride"], args["queries"] + first * heads.query_bytes
    out_scores, scales = thread.local("scores"), thread.local("scales")
    score_stride = args["scores_stride"]
    planes = out_scores + score_stride * sizes.score_rows
    if heads.has_planes:
        weights, weight_stride = planes, score_stride >> 1
    else:
        weights, weight_stride = out_scores, score_stride
    out_stride = kind.attention * 4
    if heads.latent:  # latents, of which values are made later
        out_stride = heads.group * heads.latent.rank * 4
    walk = {"records": records, "stride": stride, "table": table, "count": num_blocks}
    of_many = {"num_queries": count, "scratch": thread.local("tiles")} if heads.by_tiles else {}
    for queries in dict.fromkeys((1, heads.tile)):
        alone = queries == 1
        by_tiles = of_many and not alone
        with fn.when(count > 1 if by_tiles else count.equals(queries)):
            of_heads(TILE_SCORES if by_tiles else scores(queries)).call(
                fn, query=query, **walk, kv_head=kv_head, out=out_scores, out_stride=score_stride,
                **(of_many if by_tiles else {}),
            )  # fmt: skip
            if heads.splits_key_bias:
                of_heads(ADD_KEY_BIAS).call(
                    fn, query=query, pairs=pairs, rope_by_pair=args["rope_by_pair"] + start * 4,
                    stride=args["rope_by_pair_stride"], count=num_blocks, kv_head=kv_head,
                    num_queries=count, out=out_scores, out_stride=score_stride,
                )  # fmt: skip
            if alone:
                prefetch_next_head(thread, walk, sequences, first, kv_head, start)
            with fn.loop(count) as n:
                at, row = position + n, n * heads.group
                low, high = maximum(at - reach + 1, 0) - start, at + 1 - start
                if not heads.attention.causal:
                    high = fn.lower(length, at + reach) - start
                of_head = args["relative_bias"] + kv_head * args["relative_bias_stride"]
                of_heads(SOFTMAX).call(
                    fn, scores=out_scores + row * score_stride, score_stride=score_stride,
                    low=low, high=high, **walk, planes=planes + row * (score_stride >> 1),
                    scales=scales + row * 4, sinks=sinks, biases=of_head + (start - at) * 4,
                    kv_head=kv_head,
                )  # fmt: skip
            of_heads(TILE_VALUES if by_tiles else weighted_values(queries)).call(
                fn, planes=weights, plane_stride=weight_stride, **walk, scales=scales, out=out,
                out_stride=out_stride, **(of_many if by_tiles else {}),
            )  # fmt: skip
    fn.finish()


def _by_outputs(thread: StepEmitter, scope: str) -> None:
    """Each thread computes its share of every product's outputs, for all rows.

    Activations, and all else that is done for a row, are ``shared``: a thread does its share of the
    rows (``rows``: first and end), then all meet. Or they are ``local``: each does all for itself.
    """
    fn, args, sizes = thread.fn, thread.args, thread.sizes
    num_rows, x_bytes = args["num_rows"], sizes.hidden * 4
    if scope == "shared":
        x = args["x"]
        rows = tuple(num_rows * (thread.number + j) // args["threads"] for j in (0, 1))
    else:
        x, rows, thread.shares_ranks = thread.local("x"), (fn.i64(0), num_rows), True
        with fn.loop(num_rows) as m:
            COPY.call(fn, x=x + m * x_bytes, y=args["x"] + m * x_bytes, size=sizes.hidden)
    let_attend = _attend_rows if scope == "shared" else _attend_heads
    with thread.layers() as (i, layer, cache):
        for _ in thread.each_kind(layer):
            with fn.loop(rows[1], start=rows[0]) as m:
                row_parts.norm(
                    thread, layer, "attn_norm", x + m * x_bytes, m, scope, thread.kind.readers[0]
                )
            thread.barrier(scope)
            adapter_barrier(thread, scope)
            for matrix, column in thread.qkv():
                out = thread.shared("qkv") + column
                share_of_matmul(thread, i, layer, matrix, out, thread.kind.qkv * 4, "in", scope)
            if thread.kind.heads.attention.gated:
                gates, stride = args["mixed"], sizes.mixed_stride
                share_of_matmul(thread, i, layer, "q_gate", gates, stride, "in", scope)
            shape = thread.kind.recurrence
            if shape:
                share_of_projections(thread, i, layer, shape, scope)
            thread.barrier()
            share_of_queries(thread, i, layer, rows, scope)
            if shape:
                recur(thread, layer, shape)
                with fn.loop(rows[1], start=rows[0]) as m:
                    output_to_activations(thread, layer, shape, m, m, scope)
                thread.barrier(scope)
            if thread.kind.heads.num_heads:
                let_attend(thread, layer, cache, rows)
            _feed_forward(thread, i, layer, x, rows, scope)
    if scope == "local":
        with fn.when(thread.number.equals(0)), fn.loop(num_rows) as m:
            COPY.call(fn, x=args["x"] + m * x_bytes, y=x + m * x_bytes, size=sizes.hidden)


def _attend_heads(thread: StepEmitter, layer: Words, cache: Value, rows: tuple[Value, ...]) -> None:
    """Let this thread's heads attend, in all rows; quantise every row's results."""
    fn, args, kind = thread.fn, thread.args, thread.kind
    attended, num_rows = thread.shared("attended"), rows[1]

    def attend_all(h: Value) -> None:
        with fn.loop(num_rows) as m:
            out = attended + m * (kind.attention * 4)
            attend(thread, layer, cache, (m, fn.i64(1)), h, out)

    with fn.loop(kind.heads.num_kv_heads, start=thread.number, step=args["threads"]) as h:
        with fn.loop(num_rows) as m:
            rope(thread, layer, cache, m, thread.shared("qkv") + m * (kind.qkv * 4), h)
        if not kind.heads.latent:
            attend_all(h)
    if kind.heads.latent:  # another thread may have stored the key
        thread.barrier()
        with fn.loop(kind.heads.num_kv_heads, start=thread.number, step=args["threads"]) as h:
            attend_all(h)
    thread.barrier()
    with fn.loop(num_rows) as m:
        _attended_to_activations(thread, layer, attended + m * (kind.attention * 4), m)
    adapter_barrier(thread)


def _attend_rows(thread: StepEmitter, layer: Words, cache: Value, rows: tuple[Value, ...]) -> None:
    """Let this thread's rows attend, all of their heads, once everybody's keys are there."""
    fn, kind = thread.fn, thread.kind
    with fn.loop(rows[1], start=rows[0]) as m, fn.loop(kind.heads.num_kv_heads) as h:
        rope(thread, layer, cache, m, thread.shared("qkv") + m * (kind.qkv * 4), h)
    thread.barrier()
    with fn.loop(rows[1], start=rows[0]) as m:
        out = thread.shared("attended") + m * (kind.attention * 4)
        with fn.loop(kind.heads.num_kv_heads) as h:
            attend(thread, layer, cache, (m, fn.i64(1)), h, out)
        _attended_to_activations(thread, layer, out, m, "shared")
    thread.barrier()


def _feed_forward(
    thread: StepEmitter, i: Value, layer: Words, x: Value, rows: tuple[Value, ...], scope: str
) -> None:
    """Take all rows from what they attended to through the rest of the layer, by outputs."""
    fn, sizes = thread.fn, thread.sizes
    y, x_bytes, both = thread.shared("y"), sizes.hidden * 4, _has_both(thread)
    beside = thread.shared("beside") if both else y
    if thread.kind.heads.num_heads:
        share_of_matmul(thread, i, layer, "o", y, x_bytes, "in", scope)
    if thread.kind.recurrence:
        share_of_matmul(thread, i, layer, "out", beside, x_bytes, "gated", scope)
    thread.barrier()
    with fn.loop(rows[1], start=rows[0]) as m:
        if both:
            ADD.call(fn, x=x + m * x_bytes, y=beside + m * x_bytes, size=sizes.hidden)
        after_attention(thread, layer, x + m * x_bytes, y + m * x_bytes, m, scope)
    if not thread.kind.ffn.size:
        return
    thread.barrier(scope)
    adapter_barrier(thread, "local")
    own, dense, of_input = networks(thread)
    if own is None:
        routed_experts(thread, layer, thread.args["num_rows"], scope, shares_tiles=True)
    for network in (own, dense):
        if network is not None:
            gated_mlp(thread, i, layer, rows, scope, network)
    thread.barrier()
    sums = thread.shared("expert_sums") if own is None else y
    with fn.loop(rows[1], start=rows[0]) as m:
        _add_output(thread, layer, x, y, sums, m, scope)
    if of_input is not None:
        with fn.loop(rows[1], start=rows[0]) as m:
            row_parts.norm(thread, layer, "", x + m * x_bytes, m, scope, ())
        thread.barrier(scope)
        gated_mlp(thread, i, layer, rows, scope, of_input)
        thread.barrier()
    if of_input is not None or thread.kind.out_scale:
        with fn.loop(rows[1], start=rows[0]) as m:
            _end_layer(thread, layer, x + m * x_bytes, y + m * x_bytes)


def _has_both(thread: StepEmitter) -> bool:
    """Return whether a layer of this kind has attention and a mixer that keeps a state."""
    return thread.kind.recurrence is not None and thread.kind.heads.num_heads > 0


def _add_output(
    thread: StepEmitter, layer: Words, x: Value, y: Value, sums: Value, row: Value, scope: str
) -> None:
    """Add to a row of x what the feed-forward network made of it, or experts and what is beside."""
    experts, at = thread.kind.ffn.experts, row * (thread.sizes.hidden * 4)
    x_at, output = x + at, (sums if experts else y) + at
    if thread.kind.ffn.dense:
        output = add_dense(thread, layer, output, y + at, row, scope)
    row_parts.add(thread, layer, "mlp", x_at, output)


def _end_layer(thread: StepEmitter, layer: Words, x: Value, y: Value) -> None:
    """Add to a row of x what was made of the layer's own input; scale it."""
    if thread.kind.input:
        row_parts.add(thread, layer, "input", x, y)
    if thread.kind.out_scale:
        SCALE.call(thread.fn, x=x, factor=layer["out_scale"], size=thread.sizes.hidden)


def _attended_to_activations(
    thread: StepEmitter, layer: Words, attended: Value, row: Value, scope: str = "local"
) -> None:
    """Put what a row attended to, through its gates if it has some, into activations."""
    size, floats = thread.kind.attention, thread.floats("in", row, scope)
    if thread.kind.heads.changes_attended:
        gate = thread.args["mixed"] + (thread.first_row + row) * thread.sizes.mixed_stride
        thread.of_heads(GATE_ATTENDED).call(thread.fn, x=attended, gate=gate, out=floats, size=size)
        attended = floats
    elif thread.sizes.activations == "floats":
        COPY.call(thread.fn, x=floats, y=attended, size=size)
    shrink(thread, layer, ("o",), attended, row)
    row_parts.quantise(thread, "in", attended, row, size, scope=scope)


def _by_tokens(thread: StepEmitter) -> None:
    """Many rows: each thread takes blocks of them through a layer, and waits for the others once.

    After the last layer's keys and values only the rows with an output go on.
    """
    fn, args, num_layers = thread.fn, thread.args, thread.sizes.num_layers
    bounds = args["block_bounds"]
    with thread.blocks(fn.i64(num_layers), bounds) as (block, _):
        first, its_cache = thread.layer(fn.i64(0))
        rows = _ends(thread, block, 0)
        for _ in thread.each_kind(first):
            _project(thread, first, its_cache, *rows)
    with thread.layers() as (i, layer, cache):
        thread.barrier()
        for _ in thread.each_kind(layer):
            if thread.kind.recurrence:
                recur(thread, layer, thread.kind.recurrence)
        is_last = (i + 1).equals(num_layers)
        with thread.blocks(i, select(is_last, args["output_begins"], bounds)) as (block, _):
            rows = _ends(thread, block, 0)
            for _ in thread.each_kind(layer):
                _attend_block(thread, layer, cache, rows[0], _ends(thread, block, 1))
                _finish_layer(thread, layer, *rows)
            # The next layer's keys and values go where no thread reads before the next barrier.
            with fn.when(is_last.equals(0)):
                following, its_cache = thread.layer(i + 1)
                for _ in thread.each_kind(following):
                    _project(thread, following, its_cache, *rows)


def _ends(thread: StepEmitter, block: Value, part: int) -> tuple[Value, Value]:
    """Return the first of a block's rows (part 0) or items (1), and the first of the next's."""
    at = thread.args["blocks"] + block * 8 + 4 * part
    return thread.index(at), thread.index(at + 8)


def _project(thread: StepEmitter, layer: Words, cache: Value, low: Value, high: Value) -> None:
    """Norm a block of rows, compute queries, keys and values, and store them."""
    fn, args, sizes = thread.fn, thread.args, thread.sizes
    kind = thread.kind
    thread.first_row, thread.owns_rows = low, True
    with fn.loop(high - low) as m:
        x = args["x"] + (low + m) * (sizes.hidden * 4)
        row_parts.norm(thread, layer, "attn_norm", x, m, "local", kind.readers[0])
    for matrix, column in thread.qkv():
        out = thread.local("qkv") + column
        whole_matmul(thread, layer, matrix, high - low, out, kind.qkv * 4)
    if kind.heads.attention.gated:
        gates, stride = args["mixed"] + low * sizes.mixed_stride, sizes.mixed_stride
        whole_matmul(thread, layer, "q_gate", high - low, gates, stride)
    if kind.recurrence:
        whole_projections(thread, layer, kind.recurrence, low, high - low)
    whole_queries(thread, layer, high - low)
    if kind.heads.num_heads:
        with fn.loop(high - low) as m, fn.loop(kind.heads.num_kv_heads) as h:
            rope(thread, layer, cache, low + m, thread.local("qkv") + m * (kind.qkv * 4), h)


def _attend_block(
    thread: StepEmitter, layer: Words, cache: Value, low: Value, items: tuple[Value, Value]
) -> None:
    """Let the items of a block, whose first row is ``low``, attend."""
    fn, kind = thread.fn, thread.kind
    if not kind.heads.num_heads:
        return
    with fn.loop(items[1], start=items[0]) as item:
        at = thread.args["items"] + item * 8
        row, count = thread.index(at), thread.index(at + 4)
        out = thread.local("attended") + (row - low) * (kind.attention * 4)
        with fn.loop(kind.heads.num_kv_heads) as h:
            attend(thread, layer, cache, (row, count), h, out)


def _finish_layer(thread: StepEmitter, layer: Words, low: Value, high: Value) -> None:
    """Take a block of rows from what they attended to through the rest of the layer."""
    fn, args, sizes, kind = thread.fn, thread.args, thread.sizes, thread.kind
    num_rows, thread.first_row, thread.owns_rows = high - low, low, True
    x, y, x_bytes = args["x"] + low * (sizes.hidden * 4), thread.local("y"), sizes.hidden * 4
    beside = thread.local("beside") if _has_both(thread) else y
    if kind.heads.num_heads:
        with fn.loop(num_rows) as m:
            attended = thread.local("attended") + m * (kind.attention * 4)
            _attended_to_activations(thread, layer, attended, m)
        whole_matmul(thread, layer, "o", num_rows, y, x_bytes)
    if kind.recurrence:
        with fn.loop(num_rows) as m:
            output_to_activations(thread, layer, kind.recurrence, low + m, m)
        whole_matmul(thread, layer, "out", num_rows, beside, x_bytes, "gated")
    with fn.loop(num_rows) as m:
        if _has_both(thread):
            ADD.call(fn, x=x + m * x_bytes, y=beside + m * x_bytes, size=sizes.hidden)
        after_attention(thread, layer, x + m * x_bytes, y + m * x_bytes, m, "local")
    if not kind.ffn.size:
        return
    own, dense, of_input = networks(thread)
    if own is None:
        routed_experts(thread, layer, num_rows, "local", shares_tiles=False)
    for network in (own, dense):
        if network is not None:
            whole_mlp(thread, layer, num_rows, network)
    sums = thread.local("expert_sums") if own is None else y
    with fn.loop(num_rows) as m:
        _add_output(thread, layer, x, y, sums, m, "local")
    if of_input is not None:
        with fn.loop(num_rows) as m:
            row_parts.norm(thread, layer, "", x + m * x_bytes, m, "local", ())
        whole_mlp(thread, layer, num_rows, of_input)
    if of_input is not None or kind.out_scale:
        with fn.loop(num_rows) as m:
            _end_layer(thread, layer, x + m * x_bytes, y + m * x_bytes)


def share_of_queries(
    thread: StepEmitter, i: Value, layer: Words, rows: tuple[Value, ...], scope: str
) -> None:
    """Make queries of compressed rows, by outputs; threads wait for each other before and after."""
    latent = thread.kind.heads.latent
    if latent is None or not latent.q_rank:
        return
    qkv, stride = thread.shared("qkv"), thread.kind.qkv * 4
    with thread.fn.loop(rows[1], start=rows[0]) as m:
        _compressed(thread, layer, latent, qkv + m * stride, m, scope)
    thread.barrier(scope)
    share_of_matmul(thread, i, layer, "q_b", qkv, stride, "in", scope)
    thread.barrier()


def whole_queries(thread: StepEmitter, layer: Words, num_rows: Value) -> None:
    """Make queries of this thread's compressed rows."""
    latent = thread.kind.heads.latent
    if latent is None or not latent.q_rank:
        return
    qkv, stride = thread.local("qkv"), thread.kind.qkv * 4
    with thread.fn.loop(num_rows) as m:
        _compressed(thread, layer, latent, qkv + m * stride, m, "local")
    whole_matmul(thread, layer, "q_b", num_rows, qkv, stride)


def _compressed(
    thread: StepEmitter, layer: Words, latent: LatentHeads, qkv: Value, m: Value, scope: str
) -> None:
    """Put a row's compressed query, normed, into row ``m`` of activations."""
    floats = thread.floats("in", m, scope)
    x = qkv + latent.columns(thread.kind.heads.num_heads)["q_a"] * 4
    thread.of_heads(COMPRESSED_NORM).call(thread.fn, x=x, weight=layer["q_a_norm"], out=floats)
    row_parts.quantise(thread, "in", floats, m, latent.q_rank, scope=scope)


def after_attention(
    thread: StepEmitter, layer: Words, x: Value, y: Value, row: Value, scope: str
) -> None:
    """Add attention's output to a row of x; leave what the feed-forward network reads."""
    readers = () if thread.kind.ffn.experts else thread.kind.ffn.inner
    if thread.kind.is_parallel:  # of x as it is before
        names = thread.kind.norm_names
        name = "mlp_norm" if "mlp_norm" in names else "attn_norm"
        norm(thread, layer, name, x, row, scope, readers)
    add(thread, layer, "attn", x, y)
    if not thread.kind.ffn.size:
        return
    experts = thread.kind.ffn.experts
    if not thread.kind.is_parallel:
        group = "dense" if experts and experts.beside else "in"
        norm(thread, layer, "mlp_norm", x, row, scope, readers, group)
    if experts:
        route(thread, layer, experts, x, row, scope)


def rope(
    thread: StepEmitter, layer: Words, cache: Value, row: Value, qkv: Value, kv_head: Value
) -> None:
    """Rotate and store one K/V head of the row that has number ``row`` in the step."""
    args, heads = thread.args, thread.kind.heads
    if heads.latent:
        latent_rope(thread, layer, cache, row, qkv, kv_head)
        return
    position, record = thread.place(layer, cache, row)
    record = record + kv_head * heads.record_bytes
    angle = position * (heads.half * 4)
    key_bias = layer["key_bias"] + kv_head * (heads.half * 8)
    thread.of_heads(ROPE).call(
        thread.fn, row=qkv, bias=layer["qkv_bias"], key_bias=key_bias, cos=layer["cos"] + angle,
        sin=layer["sin"] + angle, query_scale=layer["query_scales"] + position * 4,
        norms=layer["qk_norms"], query=args["queries"] + row * heads.query_bytes, record=record,
        token=position & (TOKENS - 1), kv_head=kv_head, non_finite=args["non_finite"] + row * 4,
    )  # fmt: skip


def attend(
    thread: StepEmitter,
    layer: Words,
    cache: Value,
    item: tuple[Value, Value],
    kv_head: Value,
    out: Value,
) -> None:
    """Let ``item``, a first row and 1 or a tile of queries, look at its context."""
    (first, count), heads = item, thread.kind.heads
    out = out + kv_head * (heads.group * heads.out_size * 4)
    thread.of_heads(ATTEND).call(
        thread.fn, args=thread.args_address, thread=thread.number, window=layer["window"],
        pairs=layer["key_bias_pairs"] + kv_head * (4 + heads.half * 4),
        sinks=layer["sinks"] + kv_head * (heads.group * 4),
        records=cache + kv_head * heads.record_step, sequences=thread.sequences(layer),
        first=first, count=count, kv_head=kv_head,
        out=thread.local("latents") if heads.latent else out,
    )  # fmt: skip
    if heads.latent:
        expand_latents(thread, layer, count, kv_head, out)
