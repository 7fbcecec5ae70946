"""Norms, and the residual stream before them. A program has one row, so its sum has one order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def normed(
    x, inside, weight, bias, d, eps, N: tl.constexpr, LAYER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Return a row's norm; ``x`` is 0 outside of the row."""
    if LAYER:
        x = tl.where(inside, x - tl.sum(x, axis=0) / N, 0.0)
    x = x * (1.0 / tl.sqrt(tl.sum(x * x, axis=0) / N + eps))
    if HAS_WEIGHT:
        x = x * tl.load(weight + d, mask=inside, other=0.0)
    if HAS_BIAS:
        x = x + tl.load(bias + d, mask=inside, other=0.0)
    return x


@triton.jit
def add_norm_kernel(
    x, delta, out, weight, bias, post_weight, post_bias, scale, eps, x_stride,
    N: tl.constexpr, PADDED: tl.constexpr, ADD: tl.constexpr, POST: tl.constexpr,
    POST_BIAS: tl.constexpr, NORM: tl.constexpr, LAYER: tl.constexpr,
    HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Add to a row of ``x`` if ADD, then return its norm, or itself without NORM."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, PADDED)
    inside = d < N
    values = tl.load(x + row * x_stride + d, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        added = tl.load(delta + row * N + d, mask=inside, other=0.0).to(tl.float32)
        if POST:
            added = normed(added, inside, post_weight, post_bias, d, eps, N, LAYER, True, POST_BIAS)
        values = values + scale * added
        tl.store(x + row * x_stride + d, values, mask=inside)
    if NORM:
        values = normed(values, inside, weight, bias, d, eps, N, LAYER, HAS_WEIGHT, HAS_BIAS)
    tl.store(out + row * N + d, values, mask=inside)


def norm(x, weight, bias, eps, kind, dtype):
    """Return normed rows: see the twin. Rows may be part of wider ones."""
    return _launch(x, None, 0.0, None, weight, bias, eps, kind, dtype, has_norm=True)


def add_norm(x, delta, scale, post, weight, bias, eps, kind, dtype):
    """Add to the residual stream, and return the norm of the sum: see the twin."""
    has_norm = weight is not None
    return _launch(x, delta, scale, post, weight, bias, eps, kind, dtype, has_norm=has_norm)


def _launch(x, delta, scale, post, weight, bias, eps, kind, dtype, *, has_norm):
    size = x.shape[-1]
    assert x.dim() == 2 or x.is_contiguous()
    assert delta is None or delta.is_contiguous()
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    post_weight, post_bias = post or (None, None)
    padded = triton.next_power_of_2(size)
    add_norm_kernel[(out.numel() // size,)](
        x, delta, out, weight, bias, post_weight, post_bias, scale, eps, x.stride(-2),
        N=size, PADDED=padded, ADD=delta is not None, POST=post_weight is not None,
        POST_BIAS=post_bias is not None, NORM=has_norm, LAYER=kind == "layer",
        HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
        num_warps=max(1, min(8, padded // 512)),
    )  # fmt: skip
    return out
