"""Nemotron-H, of Hugging Face's files and of GGUF: layers of one half each. Literal tables."""

from __future__ import annotations

from dataclasses import replace

from ridgeline.models.families.gguf_names import LAYER, OUTER, PREFIX
from ridgeline.models.families.gguf_recurrent import SSM, SSM_LAYER
from ridgeline.models.families.hf_parts import ACTIVATIONS
from ridgeline.models.families.hf_recurrent import NO_LIMITS
from ridgeline.models.families.hf_recurrent import SSM_LAYER as HF_SSM_LAYER
from ridgeline.models.families.table import Family, choice, const, flag, has, integer, number

_ACTIVATION = choice("mlp_hidden_act", among=ACTIVATIONS, default="relu2")
_DENSE = Family(
    {
        "embed": "backbone.embeddings.weight",
        "norm": "backbone.norm_f.weight",
        "head": "lm_head.weight",
    },
    {n: f"mixer.{name}" for n, name in HF_SSM_LAYER.items()}
    | {
        "attn_norm": "norm.weight",
        "q": "mixer.q_proj.weight",
        "k": "mixer.k_proj.weight",
        "v": "mixer.v_proj.weight",
        "o": "mixer.o_proj.weight",
        "mlp_norm": "norm.weight",
        "up": "mixer.up_proj.weight",
        "up_bias": "mixer.up_proj.bias",
        "down": "mixer.down_proj.weight",
        "down_bias": "mixer.down_proj.bias",
    },
    "backbone.layers.{}.",
    {
        "hidden_size": integer("hidden_size"),
        "vocab_size": integer("vocab_size"),
        "norm_eps": number("layer_norm_epsilon", default=1e-5),
        "tied_embeddings": const(False),
        "mixer.num_heads": integer("num_attention_heads"),
        "mixer.num_kv_heads": integer("num_key_value_heads", default=8),
        "mixer.head_dim": integer("head_dim", "attention_head_dim", default=128),
        "recurrent.num_heads": integer("mamba_num_heads"),
        "recurrent.head_dim": integer("mamba_head_dim"),
        "recurrent.state_dim": integer("ssm_state_size"),
        "recurrent.num_groups": integer("n_groups"),
        "recurrent.kernel": integer("conv_kernel"),
        "recurrent.conv_bias": flag("use_conv_bias", default=True),
        "recurrent.bias": flag("use_bias"),
        "ffn.size": integer("intermediate_size"),
        "ffn.gated": const(False),
        "ffn.activation": _ACTIVATION,
        "ffn.bias": flag("mlp_bias"),
    },
    recurrent="ssm",
    by_halves=True,
    others=("mtp.",),
    refuse=("attention_bias", "mamba_proj_bias", "sliding_window", "moe_latent_size"),
    unused=(  # how a prompt is computed, for training, of other models, or other keys say it
        "attention_head_dim", "chunk_size", "expand", "mamba_ssm_cache_dtype",
        "moe_intermediate_size", "moe_shared_expert_intermediate_size",
        "moe_shared_expert_overlap", "mtp_hybrid_override_pattern", "mtp_layers_block_type",
        "n_group", "n_routed_experts", "n_shared_experts", "norm_topk_prob",
        "num_experts_per_tok", "num_logits_to_keep", "num_nextn_predict_layers",
        "rescale_prenorm_residual", "residual_in_fp32", "rms_norm_eps", "rope_parameters",
        "routed_scaling_factor",
        "time_step_floor", "time_step_max", "time_step_min", "time_step_rank", "topk_group",
        "use_mamba_kernels", "intermediate_size",
    ),
    # transformers keeps a head of its own, whatever the config says of tying.
    must={"mamba_hidden_act": "silu", "time_step_limit": NO_LIMITS, "tie_word_embeddings": False},
)  # fmt: skip
_EXPERTS = {
    "router": "mixer.gate.weight",
    "choice_bias": "mixer.gate.e_score_correction_bias",
    "shared_up": "mixer.shared_experts.up_proj.weight",
    "shared_down": "mixer.shared_experts.down_proj.weight",
}
_SPARSE = {
    "ffn.gated": const(False),
    "ffn.activation": _ACTIVATION,
    "ffn.router": const("sigmoid"),
    "ffn.num": integer("n_routed_experts"),
    "ffn.per_token": integer("num_experts_per_tok"),
    "ffn.size": integer("moe_intermediate_size"),
    "ffn.choice_bias": const(True),
    "ffn.normalised": flag("norm_topk_prob", default=True),
    "ffn.scale": number("routed_scaling_factor", default=1.0),
    "ffn.num_groups": integer("n_group", default=1),
    "ffn.groups_met": integer("topk_group", default=1),
    "shared.gated": const(False),
    "shared.activation": _ACTIVATION,
    "shared.size": integer("moe_shared_expert_intermediate_size"),
    "dense.gated": const(False),
    "dense.activation": _ACTIVATION,
    "dense.size": integer("intermediate_size"),
}


def _of_experts(family: Family) -> Family:
    """Return the facts of a family of MLPs but for these."""
    return replace(
        family, facts={name: one for name, one in family.facts.items() if name[:4] != "ffn."}
    )


FAMILIES = {
    "NemotronHForCausalLM": _DENSE,
    "NemotronHForCausalLM of experts": replace(
        _DENSE,
        layer={
            **_DENSE.layer,
            **_EXPERTS,
            "up": "mixer.experts.{e}.up_proj.weight",
            "down": "mixer.experts.{e}.down_proj.weight",
        },
        instead={name: _DENSE.layer[name] for name in ("up", "down")},
        facts={**_of_experts(_DENSE).facts, **_SPARSE},
        has_experts=True,
        refuse=(*_DENSE.refuse, "mlp_bias"),
    ),
}
_GGUF = Family(
    OUTER,
    LAYER | SSM_LAYER | {"mlp_norm": "attn_norm.weight"},
    PREFIX,
    {
        "hidden_size": integer("embedding_length"),
        "norm_eps": number("attention.layer_norm_rms_epsilon"),
        "mixer.num_heads": integer("attention.head_count"),
        "mixer.num_kv_heads": integer("attention.head_count_kv"),
        "mixer.head_dim": integer("attention.key_length"),
        "mixer.qkv_bias": has("attn_q.bias"),
        "mixer.o_bias": has("attn_output.bias"),
        "ffn.size": integer("feed_forward_length"),
        "ffn.gated": const(False),
        "ffn.activation": const("relu2"),
        **SSM,
        "recurrent.conv_bias": has("ssm_conv1d.bias"),
    },
    recurrent="ssm",
    by_halves=True,
    decays=True,
    unused=("attention.layer_norm_epsilon", "attention.value_length"),
    must={"rope.scaling.finetuned": False},
)
GGUF_FAMILIES = {
    "nemotron_h": _GGUF,
    "nemotron_h_moe": replace(
        _GGUF,
        layer={
            **_GGUF.layer,
            "choice_bias": "exp_probs_b.bias",
            **{f"shared_{name}": f"ffn_{name}_shexp.weight" for name in ("up", "down")},
            **{name: f"ffn_{name}_exps.weight" for name in ("up", "down")},
        },
        facts={
            **_of_experts(_GGUF).facts,
            "ffn.gated": const(False),
            "ffn.router": const("sigmoid"),
            "ffn.choice_bias": const(True),
            "ffn.activation": const("relu2"),
            "ffn.num": integer("expert_count"),
            "ffn.per_token": integer("expert_used_count"),
            "ffn.size": integer("expert_feed_forward_length", "feed_forward_length"),
            "ffn.normalised": flag("expert_weights_norm", default=True),
            "ffn.scale": number("expert_weights_scale", default=1.0),
            "shared.gated": const(False),
            "shared.activation": const("relu2"),
            "shared.size": integer("expert_shared_feed_forward_length"),
        },
        has_experts=True,
        refuse=("moe_latent_size",),
        unused=(*_GGUF.unused, "expert_shared_count"),
        must={**_GGUF.must, "expert_group_count": 1, "expert_group_used_count": 1},
    ),
}
