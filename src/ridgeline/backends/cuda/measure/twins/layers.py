"""Twins of the kernels of layers.

Shapes: T tokens; H query heads and K key heads of D channels; N outputs of K inputs for a matrix. A
layer's cache is ``[blocks, 2, K, block_size, D]``, keys before values, with any strides; that of
latents, ``[blocks, 1, 1, block_size, D]``, has keys alone, of which values are a part.

Torch's own products sum in an order that depends on the number of rows. The kernels on a GPU do not
(docs/results.md#gpu).
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ridgeline.backends.cuda.layer_spec import HeadSpec
from ridgeline.backends.cuda.packed import Packed


def dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the sums of ``a`` ``[..., M, K]`` times ``b`` ``[..., N, K]``, ``[..., M, N]``."""
    return a @ b.mT


def _wide(x: Tensor) -> Tensor:
    """Return ``x`` in the type that sums are made in."""
    return x if x.dtype == torch.float64 else x.float()


def norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    dtype: torch.dtype,
) -> Tensor:
    """Return rows divided by their root mean square (Zhang & Sennrich, 2019), as ``dtype``.

    Args:
        x: ``[..., N]``.
        weight: ``[N]`` float32, or None for ones.
        bias: ``[N]`` float32, or None.
        eps: added to the mean square.
        kind: "rms"; or "layer", which subtracts the mean first (Ba et al., 2016).
        dtype: of the result.
    """
    x = _wide(x)
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    if weight is not None:
        x = x * weight
    if bias is not None:
        x = x + bias
    return x.to(dtype)


def add_norm(
    x: Tensor,
    delta: Tensor,
    scale: float,
    post: tuple[Tensor, Tensor | None] | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    kind: str,
    dtype: torch.dtype,
) -> Tensor:
    """Add a sub-layer's output to the residual stream, in place, and return the norm of the sum.

    Args:
        x: the residual stream, ``[T, N]`` float32; it is changed.
        delta: what is added, ``[T, N]``, times ``scale``.
        scale: of what is added.
        post: weight and bias of a norm that ``delta`` goes through first, or None.
        weight: of the norm of the sum; None returns the sum itself.
        bias: of the norm of the sum.
        eps: as in ``norm``.
        kind: as in ``norm``.
        dtype: of the result.
    """
    if post is not None:
        delta = norm(delta, *post, eps, kind, torch.float32)
    x += scale * _wide(delta)
    return x.to(dtype) if weight is None else norm(x, weight, bias, eps, kind, dtype)


def gate(inner: Tensor, activation: str, gated: bool, gate_scale: float) -> Tensor:
    """Return the activated inner values of a feed-forward network, in the type of ``inner``.

    Args:
        inner: ``[T, 2 * size]``, gates before values, if ``gated``; else ``[T, size]``.
        activation: a name of ``arch.model.Activation``.
        gated: gates, activated, multiply the values.
        gate_scale: multiplies the gates first.
    """
    if not gated:
        return activated(_wide(inner), activation).to(inner.dtype)
    gates, up = _wide(inner).chunk(2, 1)
    gates = gates * gate_scale
    if activation == "swiglu_clamped":
        gates, up = gates.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (gates / (1.0 + torch.exp(-1.702 * gates)) * (up + 1.0)).to(inner.dtype)
    return (activated(gates, activation) * up).to(inner.dtype)


def activated(x: Tensor, activation: str) -> Tensor:
    """Return an activation of each value; formulas as in ``backends.reference.parts``."""
    if activation == "silu":
        return x / (1.0 + torch.exp(-x))
    if activation == "gelu":
        return 0.5 * x * (1.0 + torch.erf(x * 0.5**0.5))
    if activation == "gelu_tanh":
        return 0.5 * x * (1.0 + torch.tanh((2 / math.pi) ** 0.5 * (x + 0.044715 * x * x * x)))
    positive = x.clamp(min=0.0)
    return {"relu": positive, "relu2": positive.square()}[activation]


def rope_and_cache(
    qkv: Tensor,
    cache: Tensor,
    tables: Tensor,
    positions: Tensor,
    table_rows: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    poison: Tensor,
    spec: HeadSpec,
) -> Tensor:
    """Norm and rotate queries and keys (Su et al., 2021), store keys and values in their blocks.

    A key or value that is not finite is stored as zero, and its token is marked. So a block that
    others may share never holds a value that spoils a sum.

    Args:
        qkv: ``[T, (H + 2 * K) * D]``; ``(H + K) * D`` where values are keys or a part of them,
            ``H * D`` where the layer reads another's.
        cache: the layer's blocks; they are changed.
        tables: block of each run of positions, ``[rows, width]`` int32.
        positions: ``[T]`` int32.
        table_rows: the row of ``tables`` of each token, ``[T]`` int32; -1 for padding, whose
            queries may be anything.
        cos: ``[positions, spec.half]`` float32; None where nothing is rotated.
        sin: the same.
        q_norm: ``[D]`` float32, or None.
        k_norm: the same.
        poison: ``[T]`` int32; set to 1 where something was not finite.
        spec: of the heads.

    Returns:
        Queries ``[T, H, D]``, in the type of ``qkv``.
    """
    H, num_own = spec.H, spec.K if spec.own else 0
    heads = _wide(qkv).reshape(len(qkv), -1, spec.D)
    q, k = heads[:, :H], heads[:, H : H + num_own]
    v = k if spec.v_is_k or spec.value_at else heads[:, H + num_own :]
    if spec.qk_norm == 1:
        q, k = _normed_heads(q, q_norm, spec), _normed_heads(k, k_norm, spec)
    if spec.half:
        assert cos is not None
        assert sin is not None
        at = positions.long()
        q, k = (_rotated(part, cos[at, None], sin[at, None]) for part in (q, k))
    if spec.qk_norm == 2:
        q, k = _normed_heads(q, q_norm, spec), _normed_heads(k, k_norm, spec)
    if spec.own:
        v = _normed_heads(v, None, spec) if spec.v_norm else v
        _store(k, v, cache, tables, positions, table_rows, poison)
    return q.to(qkv.dtype).contiguous()


def _normed_heads(heads: Tensor, weight: Tensor | None, spec: HeadSpec) -> Tensor:
    return norm(heads, weight, None, spec.eps, "rms", heads.dtype)


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = heads.split([half, half, heads.shape[-1] - 2 * half], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


def _store(
    k: Tensor,
    v: Tensor,
    cache: Tensor,
    tables: Tensor,
    positions: Tensor,
    table_rows: Tensor,
    poison: Tensor,
) -> None:
    """Store keys and values ``[T, K, D]`` of all tokens but padding."""
    live = torch.nonzero(table_rows >= 0)[:, 0]
    size, at = cache.shape[3], positions[live].long()
    blocks = tables[table_rows[live].long(), at // size].long()
    for place, new in enumerate((k[live], v[live])[: cache.shape[1]]):
        finite = torch.isfinite(new)
        poison[live] |= (~finite).any(-1).any(-1).to(poison.dtype)
        cache[blocks, place, :, at % size] = torch.where(finite, new, 0.0).to(cache.dtype)


def attend(
    q: Tensor,
    cache: Tensor,
    tables: Tensor,
    plan: Any,
    slopes: Tensor | None,
    sinks: Tensor | None,
    spec: HeadSpec,
) -> Tensor:
    """Return softmax(scale q k) v: each token sees those before it and itself, in a paged cache.

    Algorithms: paged attention (Kwon et al., 2023), grouped queries (Ainslie et al., 2023), windows
    (Beltagy et al., 2020), soft caps (Gemma 2), sinks (Xiao et al., 2023), slopes (ALiBi; Press et
    al., 2022).

    Args:
        q: ``[T, H, D]``.
        cache: the layer's blocks.
        tables: block of each run of positions, ``[rows, width]`` int32.
        plan: the work of a step. Read here: ``spans``, of each sequence its first token in ``q``,
            number of tokens, and the first one's position; ``row_of``, its row of ``tables``.
        slopes: ``[H]`` float32, or None.
        sinks: ``[H]`` float32, a score without a value that takes a share, or None.
        spec: of the heads.

    Returns:
        ``[T, H, value_dim]``, in the type of ``q``; zero for tokens of no span.
    """
    out = q.new_zeros(*q.shape[:2], spec.value_dim)
    for row, (token, count, start) in zip(plan.row_of, plan.spans, strict=True):
        first = max(0, start - spec.window + 1) if spec.window else 0
        keys = torch.arange(first, start + count, device=q.device)
        size = cache.shape[3]
        blocks = tables[row, keys // size].long()
        k = _wide(cache[blocks, 0, :, keys % size])
        v = (
            _wide(cache[blocks, 1, :, keys % size])
            if not spec.value_at
            else k[..., spec.value_at :]
        )
        positions = torch.arange(start, start + count, device=q.device)
        one = q[token : token + count]
        output = _attended(_wide(one), k, v, positions[:, None] - keys, slopes, sinks, spec)
        out[token : token + count] = output.to(q.dtype)
    return out


def _attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    distance: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
    spec: HeadSpec,
) -> Tensor:
    """Return attention of one text: q ``[T, H, D]``; k, v ``[S, K, D]``; distances ``[T, S]``."""
    k, v = (x.repeat_interleave(spec.H // spec.K, 1) for x in (k, v))
    scores = dots(q.transpose(0, 1), k.transpose(0, 1)) * spec.scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if slopes is not None:
        scores = scores - slopes[:, None, None] * distance
    hidden = distance < 0
    if spec.window:
        hidden = hidden | (distance >= spec.window)
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:  # one more key, which has no value
        column = sinks.to(scores.dtype)[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, column], 2)
    shares = torch.softmax(scores, 2)[..., : len(k)]
    return dots(shares, v.permute(1, 2, 0)).transpose(0, 1)


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return ``x W^T + bias``, ``[M, N]``, summed in float32, as ``dtype`` (None: that of ``x``).

    ``x`` is ``[M, K]``, ``weight`` ``[N, K]`` of the same type, ``bias`` ``[N]`` float32 or None.
    """
    if x.dtype == weight.dtype and dtype in (None, x.dtype):
        cast = None if bias is None else bias.to(x.dtype)
        return torch.nn.functional.linear(x, weight, cast)
    out = dots(x.float(), weight.float())
    return (out if bias is None else out + bias).to(dtype or x.dtype)


def packed_product(
    x: Tensor, packed: Packed, bias: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return ``x W^T + bias`` as ``product``; a weight is rounded once to the type of ``x``."""
    return product(x, packed.wide().to(x.dtype), bias, dtype)


def grouped_product(
    x: Tensor, weight: Tensor | Packed, bias: Tensor | None, met: Any, first: bool
) -> Tensor:
    """Return products of rows with their experts' matrices, in the type of ``x``.

    Args:
        x: rows of tokens ``[T, K]`` if ``first``, else of pairs, by expert.
        weight: ``[experts, N, K]``; or packed, one expert's rows after another's. A packed weight
            is rounded once to the type of ``x``.
        bias: ``[experts, N]`` float32, or None.
        met: which token goes to which experts. ``order``: pairs (token times ``per_token`` plus a
        number) by
            expert; ``offsets``: where each expert's begin, and the end; ``per_token``: experts of
            a token. Kernels read also ``tile_expert``, ``tile_begin`` and ``rows``.
        first: the result's rows are pairs by expert; else pairs by token.
    """
    bounds = met.offsets.tolist()
    if not isinstance(weight, Tensor):
        weight = weight.wide().to(x.dtype).unflatten(0, (len(bounds) - 1, -1))
    out = torch.empty((len(met.order), weight.shape[1]), dtype=x.dtype, device=x.device)
    for expert, (low, high) in enumerate(pairwise(bounds)):
        pairs = met.order[low:high]
        rows = x[pairs // met.per_token] if first else x[low:high]
        products = product(rows, weight[expert], None if bias is None else bias[expert])
        if first:
            out[low:high] = products
        else:
            out[pairs] = products
    return out


def add_low_rank(
    out: Tensor, x: Tensor, met: Any, plan: Any, first: int, sizes: tuple[int, ...]
) -> None:
    """Add ``B (A x)`` to rows of some products, in place: LoRA (Hu et al., 2021).

    Args:
        out: products with matrices side by side, ``[T, N]``; rows without an adapter stay.
        x: what they are products of, ``[T, K]``.
        met: which token has the adapter of which slot, as of ``grouped_product``.
        plan: the adapters (``step.plan.AdapterPlan``). Read here: ``numbers`` and ``loaded``.
        first: the number of the first matrix (``model.adapters``); the others follow it.
        sizes: outputs of each.
    """
    for number, (low, high) in zip(plan.numbers, pairwise(met.offsets.tolist()), strict=False):
        rows, begin = met.order[low:high], 0
        for matrix, size in enumerate(sizes, first):
            if matrix in plan.loaded[number].parts:
                a, b = plan.loaded[number].parts[matrix]
                added = product(product(x[rows], a, None), b, None)
                out[rows, begin : begin + size] += added
            begin += size


def copy_blocks(cache: Tensor, old: Tensor, new: Tensor) -> None:
    """Copy blocks ``old`` to ``new``, rows of ``cache``; all are read before any is written.

    ``old`` and ``new`` are ``[copies]`` int64; no block is written twice.
    """
    cache[new] = cache[old]
