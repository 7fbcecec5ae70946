"""Latent attention (DeepSeek-V2, 2024) in numpy, float32, in its absorbed form alone.

What would make a head's keys of a latent is multiplied into its query, and what would make its
values into the sum of latents that it sees. So attention has one key head, whose values are part of
its keys, whatever the number of rows. Shapes are named as in ``reference``; R channels of a latent.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.reference.parts import linear, rms_norm, rotate
from ridgeline.model.shape.model import Attention

Floats = NDArray[np.float32]


Weights = Mapping[str, Floats]  # by canonical name: see ``arch.latent``


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


def expanded(seen: Floats, weights: Weights) -> Floats:
    """Return what latent attention adds, of the latents that each head saw, ``[T, H, R]``."""
    num_tokens, heads, rank = seen.shape
    v_b = weights["v_b"].reshape(heads, -1, rank)
    values = (seen.swapaxes(0, 1) @ v_b.swapaxes(1, 2)).swapaxes(0, 1)
    return linear(np.ascontiguousarray(values).reshape(num_tokens, -1), weights["o"], None)
