"""Activations of a feed-forward network's inner values, with or without gates."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def activated(x, ACTIVATION: tl.constexpr):
    """Return an activation: the formulas are the twin's."""
    if ACTIVATION == "silu":
        y = x / (1.0 + tl.exp(-x))
    elif ACTIVATION == "gelu":
        y = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 1 + tanh(z) = 2 - 2 / (exp(2 z) + 1)
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        y = x * (1.0 - 1.0 / (tl.exp(tl.minimum(2.0 * z, 80.0)) + 1.0))
    elif ACTIVATION == "relu":
        y = tl.maximum(x, 0.0)
    else:
        tl.static_assert(ACTIVATION == "relu2")
        y = tl.maximum(x, 0.0)
        y = y * y
    return y


@triton.jit
def gate_kernel(
    inner, out, gate_scale, size, stride,
    GATED: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK values of one row."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = i < size
    x = tl.load(inner + row * stride + i, mask=live, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(inner + row * stride + size + i, mask=live, other=0.0).to(tl.float32)
        x = x * gate_scale
        if ACTIVATION == "swiglu_clamped":
            x = tl.minimum(x, 7.0)
            up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
            y = x / (1.0 + tl.exp(-1.702 * x)) * up
        else:
            y = activated(x, ACTIVATION) * up
    else:
        y = activated(x, ACTIVATION)
    tl.store(out + row * size + i, y, mask=live)


def gate(inner, activation, gated, gate_scale):
    """Return the activated inner values: see the twin."""
    size = inner.shape[1] // (2 if gated else 1)
    out = torch.empty((len(inner), size), dtype=inner.dtype, device=inner.device)
    gate_kernel[(len(inner), triton.cdiv(size, BLOCK))](
        inner, out, gate_scale, size, inner.stride(0),
        GATED=gated, ACTIVATION=activation, BLOCK=BLOCK,
    )  # fmt: skip
    return out
