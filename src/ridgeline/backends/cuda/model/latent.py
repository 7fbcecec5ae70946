"""Latent attention (DeepSeek-V2, 2024) in its absorbed form: ``model.shape.latent``.

A query head's part of a matrix is multiplied like an expert to which every token goes. So a row has
the same bits in any batch, and only attention itself needs an operation made for latents.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ridgeline.backends.cuda.layer_spec import HeadSpec
from ridgeline.backends.cuda.model.experts import Meetings, meet_heads
from ridgeline.backends.cuda.ranks.group import Ranks
from ridgeline.backends.cuda.step.plan import AttentionPlan
from ridgeline.model.shape.model import Attention


class Places(NamedTuple):
    """Where a step's latents lie: the layer's blocks and tables, tokens, angles, and attention."""

    cache: Tensor
    table: Tensor
    positions: Tensor
    table_rows: Tensor
    angles: tuple[Tensor, ...]
    poison: Tensor
    plan: AttentionPlan


def by_head(weights: Mapping[str, Tensor], mixer: Attention) -> dict[str, Tensor]:
    """Return a layer's weights with "k_b" and "v_b" as ``[heads, out, in]``."""
    heads, rank = mixer.num_heads, mixer.value_dim
    k_b = weights["k_b"].reshape(heads, -1, rank).transpose(1, 2).contiguous()
    return {**weights, "k_b": k_b, "v_b": weights["v_b"].reshape(heads, -1, rank)}


def latent_attention(
    x: Tensor,
    weights: Mapping[str, Any],
    mixer: Attention,
    spec: HeadSpec,
    places: Places,
    ops: Any,
    product: Callable[..., Tensor],
    ranks: Ranks,
) -> Tensor:
    """Return what latent attention adds to normed rows ``x``; their latents are stored.

    ``product`` multiplies by a matrix of any format; ``ranks`` have other heads.
    """
    assert mixer.latent is not None
    turning, eps, count = spec.value_at, mixer.latent.norm_eps, len(x)
    met = meet_heads(count, spec.H, x.device)
    row, last = x, "q"
    if mixer.latent.q_rank:
        row = product(x, weights["q_a"], None, None)
        row, last = ops.norm(row, weights["q_a_norm"], None, eps, "rms", x.dtype), "q_b"
    q = product(row, weights[last], None, None).reshape(count, spec.H, -1)
    absorbed = _of_heads(q[..., turning:], weights["k_b"], met, ops)
    key = product(x, weights["kv_a"], None, None)
    latent = ops.norm(key[:, turning:], weights["kv_a_norm"], None, eps, "rms", x.dtype)
    q = torch.cat([q[..., :turning], absorbed], 2).reshape(count, -1)
    q = ops.rope_and_cache(
        torch.cat([q, key[:, :turning], latent], 1), places.cache, places.table, places.positions,
        places.table_rows, *places.angles, None, None, places.poison, spec,
    )  # fmt: skip
    latents = ops.attend(q, places.cache, places.table, places.plan, None, None, spec)
    values = _of_heads(latents, weights["v_b"], met, ops)
    whole = ranks.gather(values.reshape(count, -1))
    return ranks.gather(product(whole, weights["o"], None, None))


def _of_heads(rows: Tensor, weight: Tensor, met: Meetings, ops: Any) -> Tensor:
    """Return products of each head's rows ``[T, H, in]`` with its own matrix, ``[T, H, out]``."""
    given = rows.transpose(0, 1).reshape(-1, rows.shape[2])
    out: Tensor = ops.grouped_product(given, weight, None, met, False)
    return out.reshape(*rows.shape[:2], -1)
