"""Decoders with a mixture of experts: Mixtral, DeepSeek V3 and the like. Literal tables."""

from __future__ import annotations

from ridgeline.model.files.families.fields import (
    choice,
    count,
    either,
    flag,
    groups,
    has,
    integer,
    number,
    numbered,
    product,
    total,
)
from ridgeline.model.files.families.gguf import DENSE as DENSE_IN_GGUF
from ridgeline.model.files.families.gguf import ROUTERS
from ridgeline.model.files.families.hf_names import (
    BIASES,
    BLOCK_OF_EXPERTS,
    DENSE,
    EXPERTS,
    HEAD_NORM,
    HEADS_OF_128,
    PARTIAL,
    SHARED,
    SPARSE,
    TIED,
    gated,
)
from ridgeline.model.files.families.inherit import row

ROWS = (
    row(
        "mixtral",
        hf="MixtralForCausalLM",
        gguf="llama of experts",
        layer=BLOCK_OF_EXPERTS,
        facts={
            "ffn.num": integer("num_local_experts", default=8),
            "ffn.per_token": integer("num_experts_per_tok", default=2),
        },
        windows="all",
        has_experts=True,
        defaults={"rope_theta": 1e6},
        in_gguf={
            "interleaved": True,
        },
    ),
    row(  # experts that are taken one by one
        "phimoe",
        hf="PhimoeForCausalLM, PhiMoEForCausalLM",  # the second as its first files say
        gguf="phimoe",
        layer=BLOCK_OF_EXPERTS,
        facts=BIASES
        | {
            "norm": "layer",
            "norm_bias": True,
            "head_bias": flag("lm_head_bias"),
            "ffn.num": integer("num_local_experts", default=16),
            "ffn.per_token": integer("num_experts_per_tok", default=2),
            "ffn.router": "sparsemixer",
            "ffn.normalised": False,
            "ffn.jitter": number("router_jitter_noise", default=0.01),
        },
        windows="all",
        has_experts=True,
        defaults={"rope_theta": 1e6},
        ignored_keys="input_jitter_noise",  # for training
        required={"num_experts_per_tok": 2},
        in_gguf={
            "facts": {
                "norm_eps": number("attention.layer_norm_rms_epsilon"),
                "head_bias": has("output.bias"),
                "ffn.size": integer("feed_forward_length"),
                "ffn.jitter": 0.01,  # which files do not say
            },
            "required": {"expert_used_count": 2},
        },
    ),
    row(
        "olmoe",
        hf="OlmoeForCausalLM",
        gguf="olmoe",
        layer=EXPERTS,
        facts=BIASES | SPARSE | {"mixer.qk_norm": "width"},
        has_experts=True,
        refused_keys="clip_qkv",
        in_gguf={"facts": {"ffn.normalised": False}},
    ),
    row(
        "qwen3_moe",
        types="qwen3_moe qwen3_vl_moe_text",
        hf="Qwen3MoeForCausalLM",
        gguf="qwen3moe, qwen3vlmoe",
        layer=EXPERTS,
        facts=BIASES
        | HEAD_NORM
        | HEADS_OF_128
        | SPARSE
        | {
            "ffn.size": integer("moe_intermediate_size"),
            "dense.size": integer("intermediate_size"),
        },
        windows="switch of all",
        default_window=4096,
        has_experts=True,
        required={"use_qk_norm": True},
        alternatives=DENSE,
        dense_layers="mlp_only_layers",
        experts_every="decoder_sparse_step",
        in_gguf={"ignored_keys": "n_deepstack_layers rope.dimension_sections"},  # of pictures
    ),
    row(
        "qwen2_moe",
        like="qwen3_moe",
        hf="Qwen2MoeForCausalLM",
        gguf="qwen2moe",
        layer=SHARED,
        required={"use_qk_norm": None},
        facts={
            "mixer.qkv_bias": flag("qkv_bias", default=True),
            "mixer.o_bias": None,
            "mixer.qk_norm": None,
            "mixer.head_dim": None,
            "ffn.shared_gated": True,
            "shared.size": integer("shared_expert_intermediate_size"),
        },
        windows="switch",
        in_gguf={
            "facts": {
                "mixer.qkv_bias": True,
                "ffn.normalised": False,
            }
        },
    ),
    row(
        "granitemoe",
        like="granite",
        hf="GraniteMoeForCausalLM",
        layer={
            "router": "block_sparse_moe.router.layer.",
            "gate up": "block_sparse_moe.input_linear.",
            "down": "block_sparse_moe.output_linear.",
        },
        facts={
            "ffn.num": integer("num_local_experts"),
            "ffn.per_token": integer("num_experts_per_tok"),
            "ffn.bias": None,
        },
        has_experts=True,
    ),
    row(
        "granitemoeshared",
        like="granitemoe",
        hf="GraniteMoeSharedForCausalLM",
        gguf="granitemoe",
        layer={
            "shared_gate shared_up": "shared_mlp.input_linear.",
            "shared_down": "shared_mlp.output_linear.",
        },
        facts={"shared.size": count("shared_intermediate_size")},
        in_gguf={"facts": {"shared.size": count("expert_shared_feed_forward_length")}},
    ),
    row(
        "gpt_oss",
        hf="GptOssForCausalLM",
        gguf="gpt-oss",
        layer={
            "sinks": "self_attn.sinks",
            "router": "mlp.router.",
            "gate up": "mlp.experts.gate_up_proj",
            "gate_bias up_bias": "mlp.experts.gate_up_proj_bias",
            "down": "mlp.experts.down_proj",
            "down_bias": "mlp.experts.down_proj_bias",
        },
        facts={
            "mixer.head_dim": integer("head_dim", default=64),
            "mixer.qkv_bias": flag("attention_bias", default=True),
            "mixer.o_bias": flag("attention_bias", default=True),
            "mixer.sinks": True,
            "ffn.num": integer("num_local_experts"),
            "ffn.per_token": integer("num_experts_per_tok", "experts_per_token"),
            "ffn.bias": True,
            "ffn.activation": "swiglu_clamped",
        },
        windows="pattern",
        default_window=128,
        pattern=2,
        has_experts=True,
        gates_by_turns=True,
        defaults={
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
        },
        ignored_keys="experts_per_token initial_context_length",
        required={"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        in_gguf={
            "layer": {"mlp_norm": "post_attention_norm."},
            # As published ("truncate": false); GGUF has no key for it, and llama.cpp truncates.
            "defaults": {"rope.scaling.yarn_truncate": False},
        },
    ),
    row(  # a sigmoid and a bias choose experts; the first layers have none
        "experts of deepseek_v3",
        layer=EXPERTS
        | {
            "choice_bias": "mlp.gate.e_score_correction_bias",
            **gated("mlp.shared_experts", "shared_"),
        },
        facts={
            "ffn.num": integer("n_routed_experts", "num_local_experts"),
            "ffn.per_token": integer("num_experts_per_tok"),
            "ffn.size": integer("moe_intermediate_size"),
            "ffn.router": "sigmoid",
            "ffn.choice_bias": True,
            "ffn.normalised": flag("norm_topk_prob", default=True),
            "ffn.scale": number("routed_scaling_factor", default=1.0),
            "ffn.num_groups": groups("n_group"),
            "ffn.groups_met": groups("topk_group"),
            "shared.size": product("n_shared_experts", "moe_intermediate_size"),
            "dense.size": integer("intermediate_size"),
        },
        has_experts=True,
        alternatives=DENSE,
        dense_layers="first_k_dense_replace",
        in_gguf={
            "facts": {
                "ffn.router": numbered("expert_gating_func", among=ROUTERS, default=2),
                "ffn.choice_bias": has("exp_probs_b.bias"),
                "ffn.normalised": flag("expert_weights_norm"),
                "shared.size": product("expert_shared_count", "expert_feed_forward_length"),
            },
        },
    ),
    row(
        "deepseek_v3",
        like="experts of deepseek_v3",
        types="deepseek_v3 kimi_k2",
        hf="DeepseekV3ForCausalLM",
        gguf="deepseek2",
        layer={
            "q_a": "self_attn.q_a_proj.",
            "q_a_norm": "self_attn.q_a_layernorm.",
            "q_b": "self_attn.q_b_proj.",
            "kv_a": "self_attn.kv_a_proj_with_mqa.",
            "kv_a_norm": "self_attn.kv_a_layernorm.",
            "k_b v_b": "self_attn.kv_b_proj.",
        },
        facts={
            "norm_eps": number("rms_norm_eps", default=1e-6),
            "mixer.head_dim": total("qk_nope_head_dim", "qk_rope_head_dim"),
            "latent.q_rank": count("q_lora_rank"),
            "latent.kv_rank": integer("kv_lora_rank"),
            "latent.v_dim": integer("v_head_dim"),
        },
        interleaved=True,
        defaults={
            "first_k_dense_replace": 3,
            "n_shared_experts": 1,
            "q_lora_rank": 1536,
            "routed_scaling_factor": 2.5,
        },
        refused_keys="attention_bias mlp_bias",
        # How experts were spread and balanced in training, and layers that guess tokens ahead.
        ignored_keys="aux_loss_alpha ep_size num_nextn_predict_layers qk_head_dim seq_aux",
        required={
            "moe_layer_freq": 1,
            "rope_interleave": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
        },
        in_gguf={  # of V2 too
            "alternatives": {"k_b": "attn_k_b.", "v_b": "attn_v_b."},
            "facts": {
                # Newer files call the latent a key, and the lengths before it is absorbed "mla".
                "mixer.head_dim": integer("attention.key_length_mla", "attention.key_length"),
                # Files of V2 lack it; with learnt biases, softmax or sigmoid would be a guess.
                "ffn.router": numbered(
                    "expert_gating_func", among=ROUTERS, default=1, must_beside="exp_probs_b.bias"
                ),
            },
            "rope_keys": "rope.scaling.yarn_log_multiplier",
            "ignored_keys": "attention.head_count_kv attention.key_length attention.value_length",
        },
    ),
    row(
        "glm4_moe_lite",
        like="deepseek_v3",
        hf="Glm4MoeLiteForCausalLM",
        defaults={
            "first_k_dense_replace": 1,
            "q_lora_rank": 768,
            "rms_norm_eps": 1e-5,
            "routed_scaling_factor": 1.8,
        },
    ),
    row(
        "deepseek_v2",
        like="deepseek_v3",
        hf="DeepseekV2ForCausalLM",
        facts={"ffn.router": None, "ffn.choice_bias": None, "ffn.normalised": False},
        defaults={
            "first_k_dense_replace": 0,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.0,
        },
        required={
            "norm_topk_prob": False,
            "rope_interleave": None,
            "scoring_func": "softmax",
            "topk_method": None,
        },
    ),
    row(
        "glm4_moe",
        like="experts of deepseek_v3",
        hf="Glm4MoeForCausalLM",
        gguf="glm4moe",
        facts={
            "mixer.qkv_bias": flag("attention_bias"),
            "mixer.qk_norm": either("use_qk_norm", yes="head", no=""),
        },
        rope_keys=PARTIAL,
        defaults={
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "partial_rotary_factor": 0.5,
        },
        ignored_keys="num_nextn_predict_layers",
        in_gguf={
            "layer": {"mlp_norm": "post_attention_norm."},
            "facts": {"mixer.qk_norm": has("blk.0.attn_q_norm.weight", yes="head", no="")},
            "ignored_keys": "rope.dimension_sections",  # of pictures; of text all are alike
        },
    ),
    row(
        "dots1",
        like="experts of deepseek_v3",
        hf="Dots1ForCausalLM",
        gguf="dots1",
        facts=BIASES
        | HEAD_NORM
        | {
            "ffn.normalised": flag("norm_topk_prob"),
            "ffn.router": choice(
                "scoring_func",
                among={"noaux_tc": "sigmoid", "sigmoid": "sigmoid"},
                default="sigmoid",
            ),
        },
        windows="switch",
        defaults={"max_window_layers": 62, "sliding_window": 4096, "use_sliding_window": True},
        ignored_keys="aux_loss_alpha ep_size seq_aux",
        required={"moe_layer_freq": 1, "topk_method": "noaux_tc"},
    ),
    row(
        "ernie4_5_moe",
        like="experts of deepseek_v3",
        hf="Ernie4_5_MoeForCausalLM",
        gguf="ernie4_5-moe",
        layer={"choice_bias": "mlp.moe_statics.e_score_correction_bias"},
        facts=TIED
        | {
            "norm_eps": number("rms_norm_eps", default=1e-5),
            "ffn.num": integer("moe_num_experts", default=64),
            "ffn.per_token": integer("moe_k", default=6),
            "ffn.router": None,
            "ffn.normalised": None,
            "ffn.scale": None,
            "ffn.num_groups": None,
            "ffn.groups_met": None,
            "shared.size": product("moe_num_shared_experts", "moe_intermediate_size"),
        },
        interleaved=True,
        dense_layers="moe_layer_start_index",
        defaults={
            "rope_theta": 500_000.0,
            "moe_layer_start_index": 1,
            "moe_num_shared_experts": 2,
        },
        ignored_tensors="model.mtp_",
        # How experts were filled in training, and layers that guess ahead.
        ignored_keys="moe_capacity num_nextn_predict_layers",
        required={
            "moe_gate": "topk",
            "moe_layer_interval": 1,
            "moe_norm_min": 1e-12,  # below every sum of weights, so no sum is raised to it
            "moe_use_aux_free": True,
        },
        in_gguf={
            "facts": {
                "ffn.router": None,
                "ffn.normalised": True,
                "ffn.scale": number("expert_weights_scale", default=1.0),
                "ffn.num_groups": integer("expert_group_count", default=1),
                "ffn.groups_met": integer("expert_group_used_count", default=1),
            },
            "ignored_keys": "expert_shared_feed_forward_length",  # of other numbers than the width
            "required": {"interleave_moe_layer_step": 1},
        },
    ),
    row(
        "minimax_m2",
        types="minimax_m2 minimax",
        hf="MiniMaxM2ForCausalLM",
        gguf="minimax-m2",
        layer=BLOCK_OF_EXPERTS | {"choice_bias": "block_sparse_moe.e_score_correction_bias"},
        facts=HEADS_OF_128
        | {
            "mixer.qk_norm": "width",
            "ffn.num": integer("num_local_experts"),
            "ffn.per_token": integer("num_experts_per_tok"),
            "ffn.router": "sigmoid",
            "ffn.choice_bias": True,
            "shared.size": count("shared_intermediate_size"),
        },
        has_experts=True,
        rope_keys=PARTIAL,
        defaults={"rope_theta": 5_000_000.0},
        refused_keys="shared_intermediate_size",
        # Layers that guess ahead, which layers see everything (all do), and parts of older models.
        ignored_keys="attn_type_list mlp_intermediate_size mtp_transformer_layers num_mtp_modules "
        "shared_moe_mode use_mtp",
        required={
            "layernorm_full_attention_beta": 1.0,
            "layernorm_linear_attention_beta": 1.0,
            "layernorm_mlp_beta": 1.0,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "use_qk_norm": True,
            "use_routing_bias": True,
        },
        in_gguf={"facts": {"shared.size": None}, "required": {"expert_gating_func": 2}},
    ),
    row(
        # Three layers in four turn queries and keys, norm them without weights, and see chunks of
        # 8,192 tokens; the others let queries grow from there on: the context ends before.
        "llama4",
        types="llama4_text",
        hf="Llama4ForCausalLM, Llama4ForConditionalGeneration",
        gguf="llama4",
        layer={
            "router": "feed_forward.router.",
            "gate up": "feed_forward.experts.gate_up_proj",
            "down": "feed_forward.experts.down_proj",
            **gated("feed_forward.shared_expert", "shared_"),
        },
        facts=BIASES
        | HEADS_OF_128
        | {
            "mixer.norm_turned": True,
            "mixer.qk_norm": either("use_qk_norm", yes="head", no="", default=True),
            "ffn.num": integer("num_local_experts", default=16),
            "ffn.per_token": integer("num_experts_per_tok", default=1),
            "ffn.router": "sigmoid",
            "ffn.normalised": False,
            "ffn.scales_input": True,
            "shared.size": integer("intermediate_size"),
            "dense.size": integer("intermediate_size_mlp"),
            "chunk.size": integer("attention_chunk_size", default=8192),
            "chunk.grows_at": integer("floor_scale", default=8192),
        },
        interleaved=True,
        ropes={"no_rope_layers": "none"},
        plain_head_norms=True,
        has_experts=True,
        experts_turned=True,
        alternatives=gated("feed_forward"),
        dense_layers="mlp_only_layers",  # which no file has
        experts_every="interleave_moe_layer_step",
        defaults={"rope_theta": 500_000.0},
        ignored_keys="attn_scale attn_temperature_tuning for_llm_compressor intermediate_size_mlp",
        in_gguf={
            "facts": {
                # As in llama.cpp: Scout's queries and keys are normed, Maverick's are not.
                "mixer.qk_norm": numbered("expert_count", among={16: "head", 128: ""}, default=16),
                "shared.size": integer("expert_feed_forward_length"),
                "dense.size": integer("feed_forward_length"),
                "chunk.size": integer("attention.chunk_size", default=8192),
                "chunk.grows_at": 8192,
            },
            "alternatives": DENSE_IN_GGUF,
            "dense_layers": "mlp_only_layers",
            "experts_every": "interleave_moe_layer_step",
            "required": {"expert_gating_func": 2},
        },
    ),
)
