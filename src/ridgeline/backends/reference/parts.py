"""The parts of a decoder in numpy, float32: norms, activations, rotation, latents, experts.

Latent attention (DeepSeek-V2, 2024) is in its absorbed form alone: what would make a head's keys of
a latent is multiplied into its query, and what would make its values into the sum of latents that
it sees. So attention has one key head, whose values are part of its keys, whatever the number of
rows. Shapes are named as in ``reference``; R channels of a latent.

Each is a plain function of arrays. It knows nothing of batches, caches and sequences: see
``reference``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.layer_weights import FeedForwardWeights, LayerWeights, Norm
from ridgeline.model.shape.model import Attention, Experts, Mlp, ModelArch

Floats = NDArray[np.float32]
Weights = Mapping[str, Floats]  # by canonical name: see ``model.shape.latent``


def linear(x: Floats, weight: Floats, bias: Floats | None) -> Floats:
    """Return ``x`` times the transposed weight, plus the bias."""
    out: Floats = x @ weight.T
    return out if bias is None else out + bias


def scaled(x: Floats, scale: float) -> Floats:
    """Return ``x`` times a number; 1 changes nothing."""
    return x if scale == 1.0 else x * np.float32(scale)


def rotate(heads: Floats, cos: Floats, sin: Floats) -> Floats:
    """Rotate the first channels of each head; ``cos`` and ``sin`` are [T, 1, dim / 2]."""
    half = cos.shape[-1]
    a, b, unrotated = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, unrotated], axis=-1)


def rms_norm(x: Floats, weight: Floats | None, eps: float) -> Floats:
    """Divide by the root mean square over the last axis, then scale (Zhang & Sennrich, 2019)."""
    mean_square: Floats = np.einsum("...i,...i->...", x, x) / np.float32(x.shape[-1])
    scale: Floats = np.sqrt(mean_square + np.float32(eps))
    out: Floats = x / scale[..., None]
    return out if weight is None else out * weight


def normalised(x: Floats, norm: Norm, arch: ModelArch) -> Floats:
    """Return rows of the residual stream after a norm of the model's kind.

    A "layer" norm (Ba et al., 2016) subtracts the mean first.
    """
    if arch.norm == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    out = rms_norm(x, norm.weight, arch.norm_eps)
    if norm.bias is not None:
        out += norm.bias
    return out


def normalised_heads(
    heads: Floats, q_norm: Floats, k_norm: Floats | None, mixer: Attention, eps: float
) -> Floats:
    """Return query and key heads, ``[tokens, heads, channels]``, after their own norms.

    The norm is over each head's channels, or over all query heads together and all key heads. A
    layer that reads another's keys has none, nor a norm of them.
    """
    num_q = mixer.num_heads
    if mixer.qk_norm == "head":
        num_k = heads.shape[1] - num_q
        weights = [q_norm] * num_q + ([] if k_norm is None else [k_norm] * num_k)
        return rms_norm(heads, np.stack(weights), eps)
    parts = [(heads[:, :num_q], q_norm)]
    if k_norm is not None:
        parts.append((heads[:, num_q:], k_norm))
    return np.concatenate(
        [rms_norm(part.reshape(len(part), -1), w, eps).reshape(part.shape) for part, w in parts],
        axis=1,
    )


def silu(x: Floats) -> Floats:
    """x * sigmoid(x)."""
    out: Floats = np.exp(-x)
    out += 1
    return x / out


def sigmoid(x: Floats) -> Floats:
    """1 / (1 + exp(-x))."""
    out: Floats = np.reciprocal(np.exp(-x) + np.float32(1))
    return out


def gelu(x: Floats) -> Floats:
    """x times the share of a normal distribution below x (Hendrycks and Gimpel, 2016)."""
    below = np.frompyfunc(lambda value: 0.5 * (1.0 + math.erf(value * 0.5**0.5)), 1, 1)
    out: Floats = x * below(x.astype(np.float64)).astype(np.float32)
    return out


def gelu_tanh(x: Floats) -> Floats:
    """Return GELU by its approximation with tanh (the same paper)."""
    inner = np.float32((2 / math.pi) ** 0.5) * (x + np.float32(0.044715) * x * x * x)
    out: Floats = np.float32(0.5) * x * (1 + np.tanh(inner))
    return out


def relu(x: Floats) -> Floats:
    """x where it is positive, else 0."""
    return np.maximum(x, np.float32(0))


def relu2(x: Floats) -> Floats:
    """Return the square of x where it is positive, else 0 (So et al., "Primer", 2021)."""
    return np.square(relu(x))


ACTIVATIONS: dict[str, Callable[[Floats], Floats]] = {
    "silu": silu, "gelu": gelu, "gelu_tanh": gelu_tanh, "relu": relu, "relu2": relu2,
}  # fmt: skip


def feed_forward(
    x: Floats, weights: FeedForwardWeights, ffn: Mlp | Experts, product: Callable[..., Floats]
) -> Floats:
    """Return what a feed-forward network makes of normed rows.

    ``product`` multiplies: it takes rows, matrices side by side, their bias and their names.
    """
    if isinstance(ffn, Experts):
        return _met_experts(x, weights, ffn, x)
    names = ("gate", "up") if ffn.gated else ("up",)
    inner = product(x, weights.gate_up, weights.gate_up_bias, *names)
    if ffn.gated:
        gate, up = np.split(inner, 2, axis=1)
        inner = gated(ffn.activation, scaled(gate, ffn.gate_scale), up)
    else:
        inner = ACTIVATIONS[ffn.activation](inner)
    out = product(inner, weights.down, weights.down_bias, "down")
    return scaled(out, ffn.out_scale)


def beside_experts(
    x: Floats,
    row: Floats,
    weights: FeedForwardWeights,
    experts: Experts,
    norm: Callable[[Floats, str], Floats],
) -> Floats:
    """Return what experts and the dense network beside them make of the residual stream ``x``.

    ``row`` is what the dense network reads; ``norm`` applies one of the layer's norms by its name.
    """
    assert experts.beside is not None
    assert weights.beside is not None
    dense = feed_forward(row, weights.beside, experts.beside, plain)
    met = _met_experts(norm(x, "experts_norm"), weights, experts, norm(x, "router_norm"))
    return norm(dense, "beside_post_norm") + norm(met, "experts_post_norm")


def with_input(
    x: Floats, own: Floats, weights: LayerWeights, activation: str, norm: Callable[..., Floats]
) -> Floats:
    """Return the residual stream with what a layer makes of its own input, ``[T, size]``."""
    gate = linear(x, weights.inputs["input_gate"], None)
    product = linear(gated(activation, gate, own), weights.inputs["input_proj"], None)
    out: Floats = x + norm(product, "input_post_norm")
    return out


def plain(x: Floats, weight: Floats, bias: Floats | None, *names: str) -> Floats:
    """Return a product of matrices that no adapter changes."""
    return linear(x, weight, bias)


def gated(activation: str, gate: Floats, up: Floats) -> Floats:
    """Return inner values that gates let through: see ``arch.model.Mlp``."""
    if activation != "swiglu_clamped":
        return ACTIVATIONS[activation](gate) * up
    gate = np.minimum(gate, np.float32(7))
    up = np.clip(up, np.float32(-7), np.float32(7))
    out: Floats = gate / (1 + np.exp(gate * np.float32(-1.702))) * (up + 1)
    return out


def routes(x: Floats, weights: FeedForwardWeights, experts: Experts) -> Floats:
    """Return each expert's weight for each row, ``[rows, experts]``; 0 where it is not met."""
    assert weights.router is not None
    logits = linear(x, weights.router, weights.router_bias)
    if experts.router == "sparsemixer":
        return _taken_one_by_one(logits, experts)
    if experts.router == "sigmoid":
        shares = sigmoid(logits)
    else:
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
    wanted = logits if experts.scales_input else shares  # sigmoids of large ones are all 1
    wanted = wanted if weights.choice_bias is None else wanted + weights.choice_bias
    chosen = _largest(_of_best_groups(wanted, experts), experts.per_token)
    chosen_shares = np.zeros_like(shares)
    np.put_along_axis(chosen_shares, chosen, np.take_along_axis(shares, chosen, axis=1), axis=1)
    if experts.normalised:
        chosen_shares /= chosen_shares.sum(axis=1, keepdims=True)
    out: Floats = chosen_shares * np.float32(experts.scale)
    return out


def _taken_one_by_one(logits: Floats, experts: Experts) -> Floats:
    """Return weights as "sparsemixer" has them: see ``arch.model.Experts``."""
    left, out = logits.copy(), np.zeros_like(logits)
    rows = np.arange(len(logits))
    for _ in range(experts.per_token):
        best = left.max(axis=1, keepdims=True)
        distance = (best - logits) / np.maximum(np.abs(logits), best)
        near = np.where(distance > np.float32(2 * experts.jitter), 0, np.exp(left - best))
        taken = left.argmax(axis=1)
        out[rows, taken] = 1 / near.sum(axis=1)
        left[rows, taken] = -np.inf
    return out


def _of_best_groups(wanted: Floats, experts: Experts) -> Floats:
    """Return what experts are chosen by, where groups limit it: minus infinity in other groups."""
    if experts.num_groups == 1:
        return wanted
    by_group = wanted.reshape(len(wanted), experts.num_groups, -1)
    best = np.sort(by_group, axis=2)
    of_groups = best[..., -1] + best[..., -2] if experts.router == "sigmoid" else best[..., -1]
    mask = np.zeros(of_groups.shape, bool)
    np.put_along_axis(mask, _largest(of_groups, experts.groups_met), True, axis=1)
    out: Floats = np.where(mask[..., None], by_group, np.float32(-np.inf)).reshape(wanted.shape)
    return out


def _largest(values: Floats, count: int) -> NDArray[np.intp]:
    """Return where the largest values of each row are; of equal ones the first."""
    return np.argsort(-values, axis=1, kind="stable")[:, :count]


def _met_experts(
    x: Floats, weights: FeedForwardWeights, experts: Experts, routed: Floats
) -> Floats:
    """Return the weighted sum of what each row's experts make of it; ``routed`` chooses them."""
    shares, out = routes(routed, weights, experts), np.zeros_like(x)
    if weights.expert_scales is not None:
        shares *= weights.expert_scales
    parts = 2 if experts.gated else 1
    inner = np.split(weights.gate_up, parts)
    biases: list[Floats | None] = [None] * parts
    if weights.gate_up_bias is not None:
        biases = list(np.split(weights.gate_up_bias, parts))

    def of_expert(stack: Floats | None, e: int, size: int) -> Any:
        return None if stack is None else stack[e * size : (e + 1) * size]

    for e in range(experts.num):
        rows = np.flatnonzero(shares[:, e])
        if len(rows):
            size, hidden, weight = experts.size, x.shape[1], shares[rows, e, None]
            read = x[rows] * weight if experts.scales_input else x[rows]
            products = [
                linear(read, of_expert(matrix, e, size), of_expert(bias, e, size))
                for matrix, bias in zip(inner, biases, strict=True)
            ]
            if experts.gated:
                activations = gated(experts.activation, *products)
            else:
                activations = ACTIVATIONS[experts.activation](products[0])
            down, bias = (of_expert(a, e, hidden) for a in (weights.down, weights.down_bias))
            met = linear(activations, down, bias)
            out[rows] += met if experts.scales_input else weight * met
    if weights.shared is not None and experts.shared is not None:
        met = feed_forward(x, weights.shared, experts.shared, plain)
        out += met if weights.shared_scale is None else sigmoid(x @ weights.shared_scale.T) * met
    return out


def softcapped(values: Floats, cap: float) -> Floats:
    """Return ``cap * tanh(value / cap)``; a cap of 0 changes nothing."""
    if not cap:
        return values
    out: Floats = np.float32(cap) * np.tanh(values / np.float32(cap))
    return out


def softmax(scores: Floats, sinks: Floats | None) -> None:
    """Turn scores into shares over the last axis, in place; a sink takes a share that is lost."""
    highest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        highest = np.maximum(highest, sinks)
    scores -= highest
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += np.exp(sinks - highest)
    scores /= total


def queries_and_key(
    x: Floats, weights: Weights, mixer: Attention, angles: tuple[Floats, Floats]
) -> tuple[Floats, Floats]:
    """Return what turns, then what does not, of absorbed queries [T, H, D] and of keys [T, 1, D].

    ``angles`` are cosines and sines, ``[T, 1, pairs]``.
    """
    assert mixer.latent is not None
    turning, heads, eps = mixer.rope_dim, mixer.num_heads, mixer.latent.norm_eps
    if "q_a" in weights:
        compressed = rms_norm(linear(x, weights["q_a"], None), weights["q_a_norm"], eps)
        q = linear(compressed, weights["q_b"], None)
    else:
        q = linear(x, weights["q"], None)
    q = rotate(q.reshape(len(x), heads, -1), *angles)
    k_b = weights["k_b"].reshape(heads, -1, weights["k_b"].shape[1])
    absorbed = (q[..., turning:].swapaxes(0, 1) @ k_b).swapaxes(0, 1)
    key = rotate(linear(x, weights["kv_a"], None)[:, None], *angles)
    latent = rms_norm(key[..., turning:], weights["kv_a_norm"], eps)
    return (
        np.concatenate([q[..., :turning], absorbed], axis=-1),
        np.concatenate([key[..., :turning], latent], axis=-1),
    )


def expanded(latents: Floats, weights: Weights) -> Floats:
    """Return what latent attention adds, of the latents that each head saw, ``[T, H, R]``."""
    num_tokens, heads, rank = latents.shape
    v_b = weights["v_b"].reshape(heads, -1, rank)
    values = (latents.swapaxes(0, 1) @ v_b.swapaxes(1, 2)).swapaxes(0, 1)
    return linear(np.ascontiguousarray(values).reshape(num_tokens, -1), weights["o"], None)
