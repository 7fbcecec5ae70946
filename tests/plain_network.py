"""Norms, activations and feed-forward networks the plain way, in float64: see ``tests.tiny``."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ridgeline.model.shape.model import Experts, ModelArch
from tests.latent import chosen_experts, shares_of


def norm_of(
    x: NDArray[np.float64], weight: NDArray[np.float64], arch: ModelArch
) -> NDArray[np.float64]:
    """Rows after an RMS norm."""
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + arch.norm_eps) * weight


def act(name: str, x: NDArray[np.float64]) -> NDArray[np.float64]:
    """An activation, by its name in ``arch.model.Mlp``."""
    if name in ("relu", "relu2"):
        return np.where(x > 0, x, 0) ** (2 if name == "relu2" else 1)
    if name == "silu":
        return x / (1 + np.exp(-x))
    if name == "gelu":
        return x * np.array([[0.5 + 0.5 * math.erf(v / 2**0.5) for v in row] for row in x])
    return x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def network(
    arch: ModelArch,
    layer: dict[str, NDArray[np.float64]],
    x: NDArray[np.float64],
    i: int,
    normed: Callable[[str], NDArray[np.float64]],
) -> NDArray[np.float64]:
    """What a layer's network makes of rows; ``normed`` applies one of its norms by name."""

    def activated(x: NDArray[np.float64]) -> NDArray[np.float64]:
        return act(name, x)

    def gated(gate: NDArray[np.float64], up: NDArray[np.float64]) -> NDArray[np.float64]:
        if name != "swiglu_clamped":
            return activated(gate) * up
        gate = np.where(gate > 7, 7, gate)
        return gate / (1 + np.exp(-1.702 * gate)) * (np.clip(up, -7, 7) + 1)

    ffn = arch.layers[i].ffn
    name = ffn.activation
    if isinstance(ffn, Experts):
        out, routed = np.zeros_like(x), x
        if ffn.beside is not None:
            inner = activated(x @ layer["beside_gate"].T) * (x @ layer["beside_up"].T)
            beside = inner @ layer["beside_down"].T
            x, routed = normed("experts_norm"), normed("router_norm")
        for row, y, z in zip(out, x, routed, strict=True):
            if ffn.router == "sparsemixer":
                row += taken_one_by_one(ffn, layer, y, layer["router"] @ z)
                continue
            shares = shares_of(ffn, layer["router"] @ z + layer.get("router_bias", 0.0))
            chosen = chosen_experts(ffn, shares, layer.get("choice_bias", 0.0))
            total = shares[chosen].sum() if ffn.normalised else 1.0
            for e in chosen:
                inner, outer = (slice(e * n, (e + 1) * n) for n in (ffn.size, len(y)))
                weight = shares[e] / total * (layer["expert_scales"][e] if ffn.own_scales else 1.0)
                read, weight = (weight * y, 1.0) if ffn.scales_input else (y, weight)
                products = [
                    layer[n][inner] @ read + (layer[f"{n}_bias"][inner] if ffn.bias else 0)
                    for n in (("gate", "up") if ffn.gated else ("up",))
                ]
                made = gated(*products) if ffn.gated else activated(products[0])
                made = layer["down"][outer] @ made
                made = made + (layer["down_bias"][outer] if ffn.bias else 0)
                row += ffn.scale * weight * made
        if ffn.shared is not None:
            inner = x @ layer["shared_up"].T
            gates = x @ layer["shared_gate"].T if ffn.shared.gated else inner
            inner = activated(gates) * (inner if ffn.shared.gated else 1.0)
            gate = np.exp(-(x @ layer["shared_scale"].T)) if ffn.shared_gated else 0.0
            out += (inner @ layer["shared_down"].T) / (1 + gate)
        if ffn.beside is not None:
            out = norm_of(out, layer["experts_post_norm"], arch)
            out = out + norm_of(beside, layer["beside_post_norm"], arch)
        return out
    up = x @ layer["up"].T + layer.get("up_bias", 0.0)
    inner = activated(up)
    if ffn.gated:
        inner = up * activated(ffn.gate_scale * (x @ layer["gate"].T + layer.get("gate_bias", 0.0)))
    return ffn.out_scale * (inner @ layer["down"].T + layer.get("down_bias", 0.0))


def taken_one_by_one(
    ffn: Experts,
    layer: dict[str, NDArray[np.float64]],
    row: NDArray[np.float64],
    products: NDArray[np.float64],
) -> NDArray[np.float64]:
    """What the two experts of a row make of it, each weighed among those that are near it."""
    left, out = list(range(ffn.num)), np.zeros_like(row)
    for _ in range(ffn.per_token):
        best = max(left, key=lambda e: products[e])
        top = products[best]
        near = [e for e in left if top - products[e] <= 2 * ffn.jitter * max(abs(products[e]), top)]
        inner, outer = (slice(best * n, (best + 1) * n) for n in (ffn.size, len(row)))
        made = act(ffn.activation, layer["gate"][inner] @ row) * (layer["up"][inner] @ row)
        out += layer["down"][outer] @ made / np.exp(products[near] - top).sum()
        left.remove(best)
    return out
