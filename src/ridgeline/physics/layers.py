"""The parts of layers as shapes: each function returns the weights of one and what it keeps.

Names are those of Hugging Face's files, since formats name the modules that they leave alone. It
reads no config: see ``config_shape``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from ridgeline.physics.shapes import Cache, Layer, Matrix


class Part(NamedTuple):
    """One half of a layer: what it is, its weights, its cache and its values of one token."""

    kind: str
    matrices: tuple[Matrix, ...]
    cache: Cache | None
    token_values: int


def vector(name: str, group: str, size: int, ways: int = 1, copies: int = 1) -> Matrix:
    """Return a norm, a bias or the like, which no format converts."""
    return Matrix(name, group, size, ways=ways, copies=copies, active=copies, linear=False)


def norms(hidden: int, count: int, *, biased: bool = False) -> tuple[Matrix, ...]:
    """Return the norms of a layer's residual stream."""
    size = hidden * (2 if biased else 1)
    names = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
             "post_feedforward_layernorm", "router.norm", "pre_feedforward_layernorm_2",
             "post_feedforward_layernorm_2", "post_feedforward_layernorm_1",
             "post_per_layer_input_norm")  # fmt: skip
    return tuple(vector(name, "norms", size) for name in names[:count])


def attention(
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    window: int | None,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norm: str = "",
    sinks: bool = False,
    output_gate: bool = False,
    keeps_cache: bool = True,
    projections: tuple[str, ...] = ("q", "k", "v"),
) -> Part:
    """Return attention with a key and a value for each head and token.

    Args:
        hidden: width of the residual stream.
        heads: of queries.
        kv_heads: of keys and values.
        head_dim: channels of each.
        window: how many last tokens are seen; None sees all.
        qkv_bias: queries, keys and values have biases.
        o_bias: the output has one.
        qk_norm: queries and keys are normalised: by "head", or over all "heads" together.
        sinks: each head has a logit more.
        output_gate: queries are twice as wide: half of them gate the output.
        keeps_cache: false for a layer that reads another layer's keys and values.
        projections: which of queries, keys and values have a matrix of their own.
    """
    q, kv, group = heads * head_dim * (2 if output_gate else 1), kv_heads * head_dim, "attention"
    matrices = [Matrix("self_attn.o_proj", group, hidden, heads * head_dim, ways=heads)]
    for name in projections:
        rows, ways = (q, heads) if name == "q" else (kv, kv_heads)
        matrices.append(Matrix(f"self_attn.{name}_proj", group, rows, hidden, ways=ways))
        if qkv_bias:
            matrices.append(vector(f"self_attn.{name}_proj.bias", group, rows, ways))
    if o_bias:
        matrices.append(vector("self_attn.o_proj.bias", group, hidden))
    if qk_norm:
        of_q, of_k = (1, 1) if qk_norm == "head" else (heads, kv_heads)
        of_k = of_k if "k" in projections else 0
        matrices.append(vector("self_attn.qk_norm", "norms", (of_q + of_k) * head_dim))
    if sinks:
        matrices.append(vector("self_attn.sinks", group, heads, heads))
    kind = "mha" if heads == kv_heads else "mqa" if kv_heads == 1 else "gqa"
    cache = Cache("shared")
    if keeps_cache:
        seen = "full attention" if window is None else "sliding window"
        cache = Cache(seen, 2 * head_dim, kv_heads, window)
    values = q + (len(projections) - 1) * kv + heads * head_dim
    return Part(kind, tuple(matrices), cache, values)


def layer_input(hidden: int, size: int) -> tuple[Matrix, ...]:
    """Return what adds a layer's own input of each token, of ``size`` channels (Gemma 3n, 2025)."""
    return (
        Matrix("per_layer_input_gate", "MLP", size, hidden),
        Matrix("per_layer_projection", "MLP", hidden, size),
    )


def layer_inputs(hidden: int, vocab: int, size: int) -> tuple[Matrix, ...]:
    """Return what makes the inputs of all layers, ``size`` channels of a token together."""
    return (
        Matrix("embed_tokens_per_layer", "embedding", vocab, size, linear=False),
        Matrix("per_layer_model_projection", "embedding", size, hidden),
    )


def latent_attention(
    hidden: int, heads: int, q_rank: int, kv_rank: int, nope_dim: int, rope_dim: int, v_dim: int
) -> Part:
    """Return multi-head latent attention (DeepSeek-V2, 2024): one vector for all heads of a token.

    It has ``kv_rank`` channels and ``rope_dim`` that rotate; every rank keeps all of it. ``q_rank``
    is 0 where queries are not compressed.
    """
    group, q = "attention", heads * (nope_dim + rope_dim)
    matrices = [
        Matrix("self_attn.kv_a_proj_with_mqa", group, kv_rank + rope_dim, hidden),
        vector("self_attn.kv_a_layernorm", "norms", kv_rank),
        Matrix("self_attn.kv_b_proj", group, heads * (nope_dim + v_dim), kv_rank, ways=heads),
        Matrix("self_attn.o_proj", group, hidden, heads * v_dim, ways=heads),
    ]
    if q_rank:
        matrices.append(Matrix("self_attn.q_a_proj", group, q_rank, hidden))
        matrices.append(vector("self_attn.q_a_layernorm", "norms", q_rank))
        matrices.append(Matrix("self_attn.q_b_proj", group, q, q_rank, ways=heads))
    else:
        matrices.append(Matrix("self_attn.q_proj", group, q, hidden, ways=heads))
    values = q + heads * (nope_dim + 2 * v_dim)
    return Part("mla", tuple(matrices), Cache("latent", kv_rank + rope_dim), values)


def mlp(hidden: int, width: int, *, gated: bool = True, biased: bool = False) -> Part:
    """Return a dense MLP, whose inner width is ``width``."""
    return Part("", _mlp("mlp", "MLP", hidden, width, gated, biased, 1, 1), None,
                (3 if gated else 2) * width)  # fmt: skip


def experts(
    hidden: int,
    width: int,
    count: int,
    active: int,
    *,
    shared_width: int = 0,
    shared_gate: bool = False,
    biased: bool = False,
    router_bias: bool = False,
    own_scales: bool = False,
    gated: bool = True,
) -> Part:
    """Return a mixture of experts: ``count`` of ``width``, of which a token meets ``active``.

    Args:
        hidden: width of the residual stream.
        width: inner width of an expert.
        count: experts.
        active: experts that a token meets.
        shared_width: inner width of what all tokens meet; 0 for none.
        shared_gate: the shared expert's output is scaled by a gate.
        biased: experts and router have biases.
        router_bias: the router has a bias, for balance.
        own_scales: each expert's weight has a learnt factor.
        gated: experts and what all tokens meet have gates.
    """
    group = "experts"
    matrices = [Matrix("mlp.router", group, count, hidden, linear=False)]
    matrices += _mlp("mlp.experts", group, hidden, width, gated, biased, count, active)
    if router_bias or biased:
        matrices.append(vector("mlp.router.bias", group, count))
    if own_scales:
        matrices.append(vector("mlp.router.per_expert_scale", group, count))
    if shared_width:
        matrices += _mlp("mlp.shared_experts", group, hidden, shared_width, gated, False, 1, 1)
    if shared_gate:
        matrices.append(vector("mlp.shared_expert_gate", group, hidden))
    # Each chosen expert computes a gate, an up, their product and a row of output.
    inner = 3 if gated else 2
    values = active * (inner * width + 2 * hidden) + inner * shared_width
    return Part("", tuple(matrices), None, values)


def _mlp(
    name: str, group: str, hidden: int, width: int, gated: bool, biased: bool, copies: int,
    active: int,
) -> tuple[Matrix, ...]:  # fmt: skip
    inner = [f"{name}.gate_proj", f"{name}.up_proj"] if gated else [f"{name}.up_proj"]
    ways = width * copies  # by width, or by expert
    of = partial(Matrix, copies=copies, active=active)
    matrices = [of(n, group, width, hidden, ways=ways) for n in inner]
    matrices.append(of(f"{name}.down_proj", group, hidden, width, ways=ways))
    if biased:
        matrices += [of(f"{n}.bias", group, width, ways=ways, linear=False) for n in inner]
        matrices.append(of(f"{name}.down_proj.bias", group, hidden, ways=copies, linear=False))
    return tuple(matrices)


def mamba(
    hidden: int, inner: int, state: int, kernel: int, dt_rank: int, *, biased: bool,
    conv_biased: bool, has_norms: bool,
) -> Part:  # fmt: skip
    """Return a selective state space (Mamba; Gu and Dao, 2023): a state of ``inner * state``."""
    group = "state space"
    matrices = [
        Matrix("mamba.in_proj", group, 2 * inner, hidden, inner),
        Matrix("mamba.conv1d", group, inner, kernel, inner, linear=False),
        Matrix("mamba.x_proj", group, dt_rank + 2 * state, inner, inner),
        Matrix("mamba.dt_proj", group, inner, dt_rank, inner),
        Matrix("mamba.out_proj", group, hidden, inner, inner),
        vector("mamba.A_log", group, inner * state, inner),
        vector("mamba.dt_proj.bias", group, inner, inner),
        vector("mamba.D", group, inner, inner),
    ]
    if conv_biased:
        matrices.append(vector("mamba.conv1d.bias", group, inner, inner))
    if biased:
        matrices.append(vector("mamba.proj.bias", group, 2 * inner + hidden))
    if has_norms:  # Jamba's, of the step, B and C
        matrices.append(vector("mamba.norms", "norms", dt_rank + 2 * state))
    cache = Cache("state", state_values=inner * (state + kernel - 1), num_heads=inner)
    return Part("state space", tuple(matrices), cache, 3 * inner)


def mamba2(
    hidden: int, heads: int, head_dim: int, groups: int, state: int, kernel: int, *, biased: bool,
    conv_biased: bool, has_norm: bool = True,
) -> Part:  # fmt: skip
    """Return Mamba 2 (Dao and Gu, 2024): a state of ``head_dim * state`` for each head."""
    group, inner = "state space", heads * head_dim
    conv = inner + 2 * groups * state
    matrices = [
        Matrix("mamba.in_proj", group, inner + conv + heads, hidden, heads),
        Matrix("mamba.conv1d", group, conv, kernel, heads, linear=False),
        Matrix("mamba.out_proj", group, hidden, inner, heads),
        vector("mamba.A_log, D, dt_bias", group, 3 * heads, heads),
    ]
    if has_norm:
        matrices.append(vector("mamba.norm", "norms", inner, heads))
    if conv_biased:
        matrices.append(vector("mamba.conv1d.bias", group, conv, heads))
    if biased:
        matrices.append(vector("mamba.proj.bias", group, inner + conv + heads + hidden))
    cache = Cache("state", state_values=inner * state + conv * (kernel - 1), num_heads=heads)
    return Part("state space", tuple(matrices), cache, inner + conv + heads + inner)


def beside(part: Part, other: Part) -> Part:
    """Return attention and what keeps a state, which read the same row, as one part."""
    assert part.cache is not None
    assert other.cache is not None
    return Part(
        part.kind,
        part.matrices + other.matrices,
        replace(part.cache, state_values=other.cache.state_values),
        part.token_values + other.token_values,
    )


def short_conv(hidden: int, kernel: int, *, biased: bool) -> Part:
    """Return a short convolution between two gates (LFM2; Liquid AI, 2025)."""
    group = "state space"
    matrices = [
        Matrix("conv.in_proj", group, 3 * hidden, hidden, hidden),
        Matrix("conv.conv", group, hidden, kernel, hidden, linear=False),
        Matrix("conv.out_proj", group, hidden, hidden, hidden),
    ]
    if biased:
        matrices.append(vector("conv.biases", group, 5 * hidden, hidden))
    cache = Cache("state", state_values=hidden * (kernel - 1), num_heads=hidden)
    return Part("state space", tuple(matrices), cache, 4 * hidden)


def delta_net(
    hidden: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int, kernel: int
) -> Part:
    """Return gated linear attention with the delta rule (Yang et al., 2024; Qwen3-Next's)."""
    group, keys, values = "attention", key_heads * key_dim, value_heads * value_dim
    conv = 2 * keys + values
    matrices = (
        Matrix("linear_attn.in_proj_qkvz", group, conv + values, hidden, key_heads),
        Matrix("linear_attn.in_proj_ba", group, 2 * value_heads, hidden, key_heads),
        Matrix("linear_attn.conv1d", group, conv, kernel, key_heads, linear=False),
        Matrix("linear_attn.out_proj", group, hidden, values, key_heads),
        vector("linear_attn.A_log, dt_bias", group, 2 * value_heads, key_heads),
        vector("linear_attn.norm", "norms", value_dim),
    )
    state = value_heads * key_dim * value_dim + conv * (kernel - 1)
    cache = Cache("state", state_values=state, num_heads=key_heads)
    return Part("linear attention", matrices, cache, conv + 2 * values)


def joined(mixer: Part, inner: Part | None, between: tuple[Matrix, ...]) -> Layer:
    """Return a layer made of a mixer, what stands behind it, and norms."""
    assert mixer.cache is not None
    matrices = (*mixer.matrices, *(inner.matrices if inner else ()), *between)
    return Layer(
        mixer.kind, matrices, mixer.cache, mixer.token_values, inner.token_values if inner else 0
    )


def embedding(hidden: int, vocab: int, positions: int = 0) -> tuple[Matrix, ...]:
    """Return the embedding, and that of ``positions`` if there are learnt ones."""
    matrices = (Matrix("embed_tokens", "embedding", vocab, hidden, ways=vocab, linear=False),)
    if not positions:
        return matrices
    return *matrices, Matrix("embed_positions", "embedding", positions, hidden, linear=False)


def end(
    hidden: int, vocab: int, *, tied: bool, norm_bias: bool, biased: bool = False
) -> tuple[Matrix, ...]:
    """Return the last norm and, unless it is the embedding, the head, which may be ``biased``."""
    norm = vector("norm", "norms", hidden * (2 if norm_bias else 1))
    if tied:
        return (norm,)
    head = Matrix("lm_head", "head", vocab, hidden, ways=vocab)
    return (norm, head, vector("lm_head.bias", "head", vocab, vocab)) if biased else (norm, head)
