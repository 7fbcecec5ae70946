"""The padded widths that a model's kernels are compiled for, from its structural facts."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.backends.cpu.layout.pack import padded
from ridgeline.backends.cpu.layout.shapes import Block, Experts, Heads, Sizes
from ridgeline.physics import arch as arch_parts
from ridgeline.physics.arch import ModelArch

_LANES = 16
# What products take, of dtypes that are not blocks of 32 weights.
_ACTIVATIONS = {"f32": "floats", "bf16": "bf16", "int8-row": "rows"}


def head_shape(arch: ModelArch, cache: str) -> Heads:
    """Return the padded shape of a model's heads, and the cache's format."""
    attention = arch.layers[0].known_attention
    pairs = rotating_pairs(arch)
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


def model_sizes(arch: ModelArch, dtype: str, cache: str, max_rank: int = 0) -> Sizes:
    """Return the padded widths of a model; ``max_rank`` is that of adapters.

    Raises ValueError for layers that differ in more than their window and rope.
    """
    _check_layers(arch)
    first, experts = arch.layers[-1], None
    if isinstance(first.ffn, arch_parts.Experts):
        ffn = first.ffn
        experts = Experts(ffn.num, ffn.per_token, ffn.normalised, ffn.scale, ffn.bias)
    return Sizes(
        num_layers=arch.num_layers,
        num_channels=arch.hidden_size,
        hidden=padded(arch.hidden_size),
        intermediate=padded(arch.layers[0].ffn.size),
        heads=head_shape(arch, cache),
        activations=_ACTIVATIONS.get(dtype, "groups"),
        o_bias=arch.layers[0].known_attention.o_bias,
        vocab_size=arch.vocab_size,
        block=Block(
            norm_names=first.norm_names,
            norm=arch.norm,
            norm_bias=arch.norm_bias,
            is_parallel=first.is_parallel,
            norms_replace=first.norms == "within",
            first_is_bare=arch.layers[0].norms == "before mlp",
            residual_scale=arch.residual_scale,
            activation=first.ffn.activation,
            gated=first.ffn.gated,
            mlp_bias=first.ffn.bias,
        ),
        experts=experts,
        head_bias=arch.head_bias,
        logit_softcap=arch.logit_softcap,
        max_rank=max_rank,
    )


def _check_layers(arch: ModelArch) -> None:
    first = arch.layers[-1]
    for i, layer in enumerate(arch.layers):
        if layer.recurrent is not None:
            raise ValueError(f"layer {i} keeps a state: use --backend reference")
        if layer.known_attention.gated:
            raise ValueError(f"the attention of layer {i} is gated: use --backend reference")
        if isinstance(layer.ffn, arch_parts.Experts) and layer.ffn.shared is not None:
            raise ValueError(f"layer {i} has a shared expert: use --backend reference")
        if what := _of_gemma_4(layer):
            raise ValueError(f"layer {i} has {what}: use --backend reference")
        mixer = layer.mixer
        if isinstance(first.mixer, arch_parts.Attention) and isinstance(
            mixer, arch_parts.Attention
        ):
            mixer = replace(mixer, window=first.mixer.window, rope=first.mixer.rope)
        norms = first.norms if layer.norms == "before mlp" and i == 0 else layer.norms
        if replace(layer, mixer=mixer, norms=norms) != first:
            raise ValueError(f"layer {i} has another shape than the last: use --backend reference")
    ropes = {layer.known_attention.rope for layer in arch.layers}
    has_post_norm = "attn_post_norm" in first.norm_names
    if len({rope.dim for rope in ropes if rope}) > 1:
        raise ValueError("layers rotate different numbers of channels: use --backend reference")
    if first.known_attention.qkv_bias and (
        len(ropes) > 1 or first.known_attention.qk_norm == "width"
    ):
        raise ValueError("keys have a bias and layers differ in rope: use --backend reference")
    if has_post_norm and (first.known_attention.o_bias or first.ffn.bias):
        raise ValueError("a bias before a norm behind: use --backend reference")


def _of_gemma_4(layer: arch_parts.Layer) -> str:
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


def rotating_pairs(arch: ModelArch) -> int:
    """Pairs of channels that rotate."""
    return max(
        (
            layer.known_attention.rope.dim // 2
            for layer in arch.layers
            if layer.known_attention.rope
        ),
        default=0,
    )


def _to_lanes(count: int) -> int:
    return -(-count // _LANES) * _LANES
