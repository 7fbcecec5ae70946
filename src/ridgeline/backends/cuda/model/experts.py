"""Mixtures of experts on the device: which token goes where, and products with the matrices.

Pairs of a token and an expert are sorted by expert, and cut into tiles of one expert. A row's sum
has one order, and a token's experts are added up in the order of their numbers: the same bits in
any batch. All shapes follow from the number of tokens, so that a graph can hold it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ridgeline.backends.cuda.ranks.group import Ranks
from ridgeline.backends.layer_weights import FeedForwardWeights
from ridgeline.model.shape.model import Experts

_TILES = ((32, 16), (128, 64))  # up to this many pairs of an expert, rows of a tile
_MOST_ROWS = 128


@dataclass(frozen=True, slots=True)
class Meetings:
    """The pairs of a token and an expert in a step.

    Attributes:
        order: pairs, numbered by token, in the order of their experts.
        offsets: where the pairs of each expert begin, and their end.
        tile_expert: the expert of each tile; -1 for none.
        tile_begin: its first row, among pairs in that order.
        per_token: experts of a token.
        rows: of a tile.
    """

    order: Tensor
    offsets: Tensor
    tile_expert: Tensor
    tile_begin: Tensor
    per_token: int
    rows: int


def mixture(
    x: Tensor,
    routed: Tensor,
    weights: FeedForwardWeights,
    experts: Experts,
    ops: Any,
    product: Callable[..., Tensor],
    ranks: Ranks,
) -> Tensor:
    """Return the weighted sum of the outputs of each token's experts, float32.

    ``routed`` are the rows that choose them; ``product`` multiplies by a matrix of any format. Each
    of the ``ranks`` has a part of every expert.
    """
    w: Any = weights
    logits = ops.product(routed, w.router, w.router_bias, torch.float32)
    chosen, shares = route(logits, w, experts)
    met = read = meet(chosen, experts.num)
    rows = x
    if experts.scales_input:  # each pair reads a row of its own
        rows = x[met.order // met.per_token] * shares.reshape(-1)[met.order, None].to(x.dtype)
        read = replace(met, order=torch.arange(len(rows), device=x.device), per_token=1)
        shares = torch.ones_like(shares)
    inner = ops.grouped_product(rows, w.gate_up, w.gate_up_bias, read, True)
    inner = ranks.gather(ops.gate(inner, experts.activation, experts.gated, 1.0))
    products = ops.grouped_product(inner, w.down, w.down_bias, met, False)
    by_expert = products.reshape(len(x), experts.per_token, -1)
    out = torch.zeros(by_expert[:, 0].shape, dtype=torch.float32, device=x.device)
    for i in range(experts.per_token):
        out += shares[:, i, None] * by_expert[:, i].float()
    if w.shared is not None and experts.shared is not None:
        shared = experts.shared
        inner = product(x, w.shared.gate_up, w.shared.gate_up_bias, None)
        inner = ranks.gather(ops.gate(inner, shared.activation, shared.gated, shared.gate_scale))
        dense = product(inner, w.shared.down, w.shared.down_bias, torch.float32)
        if w.shared_scale is not None:
            dense = torch.sigmoid(ops.product(x, w.shared_scale, None, torch.float32)) * dense
        out += dense
    return ranks.gather(out)


def route(logits: Tensor, w: Any, experts: Experts) -> tuple[Tensor, Tensor]:
    """Return each token's experts, by rising number, and their weights.

    Among experts with equal shares the first is chosen (``arch.model.Experts``).
    """
    if experts.router == "sparsemixer":
        return _taken_one_by_one(logits, experts)
    is_sigmoid = experts.router == "sigmoid"
    shares = torch.sigmoid(logits) if is_sigmoid else torch.softmax(logits, 1)
    wanted = logits if experts.scales_input else shares  # sigmoids of large ones are all 1
    wanted = wanted if w.choice_bias is None else wanted + w.choice_bias
    if experts.num_groups > 1:
        wanted = _in_best_groups(wanted, experts, best=2 if is_sigmoid else 1)
    chosen = _largest(wanted, experts.per_token).sort(1).values
    weights = shares.gather(1, chosen)
    if experts.normalised:
        total = weights[:, 0].clone()
        for i in range(1, experts.per_token):  # one order
            total += weights[:, i]
        weights = weights / total[:, None]
    weights = weights * experts.scale
    return chosen, weights if w.expert_scales is None else weights * w.expert_scales[chosen]


def meet_heads(num_tokens: int, num_heads: int, device: torch.device) -> Meetings:
    """Return the pairs of tokens and heads, where each head has a matrix for all tokens."""
    return meet(torch.arange(num_heads, device=device).expand(num_tokens, -1), num_heads)


def _taken_one_by_one(logits: Tensor, experts: Experts) -> tuple[Tensor, Tensor]:
    """Return experts and weights as "sparsemixer" has them: see ``arch.model.Experts``."""
    left, chosen, weights = logits, list[Tensor](), list[Tensor]()
    for _ in range(experts.per_token):
        taken = _largest(left, 1)
        best = left.gather(1, taken)
        distance = (best - logits) / torch.maximum(logits.abs(), best)
        near = torch.where(distance > 2 * experts.jitter, 0.0, torch.exp(left - best))
        total = near[:, 0].clone()
        for i in range(1, experts.num):  # one order
            total += near[:, i]
        chosen.append(taken)
        weights.append(1.0 / total[:, None])
        left = left.scatter(1, taken, float("-inf"))
    ids, order = torch.cat(chosen, 1).sort(1)
    return ids, torch.cat(weights, 1).gather(1, order)


def _in_best_groups(wanted: Tensor, experts: Experts, best: int) -> Tensor:
    """Return shares, minus infinity outside the groups whose ``best`` shares sum to most."""
    by_group = wanted.unflatten(1, (experts.num_groups, -1))
    top = by_group.sort(2, descending=True).values[..., :best]
    of_group = top[..., 0] if best == 1 else top[..., 0] + top[..., 1]
    hidden = torch.ones_like(of_group, dtype=torch.bool)
    hidden = hidden.scatter(1, _largest(of_group, experts.groups_met), False)
    return by_group.masked_fill(hidden[..., None], float("-inf")).flatten(1)


def _largest(values: Tensor, count: int) -> Tensor:
    """Return where the largest values of each row are; among equal ones the first."""
    return torch.sort(-values, dim=1, stable=True).indices[:, :count]


def meet(chosen: Tensor, num: int) -> Meetings:
    """Sort the pairs of ``chosen`` ``[tokens, per_token]`` by expert, and cut them into tiles."""
    flat = chosen.reshape(-1)
    pairs, device = len(flat), chosen.device
    rows = next((rows for most, rows in _TILES if pairs <= most * num), _MOST_ROWS)
    counts = (flat[:, None] == torch.arange(num, device=device)).sum(0)
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    tiles = (counts + rows - 1) // rows
    ends = tiles.cumsum(0)
    number = torch.arange(min(pairs, pairs // rows + num), device=device)  # no tile is empty
    expert = torch.searchsorted(ends, number, right=True)
    valid = expert.clamp(max=num - 1)
    begin = offsets[valid] + (number - (ends - tiles)[valid]) * rows
    return Meetings(
        order=torch.sort(flat, stable=True).indices,
        offsets=offsets,
        tile_expert=torch.where(expert < num, valid, -1),
        tile_begin=begin,
        per_token=chosen.shape[1],
        rows=rows,
    )
