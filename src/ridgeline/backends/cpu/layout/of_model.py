"""The padded widths that a model's kernels are compiled for, from its structural facts."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.backends.cpu.layout.pack import padded
from ridgeline.backends.cpu.layout.shapes import Experts, FeedForward, Heads, LayerKind, Sizes
from ridgeline.physics import arch as arch_parts
from ridgeline.physics.arch import Layer, ModelArch

_LANES = 16
# What products take, of dtypes that are not blocks of 32 weights.
_ACTIVATIONS = {"f32": "floats", "bf16": "bf16", "int8-row": "rows"}


def model_sizes(arch: ModelArch, dtype: str, cache: str, max_rank: int = 0) -> Sizes:
    """Return the padded widths of a model; ``max_rank`` is that of adapters.

    Raises ValueError for layers that have no code.
    """
    _check_layers(arch)
    of_layers = [_kind(arch, layer, cache) for layer in arch.layers]
    together = min(kind.heads.tile for kind in of_layers)
    query_bytes = max(kind.heads.query_bytes for kind in of_layers)
    for i, kind in enumerate(of_layers):
        heads = replace(kind.heads, most_together=together, least_query_bytes=query_bytes)
        of_layers[i] = replace(kind, heads=heads)
    kinds = tuple(dict.fromkeys(of_layers))
    return Sizes(
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
        max_rank=max_rank,
    )


def _kind(arch: ModelArch, layer: Layer, cache: str) -> LayerKind:
    """Return what a layer's code depends on: all but its window and the angles of its rope."""
    ffn, experts = layer.ffn, None
    if isinstance(ffn, arch_parts.Experts):
        experts = Experts(ffn.num, ffn.per_token, ffn.normalised, ffn.scale, ffn.bias)
    return LayerKind(
        hidden=padded(arch.hidden_size),
        heads=_heads(arch, layer, cache),
        ffn=FeedForward(padded(ffn.size), ffn.activation, ffn.gated, ffn.bias, experts),
        o_bias=layer.known_attention.o_bias,
        norm_names=layer.norm_names,
        is_parallel=layer.is_parallel,
        norms_replace=layer.norms == "within",
    )


def _heads(arch: ModelArch, layer: Layer, cache: str) -> Heads:
    """Return the padded shape of a layer's heads, and the cache's format."""
    attention, pairs = layer.known_attention, rotating_pairs(arch, layer)
    return Heads(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        half=_to_lanes(pairs),
        rest=_to_lanes(attention.head_dim - 2 * pairs),
        num_channels=attention.head_dim,
        cache=cache,
        qkv_bias=attention.qkv_bias,
        qk_norm=attention.qk_norm,
        eps=arch.norm_eps,
        scale=attention.scale,
        softcap=attention.softcap,
        sinks=attention.sinks,
        causal=attention.causal,
    )


def _check_layers(arch: ModelArch) -> None:
    for i, layer in enumerate(arch.layers):
        if layer.recurrent is not None:
            raise ValueError(f"layer {i} keeps a state: use --backend reference")
        if layer.known_attention.gated:
            raise ValueError(f"the attention of layer {i} is gated: use --backend reference")
        if isinstance(layer.ffn, arch_parts.Experts) and layer.ffn.shared is not None:
            raise ValueError(f"layer {i} has a shared expert: use --backend reference")
        if what := _of_gemma_4(layer):
            raise ValueError(f"layer {i} has {what}: use --backend reference")
        attention, ffn = layer.known_attention, layer.ffn
        if "attn_post_norm" in layer.norm_names and (attention.o_bias or ffn.bias):
            raise ValueError("a bias before a norm behind: use --backend reference")
    ropes = {(mixer.rope, mixer.head_dim) for mixer in arch.attentions}
    if any(
        mixer.qkv_bias and (len(ropes) > 1 or mixer.qk_norm == "width") for mixer in arch.attentions
    ):
        raise ValueError("keys have a bias and layers differ in rope: use --backend reference")


def _of_gemma_4(layer: Layer) -> str:
    """Return what a layer has that no kernel computes, in words."""
    mixer, ffn = layer.known_attention, layer.ffn
    has = {
        "no keys and values of its own": mixer.kv_of is not None,
        "values that are normed": mixer.v_norm,
        "no matrix of values": mixer.v_is_k,
        "an input of its own": layer.input_size,
        "a scale": layer.out_scale,
        "scales of experts": isinstance(ffn, arch_parts.Experts) and ffn.own_scales,
        "a dense network beside experts": isinstance(ffn, arch_parts.Experts) and ffn.beside,
    }
    return next((what for what, is_there in has.items() if is_there), "")


def rotating_pairs(arch: ModelArch, layer: Layer) -> int:
    """Pairs of channels that rotate; in a layer without rope, those of layers with such heads."""
    attention = layer.known_attention
    if attention.rope:
        return attention.rope.dim // 2
    alike = [one.rope for one in arch.attentions if one.head_dim == attention.head_dim]
    return max((rope.dim // 2 for rope in alike if rope), default=0)


def _to_lanes(count: int) -> int:
    return -(-count // _LANES) * _LANES
