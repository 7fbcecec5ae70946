"""Families in GGUF files, by ``general.architecture``. Literal tables."""

from __future__ import annotations

from ridgeline.models.families.table import (
    Family,
    const,
    has,
    integer,
    inverse,
    number,
    power,
)

_PREFIX = "blk.{}."
_OUTER = {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"}
_LAYER = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "attn_post_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "mlp_post_norm": "post_ffw_norm.weight",
    "router": "ffn_gate_inp.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
_FUSED = _LAYER | {
    "q": "attn_qkv.weight",
    "k": "attn_qkv.weight",
    "v": "attn_qkv.weight",
    "gate": "ffn_up.weight",
    "up": "ffn_up.weight",
}
_EXPERTS = _LAYER | {
    "gate": "ffn_gate_exps.weight",
    "up": "ffn_up_exps.weight",
    "down": "ffn_down_exps.weight",
}
_MODEL = {
    "hidden_size": integer("embedding_length"),
    "norm_eps": number("attention.layer_norm_rms_epsilon"),
    "mixer.num_heads": integer("attention.head_count"),
    "mixer.qkv_bias": has("blk.0.attn_q.bias"),
    "mixer.o_bias": has("blk.0.attn_output.bias"),
    "ffn.size": integer("feed_forward_length"),
}
_GEMMA = {
    "embed_scale": power("embedding_length", 0.5),
    "layer.norms": const("around"),
    "ffn.activation": const("gelu_tanh"),
}
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
_REFUSED = (
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention.scale",
    "attention.sliding_window_pattern",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "rope.scaling.yarn_log_multiplier",
    "expert_count",
)


def _refused_but(*keys: str) -> tuple[str, ...]:
    return tuple(key for key in _REFUSED if key not in keys)


FAMILIES = {
    "llama": Family(
        _OUTER, _LAYER, _PREFIX, _MODEL, windows="all", interleaved=True, refuse=_REFUSED
    ),
    "phi3": Family(_OUTER, _FUSED, _PREFIX, _MODEL, windows="all", refuse=_REFUSED),
    # Converters copy a window that these models' configs switch off.
    "qwen2": Family(
        _OUTER, _LAYER, _PREFIX, _MODEL | {"mixer.qkv_bias": const(True)}, refuse=_REFUSED
    ),
    "qwen3": Family(
        _OUTER, _LAYER, _PREFIX, _MODEL | {"mixer.qk_norm": const("head")}, refuse=_REFUSED
    ),
    "gemma3": Family(
        _OUTER,
        _LAYER,
        _PREFIX,
        _MODEL | _GEMMA | {"mixer.qk_norm": const("head")},
        windows="pattern",
        pattern=6,
        ropes={"sliding": "10000"},
        refuse=_refused_but("attention.sliding_window_pattern"),
        refuse_layers=(62,),
    ),
    "gemma2": Family(
        _OUTER,
        _LAYER,
        _PREFIX,
        _MODEL
        | _GEMMA
        | {
            "mixer.softcap": number("attn_logit_softcapping", default=50.0),
            "logit_softcap": number("final_logit_softcapping", default=30.0),
        },
        windows="pattern",
        pattern=2,
        refuse=_refused_but("attn_logit_softcapping", "final_logit_softcapping"),
        refuse_layers=(46,),
    ),
    "granite": Family(
        _OUTER,
        _LAYER,
        _PREFIX,
        _MODEL | _SCALES | {"mixer.scale": number("attention.scale", default=1.0)},
        interleaved=True,
        refuse=_refused_but("attention.scale", "embedding_scale", "residual_scale", "logit_scale"),
    ),
    "olmo2": Family(
        _OUTER,
        _LAYER,
        _PREFIX,
        _MODEL | {"layer.norms": const("behind"), "mixer.qk_norm": const("width")},
        refuse=_REFUSED,
    ),
    "smollm3": Family(
        _OUTER,
        _LAYER,
        _PREFIX,
        _MODEL,
        interleaved=True,
        ropes={"no_rope_layers": "none"},
        refuse=_REFUSED,
    ),
    "qwen3moe": Family(
        _OUTER,
        _EXPERTS,
        _PREFIX,
        _MODEL | _SPARSE | {"mixer.qk_norm": const("head")},
        has_experts=True,
        refuse=_refused_but("expert_count"),
    ),
}
FAMILIES["lfm2"] = Family(
    _OUTER | {"norm": "token_embd_norm.weight"},
    _LAYER
    | {
        "in": "shortconv.in_proj.weight",
        "conv": "shortconv.conv.weight",
        "out": "shortconv.out_proj.weight",
    },
    _PREFIX,
    _MODEL | {"mixer.qk_norm": const("head"), "recurrent.kernel": integer("shortconv.l_cache")},
    recurrent="conv",
    refuse=_REFUSED,
)
HARMLESS = frozenset((
    "attention.key_length_swa", "attention.sliding_window", "attention.value_length_swa",
    "expert_used_count", "feed_forward_length", "rope.dimension_count", "rope.freq_base",
    "rope.scale_linear", "rope.scaling.attn_factor", "rope.scaling.factor",
    "rope.scaling.finetuned", "rope.scaling.original_context_length", "rope.scaling.type",
    "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow", "vocab_size",
))  # fmt: skip
