"""What attention does with a row, as calls of kernels: rotate and store, attend, add."""

from __future__ import annotations

from ridgeline.backends.cpu.emit.args import StepEmitter
from ridgeline.backends.cpu.emit.attention import ROPE
from ridgeline.backends.cpu.emit.experts import routed
from ridgeline.backends.cpu.emit.ir import Value
from ridgeline.backends.cpu.emit.kernel import Kernel, Words
from ridgeline.backends.cpu.emit.latent import expand_latents, latent_rope
from ridgeline.backends.cpu.emit.row_parts import add, norm
from ridgeline.backends.cpu.layout.shapes import TOKENS

# ``step`` emits it, from a ``StepEmitter``.
ATTEND = Kernel(
    "attend",
    (
        *("args", "thread", "window", "pairs", "sinks", "records", "sequences"),
        *("first", "count", "kv_head", "out"),
    ),
)


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
        routed(thread, layer, experts, x, row, scope)


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
