"""Latent attention and DeepSeek's routers, computed the plain way: keys and values of every head
are made of latents, nothing is absorbed, float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ridgeline.model.shape.latent import Latent
from ridgeline.model.shape.model import Attention, Experts, Layer, Mlp, Rope

Floats = NDArray[np.float64]
# As V2-Lite, and as V3: there are 4 heads in one group, and 6 in two.
PLAIN_QUERIES = Attention(4, 1, 10, Rope(1e4, 4), scale=0.4, latent=Latent(0, 20, 6, 10))
COMPRESSED = replace(
    PLAIN_QUERIES,
    num_heads=6,
    head_dim=22,
    rope=Rope(1e4, 6, (1.0, 1.5, 3.0), attention_factor=1.1),
    scale=0.3,
    latent=Latent(36, 32, 16, 12),
)
SHARED = Mlp(24)
LAYERS = {
    "latent": (
        Layer(PLAIN_QUERIES, Mlp(40)),
        Layer(PLAIN_QUERIES, Experts(5, 2, 40, normalised=False, scale=1.7, shared=SHARED)),
    ),
    "latent of compressed queries": (
        Layer(COMPRESSED, Mlp(40)),
        Layer(
            COMPRESSED,
            Experts(
                12,
                3,
                32,
                scale=2.5,
                shared=SHARED,
                router="sigmoid",
                choice_bias=True,
                num_groups=4,
                groups_met=2,
            ),
        ),
        Layer(COMPRESSED, Experts(6, 2, 32, normalised=False, num_groups=3, groups_met=2)),
    ),
    "latent beside attention": (
        Layer(replace(PLAIN_QUERIES, num_heads=1), Mlp(40)),
        Layer(Attention(4, 2, 8, Rope(1e4, 8), window=5), Mlp(40)),
        Layer(PLAIN_QUERIES, Experts(18, 3, 32, router="sigmoid", normalised=False)),
        Layer(
            PLAIN_QUERIES,
            Experts(5, 2, 32, router="sigmoid", normalised=False, shared=SHARED, scales_input=True),
        ),
    ),
}


def latent_attention(
    mixer: Attention, layer: dict[str, Floats], x: Floats, rotated: Callable[[Floats, int], Floats]
) -> Floats:
    """What one sequence's attention adds; ``rotated`` turns a vector by a position."""
    latent = mixer.latent
    assert latent is not None
    heads, turning = mixer.num_heads, mixer.rope_dim

    def norm(rows: Floats, name: str) -> Floats:
        size = (rows**2).mean(axis=-1, keepdims=True)
        return rows / np.sqrt(size + latent.norm_eps) * layer[name]

    read = norm(x @ layer["q_a"].T, "q_a_norm") if latent.q_rank else x
    q = read @ layer["q_b" if latent.q_rank else "q"].T
    q = q.reshape(len(x), heads, -1)
    both = x @ layer["kv_a"].T
    c = norm(both[:, turning:], "kv_a_norm")
    k_turning = np.array([rotated(both[p, :turning], p) for p in range(len(x))])
    out = np.empty((len(x), heads, latent.v_dim))
    for head in range(heads):
        k = c @ layer["k_b"].reshape(heads, -1, latent.kv_rank)[head].T
        v = c @ layer["v_b"].reshape(heads, -1, latent.kv_rank)[head].T
        for p in range(len(x)):
            turned = rotated(q[p, head, :turning], p)
            scores = k_turning[: p + 1] @ turned + k[: p + 1] @ q[p, head, turning:]
            weights = np.exp(scores * mixer.score_scale)
            out[p, head] = weights @ v[: p + 1] / weights.sum()
    return out.reshape(len(x), -1) @ layer["o"].T


def shares_of(experts: Experts, products: Floats) -> Floats:
    """The shares of one row's products with the router."""
    if experts.router == "sigmoid":
        return 1 / (1 + np.exp(-products))
    shares = np.exp(products)
    return shares / shares.sum()


def chosen_experts(experts: Experts, shares: Floats, bias: Floats | float) -> list[int]:
    """The experts that a row goes to, the largest first."""
    wanted = dict(enumerate(shares + bias))
    size = experts.num // experts.num_groups

    def of_group(group: int) -> float:
        best = sorted((wanted[e] for e in range(group * size, (group + 1) * size)), reverse=True)
        return math.fsum(best[:2]) if experts.router == "sigmoid" else best[0]

    groups = sorted(range(experts.num_groups), key=of_group, reverse=True)[: experts.groups_met]
    met = [e for e in wanted if e // size in groups]
    return sorted(met, key=lambda e: -wanted[e])[: experts.per_token]
