"""From a ``ModelArch`` to a ``Shape``: the models that the engine runs, as the planner sees all."""

from __future__ import annotations

from ridgeline.arch.latent import Latent
from ridgeline.arch.model import Attention, Experts, Layer, Mlp, ModelArch
from ridgeline.arch.recurrent import Conv, Delta, Recurrent, Ssm
from ridgeline.physics.layers import (
    Part,
    attention,
    beside,
    delta_net,
    embedding,
    end,
    experts,
    joined,
    latent_attention,
    layer_input,
    layer_inputs,
    mamba2,
    mlp,
    norms,
    short_conv,
    vector,
)
from ridgeline.physics.shapes import Matrix, Shape


def shape_of_arch(arch: ModelArch, name: str) -> Shape:
    """Return the shape of a model that the engine runs."""
    hidden, of_inputs = arch.hidden_size, arch.num_layers * arch.input_size
    layers = tuple(
        joined(
            _mixers_shape(hidden, layer),
            _ffn_shape(hidden, layer.ffn) if layer.ffn.size else None,
            _between(arch, layer),
        )
        for layer in arch.layers
    )
    before = embedding(hidden, arch.vocab_size, arch.position_rows)
    if arch.embed_norm:
        before += norms(hidden, 1, biased=True)
    if of_inputs:
        before += layer_inputs(hidden, arch.vocab_size, of_inputs)
        before += (vector("per_layer_projection_norm", "norms", arch.input_size),)
    for mixer in arch.attentions[:1]:
        if mixer.bias_buckets:
            numbers = mixer.bias_buckets * mixer.num_heads
            before += (vector("relative_attention_bias", "attention", numbers),)
    heads = [(mixer.num_heads, mixer.num_kv_heads) for mixer in arch.attentions] or [(1, 1)]
    return Shape(
        name, hidden, arch.vocab_size, arch.max_position,
        num_heads=heads[0][0],
        num_kv_heads=heads[0][1],
        layers=layers,
        embedding=before,
        end=(
            *end(hidden, arch.vocab_size, tied=arch.tied_embeddings, norm_bias=arch.norm_bias),
            *([vector("lm_head.bias", "head", arch.vocab_size)] if arch.head_bias else []),
        ),
        is_tied=arch.tied_embeddings,
    )  # fmt: skip


def _between(arch: ModelArch, layer: Layer) -> tuple[Matrix, ...]:
    """Return a layer's norms, its scale, and what adds its own input."""
    matrices = norms(arch.hidden_size, len(layer.norm_names), biased=arch.norm_bias)
    if layer.out_scale:
        matrices += (vector("layer_scalar", "norms", 1),)
    return (
        matrices + layer_input(arch.hidden_size, layer.input_size) if layer.input_size else matrices
    )


def _mixers_shape(hidden: int, layer: Layer) -> Part:
    part = _mixer_shape(hidden, layer.mixer)
    return part if layer.beside is None else beside(part, _mixer_shape(hidden, layer.beside))


def _mixer_shape(hidden: int, mixer: Attention | Recurrent) -> Part:
    match mixer:
        case Attention(latent=Latent() as latent):
            return latent_attention(
                hidden, mixer.num_heads, latent.q_rank, latent.kv_rank, latent.nope_dim,
                mixer.rope_dim, latent.v_dim,
            )  # fmt: skip
        case Attention():
            return attention(
                hidden, mixer.num_heads, mixer.num_kv_heads, mixer.head_dim, mixer.window,
                qkv_bias=mixer.qkv_bias, o_bias=mixer.o_bias, qk_norm=mixer.qk_norm,
                output_gate=mixer.gated, sinks=mixer.sinks,
                keeps_cache=mixer.kv_of is None, projections=mixer.projections,
            )  # fmt: skip
        case Conv():
            return short_conv(hidden, mixer.kernel, biased=mixer.bias)
        case Delta():
            return delta_net(
                hidden, mixer.num_key_heads, mixer.num_value_heads, mixer.key_dim, mixer.value_dim,
                mixer.kernel,
            )  # fmt: skip
        case Ssm():
            return mamba2(
                hidden, mixer.num_heads, mixer.head_dim, mixer.num_groups, mixer.state_dim,
                mixer.kernel, biased=mixer.bias, conv_biased=mixer.conv_bias,
                has_norm=mixer.gated_norm,
            )  # fmt: skip


def _ffn_shape(hidden: int, ffn: Mlp | Experts) -> Part:
    if isinstance(ffn, Mlp):
        return mlp(hidden, ffn.size, gated=ffn.gated, biased=ffn.bias)
    shared = 0 if ffn.shared is None else ffn.shared.size
    part = experts(
        hidden,
        ffn.size,
        ffn.num,
        ffn.per_token,
        shared_width=shared,
        shared_gate=ffn.shared_gated,
        biased=ffn.bias,
        own_scales=ffn.own_scales,
        router_bias=ffn.choice_bias,
        gated=ffn.gated,
    )
    if ffn.beside is None:
        return part
    dense = _ffn_shape(hidden, ffn.beside)
    return part._replace(
        matrices=part.matrices + dense.matrices,
        token_values=part.token_values + dense.token_values,
    )
