"""Where the channels of padded heads come from."""

from __future__ import annotations

import numpy as np

from ridgeline.backends.cpu.layout.latent import latent_places
from ridgeline.backends.cpu.layout.pack import Index
from ridgeline.backends.cpu.layout.shapes import Heads, Sizes
from ridgeline.model.shape.model import Layer, ModelArch


def head_permutation(
    arch: ModelArch, sizes: Sizes, layer: int
) -> tuple[dict[str, Index], dict[str, Index]]:
    """Return where outputs of a layer's q, k and v come from, and inputs of o; -1 is padding.

    Those of latent attention have other names.
    """
    mixer, latent = arch.layers[layer].attention, sizes.layers[layer].heads.latent
    if mixer is not None and latent is not None:
        return latent_places(mixer, latent)
    heads, pairs = sizes.layers[layer].heads, rotating_pairs(arch, arch.layers[layer])
    rope_order, plain = _channels(heads, pairs)
    counts = heads.num_heads, heads.num_kv_heads
    q_rows, k_rows = (_heads(rope_order, count, heads) for count in counts)
    values = rope_order if heads.attention.v_is_k else plain
    o_columns, v_rows = (_heads(values, count, heads) for count in counts)
    return {"q": q_rows, "k": k_rows, "v": v_rows}, {"o": o_columns}


def rotating_pairs(arch: ModelArch, layer: Layer) -> int:
    """Pairs of channels that rotate; in a layer without rope, those of layers with such heads."""
    attention = layer.attention
    if attention is None:
        return 0
    if attention.rope:
        return attention.rope.dim // 2
    alike = [one.rope for one in arch.attentions if one.head_dim == attention.head_dim]
    return max((rope.dim // 2 for rope in alike if rope), default=0)


def _channels(heads: Heads, pairs: int) -> tuple[Index, Index]:
    """Return where a padded head's channels come from, -1 for padding: of q and k, and of v."""
    num_channels = heads.num_channels
    rope_order = np.full(heads.size, -1)
    rope_order[:pairs] = np.arange(pairs)
    rope_order[heads.half : heads.half + pairs] = np.arange(pairs, 2 * pairs)
    num_unrotated = num_channels - 2 * pairs
    rope_order[2 * heads.half : 2 * heads.half + num_unrotated] = np.arange(2 * pairs, num_channels)
    plain = np.full(heads.size, -1)
    plain[:num_channels] = np.arange(num_channels)
    return rope_order, plain


def _heads(channels: Index, count: int, heads: Heads) -> Index:
    first = np.arange(count)[:, None] * heads.num_channels
    return np.where(channels < 0, -1, channels + first).reshape(-1)
