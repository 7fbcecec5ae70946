"""Families in GGUF files, by ``general.architecture``. Literal tables."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.models.families.gguf_dense import FAMILIES as _OF_LAYER_NORM
from ridgeline.models.families.gguf_names import (
    LAYER,
    OUTER,
    PREFIX,
    REFUSED,
    SHARED,
    refused_but,
)
from ridgeline.models.families.table import (
    Family,
    const,
    count,
    has,
    integer,
    inverse,
    number,
    numbered,
    power,
)

_FUSED = LAYER | {
    "q": "attn_qkv.weight",
    "k": "attn_qkv.weight",
    "v": "attn_qkv.weight",
    "gate": "ffn_up.weight",
    "up": "ffn_up.weight",
}
_EXPERTS = LAYER | {
    "gate": "ffn_gate_exps.weight",
    "up": "ffn_up_exps.weight",
    "down": "ffn_down_exps.weight",
}
_GPT_OSS_NAMES = {
    "sinks": "attn_sinks.weight",
    "mlp_norm": "post_attention_norm.weight",
    "router_bias": "ffn_gate_inp.bias",
    "gate_bias": "ffn_gate_exps.bias",
    "up_bias": "ffn_up_exps.bias",
    "down_bias": "ffn_down_exps.bias",
}
_MODEL = {
    "hidden_size": integer("embedding_length"),
    "norm_eps": number("attention.layer_norm_rms_epsilon"),
    "mixer.num_heads": integer("attention.head_count"),
    "mixer.qkv_bias": has("blk.0.attn_q.bias"),
    "mixer.o_bias": has("blk.0.attn_output.bias"),
    "ffn.size": integer("feed_forward_length"),
}
_GEMMA_1 = {
    "embed_scale": power("embedding_length", 0.5),
    "ffn.activation": const("gelu_tanh"),
}
_GEMMA = _GEMMA_1 | {"layer.norms": const("around")}
_SCALES = {
    "embed_scale": number("embedding_scale", default=1.0),
    "residual_scale": number("residual_scale", default=1.0),
    "logit_scale": inverse("logit_scale", 1.0),
}
_SPARSE = {
    "ffn.num": integer("expert_count"),
    "ffn.per_token": integer("expert_used_count"),
    "ffn.size": integer("expert_feed_forward_length", "feed_forward_length"),
}
# Converters copy a window that these models' configs switch off.
_SWITCHED_OFF = ("attention.sliding_window",)
# And what Granite 4's say of parts that models of attention and an MLP alone do not have.
_OF_GRANITE_4 = (
    "expert_shared_feed_forward_length",
    "ssm.conv_kernel",
    "ssm.group_count",
    "ssm.inner_size",
    "ssm.state_size",
    "ssm.time_step_rank",
)


FAMILIES = {
    "llama": Family(
        OUTER,
        LAYER,
        PREFIX,
        _MODEL,
        windows="all",
        default_window=0,
        interleaved=True,
        refuse=REFUSED,
    ),
    "phi3": Family(OUTER, _FUSED, PREFIX, _MODEL, windows="all", default_window=0, refuse=REFUSED),
    "qwen2": Family(
        OUTER,
        LAYER,
        PREFIX,
        _MODEL | {"mixer.qkv_bias": const(True)},
        refuse=REFUSED,
        unused=_SWITCHED_OFF,
    ),
    "qwen3": Family(
        OUTER,
        LAYER,
        PREFIX,
        _MODEL | {"mixer.qk_norm": const("head")},
        refuse=REFUSED,
        unused=_SWITCHED_OFF,
    ),
    "gemma": Family(OUTER, LAYER, PREFIX, _MODEL | _GEMMA_1, refuse=REFUSED),
    "gemma3": Family(
        OUTER,
        LAYER,
        PREFIX,
        _MODEL | _GEMMA | {"mixer.qk_norm": const("head")},
        windows="pattern",
        pattern=6,
        ropes={"sliding": "10000"},
        refuse=refused_but("attention.sliding_window_pattern"),
        wide_scale_layers=(62,),
    ),
    "gemma2": Family(
        OUTER,
        LAYER,
        PREFIX,
        _MODEL
        | _GEMMA
        | {
            "mixer.softcap": number("attn_logit_softcapping", default=50.0),
            "logit_softcap": number("final_logit_softcapping", default=30.0),
        },
        windows="pattern",
        pattern=2,
        refuse=refused_but("attn_logit_softcapping", "final_logit_softcapping"),
        wide_scale_layers=(46,),
    ),
    "granite": Family(
        OUTER,
        LAYER,
        PREFIX,
        _MODEL | _SCALES | {"mixer.scale": number("attention.scale", default=1.0)},
        interleaved=True,
        refuse=refused_but("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
        unused=_OF_GRANITE_4,
    ),
    "olmo2": Family(
        OUTER,
        LAYER,
        PREFIX,
        _MODEL | {"layer.norms": const("behind"), "mixer.qk_norm": const("width")},
        windows="pattern",  # of OLMo 3; OLMo 2 has no window
        default_window=0,
        pattern=4,
        ropes={"sliding": "rope.freq_base"},
        refuse=refused_but("attention.sliding_window_pattern"),
    ),
    "smollm3": Family(
        OUTER,
        LAYER,
        PREFIX,
        _MODEL,
        interleaved=True,
        ropes={"no_rope_layers": "none"},
        refuse=REFUSED,
    ),
    **_OF_LAYER_NORM,
    "llama of experts": Family(  # Mixtral
        OUTER,
        _EXPERTS,
        PREFIX,
        _MODEL | _SPARSE,
        windows="all",
        default_window=0,
        interleaved=True,
        has_experts=True,
        refuse=refused_but("expert_count"),
    ),
    "olmoe": Family(
        OUTER,
        _EXPERTS,
        PREFIX,
        _MODEL | _SPARSE | {"mixer.qk_norm": const("width"), "ffn.normalised": const(False)},
        has_experts=True,
        refuse=refused_but("expert_count"),
    ),
    "granitemoe": Family(
        OUTER,
        _EXPERTS | SHARED,
        PREFIX,
        _MODEL
        | _SPARSE
        | _SCALES
        | {
            "mixer.scale": number("attention.scale", default=1.0),
            "shared.size": count("expert_shared_feed_forward_length"),
        },
        interleaved=True,
        has_experts=True,
        refuse=refused_but(
            "attention.scale", "embedding_scale", "residual_scale", "logit_scale", "expert_count"
        ),
    ),
    "gpt-oss": Family(
        OUTER,
        _EXPERTS | _GPT_OSS_NAMES,
        PREFIX,
        _MODEL
        | _SPARSE
        | {
            "mixer.sinks": const(True),
            "ffn.bias": const(True),
            "ffn.activation": const("swiglu_clamped"),
        },
        windows="pattern",
        pattern=2,
        has_experts=True,
        # As published ("truncate": false); GGUF has no key for it, and llama.cpp truncates.
        defaults={"rope.scaling.yarn_truncate": False},
        refuse=refused_but("attention.sliding_window_pattern", "expert_count"),
    ),
    "qwen2moe": Family(
        OUTER,
        _EXPERTS | SHARED | {"shared_scale": "ffn_gate_inp_shexp.weight"},
        PREFIX,
        _MODEL
        | _SPARSE
        | {
            "mixer.qkv_bias": const(True),
            "ffn.normalised": const(False),
            "ffn.shared_gated": const(True),
            "shared.size": integer("expert_shared_feed_forward_length"),
        },
        has_experts=True,
        refuse=refused_but("expert_count"),
        unused=_SWITCHED_OFF,
    ),
    "qwen3moe": Family(
        OUTER,
        _EXPERTS,
        PREFIX,
        _MODEL | _SPARSE | {"mixer.qk_norm": const("head")},
        has_experts=True,
        refuse=refused_but("expert_count"),
        unused=_SWITCHED_OFF,
    ),
}
FAMILIES["lfm2"] = Family(
    OUTER | {"norm": "token_embd_norm.weight"},
    LAYER
    | {
        "in": "shortconv.in_proj.weight",
        "conv": "shortconv.conv.weight",
        "out": "shortconv.out_proj.weight",
    },
    PREFIX,
    _MODEL | {"mixer.qk_norm": const("head"), "recurrent.kernel": integer("shortconv.l_cache")},
    recurrent="conv",
    refuse=REFUSED,
)
FAMILIES["lfm2moe"] = replace(
    FAMILIES["lfm2"],
    layer={
        **FAMILIES["lfm2"].layer,
        "choice_bias": "exp_probs_b.bias",
        **{name: f"ffn_{name}_exps.weight" for name in ("gate", "up", "down")},
    },
    facts={
        **FAMILIES["lfm2"].facts,
        "dense.size": integer("feed_forward_length"),
        "ffn.num": integer("expert_count"),
        "ffn.per_token": integer("expert_used_count"),
        "ffn.size": integer("expert_feed_forward_length"),
        "ffn.router": numbered("expert_gating_func", among={1: "softmax", 2: "sigmoid"}, default=2),
        "ffn.choice_bias": has("exp_probs_b.bias"),
        "ffn.scale": number("expert_weights_scale", default=1.0),
    },
    has_experts=True,
    instead={name: f"ffn_{name}.weight" for name in ("gate", "up", "down")},
    dense_layers="leading_dense_block_count",
    refuse=refused_but("expert_count"),
)
# Of models that also see: sections of positions are those of pictures, and so are the deep stacks.
FAMILIES |= {
    name: replace(
        FAMILIES[of_text],
        unused=(*_SWITCHED_OFF, "n_deepstack_layers", "rope.dimension_sections"),
    )
    for name, of_text in (("qwen2vl", "qwen2"), ("qwen3vl", "qwen3"), ("qwen3vlmoe", "qwen3moe"))
}
HARMLESS = frozenset((
    "attention.key_length_swa", "attention.value_length_swa",
    "expert_used_count", "feed_forward_length", "rope.dimension_count", "rope.freq_base",
    "rope.scale_linear", "rope.scaling.attn_factor", "rope.scaling.factor",
    "rope.scaling.finetuned", "rope.scaling.original_context_length", "rope.scaling.type",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "rope.scaling.yarn_truncate",
    "vocab_size",
))  # fmt: skip
