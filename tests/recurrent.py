"""Recurrent mixers the plain way: float64, one token, head and channel after another."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ridgeline.model.shape.recurrent import Conv, Delta, Recurrent, Ssm

Doubles = NDArray[np.float64]
MIXERS: dict[str, Recurrent] = {
    "short convolution": Conv(kernel=3),
    "short convolution with biases": Conv(kernel=4, bias=True),
    "convolution of one token": Conv(kernel=1),
    "delta rule": Delta(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6, kernel=4),
    "state space": Ssm(num_heads=6, head_dim=4, state_dim=5, num_groups=2, kernel=4),
    "state space, normed first": Ssm(
        num_heads=4,
        head_dim=6,
        state_dim=3,
        num_groups=2,
        kernel=3,
        norm_first=True,
        in_scale=0.8,
        out_scale=1.5,
        part_scales=(0.7, 1.2, 0.9, 1.1, 0.6),
    ),
    "state space, plain": Ssm(3, 4, 5, 1, 2, conv_bias=False, bias=True, gated_norm=False),
}


def recurred(mixer: Recurrent, w: dict[str, Doubles], x: Doubles, eps: float) -> Doubles:
    """What a mixer adds to rows of one text, ``[tokens, hidden]``."""
    if isinstance(mixer, Conv):
        b, c, u = np.split(x @ w["in"].T + w.get("in_bias", 0.0), 3, axis=1)
        return (c * _convolved(b * u, w)) @ w["out"].T + w.get("out_bias", 0.0)
    if isinstance(mixer, Delta):
        return _delta(mixer, w, x, eps) @ w["out"].T
    made = _ssm(mixer, w, x * mixer.in_scale, eps) @ w["out"].T + w.get("out_bias", 0.0)
    return made * mixer.out_scale


def _convolved(rows: Doubles, w: dict[str, Doubles]) -> Doubles:
    kernel = w["conv"]
    out = np.zeros_like(rows)
    for t in range(len(rows)):
        for back in range(min(t + 1, kernel.shape[1])):
            out[t] += kernel[:, -1 - back] * rows[t - back]
    return out + w.get("conv_bias", 0.0)


def _silu(x: Doubles) -> Doubles:
    return x / (1 + np.exp(-x))


def _delta(mixer: Delta, w: dict[str, Doubles], x: Doubles, eps: float) -> Doubles:
    qkv = _silu(_convolved(x @ w["qkv"].T, w))
    strength = 1 / (1 + np.exp(-(x @ w["beta"].T)))
    pace = np.log1p(np.exp(x @ w["decay"].T + w["dt_bias"]))
    gate = _silu(x @ w["z"].T).reshape(len(x), mixer.num_value_heads, -1)
    out = np.zeros((len(x), mixer.num_value_heads, mixer.value_dim))
    for head in range(mixer.num_value_heads):
        key_head = head * mixer.num_key_heads // mixer.num_value_heads
        key_head = head % mixer.num_key_heads if mixer.by_turns else key_head
        memory = np.zeros((mixer.value_dim, mixer.key_dim))
        for t in range(len(x)):
            q, k = (
                qkv[t, first + key_head * mixer.key_dim :][: mixer.key_dim]
                for first in (0, mixer.key_size)
            )
            v = qkv[t, 2 * mixer.key_size + head * mixer.value_dim :][: mixer.value_dim]
            q, k = (part / np.sqrt(part @ part + 1e-6) for part in (q, k))
            memory *= np.exp(-np.exp(w["a_log"][head]) * pace[t, head])
            memory += strength[t, head] * np.outer(v - memory @ k, k)
            out[t, head] = memory @ q / np.sqrt(mixer.key_dim)
    out /= np.sqrt((out**2).mean(axis=-1, keepdims=True) + eps)
    return (out * w["gated_scale"] * gate).reshape(len(x), -1)


def _ssm(mixer: Ssm, w: dict[str, Doubles], x: Doubles, eps: float) -> Doubles:
    projected = x @ w["in"].T + w.get("in_bias", 0.0)
    ends = np.cumsum([mixer.inner_size] * 2 + [mixer.num_groups * mixer.state_dim] * 2)
    parts = zip(np.split(projected, ends, axis=1), mixer.part_scales, strict=True)
    projected = np.concatenate([part * scale for part, scale in parts], axis=1)
    gate = _silu(projected[:, : mixer.inner_size])
    pace = np.log1p(np.exp(projected[:, -mixer.num_heads :] + w["dt_bias"]))
    rows = _silu(_convolved(projected[:, mixer.inner_size : -mixer.num_heads], w))
    out = np.zeros((len(x), mixer.num_heads, mixer.head_dim))
    shared = mixer.num_groups * mixer.state_dim
    for head in range(mixer.num_heads):
        group = head * mixer.num_groups // mixer.num_heads
        memory = np.zeros((mixer.head_dim, mixer.state_dim))
        for t in range(len(x)):
            u = rows[t, head * mixer.head_dim :][: mixer.head_dim]
            b, c = (
                rows[t, first + group * mixer.state_dim :][: mixer.state_dim]
                for first in (mixer.inner_size, mixer.inner_size + shared)
            )
            memory *= np.exp(-np.exp(w["a_log"][head]) * pace[t, head])
            memory += pace[t, head] * np.outer(u, b)
            out[t, head] = memory @ c + w["skip"][head] * u
    made = out.reshape(len(x), -1) * (1 if mixer.norm_first else gate)
    if mixer.gated_norm:
        groups = made.reshape(len(x), mixer.num_groups, -1)
        groups = groups / np.sqrt((groups**2).mean(axis=-1, keepdims=True) + eps)
        made = groups.reshape(len(x), -1) * w["gated_scale"]
    return made * gate if mixer.norm_first else made
