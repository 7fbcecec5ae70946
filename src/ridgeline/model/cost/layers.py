"""From a ``ModelArch`` to a ``ModelShape``: the weights of each part of a model, and what it keeps.

Names are those of Hugging Face's files, since formats name the modules that they leave alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ridgeline.model.cost import shapes
from ridgeline.model.cost.shapes import LayerCache, Matrix, ModelShape
from ridgeline.model.shape.latent import Latent
from ridgeline.model.shape.model import Attention, Experts, Layer, Mlp, ModelArch
from ridgeline.model.shape.recurrent import Conv, Delta, Recurrent, Ssm, num_state_values


class LayerHalf(NamedTuple):
    """One half of a layer: what it is, its weights, its cache and its values of one token."""

    kind: str
    matrices: tuple[Matrix, ...]
    cache: LayerCache
    token_values: int


def shape_of_arch(arch: ModelArch, name: str, *, fused_qkv: bool = False) -> ModelShape:
    """Return the shape of a model; ``fused_qkv`` says what its files do (see ``ModelShape``)."""
    heads = [(mixer.num_heads, mixer.num_kv_heads) for mixer in arch.attentions] or [(1, 1)]
    layers = tuple(_layer(arch, layer) for layer in arch.layers)
    of_guess = (
        *layers[-1].matrices,
        Matrix("eh_proj", "head", arch.hidden_size, 2 * arch.hidden_size, arch.hidden_size),
        vector("enorm, hnorm, norm", "norms", 3 * arch.hidden_size),
    )
    return ModelShape(
        name,
        arch.hidden_size,
        arch.vocab_size,
        arch.max_position,
        num_heads=heads[0][0],
        num_kv_heads=heads[0][1],
        layers=layers,
        embedding=_before(arch),
        end=_end(arch),
        is_tied=arch.tied_embeddings,
        fused_qkv=fused_qkv,
        mtp=of_guess * arch.num_guessing,
    )


def vector(name: str, group: str, size: int, ways: int = 1, copies: int = 1) -> Matrix:
    """Return a norm, a bias or the like, which no format converts."""
    return Matrix(name, group, size, ways=ways, copies=copies, active=copies, linear=False)


def _before(arch: ModelArch) -> tuple[Matrix, ...]:
    """Return the embedding and what else stands before the layers."""
    hidden, vocab, group = arch.hidden_size, arch.vocab_size, "embedding"
    found = [Matrix("embed_tokens", group, vocab, hidden, ways=vocab, linear=False)]
    if arch.position_rows:
        found.append(Matrix("embed_positions", group, arch.position_rows, hidden, linear=False))
    if arch.embed_norm:
        found.append(vector("input_layernorm", "norms", 2 * hidden))
    if size := arch.num_layers * arch.input_size:
        found += [
            Matrix("embed_tokens_per_layer", group, vocab, size, linear=False),
            Matrix("per_layer_model_projection", group, size, hidden),
            vector("per_layer_projection_norm", "norms", arch.input_size),
        ]
    for mixer in arch.attentions[:1]:
        if mixer.bias_buckets:
            numbers = mixer.bias_buckets * mixer.num_heads
            found.append(vector("relative_attention_bias", "attention", numbers))
    return tuple(found)


def _end(arch: ModelArch) -> tuple[Matrix, ...]:
    """Return the last norm and, unless it is the embedding, the head."""
    hidden, vocab = arch.hidden_size, arch.vocab_size
    found = [vector("norm", "norms", hidden * (2 if arch.norm_bias else 1))]
    if not arch.tied_embeddings:
        found.append(Matrix("lm_head", "head", vocab, hidden, ways=vocab))
    if arch.head_bias:
        found.append(vector("lm_head.bias", "head", vocab, vocab))
    return tuple(found)


def _layer(arch: ModelArch, layer: Layer) -> shapes.LayerShape:
    hidden = arch.hidden_size
    mixer = _mixer(hidden, layer.mixer, arch.chunk)
    if layer.beside is not None:  # which reads the same row
        state = _mixer(hidden, layer.beside)
        mixer = LayerHalf(
            mixer.kind,
            mixer.matrices + state.matrices,
            replace(mixer.cache, state_values=state.cache.state_values),
            mixer.token_values + state.token_values,
        )
    matrices, values = _network(hidden, layer.ffn)
    matrices = mixer.matrices + matrices + _between(arch, layer)
    return shapes.LayerShape(mixer.kind, matrices, mixer.cache, mixer.token_values, values)


_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
    "post_feedforward_layernorm", "router.norm", "pre_feedforward_layernorm_2",
    "post_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_per_layer_input_norm",
)  # fmt: skip


def _between(arch: ModelArch, layer: Layer) -> tuple[Matrix, ...]:
    """Return a layer's norms, its scale, and what adds its own input (Gemma 3n, 2025)."""
    hidden, size = arch.hidden_size, layer.input_size
    width = hidden * (2 if arch.norm_bias else 1)
    found = [vector(name, "norms", width) for name in _NORMS[: len(layer.norm_names)]]
    if layer.out_scale:
        found.append(vector("layer_scalar", "norms", 1))
    if size:
        found.append(Matrix("per_layer_input_gate", "MLP", size, hidden))
        found.append(Matrix("per_layer_projection", "MLP", hidden, size))
    return tuple(found)


def _mixer(hidden: int, mixer: Attention | Recurrent, chunk: int = 0) -> LayerHalf:
    match mixer:
        case Attention(latent=Latent() as latent):
            return _latent_attention(hidden, mixer, latent)
        case Attention():
            return _attention(hidden, mixer, chunk)
        case Conv():
            matrices, values = _short_conv(hidden, mixer), 4 * hidden
            return LayerHalf("state space", matrices, _state(mixer, hidden, hidden), values)
        case Delta():
            channels = 2 * mixer.key_size + mixer.value_size
            values, cache = channels + 2 * mixer.value_size, mixer.num_key_heads
            state = _state(mixer, hidden, cache)
            return LayerHalf("linear attention", _delta_net(hidden, mixer), state, values)
        case Ssm():
            inner = mixer.inner_size
            values = 3 * inner
            if not mixer.step_rank:
                values = 2 * inner + mixer.conv_size + mixer.num_heads
            matrices = _mamba(hidden, mixer) if mixer.step_rank else _mamba2(hidden, mixer)
            return LayerHalf(
                "state space", matrices, _state(mixer, hidden, mixer.num_heads), values
            )


def _state(mixer: Recurrent, hidden: int, num_heads: int) -> LayerCache:
    return LayerCache("state", state_values=num_state_values(mixer, hidden), num_heads=num_heads)


def _attention(hidden: int, mixer: Attention, chunk: int) -> LayerHalf:
    """Return attention with a key and a value for each head and token.

    Where positions turn, a token sees no more than its ``chunk`` of tokens, if there are any.
    """
    heads, kv_heads, head_dim = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    q, kv, group = mixer.q_size * (2 if mixer.gated else 1), mixer.kv_size, "attention"
    matrices = [Matrix("self_attn.o_proj", group, hidden, mixer.q_size, ways=heads)]
    for name in mixer.projections:
        rows, ways = (q, heads) if name == "q" else (kv, kv_heads)
        matrices.append(Matrix(f"self_attn.{name}_proj", group, rows, hidden, ways=ways))
        if mixer.qkv_bias:
            matrices.append(vector(f"self_attn.{name}_proj.bias", group, rows, ways))
    if mixer.o_bias:
        matrices.append(vector("self_attn.o_proj.bias", group, hidden))
    if mixer.qk_norm:
        of_q, of_k = (1, 1) if mixer.qk_norm == "head" else (heads, kv_heads)
        of_k = of_k if "k" in mixer.projections else 0
        matrices.append(vector("self_attn.qk_norm", "norms", (of_q + of_k) * head_dim))
    if mixer.sinks:
        matrices.append(vector("self_attn.sinks", group, heads, heads))
    window = chunk if chunk and mixer.rope else mixer.window
    cache = LayerCache("shared")
    if mixer.kv_of is None:
        seen = "full attention" if window is None else "sliding window"
        cache = LayerCache(seen, 2 * head_dim, kv_heads, window)
    kind = "mha" if heads == kv_heads else "mqa" if kv_heads == 1 else "gqa"
    values = q + (len(mixer.projections) - 1) * kv + mixer.q_size
    return LayerHalf(kind, tuple(matrices), cache, values)


def _latent_attention(hidden: int, mixer: Attention, latent: Latent) -> LayerHalf:
    """Return multi-head latent attention, whose vector of a token every rank keeps whole."""
    heads, rope_dim, kv_rank = mixer.num_heads, mixer.rope_dim, latent.kv_rank
    group, q, nope_dim, v_dim = "attention", mixer.q_size, latent.nope_dim, latent.v_dim
    matrices = [
        Matrix("self_attn.kv_a_proj_with_mqa", group, kv_rank + rope_dim, hidden),
        vector("self_attn.kv_a_layernorm", "norms", kv_rank),
        Matrix("self_attn.kv_b_proj", group, heads * (nope_dim + v_dim), kv_rank, ways=heads),
        Matrix("self_attn.o_proj", group, hidden, heads * v_dim, ways=heads),
    ]
    if latent.q_rank:
        matrices.append(Matrix("self_attn.q_a_proj", group, latent.q_rank, hidden))
        matrices.append(vector("self_attn.q_a_layernorm", "norms", latent.q_rank))
        matrices.append(Matrix("self_attn.q_b_proj", group, q, latent.q_rank, ways=heads))
    else:
        matrices.append(Matrix("self_attn.q_proj", group, q, hidden, ways=heads))
    values = q + heads * (nope_dim + 2 * v_dim)
    return LayerHalf("mla", tuple(matrices), LayerCache("latent", kv_rank + rope_dim), values)


def _short_conv(hidden: int, mixer: Conv) -> tuple[Matrix, ...]:
    group = "state space"
    matrices = [
        Matrix("conv.in_proj", group, 3 * hidden, hidden, hidden),
        Matrix("conv.conv", group, hidden, mixer.kernel, hidden, linear=False),
        Matrix("conv.out_proj", group, hidden, hidden, hidden),
    ]
    if mixer.bias:
        matrices.append(vector("conv.biases", group, 5 * hidden, hidden))
    return tuple(matrices)


def _delta_net(hidden: int, mixer: Delta) -> tuple[Matrix, ...]:
    group, ways, values = "attention", mixer.num_key_heads, mixer.value_size
    channels = 2 * mixer.key_size + values
    return (
        # One module in Qwen3-Next (2025), two in Qwen3.5 (2026) and in GGUF files of both.
        Matrix("linear_attn.in_proj_qkvz.qkv", group, channels, hidden, ways),
        Matrix("linear_attn.in_proj_qkvz.z", group, values, hidden, ways),
        Matrix("linear_attn.in_proj_ba", group, 2 * mixer.num_value_heads, hidden, ways),
        Matrix("linear_attn.conv1d", group, channels, mixer.kernel, ways, linear=False),
        Matrix("linear_attn.out_proj", group, hidden, values, ways),
        vector("linear_attn.A_log, dt_bias", group, 2 * mixer.num_value_heads, ways),
        vector("linear_attn.norm", "norms", mixer.value_dim),
    )


def _mamba(hidden: int, mixer: Ssm) -> tuple[Matrix, ...]:
    """Return the first Mamba, whose channels are heads of their own."""
    group, inner, state, rank = "state space", mixer.inner_size, mixer.state_dim, mixer.step_rank
    matrices = [
        Matrix("mamba.in_proj", group, 2 * inner, hidden, inner),
        Matrix("mamba.conv1d", group, inner, mixer.kernel, inner, linear=False),
        Matrix("mamba.x_proj", group, rank + 2 * state, inner, inner),
        Matrix("mamba.dt_proj", group, inner, rank, inner),
        Matrix("mamba.out_proj", group, hidden, inner, inner),
        vector("mamba.A_log", group, inner * state, inner),
        vector("mamba.dt_proj.bias", group, inner, inner),
        vector("mamba.D", group, inner, inner),
    ]
    if mixer.conv_bias:
        matrices.append(vector("mamba.conv1d.bias", group, inner, inner))
    if mixer.bias:
        matrices.append(vector("mamba.proj.bias", group, 2 * inner + hidden))
    if mixer.part_norms:
        matrices.append(vector("mamba.norms", "norms", rank + 2 * state))
    return tuple(matrices)


def _mamba2(hidden: int, mixer: Ssm) -> tuple[Matrix, ...]:
    group, inner, heads = "state space", mixer.inner_size, mixer.num_heads
    rows = inner + mixer.conv_size + heads
    matrices = [
        Matrix("mamba.in_proj", group, rows, hidden, heads),
        Matrix("mamba.conv1d", group, mixer.conv_size, mixer.kernel, heads, linear=False),
        Matrix("mamba.out_proj", group, hidden, inner, heads),
        vector("mamba.A_log, D, dt_bias", group, 3 * heads, heads),
    ]
    if mixer.gated_norm:
        matrices.append(vector("mamba.norm", "norms", inner, heads))
    if mixer.conv_bias:
        matrices.append(vector("mamba.conv1d.bias", group, mixer.conv_size, heads))
    if mixer.bias:
        matrices.append(vector("mamba.proj.bias", group, rows + hidden))
    return tuple(matrices)


def _network(hidden: int, ffn: Mlp | Experts) -> tuple[tuple[Matrix, ...], int]:
    """Return the weights behind the mixer, and the values of one token while it computes."""
    if isinstance(ffn, Mlp):
        return _matrices("mlp", "MLP", hidden, ffn), (3 if ffn.gated else 2) * ffn.size
    group, shared, inner = "experts", ffn.shared, 3 if ffn.gated else 2
    place = "mlp." if ffn.beside is None else ""  # else that is what stands beside
    matrices = [Matrix(f"{place}router", group, ffn.num, hidden, linear=False)]
    matrices += _matrices(f"{place}experts", group, hidden, ffn, ffn.num, ffn.per_token)
    # Each chosen expert computes a gate, an up, their product and a row of output.
    values = ffn.per_token * (inner * ffn.size + 2 * hidden)
    if ffn.choice_bias or ffn.bias:
        matrices.append(vector(f"{place}router.bias", group, ffn.num))
    if ffn.own_scales:
        matrices.append(vector(f"{place}router.per_expert_scale", group, ffn.num))
    if shared is not None:
        matrices += _matrices("mlp.shared_experts", group, hidden, shared)
        values += inner * shared.size
    if ffn.shared_gated:
        matrices.append(vector("mlp.shared_expert_gate", group, hidden))
    dense, dense_values = ((), 0) if ffn.beside is None else _network(hidden, ffn.beside)
    return (*matrices, *dense), values + dense_values


def _matrices(
    name: str, group: str, hidden: int, ffn: Mlp | Experts, copies: int = 1, active: int = 1
) -> tuple[Matrix, ...]:
    if not ffn.size:
        return ()
    inner = [f"{name}.gate_proj", f"{name}.up_proj"] if ffn.gated else [f"{name}.up_proj"]
    width, ways = ffn.size, ffn.size * copies  # by width, or by expert
    of = partial(Matrix, copies=copies, active=active)
    matrices = [of(n, group, width, hidden, ways=ways) for n in inner]
    matrices.append(of(f"{name}.down_proj", group, hidden, width, ways=ways))
    if ffn.bias:
        matrices += [of(f"{n}.bias", group, width, ways=ways, linear=False) for n in inner]
        matrices.append(of(f"{name}.down_proj.bias", group, hidden, ways=copies, linear=False))
    return tuple(matrices)
