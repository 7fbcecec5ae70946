"""Families whose weights and cache are counted, and that do not run. Literal tables.

A row says what changes a size. What runs in the place of such a family stands in ``lookup``.
"""

from __future__ import annotations

from ridgeline.model.files.families.fields import count, either, flag, integer, rank, total
from ridgeline.model.files.families.hf_names import BIASES, HEADS_OF_128, MLP_BIAS, TIED
from ridgeline.model.files.families.inherit import row

_SPARSE = {
    "ffn.num": integer("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "ffn.per_token": integer("num_experts_per_tok", "experts_per_token", "moe_topk"),
    "ffn.size": integer("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
    "shared.size": count("shared_expert_intermediate_size", "shared_intermediate_size"),
    "dense.size": integer("intermediate_size"),
}
_LATENT = {
    "mixer.head_dim": total("qk_nope_head_dim", "qk_rope_head_dim"),
    "latent.q_rank": count("q_lora_rank"),
    "latent.kv_rank": integer("kv_lora_rank"),
    "latent.v_dim": integer("v_head_dim"),
}
# Whether MLPs have gates, by the model types of families without a row, which are counted as Llamas
# with the sizes of their configs. It is a quarter of such a model, and in no config.
_GATED = (
    "aquila axk1 baichuan beam bitnet cwm deepseek diffllama emu3 emu3_text_model exaone flex_olmo "
    "flint granite_swa granitemoe_swa hyperclovax internlm internlm2 internlm3 kolibri1 mellum "
    "mllama mllama_text_model orion phi4_multimodal phi4mm xverse youtu"
)
_UNGATED = "apertus apertus1p5_text bert-generation biogpt nanochat"
# Why models of other types are no Llamas with the sizes of their configs, by model type.
NO_LLAMAS = {
    "deepseek_v4": "its layers keep tokens compressed, each by another ratio (compress_ratios)",
    "deepseek_ref": "its layers keep tokens compressed, each by another ratio (compress_ratios)",
    "kimi_linear": "most of its layers are linear attention with gates of their own",
    "step3p7": "its config names no heads of its layers with windows, nor their gates",
}
HAS_GATES = dict.fromkeys(_GATED.split(), True) | dict.fromkeys(_UNGATED.split(), False)
ROWS = (
    row(
        "gpt_bigcode",
        like="gpt2",
        hf="GPTBigCodeForCausalLM",
        runs=False,
        defaults={"num_key_value_heads": 1},
        ignored_keys="multi_query pre_allocate_kv_cache",
    ),
    row(
        "gpt_bigcode of keys by head",
        like="gpt_bigcode",
        hf="GPTBigCodeForCausalLM of keys by head",
        runs=False,
        defaults={"num_key_value_heads": None},
    ),
    row(  # an indexer is counted beside it (counting)
        "deepseek_v32",
        like="deepseek_v3",
        types="deepseek_v32 glm_moe_dsa",
        hf="DeepseekV32ForCausalLM, GlmMoeDsaForCausalLM",
        runs=False,
        ignored_keys="head_dim index_topk index_topk_freq index_skip_topk_offset layer_types "
        "index_share_for_mtp_iteration indexer_types mlp_layer_types num_experts",
    ),
    row(  # its experts compute in a narrower width (counting)
        "nemotron_h of latent experts",
        like="nemotron_h of experts",
        hf="NemotronHForCausalLM of latent experts",
        runs=False,
        refused_keys="-moe_latent_size",
        ignored_keys="moe_latent_size",
    ),
    row(
        "mimo",
        like="qwen2",
        hf="MiMoForCausalLM",
        runs=False,
        ignored_keys="attention_bias num_nextn_predict_layers",
    ),
    row(  # each of its layers says its own sizes (counting)
        "nemotron-nas",
        like="llama",
        hf="DeciLMForCausalLM",
        runs=False,
        ignored_keys="block_configs",
    ),
    row(  # layers with windows have other heads (counting)
        "mimo_v2_flash",
        like="minimax_m2",
        hf="MiMoV2FlashForCausalLM",
        runs=False,
        facts={
            "mixer.qk_norm": None,
            "ffn.num": integer("n_routed_experts"),
            "ffn.size": integer("moe_intermediate_size"),
            "dense.size": integer("intermediate_size"),
        },
        dense_layers="first_k_dense_replace",
        refused_keys="-shared_intermediate_size",
        ignored_keys="attention_chunk_size attention_value_scale hybrid_layer_pattern "
        "sliding_window sliding_window_size swa_num_attention_heads swa_num_key_value_heads "
        "swa_head_dim swa_v_head_dim swa_rope_theta v_head_dim",
        required={"n_shared_experts": None, "use_qk_norm": None, "use_routing_bias": None},
    ),
    row(  # what chooses blocks of tokens is counted beside it (counting)
        "minimax_m3",
        like="minimax_m2",
        types="minimax_m3 minimax_m3_vl",
        hf="MiniMaxM3ForCausalLM, MiniMaxM3SparseForConditionalGeneration",
        runs=False,
        facts={
            "mixer.qk_norm": "head",
            "dense.size": integer("dense_intermediate_size"),
        },
        dense_layers="first_k_dense_replace",
        refused_keys="-shared_intermediate_size",
        ignored_keys="moe_intermediate_size n_shared_experts num_nextn_predict_layers "
        "sparse_attention_config",
        required={
            "attention_output_gate": False,
            "n_shared_experts": 1,
            "qk_norm_type": "per_head",
        },
    ),
    row(
        "gptj",
        hf="GPTJForCausalLM",
        runs=False,
        facts={
            "norm_bias": True,
            "head_bias": True,
            "layer.norms": "beside",
            "ffn.size": integer("intermediate_size", times_hidden=4),
            "ffn.gated": False,
            "ffn.bias": True,
        },
        aliases={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "n_inner": "intermediate_size",
            "n_ctx": "max_position_embeddings",
        },
    ),
    row(  # a key for each head, as in the first of them, of 1B
        "falcon of keys by head",
        like="falcon",
        hf="FalconForCausalLM of keys by head, RWForCausalLM of keys by head",
        runs=False,
        facts={
            "layer.norms": either("parallel_attn", yes="beside", no="before", default=True),
        },
        defaults={"num_key_value_heads": None},
        ignored_keys="n_head_kv",
        required={"multi_query": None, "new_decoder_architecture": None, "parallel_attn": None},
    ),
    row(
        "refined_web",
        like="falcon",
        types="RefinedWeb RefinedWebModel",
        hf="RWForCausalLM",
        runs=False,
        ignored_keys="n_head_kv",
    ),
    row(
        "refined_web of groups",
        like="falcon of groups",
        hf="RWForCausalLM of groups",
        runs=False,
        aliases={"n_head_kv": "num_key_value_heads"},
    ),
    row(
        "chatglm",
        hf="ChatGLMModel",
        runs=False,
        facts=HEADS_OF_128 | {"mixer.qkv_bias": flag("add_qkv_bias")},
        aliases={
            "padded_vocab_size": "vocab_size",
            "num_layers": "num_hidden_layers",
            "multi_query_group_num": "num_key_value_heads",
            "kv_channels": "head_dim",
            "ffn_hidden_size": "intermediate_size",
            "seq_length": "max_position_embeddings",
        },
        required={
            "add_bias_linear": False,
            "multi_query_attention": True,
            "post_layer_norm": True,
            "rmsnorm": True,
        },
    ),
    row(
        "gemma3n",
        like="gemma3",
        types="gemma3n_text",
        hf="Gemma3nForCausalLM",
        runs=False,
        default_window=None,
        pattern=5,
    ),
    row(
        "mamba",
        types="mamba falcon_mamba",
        hf="MambaForCausalLM, FalconMambaForCausalLM",
        runs=False,
        facts=TIED
        | {
            "hidden_size": integer("hidden_size", "d_model"),
            "mixer.num_heads": None,
            "recurrent.num_heads": integer("intermediate_size", times_hidden=2),
            "recurrent.head_dim": 1,
            "recurrent.num_groups": 1,
            "recurrent.state_dim": integer("state_size"),
            "recurrent.kernel": integer("conv_kernel", default=4),
            "recurrent.step_rank": rank("time_step_rank"),
            "recurrent.bias": flag("use_bias"),
            "recurrent.conv_bias": flag("use_conv_bias", default=True),
            "ffn.size": 0,
        },
        recurrent="ssm",
        ignored_keys="expand d_inner n_layer",
    ),
    row(
        "jamba",
        hf="JambaForCausalLM",
        runs=False,
        facts={
            "recurrent.num_heads": integer("mamba_d_inner", times_hidden=2),
            "recurrent.head_dim": 1,
            "recurrent.num_groups": 1,
            "recurrent.state_dim": integer("mamba_d_state", default=16),
            "recurrent.kernel": integer("mamba_d_conv", default=4),
            "recurrent.step_rank": rank("mamba_dt_rank"),
            "recurrent.bias": flag("mamba_proj_bias"),
            "recurrent.conv_bias": flag("mamba_conv_bias", default=True),
            "recurrent.part_norms": True,
        },
        recurrent="ssm",
        attention_layers="attn_layer_period",
        defaults={"attn_layer_period": 8, "attn_layer_offset": 4},
        ignored_keys="num_experts num_experts_per_tok expert_layer_period expert_layer_offset",
        required={"mamba_expand": 2},
    ),
    row(
        "jamba of many experts",
        like="jamba",
        hf="JambaForCausalLM of many experts",
        runs=False,
        facts=_SPARSE,
        has_experts=True,
        dense_layers="mlp_only_layers",
        experts_every="expert_layer_period",
    ),
    row(  # of a family that is in no table: a Llama with the sizes of its config
        "unknown",
        types="",
        hf="unknown",
        runs=False,
        facts=BIASES | MLP_BIAS,
        windows="named",
    ),
    row(
        "unknown of many experts",
        like="unknown",
        hf="unknown of many experts",
        runs=False,
        facts=_SPARSE,
        has_experts=True,
        dense_layers="mlp_only_layers",
        experts_every="decoder_sparse_step",
    ),
    row(
        "unknown of latents",
        hf="unknown of latents",
        runs=False,
        facts=_LATENT,
        ignored_keys="aux_loss_alpha ep_size num_nextn_predict_layers qk_head_dim seq_aux",
    ),
    row(
        "unknown of latent experts",
        like="deepseek_v2",
        hf="unknown of latent experts",
        runs=False,
        defaults=dict.fromkeys(("n_shared_experts", "q_lora_rank", "routed_scaling_factor")),
        required=dict.fromkeys(("moe_layer_freq", "norm_topk_prob", "scoring_func")),
    ),
)
