"""The padded widths that a model's kernels are compiled for, from its structural facts.

And what follows from them: where the channels of padded heads come from, and where keys and values
lie in a block of the paged cache. All blocks are as large as the largest group of layers needs, so
any group may have any block. Of one group each is a run of records, one for a layer and key/value
head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.cpu.layout.arguments import LAYER
from ridgeline.backends.cpu.layout.feed_forward import FeedForward
from ridgeline.backends.cpu.layout.formats import TILE
from ridgeline.backends.cpu.layout.latent import latent_heads, latent_places, num_groups
from ridgeline.backends.cpu.layout.pack import LANES, Index, padded, to_lanes
from ridgeline.backends.cpu.layout.recurrent import Recurrence, recurrence
from ridgeline.backends.cpu.layout.shapes import (
    TOKENS,
    AttentionLayout,
    Inputs,
    KernelConfig,
    LayerVariant,
)
from ridgeline.model.shape.cache_groups import CacheGroup, places, spans
from ridgeline.model.shape.model import Attention, Experts, Layer, Mlp, ModelArch
from ridgeline.model.shape.recurrent import Delta, Ssm

# What products take, of dtypes that are not blocks of 32 weights.
_ACTIVATIONS = {"f32": "floats", "bf16": "bf16", "int8-row": "rows"}


def model_sizes(
    arch: ModelArch,
    dtype: str,
    kv_cache_dtype: str,
    max_lora_rank: int = 0,
    *,
    has_tiles: bool = False,
) -> KernelConfig:
    """Return the padded widths of a model.

    ``max_lora_rank`` is that of adapters; ``has_tiles`` says whether there are matrix tiles.

    Raises ValueError for layers that have no code.
    """
    _check_layers(arch)
    of_layers = [_kind(arch, layer, kv_cache_dtype, dtype) for layer in arch.layers]
    by_tiles = has_tiles and all(
        kind.heads.suits_tiles for kind in of_layers if kind.heads.num_heads
    )
    if by_tiles:
        of_layers = [
            replace(kind, heads=replace(kind.heads, by_tiles=True, most_together=TOKENS))
            for kind in of_layers
        ]
    together = min(kind.heads.tile for kind in of_layers)
    query_bytes = max(kind.heads.query_bytes for kind in of_layers)
    for i, kind in enumerate(of_layers):
        heads = replace(kind.heads, most_together=together, least_query_bytes=query_bytes)
        of_layers[i] = replace(kind, heads=heads)
    kinds = tuple(dict.fromkeys(of_layers))
    inputs = None
    if arch.input_size:
        inputs = Inputs(padded(arch.input_size), arch.input_size, arch.input_scales)
    return KernelConfig(
        kinds=kinds,
        kind_of=tuple(kinds.index(kind) for kind in of_layers),
        num_channels=arch.hidden_size,
        hidden=padded(arch.hidden_size),
        activations=_ACTIVATIONS.get(dtype, "groups"),
        vocab_size=arch.vocab_size,
        norm=arch.norm,
        norm_bias=arch.norm_bias,
        residual_scale=arch.residual_scale,
        head_bias=arch.head_bias,
        logit_softcap=arch.logit_softcap,
        inputs=inputs,
        max_lora_rank=max_lora_rank,
        has_tiles=has_tiles,
    )


def _kind(arch: ModelArch, layer: Layer, kv_cache_dtype: str, dtype: str) -> LayerVariant:
    """Return what a layer's code depends on: all but its window and the angles of its rope."""
    of_input = None
    if layer.input_size:
        size = padded(layer.input_size)
        of_input = FeedForward(Mlp(size, layer.ffn.activation), given=True)
    return LayerVariant(
        hidden=padded(arch.hidden_size),
        heads=_heads(arch, layer, kv_cache_dtype, dtype),
        ffn=_feed_forward(layer.ffn),
        o_bias=_has_bias(layer),
        norm_names=layer.norm_names,
        is_parallel=layer.is_parallel,
        norms_replace=layer.norms == "within",
        input=of_input,
        out_scale=layer.out_scale,
        recurrence=_recurrence(arch, layer),
    )


def _recurrence(arch: ModelArch, layer: Layer) -> Recurrence | None:
    """Return the shape of a mixer that keeps a state; the row that it reads is attention's."""
    mixer = layer.recurrent
    if layer.attention is not None and isinstance(mixer, Ssm):
        mixer = replace(mixer, in_scale=mixer.in_scale / layer.attention.in_scale)
    return None if mixer is None else recurrence(mixer, arch.hidden_size)


def _has_bias(layer: Layer) -> bool:
    """Return whether what the mixer adds to the residual stream has a bias."""
    if isinstance(layer.mixer, Attention):
        return layer.mixer.o_bias
    return not isinstance(layer.mixer, Delta) and layer.mixer.bias


def _feed_forward(ffn: Mlp | Experts) -> FeedForward:
    if isinstance(ffn, Experts):
        shared, beside = (
            one and replace(one, size=padded(one.size)) for one in (ffn.shared, ffn.beside)
        )
        ffn = replace(ffn, shared=shared, beside=beside)
    return FeedForward(replace(ffn, size=padded(ffn.size)))


def _heads(arch: ModelArch, layer: Layer, kv_cache_dtype: str, dtype: str) -> AttentionLayout:
    """Return the padded shape of a layer's heads, and the cache's format."""
    attention, pairs = layer.attention, rotating_pairs(arch, layer)
    if attention is None:
        nothing = Attention(num_heads=0, num_kv_heads=0, head_dim=0, rope=None)
        return AttentionLayout(
            nothing,
            0,
            half=0,
            rest=0,
            num_channels=0,
            kv_cache_dtype=kv_cache_dtype,
            eps=arch.norm_eps,
        )
    latent = latent_heads(attention, dtype)
    half, rest = to_lanes(pairs), to_lanes(attention.key_dim - 2 * pairs)
    if not latent and attention.num_kv_heads * (2 * half + rest) % TILE:
        rest += LANES  # keys end with a tile, since values begin with one
    return AttentionLayout(
        attention=_shared_code(attention),
        num_kv_heads=num_groups(attention.num_heads) if latent else attention.num_kv_heads,
        half=half,
        rest=rest,
        num_channels=attention.key_dim,
        kv_cache_dtype=kv_cache_dtype,
        eps=arch.norm_eps,
        grows=bool(attention.rope and attention.rope.query_growth),
        latent=latent,
    )


def _shared_code(attention: Attention) -> Attention:
    """Return attention without what may differ between layers of one kind.

    Windows, tables of rope and whose keys are read are words of a layer; a scale of what is read
    stands in the norm before.
    """
    kv_of = None if attention.kv_of is None else 0
    return replace(attention, window=None, rope=None, kv_of=kv_of, in_scale=1.0)


def _check_layers(arch: ModelArch) -> None:
    for i, layer in enumerate(arch.layers):
        if feature := _has_no_code(arch, layer):
            raise ValueError(f"layer {i} has {feature}: use --backend reference")
    if len({layer.recurrent for layer in arch.layers if layer.recurrent}) > 1:
        raise ValueError("layers keep states of different shapes: use --backend reference")
    ropes = {(mixer.rope, mixer.head_dim) for mixer in arch.attentions}
    if any(
        mixer.qkv_bias and (len(ropes) > 1 or mixer.qk_norm == "width") for mixer in arch.attentions
    ):
        raise ValueError("keys have a bias and layers differ in rope: use --backend reference")


def _has_no_code(arch: ModelArch, layer: Layer) -> str:
    """Return what a layer has that no kernel computes, in words; "" if there is nothing."""
    mixer, ffn, keeps = layer.attention, layer.ffn, layer.recurrent
    if keeps is not None and (layer.norms != "before" or arch.norm != "rms"):
        return "a state and norms elsewhere than before"
    if mixer is None:
        return ""
    experts = ffn if isinstance(ffn, Experts) else None
    dense = [one for one in (experts.shared, experts.beside) if one] if experts else []
    has_post_norm = "attn_post_norm" in layer.norm_names
    reads = None if mixer.kv_of is None else arch.layers[mixer.kv_of]
    is_plain = layer.norms == "before" and arch.norm == "rms" and not arch.norm_bias
    has = {
        "a weight of what experts read, but none that all tokens meet": experts
        and experts.scales_input
        and (experts.shared is None or experts.shared_gated),
        "biases of experts and of their choice": experts and experts.bias and experts.choice_bias,
        "another mixer than a state space beside attention": keeps and not isinstance(keeps, Ssm),
        "biases beside attention": isinstance(keeps, Ssm) and keeps.bias,
        "gated attention beside a state": keeps and mixer.gated,
        "a scale of what attention reads": mixer.in_scale != 1.0 and not is_plain,
        "a bias before a scale": (mixer.o_bias and mixer.out_scale != 1.0)
        or (isinstance(ffn, Mlp) and ffn.bias and ffn.out_scale != 1.0),
        "a bias before a norm behind": has_post_norm and (mixer.o_bias or ffn.bias),
        "slopes and sight of what follows": mixer.slopes and not mixer.causal,
        "biases by distance, and heads that share keys": mixer.bias_buckets
        and mixer.num_heads != mixer.num_kv_heads,
        "values that are keys with a bias": mixer.v_is_k and mixer.qkv_bias,
        "a norm over all heads but no keys": reads and mixer.qk_norm == "width",
        "another rope than the keys it reads": reads
        and rotating_pairs(arch, layer) != rotating_pairs(arch, reads),
        "dense networks with biases beside experts": any(one.bias for one in dense),
        "two dense networks beside experts": len(dense) > 1,
        "an input of its own and a scale of what is added": layer.input_size
        and arch.residual_scale != 1.0,
    }
    return next((feature for feature, is_there in has.items() if is_there), "")


def head_permutation(
    arch: ModelArch, sizes: KernelConfig, layer: int
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
    q_rows, k_rows = (_places_of_heads(rope_order, count, heads) for count in counts)
    values = rope_order if heads.attention.v_is_k else plain
    o_columns, v_rows = (_places_of_heads(values, count, heads) for count in counts)
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


def _channels(heads: AttentionLayout, pairs: int) -> tuple[Index, Index]:
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


def _places_of_heads(channels: Index, count: int, heads: AttentionLayout) -> Index:
    first = np.arange(count)[:, None] * heads.num_channels
    return np.where(channels < 0, -1, channels + first).reshape(-1)


def part_bytes(sizes: KernelConfig, groups: Sequence[CacheGroup]) -> int:
    """Return the bytes of 16 tokens in a block."""
    return max(sum(sizes.layers[i].cache_bytes for i in group.layers) for group in groups)


def put_places(
    layers: NDArray[np.int64], arch: ModelArch, sizes: KernelConfig, groups: tuple[CacheGroup, ...]
) -> None:
    """Say in the words of each layer which group it is of, and where in a block it begins.

    A layer that reads another's keys and values has that one's place.
    """
    words = {name: i for i, name in enumerate(LAYER)}
    layers[:, words["group"]] = places(groups, arch)
    part_of = {i: sizes.layers[i].cache_bytes for group in groups for i in group.layers}
    for i, (begin, _) in spans(groups, part_of).items():
        layers[i, words["cache_at"]] = begin
    for i, layer in enumerate(arch.layers):
        if layer.attention is not None and layer.attention.kv_of is not None:
            layers[i, words["cache_at"]] = layers[layer.attention.kv_of, words["cache_at"]]


def has_unlike_records(sizes: KernelConfig, groups: Sequence[CacheGroup]) -> bool:
    """Return whether a block may pass between groups whose records differ.

    What is left of one's bytes need not be finite numbers in the other's places.
    """
    owners = [sizes.layers[i].heads for group in groups for i in group.layers]
    return len(groups) > 1 and len({(heads.size, heads.record_bytes) for heads in owners}) > 1
