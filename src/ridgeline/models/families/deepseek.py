"""DeepSeek V2 and V3, and what is made like them (R1, Kimi K2, GLM Flash). Literal tables.

Attention is latent (``arch.latent``); the first layers have a dense network, the others experts
and a network that all tokens meet. V2's router is a softmax, V3's a sigmoid with a bias for the
choice.
"""

from __future__ import annotations

from dataclasses import replace

from ridgeline.models.families.hf_parts import DENSE, DENSE_NAMES, LAYER, MODEL, OUTER, PREFIX
from ridgeline.models.families.table import (
    Family,
    const,
    count,
    flag,
    groups,
    has,
    integer,
    number,
    numbered,
    product,
    total,
)

SPARSE_NAMES = {
    "router": "mlp.gate.weight",
    "choice_bias": "mlp.gate.e_score_correction_bias",
    **{name: f"mlp.experts.{{e}}.{name}_proj.weight" for name in ("gate", "up", "down")},
    **{f"shared_{n}": f"mlp.shared_experts.{n}_proj.weight" for n in ("gate", "up", "down")},
}
_NAMES = LAYER | {
    "q_a": "self_attn.q_a_proj.weight",
    "q_a_norm": "self_attn.q_a_layernorm.weight",
    "q_b": "self_attn.q_b_proj.weight",
    "kv_a": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_a_norm": "self_attn.kv_a_layernorm.weight",
    "k_b": "self_attn.kv_b_proj.weight",
    "v_b": "self_attn.kv_b_proj.weight",
    **SPARSE_NAMES,
}
_SPARSE = {
    **DENSE,
    "ffn.num": integer("n_routed_experts", "num_local_experts"),
    "ffn.per_token": integer("num_experts_per_tok"),
    "ffn.size": integer("moe_intermediate_size"),
    "ffn.scale": number("routed_scaling_factor", default=1.0),
    "ffn.num_groups": groups("n_group"),
    "ffn.groups_met": groups("topk_group"),
    "shared.size": product("n_shared_experts", "moe_intermediate_size"),
}
V3_SPARSE = _SPARSE | {
    "ffn.router": const("sigmoid"),
    "ffn.choice_bias": const(True),
    "ffn.normalised": flag("norm_topk_prob", default=True),
}
_LATENT = MODEL | {
    "norm_eps": number("rms_norm_eps", default=1e-6),
    "mixer.head_dim": total("qk_nope_head_dim", "qk_rope_head_dim"),
    "latent.q_rank": count("q_lora_rank"),
    "latent.kv_rank": integer("kv_lora_rank"),
    "latent.v_dim": integer("v_head_dim"),
}
_V3 = Family(
    OUTER,
    _NAMES,
    PREFIX,
    _LATENT | V3_SPARSE,
    interleaved=True,
    has_experts=True,
    instead=DENSE_NAMES,
    dense_layers="first_k_dense_replace",
    defaults={"first_k_dense_replace": 3},
    refuse=("attention_bias", "mlp_bias"),
    # How experts were spread and balanced in training, and layers that guess tokens ahead.
    unused=("aux_loss_alpha", "ep_size", "num_nextn_predict_layers", "qk_head_dim", "seq_aux"),
    must={
        "moe_layer_freq": 1,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
)
FAMILIES = {
    "DeepseekV2ForCausalLM": replace(
        _V3,
        facts=_LATENT | _SPARSE | {"ffn.normalised": const(False)},
        defaults={"first_k_dense_replace": 0},
        must={"moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax"},
    ),
    "DeepseekV3ForCausalLM": _V3,
    "Glm4MoeLiteForCausalLM": replace(_V3, defaults={"first_k_dense_replace": 1}),
}

GGUF_SPARSE_NAMES = {
    "router": "ffn_gate_inp.weight",
    "choice_bias": "exp_probs_b.bias",
    **{name: f"ffn_{name}_exps.weight" for name in ("gate", "up", "down")},
    **{f"shared_{name}": f"ffn_{name}_shexp.weight" for name in ("gate", "up", "down")},
}
GGUF_DENSE_NAMES = {name: f"ffn_{name}.weight" for name in ("gate", "up", "down")}
ROUTERS = {1: "softmax", 2: "sigmoid"}  # GGUF's numbers
GGUF_SPARSE = {
    "dense.size": integer("feed_forward_length"),
    "ffn.num": integer("expert_count"),
    "ffn.per_token": integer("expert_used_count"),
    "ffn.size": integer("expert_feed_forward_length"),
    "ffn.scale": number("expert_weights_scale", default=1.0),
    "ffn.normalised": flag("expert_weights_norm"),
    "ffn.choice_bias": has("exp_probs_b.bias"),
    "ffn.num_groups": integer("expert_group_count", default=1),
    "ffn.groups_met": integer("expert_group_used_count", default=1),
    "shared.size": product("expert_shared_count", "expert_feed_forward_length"),
}
_GGUF_NAMES = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "q_a": "attn_q_a.weight",
    "q_a_norm": "attn_q_a_norm.weight",
    "q_b": "attn_q_b.weight",
    "kv_a": "attn_kv_a_mqa.weight",
    "kv_a_norm": "attn_kv_a_norm.weight",
    "k_b": "attn_kv_b.weight",
    "v_b": "attn_kv_b.weight",
    "o": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    **GGUF_SPARSE_NAMES,
}
GGUF_FAMILIES = {
    "deepseek2": Family(
        {"embed": "token_embd.weight", "norm": "output_norm.weight", "head": "output.weight"},
        _GGUF_NAMES,
        "blk.{}.",
        {
            "hidden_size": integer("embedding_length"),
            "norm_eps": number("attention.layer_norm_rms_epsilon"),
            "mixer.num_heads": integer("attention.head_count"),
            # Newer files call the latent a key, and the lengths before it is absorbed "mla".
            "mixer.head_dim": integer("attention.key_length_mla", "attention.key_length"),
            "latent.q_rank": count("attention.q_lora_rank"),
            "latent.kv_rank": integer("attention.kv_lora_rank"),
            "latent.v_dim": integer("attention.value_length_mla", "attention.value_length"),
            **GGUF_SPARSE,
            # Files of V2 lack it; with learnt biases, softmax or sigmoid would be a guess.
            "ffn.router": numbered(
                "expert_gating_func", among=ROUTERS, default=1, must_beside="exp_probs_b.bias"
            ),
        },
        interleaved=True,
        has_experts=True,
        instead={
            "k_b": "attn_k_b.weight",
            "v_b": "attn_v_b.weight",
            **GGUF_DENSE_NAMES,
        },
        dense_layers="leading_dense_block_count",
        refuse=("attention.scale", "embedding_scale", "logit_scale", "attn_logit_softcapping"),
        unused=(
            "attention.head_count_kv",
            "attention.key_length",
            "attention.value_length",
        ),
    ),
}
