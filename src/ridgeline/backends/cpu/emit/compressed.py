"""Queries that are made of compressed rows, between a layer's first products and its attention."""

from __future__ import annotations

from ridgeline.backends.cpu.emit import row_parts
from ridgeline.backends.cpu.emit.args import StepEmitter
from ridgeline.backends.cpu.emit.feed_forward import share_of_matmul, whole_matmul
from ridgeline.backends.cpu.emit.ir import Value
from ridgeline.backends.cpu.emit.kernel import Words
from ridgeline.backends.cpu.emit.latent import COMPRESSED_NORM
from ridgeline.backends.cpu.layout.latent import LatentHeads


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
