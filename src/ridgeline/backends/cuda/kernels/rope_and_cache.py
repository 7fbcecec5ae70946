"""Norms and rotation of query and key heads, and keys and values into their blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def inverse_rms(x, eps, D: tl.constexpr):
    """Return one over the root mean square of a head; ``x`` is 0 outside of it."""
    return 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / D + eps)


@triton.jit
def turned_head(
    source, x, d, inside, position, cos, sin, norm_weight, eps,
    D: tl.constexpr, HALF: tl.constexpr, QK_NORM: tl.constexpr,
):  # fmt: skip
    """Return a query or key head after its norm and rotation: channel d turns with d + HALF."""
    rotates = d < 2 * HALF
    partner = tl.where(d < HALF, d + HALF, d - HALF)
    other = tl.load(source + partner, mask=rotates, other=0.0).to(tl.float32)
    if QK_NORM == 1:
        scale = inverse_rms(x, eps, D)
        x = x * scale * tl.load(norm_weight + d, mask=inside, other=0.0)
        other = other * scale * tl.load(norm_weight + partner, mask=rotates, other=0.0)
    if HALF > 0:
        angle = position * HALF + tl.where(d < HALF, d, d - HALF)
        c = tl.load(cos + angle, mask=rotates, other=1.0)
        s = tl.load(sin + angle, mask=rotates, other=0.0)
        x = x * c + other * tl.where(d < HALF, -s, s)
    if QK_NORM == 2:
        x = x * inverse_rms(x, eps, D) * tl.load(norm_weight + d, mask=inside, other=0.0)
    return x


@triton.jit(
    do_not_specialize_on_alignment=["tables", "positions", "table_rows", "poison"],
)
def rope_and_cache_kernel(
    qkv, q_out, cache, tables, positions, table_rows, cos, sin, q_norm, k_norm, poison, eps,
    qkv_stride, table_stride, block_stride, kind_stride, head_stride, slot_stride,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr,
    QK_NORM: tl.constexpr, V_NORM: tl.constexpr, V_IS_K: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Make one head of one token: heads are H of queries, K of keys, K of values."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(table_rows + token).to(tl.int64)
    if row < 0:
        return
    d = tl.arange(0, PADDED)
    inside = d < D
    place = head
    if V_IS_K:
        place = tl.where(head >= H + K, head - K, head)
    source = qkv + token * qkv_stride + place * D
    position = tl.load(positions + token)
    x = tl.load(source + d, mask=inside, other=0.0).to(tl.float32)
    if head < H:
        x = turned_head(source, x, d, inside, position, cos, sin, q_norm, eps, D, HALF, QK_NORM)
        tl.store(q_out + (token * H + head) * D + d, x, mask=inside)
    else:
        if head < H + K:
            x = turned_head(source, x, d, inside, position, cos, sin, k_norm, eps, D, HALF, QK_NORM)
        else:
            if V_NORM:
                x = x * inverse_rms(x, eps, D)
        finite = tl.abs(x) < float("inf")  # neither is nan
        if tl.sum((inside & (finite == 0)).to(tl.int32), axis=0) > 0:
            tl.store(poison + token, 1)
        kind = (head - H) // K
        block = tl.load(tables + row * table_stride + position // BLOCK_SIZE).to(tl.int64)
        at = block * block_stride + kind * kind_stride + (head - H - kind * K) * head_stride
        at += (position % BLOCK_SIZE) * slot_stride
        tl.store(cache + at + d, tl.where(finite, x, 0.0), mask=inside)


def rope_and_cache(
    qkv, cache, tables, positions, table_rows, cos, sin, q_norm, k_norm, poison, spec
):
    """Return queries ``[T, H, D]``; keys and values are stored: see the twin."""
    H, K, D = spec.H, spec.K, spec.D
    q = torch.empty((len(qkv), H, D), dtype=qkv.dtype, device=qkv.device)
    num_stored = K * cache.shape[1] if spec.own else 0
    rope_and_cache_kernel[(len(qkv), H + num_stored)](
        qkv, q, cache, tables, positions, table_rows, cos, sin, q_norm, k_norm, poison, spec.eps,
        qkv.stride(0), tables.stride(0), *cache.stride()[:4],
        H=H, K=K, D=D, PADDED=triton.next_power_of_2(D), HALF=spec.half, QK_NORM=spec.qk_norm,
        V_NORM=spec.v_norm, V_IS_K=spec.v_is_k, BLOCK_SIZE=cache.shape[3], num_warps=1,
    )  # fmt: skip
    return q
