"""From any config.json to a ``Shape``: also of models that the engine does not run.

A literal table says what a family's name implies and its config does not. What the config says of
sizes and is not read here is refused by name. It opens no file.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.physics.config_families import FAMILIES, LLAMA, Family
from ridgeline.physics.fields import Fields
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
    mamba,
    mamba2,
    mlp,
    norms,
    short_conv,
    vector,
)
from ridgeline.physics.own_names import in_usual_names
from ridgeline.physics.shape_by_halves import layers_by_halves
from ridgeline.physics.shape_by_layer import layers_by_layer
from ridgeline.physics.shapes import Matrix, Shape
from ridgeline.physics.text_defaults import TEXT_DEFAULTS

_MOST_LETTERS = 80  # of a family's name
# Fields of parts whose weights are not counted here, and that keep nothing of a sequence.
_WEIGHTS_ALONE = (
    "vision_config", "audio_config", "laurel_rank", "hidden_size_per_layer_input",
    "vocab_size_per_layer_input", "altup_num_inputs", "altup_active_idx",
    "activation_sparsity_pattern", "image_token_index", "mm_tokens_per_image", "vision_soft_tokens",
    "audio_soft_tokens_per_image", "vision_soft_tokens_per_image",
)  # fmt: skip
_FULL = ("full_attention", "attention", "global")
_SLIDING = ("sliding_attention", "chunked_attention", "local")
_LINEAR = ("linear_attention", "mamba", "conv")


def shape_of_config(values: Mapping[str, Any], where: str = "config.json") -> Shape:
    """Return the shape that a config.json describes.

    Weights that it mentions and that are not counted stand in ``not_counted``.

    Args:
        values: as parsed.
        where: what to call it in messages.

    Raises:
        ValueError: a key is missing, out of range, or says a size that is not understood.
    """
    text = next((key for key in ("text_config", "llm_config") if values.get(key)), "")
    outer = {k: v for k, v in values.items() if k in _WEIGHTS_ALONE} if text else {}
    if text:
        if not isinstance(values[text], Mapping):
            raise ValueError(f"{where}: {text} is not an object")
        shared = {k: values[k] for k in ("tie_word_embeddings",) if k in values}
        defaults = TEXT_DEFAULTS.get(str(values[text].get("model_type")), {})
        values = {**defaults, **shared, **values[text], **outer}
    config = Fields(in_usual_names(values, where), where)
    name = config.text("model_type")[:_MOST_LETTERS] or "unknown"
    family = FAMILIES.get(name, LLAMA)
    assumptions = []
    if name not in FAMILIES:
        assumptions.append(
            f"model_type {name!r} is not known here: taken for a Llama with the sizes of the config"
        )
    if text and "vision_config" not in outer and len(values) < 4:
        config.fail(f"{text} does not say the model's sizes: give the config of the text model")
    shape = _decoder(config, name, family)
    config.get("torch_dtype", "dtype", "architectures", "quantization_config", *_WEIGHTS_ALONE)
    if unknown := config.not_understood():
        config.fail(
            f"{unknown[0]} is {reprlib.repr(config.values[unknown[0]])}, which may change the "
            f"model's size and is not understood; nothing is guessed"
        )
    counted = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")
    left = [key for key in _WEIGHTS_ALONE if values.get(key)]
    if family.by_layer:
        left = [key for key in left if key not in counted]
    return replace(shape, not_counted=tuple(left), assumptions=tuple(assumptions))


def _decoder(config: Fields, name: str, family: Family) -> Shape:
    hidden = config.integer("hidden_size", "d_model", "n_embd")
    vocab = config.integer("vocab_size")
    count = config.count("num_hidden_layers", "n_layer", "n_layers")
    context = config.integer("max_position_embeddings", "n_positions", default=0, low=0)
    rows = 0 if family.positions is None else context + family.positions
    before = embedding(hidden, vocab, rows)
    if family.embedding_norm:
        before += norms(hidden, 1, biased=True)
    if family.by_layer:
        windows = _windows(config, name, family, _kinds(config, name, count))
        layers, of_inputs = layers_by_layer(
            config, hidden, [*windows[:-1], None], family.input_size
        )
        before += of_inputs
    elif name == "nemotron_h":
        layers = layers_by_halves(config, hidden)
    else:
        mixers = _mixers(config, name, family, count, hidden)
        mlps = [_mlp(config, name, family, i, count, hidden) for i in range(count)]
        num_norms = config.integer("num_ln_in_parallel_attn", default=family.norms)
        between = norms(hidden, num_norms, biased=family.norm_bias)
        layers = tuple(joined(a, b, between) for a, b in zip(mixers, mlps, strict=True))
    head_bias = config.flag("lm_head_bias", default=family.head_bias)
    tied = config.flag("tie_word_embeddings", "tie_embeddings", default=family.tied)
    tied = tied or _is_bare(config, name)
    num_mtp = config.count("num_nextn_predict_layers", "mtp_num_hidden_layers", default=0, low=0)
    mtp = (
        *layers[-1].matrices,
        Matrix("eh_proj", "head", hidden, 2 * hidden, hidden),
        vector("enorm, hnorm, norm", "norms", 3 * hidden),
    )
    heads, kv_heads = _heads(config) if _has_attention(config) else (1, 1)
    return Shape(
        name=name,
        hidden_size=hidden,
        vocab_size=vocab,
        max_position=context,
        num_heads=heads,
        num_kv_heads=kv_heads,
        layers=layers,
        embedding=before,
        end=end(hidden, vocab, tied=tied, norm_bias=family.norm_bias, biased=head_bias),
        is_tied=tied,
        mtp=mtp * num_mtp,
    )


def _is_bare(config: Fields, name: str) -> bool:
    """Return whether a class such as ``MistralModel`` says that the files have no head."""
    classes = config.get("architectures")
    first = str(classes[0]) if type(classes) is list and classes else ""
    has_head = first.endswith("LMHeadModel") or name == "chatglm"
    return first.endswith("Model") and not has_head


# --- attention and state -----------------------------------------------------------------------


def _has_attention(config: Fields) -> bool:
    return config.get("num_attention_heads", "n_head") is not None


def _heads(config: Fields) -> tuple[int, int]:
    heads = config.integer("num_attention_heads", "n_head")
    kv_heads = config.integer("num_key_value_heads", default=heads)
    if heads % kv_heads:
        config.fail(f"{heads} heads cannot share {kv_heads} key and value heads evenly")
    return heads, kv_heads


def _mixers(config: Fields, name: str, family: Family, count: int, hidden: int) -> list[Part]:
    """Return what mixes tokens in each layer: attention, or a state."""
    kinds = _kinds(config, name, count)
    states = [kind in _LINEAR for kind in kinds]
    state = _state(config, name, hidden) if any(states) else None
    if all(states):
        assert state is not None
        return [state] * count
    windows = _windows(config, name, family, kinds)
    shared = config.integer("num_kv_shared_layers", default=0, low=0)
    if shared >= count:
        config.fail(f"num_kv_shared_layers is {shared}, but there are {count} layers")
    heads, kv_heads = _heads(config)
    if config.has("kv_lora_rank"):
        part = latent_attention(
            hidden,
            heads,
            config.integer("q_lora_rank", default=0, low=0),
            config.integer("kv_lora_rank"),
            config.integer("qk_nope_head_dim"),
            config.integer("qk_rope_head_dim"),
            config.integer("v_head_dim"),
        )
        config.get("head_dim", "qk_head_dim")  # of no size of its own here
        return [part] * count
    biased = family.bias_switch and config.flag(
        "attention_bias", "qkv_bias", "use_bias", default=False
    )
    qk_norm = family.qk_norm
    if family.optional_qk_norm and config.flag("use_qk_norm", default=False):
        qk_norm = family.optional_qk_norm
    if qk_norm or name == "llama4_text":  # whose norms have no weights
        config.get("use_qk_norm")
    made: dict[tuple[int | None, bool], Part] = {
        (window, keeps): attention(
            hidden,
            heads,
            kv_heads,
            config.integer("head_dim", default=family.head_dim or hidden // heads),
            window,
            qkv_bias=family.qkv_bias or biased,
            o_bias=biased and family.o_bias,
            qk_norm=qk_norm,
            sinks=family.sinks,
            output_gate=family.output_gate,
            keeps_cache=keeps,
        )
        for window in dict.fromkeys(windows)
        for keeps in (True, False)
    }
    if name == "falcon_h1":
        config.get("mamba_d_ssm", "mamba_use_mlp")  # of no size of their own
        return [beside(made[None, True], _state(config, name, hidden))] * count
    return [
        state if is_state and state else made[windows[i], i < count - shared]
        for i, is_state in enumerate(states)
    ]


def _kinds(config: Fields, name: str, count: int) -> list[str]:
    """Return what each layer is called; an empty text where only the family knows."""
    if name in ("mamba", "mamba2", "falcon_mamba"):
        return ["mamba"] * count
    kinds = config.list_of(str, "layer_types", length=count)
    if kinds is not None:
        if unknown := [kind for kind in kinds if kind not in (*_FULL, *_SLIDING, *_LINEAR)]:
            config.fail(f"layer_types has {unknown[0]!r}, which is not understood")
        return kinds
    if (places := config.list_of(int, "full_attn_idxs")) is not None:
        return ["full_attention" if i in places else "conv" for i in range(count)]
    if every := config.get("full_attention_interval"):
        every = config.integer("full_attention_interval")
        return ["linear_attention" if (i + 1) % every else "full_attention" for i in range(count)]
    if config.get("attn_layer_period"):
        period = config.integer("attn_layer_period")
        offset = config.integer("attn_layer_offset", default=0, low=0)
        return ["full_attention" if i % period == offset else "mamba" for i in range(count)]
    if (places := config.list_of(int, "attn_layer_indices")) is not None:
        return ["full_attention" if i in places else "mamba" for i in range(count)]
    return [""] * count


def _windows(config: Fields, name: str, family: Family, kinds: list[str]) -> list[int | None]:
    """Return how many last tokens each layer sees; None where it sees all."""
    rule = family.window
    window: int | None = config.integer("sliding_window", "sliding_window_size", default=0, low=0)
    if "sliding_window" not in config.values and "sliding_window_size" not in config.values:
        window = family.default_window
    if name == "llama4_text":
        window = config.integer("attention_chunk_size", default=8192)
    switched_on = config.flag("use_sliding_window", default=rule != "switch")
    first = config.integer("max_window_layers", default=28, low=0) if rule == "switch" else 0
    every = config.integer(
        "sliding_window_pattern", "_sliding_window_pattern", "layer_switch",
        default=rule if isinstance(rule, int) else 0, low=0,
    )  # fmt: skip
    if not switched_on:
        window = None
    rotating = config.list_of(int, "no_rope_layers") or []  # 1 where a layer rotates
    windows = []
    for i, kind in enumerate(kinds):
        if kind:
            is_seen_through = kind in _SLIDING
        elif name == "llama4_text":
            is_seen_through = bool(rotating[i] if i < len(rotating) else (i + 1) % 4)
        elif every:
            is_seen_through = bool((i + 1) % every)
        else:
            is_seen_through = bool(rule) and i >= first
        windows.append((window or None) if is_seen_through else None)
    return windows


def _state(config: Fields, name: str, hidden: int) -> Part:
    if name in ("lfm2", "lfm2_moe"):
        config.get("conv_dim", "conv_dim_out", "conv_use_xavier_init", "block_dim", "num_heads")
        kernel = config.integer("conv_L_cache", default=3)
        return short_conv(hidden, kernel, biased=config.flag("conv_bias", default=False))
    if config.has("linear_num_value_heads"):
        return delta_net(
            hidden,
            config.integer("linear_num_key_heads"),
            config.integer("linear_num_value_heads"),
            config.integer("linear_key_head_dim"),
            config.integer("linear_value_head_dim"),
            config.integer("linear_conv_kernel_dim"),
        )
    prefix = "mamba_" if name not in ("mamba", "mamba2", "falcon_mamba") else ""
    expand = config.integer(f"{prefix}expand", default=2)
    state = config.integer(f"{prefix}d_state", "state_size")
    kernel = config.integer(f"{prefix}d_conv", "conv_kernel", default=4)
    conv_biased = config.flag(f"{prefix}conv_bias", "use_conv_bias", default=True)
    biased = config.flag(f"{prefix}proj_bias", "use_bias", default=False)
    if config.has("mamba_n_heads") or name == "mamba2":
        heads = config.integer("mamba_n_heads", "num_heads")
        head_dim = config.get("mamba_d_head", "head_dim")
        size = head_dim if type(head_dim) is int and head_dim > 0 else expand * hidden // heads
        groups = config.integer("mamba_n_groups", "n_groups", default=1)
        has_norm = name != "falcon_h1" or config.flag("mamba_rms_norm", default=False)
        return mamba2(
            hidden, heads, size, groups, state, kernel, biased=biased, conv_biased=conv_biased,
            has_norm=has_norm,
        )  # fmt: skip
    inner = config.integer("intermediate_size", default=expand * hidden)
    inner = inner if not prefix else expand * hidden
    rank = config.get("mamba_dt_rank", "time_step_rank")
    return mamba(
        hidden, inner, state, kernel, rank if type(rank) is int else -(-hidden // 16),
        biased=biased, conv_biased=conv_biased, has_norms=name == "jamba",
    )  # fmt: skip


# --- MLP and experts ---------------------------------------------------------------------------

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def _mlp(config: Fields, name: str, family: Family, i: int, count: int, hidden: int) -> Part | None:
    """Return what stands behind the mixer in layer ``i``: an MLP, experts, or nothing."""
    if name in ("mamba", "mamba2", "falcon_mamba"):
        return None
    num_experts = config.integer(*_EXPERTS, default=0, low=0)
    # Where all layers have experts, these widths belong to no layer.
    config.get("intermediate_size", "intermediate_size_mlp")
    biased = family.mlp_switch and config.flag("mlp_bias", "use_bias", default=False)
    if num_experts > 1 and _is_sparse(config, name, i, count):
        width = config.integer("moe_intermediate_size", "expert_ffn_hidden_size", default=0, low=0)
        width = width or config.integer("intermediate_size")
        shared = config.integer("n_shared_experts", "num_shared_experts", default=0, low=0) * width
        shared = config.integer(
            "shared_expert_intermediate_size", "shared_intermediate_size", default=shared, low=0
        )
        if name == "llama4_text":
            shared = width
        active = config.integer("num_experts_per_tok", "experts_per_token", "moe_topk")
        if active > num_experts:
            config.fail(f"{active} experts for a token, but there are {num_experts}")
        return experts(
            hidden,
            width,
            num_experts,
            active,
            shared_width=shared,
            shared_gate=config.values.get("shared_expert_intermediate_size") is not None,
            biased=family.expert_bias,
            router_bias=config.flag("use_expert_bias", default=family.router_bias),
        )
    width = config.integer("block_ff_dim", "intermediate_size", "n_inner")
    if name == "granitemoehybrid":  # without experts, what they would share is all there is
        width = config.integer("shared_intermediate_size", default=width)
    if name == "lfm2" and config.flag("block_auto_adjust_ff_dim", default=True):
        if config.get("block_ffn_dim_multiplier") not in (None, 1):
            config.fail("block_ffn_dim_multiplier is set, which is not supported")
        config.get("block_use_swiglu", "block_use_xavier_init", "intermediate_size")
        multiple = config.integer("block_multiple_of", default=256)
        width = -(-int(2 * width / 3) // multiple) * multiple
    if name == "llama4_text":
        width = config.integer("intermediate_size_mlp", default=width)
    return mlp(hidden, width, gated=family.gated, biased=biased)


def _is_sparse(config: Fields, name: str, i: int, count: int) -> bool:
    """Return whether layer ``i`` has experts: the first few, or all but each N-th, may be dense."""
    dense = config.list_of(int, "mlp_only_layers") or []
    period = config.integer("decoder_sparse_step", "moe_layer_freq", default=1)
    first = config.integer("first_k_dense_replace", "num_dense_layers", default=0, low=0)
    if name == "llama4_text":
        period = config.integer("interleave_moe_layer_step", default=1)
    if (sparse := config.list_of(int, "moe_layers")) is not None:
        return i in sparse
    if config.get("expert_layer_period"):
        step = config.integer("expert_layer_period")
        return i % step == config.integer("expert_layer_offset", default=0, low=0)
    return i >= first and i not in dense and (i + 1) % period == 0
