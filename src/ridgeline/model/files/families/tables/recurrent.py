"""Decoders with layers that keep a state: convolutions, the delta rule, state spaces.

Literal tables. llama.cpp's converter stores what decays states as minus an exponential,
convolutions without their empty axis, multipliers of Falcon-H1 within the weights, and value heads
of Qwen3.5 in the order in which key heads serve them by turns.
"""

from __future__ import annotations

from ridgeline.model.files.families.fields import (
    adjusted,
    choice,
    const,
    flag,
    integer,
    number,
    numbered,
    numbers,
)
from ridgeline.model.files.families.gguf import ROUTERS
from ridgeline.model.files.families.hf_names import (
    BIASES,
    DENSE,
    EXPERTS,
    HEAD_NORM,
    MLP_BIAS,
    NO_LIMITS,
    PARTIAL,
    SHARED,
    SSM,
    activation,
    gated,
    numbered_matrices,
)
from ridgeline.model.files.families.inherit import row

_SILU = {"ffn.activation": choice("hidden_act", among={"silu": "silu"}, default="silu")}
_SQUARED = {"ffn.gated": const(False)} | activation("mlp_hidden_act", default="relu2")
_QWEN_EXPERTS = {
    "ffn.num": integer("num_experts"),
    "ffn.per_token": integer("num_experts_per_tok"),
    "ffn.normalised": flag("norm_topk_prob", default=True),
    "ffn.size": integer("moe_intermediate_size"),
    "ffn.shared_gated": const(True),
    "shared.size": integer("shared_expert_intermediate_size"),
}
_MAMBA_OF_HYBRID = {
    "recurrent.num_heads": integer("mamba_n_heads"),
    "recurrent.head_dim": integer("mamba_d_head"),
    "recurrent.state_dim": integer("mamba_d_state"),
    "recurrent.num_groups": integer("mamba_n_groups"),
    "recurrent.kernel": integer("mamba_d_conv"),
    "recurrent.conv_bias": flag("mamba_conv_bias", default=True),
    "recurrent.bias": flag("mamba_proj_bias"),
}
_FEED_FORWARD = gated("feed_forward") | {"mlp_norm": "pre_ff_layernorm."}
_SHARED_MLP = {"gate up": "shared_mlp.input_linear.", "down": "shared_mlp.output_linear."}


def _ssm(module: str) -> dict[str, str]:
    """Return names of a state space that stands in a module."""
    return {part: f"{module}.{name}" for part, name in SSM.items()}


ROWS = (
    row(
        "lfm2",
        hf="Lfm2ForCausalLM",
        gguf="lfm2",
        outer={"norm": "model.embedding_norm."},
        layer={
            "attn_norm": "operator_norm.",
            "o": "self_attn.out_proj.",
            "q_norm": "self_attn.q_layernorm.",
            "k_norm": "self_attn.k_layernorm.",
            "in": "conv.in_proj.",
            "conv": "conv.conv.",
            "out": "conv.out_proj.",
            "mlp_norm": "ffn_norm.",
            **numbered_matrices("feed_forward"),
        },
        facts=HEAD_NORM
        | {
            "norm_eps": number("norm_eps", default=1e-5),
            "tied_embeddings": flag("tie_embedding", "tie_word_embeddings", default=True),
            "recurrent.kernel": integer("conv_L_cache", default=3),
            "recurrent.bias": flag("conv_bias"),
            "ffn.size": adjusted("block_ff_dim", "intermediate_size"),
            "ffn.activation": None,
        },
        recurrent="conv",
        attention_layers="full_attn_idxs",
        pattern=1,
        defaults={"rope_theta": 1e6},
        # Other keys say it, or it was for training.
        ignored_keys="block_dim block_mlp_init_scale block_norm_eps block_out_init_scale "
        "block_use_xavier_init conv_dim conv_dim_out conv_use_xavier_init intermediate_size "
        "num_heads theta tie_word_embeddings",
        required={"block_use_swiglu": True, "use_pos_enc": True},
        in_gguf={
            "outer": {"norm": "token_embd_norm."},
            "layer": {
                "in": "shortconv.in_proj.",
                "conv": "shortconv.conv.",
                "out": "shortconv.out_proj.",
            },
            "facts": {
                "recurrent.kernel": integer("shortconv.l_cache"),
            },
        },
    ),
    row(
        "lfm2_moe",
        like="lfm2",
        hf="Lfm2MoeForCausalLM",
        gguf="lfm2moe",
        layer={
            "router": "feed_forward.gate.",
            "choice_bias": "feed_forward.expert_bias",
            **numbered_matrices("feed_forward.experts.{e}"),
        },
        facts={
            "ffn.num": integer("num_experts"),
            "ffn.per_token": integer("num_experts_per_tok"),
            "ffn.size": integer("moe_intermediate_size"),
            "ffn.router": "sigmoid",
            "ffn.choice_bias": flag("use_expert_bias", default=True),
            "ffn.normalised": flag("norm_topk_prob", default=True),
            "ffn.scale": number("routed_scaling_factor", default=1.0),
            "dense.size": integer("intermediate_size"),
        },
        has_experts=True,
        alternatives=numbered_matrices("feed_forward"),
        dense_layers="num_dense_layers",
        defaults={"num_dense_layers": 2},
        ignored_keys="block_auto_adjust_ff_dim block_ffn_dim_multiplier block_multiple_of",
        in_gguf={
            "facts": {"ffn.router": numbered("expert_gating_func", among=ROUTERS, default=2)},
        },
    ),
    row(
        "decoder of deltas",
        layer={
            "q_gate": "self_attn.q_proj.",
            "conv": "linear_attn.conv1d.",
            "dt_bias": "linear_attn.dt_bias",
            "a_log": "linear_attn.A_log",
            "gated_scale": "linear_attn.norm.",
            "out": "linear_attn.out_proj.",
        },
        facts=HEAD_NORM
        | _SILU
        | {
            "mixer.head_dim": integer("head_dim", default=256),
            "mixer.gated": True,
            "recurrent.num_key_heads": integer("linear_num_key_heads", default=16),
            "recurrent.num_value_heads": integer("linear_num_value_heads", default=32),
            "recurrent.key_dim": integer("linear_key_head_dim", default=128),
            "recurrent.value_dim": integer("linear_value_head_dim", default=128),
            "recurrent.kernel": integer("linear_conv_kernel_dim", default=4),
        },
        recurrent="delta",
        attention_layers="full_attention_interval",
        pattern=4,
        norm_offset=1.0,
        rope_keys=PARTIAL,
        defaults={"partial_rotary_factor": 0.25},
        ignored_tensors="mtp.",
        refused_keys="attention_bias",
        ignored_keys="full_attention_interval",
        in_gguf={
            "layer": {"mlp_norm": "post_attention_norm."},
            "attention_layers": "full_attention_interval",
            "ignored_keys": "rope.dimension_sections",  # of pictures; of text all are alike
        },
    ),
    row(
        "qwen3_next",
        like="decoder of deltas",
        hf="Qwen3NextForCausalLM",
        gguf="qwen3next",
        layer=EXPERTS
        | SHARED
        | {
            "qkv z": "linear_attn.in_proj_qkvz.",
            "beta decay": "linear_attn.in_proj_ba.",
        },
        facts=_QWEN_EXPERTS | {"dense.size": integer("intermediate_size")},
        has_experts=True,
        alternatives=DENSE,
        dense_layers="mlp_only_layers",
        experts_every="decoder_sparse_step",
        defaults={"num_key_value_heads": 2},
        ignored_keys="intermediate_size",  # where all layers have experts
        in_gguf={"layer": {"beta decay": "ssm_ba."}},
    ),
    row(
        "qwen3_5",
        like="decoder of deltas",
        types="qwen3_5_text",
        defaults={"num_key_value_heads": 4},
        hf="Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration",
        gguf="qwen35",
        layer={
            "qkv": "linear_attn.in_proj_qkv.",
            "z": "linear_attn.in_proj_z.",
            "beta": "linear_attn.in_proj_b.",
            "decay": "linear_attn.in_proj_a.",
        },
        refused_keys="mlp_only_layers",
        ignored_keys="mamba_ssm_dtype mtp_num_hidden_layers mtp_use_dedicated_embeddings",
        required={"attn_output_gate": True, "output_gate_type": "swish"},
        in_gguf={"facts": {"recurrent.by_turns": True}},
    ),
    row(
        "qwen3_5_moe",
        like="qwen3_5",
        types="qwen3_5_moe_text",
        defaults={"num_key_value_heads": 2},
        hf="Qwen3_5MoeForCausalLM, Qwen3_5MoeForConditionalGeneration",
        gguf="qwen35moe",
        layer=EXPERTS | SHARED,
        facts=_QWEN_EXPERTS,
        has_experts=True,
        alternatives={"gate up": "mlp.experts.gate_up_proj", "down": "mlp.experts.down_proj"},
        required={"norm_topk_prob": True},
    ),
    row(
        "bamba",
        hf="BambaForCausalLM",
        outer={"norm": "model.final_layernorm."},
        layer=_ssm("mamba") | _FEED_FORWARD,
        facts=BIASES | MLP_BIAS | _MAMBA_OF_HYBRID,
        recurrent="ssm",
        attention_layers="attn_layer_indices",
        rope_keys=PARTIAL,
        defaults={"partial_rotary_factor": 0.5},
        refused_keys="mlp_bias",
        # How a prompt is computed, for training, or other keys say it.
        ignored_keys="attn_rotary_emb mamba_chunk_size mamba_expand num_logits_to_keep "
        "z_loss_coefficient",
        required={"time_step_limit": NO_LIMITS},
    ),
    row(
        "granitemoehybrid",
        hf="GraniteMoeHybridForCausalLM",
        gguf="granitehybrid",
        like="granite",
        layer=_ssm("mamba") | _SHARED_MLP,
        facts=_MAMBA_OF_HYBRID
        | {
            "rope.turns": choice(
                "position_embedding_type", among={"rope": True, "nope": False}, default="nope"
            ),
            "ffn.size": integer("shared_intermediate_size"),
            "ffn.bias": None,
        },
        recurrent="ssm",
        aliases={"layers_block_type": "layer_types"},
        attention_layers="attn_layer_indices",
        defaults={"num_local_experts": 8},
        # How a prompt is computed, other keys say it, or there is no such part.
        ignored_keys="init_method intermediate_size mamba_chunk_size mamba_conv_bias mamba_d_conv "
        "mamba_d_head mamba_d_state mamba_expand mamba_n_groups mamba_n_heads num_experts_per_tok",
        required={"normalization_function": "rmsnorm", "time_step_limit": NO_LIMITS},
        in_gguf={
            "facts": {
                "ffn.size": integer("expert_shared_feed_forward_length", "feed_forward_length")
            },
            "required": {"rope.scaling.finetuned": False},  # Bamba's files have the name, but turn
        },
    ),
    row(
        "granitemoehybrid of experts",
        like="granitemoehybrid",
        hf="GraniteMoeHybridForCausalLM of experts",
        gguf="granitehybrid of experts",
        layer={
            "router": "block_sparse_moe.router.layer.",
            "gate up": "block_sparse_moe.input_linear.",
            "down": "block_sparse_moe.output_linear.",
            "shared_gate shared_up": "shared_mlp.input_linear.",
            "shared_down": "shared_mlp.output_linear.",
        },
        facts={
            "ffn.num": integer("num_local_experts"),
            "ffn.per_token": integer("num_experts_per_tok"),
            "ffn.size": integer("intermediate_size"),
            "shared.size": integer("shared_intermediate_size"),
        },
        has_experts=True,
        in_gguf={
            "facts": {"ffn.size": integer("expert_feed_forward_length", "feed_forward_length")},
        },
    ),
    row(
        "falcon_h1",
        hf="FalconH1ForCausalLM",
        gguf="falcon-h1",
        outer={"norm": "model.final_layernorm."},
        layer=_ssm("mamba") | _FEED_FORWARD,
        facts=_MAMBA_OF_HYBRID
        | _SILU
        | MLP_BIAS
        | {
            "norm_eps": number("rms_norm_eps", default=1e-5),
            "embed_scale": number("embedding_multiplier", default=1.0),
            "logit_scale": number("lm_head_multiplier", default=1.0),
            "mixer.key_scale": number("key_multiplier", default=1.0),
            "mixer.in_scale": number("attention_in_multiplier", default=1.0),
            "mixer.out_scale": number("attention_out_multiplier", default=1.0),
            "recurrent.bias": None,
            "recurrent.gated_norm": flag("mamba_rms_norm"),
            "recurrent.norm_first": flag("mamba_norm_before_gate", default=True),
            "recurrent.in_scale": number("ssm_in_multiplier", default=1.0),
            "recurrent.out_scale": number("ssm_out_multiplier", default=1.0),
            "recurrent.part_scales": numbers("ssm_multipliers", default=(1.0,) * 5),
            "scales.ffn": numbers("mlp_multipliers", default=(1.0, 1.0)),
        },
        recurrent="ssm",
        parallel_mixer=True,
        refused_keys="attention_bias mlp_bias mamba_proj_bias projectors_bias",
        # Other keys say it, or how a prompt is computed.
        ignored_keys="mamba_chunk_size mamba_d_ssm mamba_expand num_logits_to_keep "
        "attn_layer_indices",
        required={"time_step_limit": NO_LIMITS, "mamba_use_mlp": True},
        in_gguf={
            "facts": {
                "recurrent.gated_norm": False,  # whether it is before the gate is not said
            },
            "alternatives": {"mlp_norm": "ffn_norm"},  # which llama.cpp has without a suffix
            "ignored_keys": "attention.sliding_window",
        },
    ),
    row(
        "mamba2",
        hf="Mamba2ForCausalLM",
        gguf="mamba2",
        outer={"embed": "backbone.embeddings.", "norm": "backbone.norm_f."},
        layer=_ssm("mixer") | {"attn_norm": "norm."},
        prefix="backbone.layers.{}.",
        facts=_SILU
        | {
            "norm_eps": number("layer_norm_epsilon", default=1e-5),
            "mixer.num_heads": None,
            "recurrent.num_heads": integer("num_heads"),
            "recurrent.head_dim": integer("head_dim"),
            "recurrent.state_dim": integer("state_size"),
            "recurrent.num_groups": integer("n_groups"),
            "recurrent.kernel": integer("conv_kernel"),
            "recurrent.conv_bias": flag("use_conv_bias", default=True),
            "recurrent.bias": flag("use_bias"),
            "ffn.size": 0,
        },
        recurrent="ssm",
        # For training, or other keys say it.
        ignored_keys="chunk_size expand intermediate_size norm_before_gate residual_in_fp32 "
        "rescale_prenorm_residual rms_norm time_step_floor time_step_init_scheme time_step_max "
        "time_step_min time_step_rank time_step_scale",
        required={"time_step_limit": NO_LIMITS},
    ),
    row(  # layers of one half each
        "nemotron_h",
        hf="NemotronHForCausalLM",
        gguf="nemotron_h",
        outer={"embed": "backbone.embeddings.", "norm": "backbone.norm_f."},
        layer=_ssm("mixer")
        | {
            "attn_norm mlp_norm": "norm.",
            "q": "mixer.q_proj.",
            "k": "mixer.k_proj.",
            "v": "mixer.v_proj.",
            "o": "mixer.o_proj.",
            "up": "mixer.up_proj.",
            "down": "mixer.down_proj.",
        },
        prefix="backbone.layers.{}.",
        facts=MLP_BIAS
        | _SQUARED
        | {
            "norm_eps": number("layer_norm_epsilon", default=1e-5),
            "tied_embeddings": False,
            "mixer.num_kv_heads": integer("num_key_value_heads", default=8),
            "mixer.head_dim": integer("head_dim", "attention_head_dim", default=128),
            "recurrent.num_heads": integer("mamba_num_heads"),
            "recurrent.head_dim": integer("mamba_head_dim"),
            "recurrent.state_dim": integer("ssm_state_size"),
            "recurrent.num_groups": integer("n_groups"),
            "recurrent.kernel": integer("conv_kernel"),
            "recurrent.conv_bias": flag("use_conv_bias", default=True),
            "recurrent.bias": flag("use_bias"),
        },
        recurrent="ssm",
        layers_are_halves=True,
        ignored_tensors="mtp.",
        refused_keys="attention_bias mamba_proj_bias sliding_window moe_latent_size",
        # How a prompt is computed, for training, of other models, or other keys say it.
        ignored_keys="attention_head_dim chunk_size expand mamba_ssm_cache_dtype "
        "moe_intermediate_size moe_shared_expert_intermediate_size moe_shared_expert_overlap "
        "mtp_hybrid_override_pattern mtp_layers_block_type n_group n_routed_experts "
        "num_experts_per_tok num_logits_to_keep num_nextn_predict_layers rescale_prenorm_residual "
        "residual_in_fp32 rms_norm_eps rope_parameters routed_scaling_factor time_step_floor "
        "time_step_max time_step_min time_step_rank topk_group use_mamba_kernels "
        "intermediate_size n_shared_experts norm_topk_prob",
        required={
            "mamba_hidden_act": "silu",
            # transformers keeps a head of its own, whatever the config says of tying.
            "tie_word_embeddings": False,
            "time_step_limit": NO_LIMITS,
        },
        in_gguf={
            "layer": {"mlp_norm": "attn_norm."},
            "facts": {
                "mixer.num_kv_heads": integer("attention.head_count_kv"),
                "mixer.head_dim": integer("attention.key_length"),
            },
            "ignored_keys": "attention.layer_norm_epsilon attention.value_length",
            "required": {"rope.scaling.finetuned": False},
        },
    ),
    row(
        "nemotron_h of experts",
        like="nemotron_h",
        hf="NemotronHForCausalLM of experts",
        gguf="nemotron_h_moe",
        layer={
            "router": "mixer.gate.",
            "choice_bias": "mixer.gate.e_score_correction_bias",
            "up": "mixer.experts.{e}.up_proj.",
            "down": "mixer.experts.{e}.down_proj.",
            "shared_up": "mixer.shared_experts.up_proj.",
            "shared_down": "mixer.shared_experts.down_proj.",
        },
        alternatives={"up": "mixer.up_proj.", "down": "mixer.down_proj."},
        facts={
            "ffn.bias": None,
            "ffn.num": integer("n_routed_experts"),
            "ffn.per_token": integer("num_experts_per_tok"),
            "ffn.size": integer("moe_intermediate_size"),
            "ffn.router": "sigmoid",
            "ffn.choice_bias": True,
            "ffn.normalised": flag("norm_topk_prob", default=True),
            "ffn.scale": number("routed_scaling_factor", default=1.0),
            "ffn.num_groups": integer("n_group", default=1),
            "ffn.groups_met": integer("topk_group", default=1),
            "shared.gated": False,
            "shared.activation": _SQUARED["ffn.activation"],
            "shared.size": integer("moe_shared_expert_intermediate_size"),
            "dense.gated": False,
            "dense.activation": _SQUARED["ffn.activation"],
            "dense.size": integer("intermediate_size"),
        },
        has_experts=True,
        refused_keys="mlp_bias",
        in_gguf={
            "facts": {"ffn.normalised": flag("expert_weights_norm", default=True)},
            "refused_keys": "moe_latent_size",
            "ignored_keys": "expert_shared_count",
            "required": {"expert_group_count": 1, "expert_group_used_count": 1},
        },
    ),
)
