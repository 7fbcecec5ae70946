"""Decoders with LayerNorm, mostly of MLPs without gates: GPT-2 and what followed.

Literal tables. llama.cpp's converters sort the rows of GPT-NeoX's fused projection into queries,
keys and values, and turn GPT-2's matrices. StableLM, Phi-2 and GPT-NeoX turn by a base of 10,000,
which no key says.
"""

from __future__ import annotations

from ridgeline.model.files.families.fields import (
    const,
    either,
    flag,
    has,
    integer,
    number,
    numbered,
    product,
    same,
    slopes,
)
from ridgeline.model.files.families.gguf import QKV
from ridgeline.model.files.families.hf_names import (
    ALL_BIASES,
    BIASES,
    LAYER_NORM,
    MLP_BIAS,
    PARTIAL,
    TIED,
    activation,
)
from ridgeline.model.files.families.inherit import row

_PLAIN_MLP = {"ffn.gated": const(False)}
_MLP_BIAS_IN_GGUF = {"ffn.bias": has("ffn_up.bias")}
_DENSE_4H = {"up": "mlp.dense_h_to_4h.", "down": "mlp.dense_4h_to_h."}
ROWS = (
    row(
        "stablelm",
        hf="StableLmForCausalLM",
        gguf="stablelm",
        facts=LAYER_NORM
        | {
            "norm_bias": True,
            "layer.norms": either("use_parallel_residual", yes="beside", no="before"),
            "mixer.qkv_bias": flag("use_qkv_bias"),
        },
        rope_keys=PARTIAL,
        defaults={"partial_rotary_factor": 0.25},
        refused_keys="use_parallel_residual qk_layernorm",
        # As in llama.cpp the norm before the MLP says it, for converters write true by default.
        in_gguf={"ignored_keys": "use_parallel_residual"},
    ),
    row(
        "cohere",
        hf="CohereForCausalLM",
        gguf="command-r",
        facts=BIASES
        | LAYER_NORM
        | TIED
        | {
            "logit_scale": number("logit_scale", default=0.0625),
            "layer.norms": "beside",
            "mixer.qk_norm": either("use_qk_norm", yes="width", no=""),
        },
        interleaved=True,
        defaults={"rope_theta": 500_000.0},
        refused_keys="use_qk_norm",
        ignored_keys="model_max_length",
        in_gguf={"facts": {"logit_scale": number("logit_scale")}},
    ),
    row(
        "cohere2",
        like="cohere",
        hf="Cohere2ForCausalLM",
        gguf="cohere2",
        facts={"mixer.qk_norm": None},
        windows="pattern",
        default_window=4096,
        pattern=4,
        ropes={"full": "none"},
        defaults={"rope_theta": None},
        ignored_keys="layer_switch use_embedding_sharing use_parallel_embedding",
        required={
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
            "use_gated_activation": True,
            "use_parallel_block": True,
        },
    ),
    row(
        "nemotron",
        hf="NemotronForCausalLM",
        gguf="nemotron",
        facts=BIASES
        | MLP_BIAS
        | LAYER_NORM
        | _PLAIN_MLP
        | activation("hidden_act", default="relu2")
        | {"norm_eps": number("norm_eps", default=1e-5), "norm_bias": True},
        norm_offset=1.0,
        rope_keys=PARTIAL,
        defaults={"partial_rotary_factor": 0.5},
        refused_keys="mlp_bias",
        in_gguf={
            "facts": _MLP_BIAS_IN_GGUF,
            "ignored_keys": "attention.layer_norm_rms_epsilon",  # converters write it twice
        },
    ),
    row(
        "jais2",
        hf="Jais2ForCausalLM",
        facts=LAYER_NORM
        | _PLAIN_MLP
        | activation("hidden_act", default="relu2")
        | dict.fromkeys(("mixer.qkv_bias", "mixer.o_bias"), flag("attention_bias", default=True))
        | {"ffn.bias": flag("mlp_bias", default=True), "norm_bias": True},
    ),
    row(
        "starcoder2",
        hf="Starcoder2ForCausalLM",
        gguf="starcoder2",
        layer={"up": "mlp.c_fc.", "down": "mlp.c_proj."},
        facts=LAYER_NORM
        | TIED
        | _PLAIN_MLP
        | activation("hidden_act", default="gelu_pytorch_tanh")
        | {
            "norm_eps": number("norm_epsilon", default=1e-5),
            "norm_bias": True,
            **dict.fromkeys(
                ("mixer.qkv_bias", "mixer.o_bias", "ffn.bias"), flag("use_bias", default=True)
            ),
        },
        windows="all",
        defaults={"num_key_value_heads": 2},
        # Other keys say it, or it was for training.
        ignored_keys="attention_softmax_in_fp32 embedding_dropout layer_norm_epsilon "
        "residual_dropout scale_attention_softmax_in_fp32",
        required={"mlp_type": "default", "norm_type": "layer_norm", "scale_attn_weights": True},
        in_gguf={
            "facts": ALL_BIASES,
            "default_window": 4096,  # of all published ones; converters leave it out
        },
    ),
    row(
        "phi",
        hf="PhiForCausalLM",
        gguf="phi2",
        outer={"norm": "model.final_layernorm."},
        layer={"o": "self_attn.dense.", "up": "mlp.fc1.", "down": "mlp.fc2."},
        facts=LAYER_NORM
        | ALL_BIASES
        | _PLAIN_MLP
        | activation("hidden_act", default="gelu_new")
        | {"head_bias": True, "layer.norms": "beside"},
        rope_keys=PARTIAL,
        defaults={"partial_rotary_factor": 0.5},
        refused_keys="qk_layernorm",
        in_gguf={"alternatives": QKV},  # of the first files
    ),
    row(
        "opt",
        hf="OPTForCausalLM",
        outer={
            "embed": "model.decoder.embed_tokens.",
            "positions": "model.decoder.embed_positions.",
            "norm": "model.decoder.final_layer_norm.",
        },
        layer={
            "attn_norm": "self_attn_layer_norm.",
            "o": "self_attn.out_proj.",
            "mlp_norm": "final_layer_norm.",
            "up": "fc1.",
            "down": "fc2.",
        },
        prefix="model.decoder.layers.{}.",
        facts=LAYER_NORM
        | TIED
        | _PLAIN_MLP
        | activation("activation_function", default="relu")
        | {
            "hidden_size": same("hidden_size", other="word_embed_proj_dim"),
            "norm_bias": True,
            "position_offset": 2,
            "ffn.size": integer("ffn_dim"),
            **dict.fromkeys(
                ("mixer.qkv_bias", "mixer.o_bias", "ffn.bias"), flag("enable_bias", default=True)
            ),
        },
        ropes={"full": "none"},
        spare_positions=2,
        refused_keys="_remove_final_layer_norm",
        required={"do_layer_norm_before": True, "layer_norm_elementwise_affine": True},
    ),
    row(
        "gpt_neox",
        hf="GPTNeoXForCausalLM",
        gguf="gptneox",
        outer={
            "embed": "gpt_neox.embed_in.",
            "norm": "gpt_neox.final_layer_norm.",
            "head": "embed_out.",
        },
        layer={
            "q k v": "attention.query_key_value.",
            "o": "attention.dense.",
            **_DENSE_4H,
        },
        prefix="gpt_neox.layers.{}.",
        facts=LAYER_NORM
        | ALL_BIASES
        | _PLAIN_MLP
        | activation("hidden_act", default="gelu")  # GGUF files do not name Pythia's either
        | {
            "layer.norms": "beside, own",
            "mixer.qkv_bias": flag("attention_bias", default=True),
            "mixer.o_bias": flag("attention_bias", default=True),
        },
        heads_inside=True,
        rope_keys=PARTIAL,
        aliases={"rotary_pct": "partial_rotary_factor", "rotary_emb_base": "rope_theta"},
        defaults={"partial_rotary_factor": 0.25},
        buffers=".attention.bias .attention.masked_bias",
        required={"use_parallel_residual": True, "attention_bias": True},
        in_gguf={"facts": ALL_BIASES, "required": {"use_parallel_residual": True}},
    ),
    row(
        "falcon",
        hf="FalconForCausalLM",
        gguf="falcon",
        outer={"embed": "transformer.word_embeddings.", "norm": "transformer.ln_f."},
        layer={
            "q k v": "self_attention.query_key_value.",
            "o": "self_attention.dense.",
            "mlp_norm": "ln_mlp.",
            **_DENSE_4H,
        },
        prefix="transformer.h.{}.",
        facts=LAYER_NORM
        | TIED
        | _PLAIN_MLP
        | activation("activation", default="gelu")
        | {
            "norm_eps": number("layer_norm_epsilon", default=1e-5),
            "norm_bias": True,
            "layer.norms": "beside",
            "ffn.size": integer("ffn_hidden_size", times_hidden=4),
            **dict.fromkeys(("mixer.qkv_bias", "mixer.o_bias", "ffn.bias"), flag("bias")),
        },
        heads_inside=True,
        defaults={"max_position_embeddings": 2048, "num_key_value_heads": 1},
        aliases={"n_head": "num_attention_heads", "n_layer": "num_hidden_layers"},
        refused_keys="alibi",
        # As many key heads as heads, though one serves all; norms are counted in the newer models.
        ignored_keys="num_kv_heads num_ln_in_parallel_attn",
        required={
            "apply_residual_connection_post_layernorm": False,
            "multi_query": True,
            "new_decoder_architecture": False,
            "parallel_attn": True,
        },
        in_gguf={
            "layer": {"mlp_norm": "attn_norm."},
            "facts": _MLP_BIAS_IN_GGUF
            | {
                "layer.norms": has("attn_norm_2.weight", yes="beside, own", no="beside"),
                "mixer.qkv_bias": has("attn_qkv.bias"),
            },
            "alternatives": {"attn_norm": "attn_norm_2."},
            "required": {"tensor_data_layout": "jploski"},  # queries first, then keys, then values
        },
    ),
    row(  # 40B, 180B, and 11B, which has one norm
        "falcon of groups",
        like="falcon",
        hf="FalconForCausalLM of groups",
        layer={"attn_norm": "ln_attn."},
        alternatives={"attn_norm": "input_layernorm."},
        facts={
            "layer.norms": numbered(
                "num_ln_in_parallel_attn", among={1: "beside", 2: "beside, own"}, default=2
            ),
        },
        defaults={"num_key_value_heads": None},
        aliases={"num_kv_heads": "num_key_value_heads"},
        ignored_keys="multi_query new_decoder_architecture parallel_attn",
        required={"multi_query": None, "new_decoder_architecture": None, "parallel_attn": None},
    ),
    row(
        "gpt2",
        hf="GPT2LMHeadModel",
        gguf="gpt2",
        outer={
            "embed": "transformer.wte.",
            "positions": "transformer.wpe.",
            "norm": "transformer.ln_f.",
        },
        layer={
            "attn_norm": "ln_1.",
            "q k v": "attn.c_attn.",
            "o": "attn.c_proj.",
            "mlp_norm": "ln_2.",
            "up": "mlp.c_fc.",
            "down": "mlp.c_proj.",
        },
        prefix="transformer.h.{}.",
        facts=LAYER_NORM
        | TIED
        | ALL_BIASES
        | _PLAIN_MLP
        | activation("activation_function", default="gelu_new")
        | {"ffn.size": integer("intermediate_size", times_hidden=4)},
        ropes={"full": "none"},
        transposed=True,
        aliases={
            "n_embd": "hidden_size",
            "n_layer": "num_hidden_layers",
            "n_head": "num_attention_heads",
            "n_positions": "max_position_embeddings",
            "n_inner": "intermediate_size",
            "layer_norm_epsilon": "layer_norm_eps",
        },
        buffers=".attn.bias .attn.masked_bias",
        ignored_keys="_num_labels n_ctx n_special output_past predict_special_tokens "
        "reorder_and_upcast_attn",
        required={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
    ),
    row(  # scores that lose by distance (ALiBi), as the next row's
        "bloom",
        hf="BloomForCausalLM",
        gguf="bloom",
        outer={
            "embed": "transformer.word_embeddings.",
            "embedding_norm": "transformer.word_embeddings_layernorm.",
            "norm": "transformer.ln_f.",
        },
        layer={
            "q k v": "self_attention.query_key_value.",
            "o": "self_attention.dense.",
            **_DENSE_4H,
        },
        prefix="transformer.h.{}.",
        facts=LAYER_NORM
        | TIED
        | ALL_BIASES
        | _PLAIN_MLP
        | {
            "norm_eps": number("layer_norm_epsilon", default=1e-5),
            "embed_norm": True,
            "mixer.slopes": slopes("num_attention_heads", largest="alibi_bias_max"),
            "ffn.size": integer("intermediate_size", times_hidden=4),
            "ffn.activation": "gelu_tanh",
        },
        ropes={"full": "none"},
        heads_inside=True,
        defaults={"max_position_embeddings": 2048},
        aliases={
            "n_embed": "hidden_size",
            "n_head": "num_attention_heads",
            "n_inner": "intermediate_size",
            "n_layer": "num_hidden_layers",
            "seq_length": "max_position_embeddings",
        },
        # Of kernels, for training, or how several machines added up.
        ignored_keys="attention_softmax_in_fp32 bias_dropout_fusion masked_softmax_fusion "
        "offset_alibi skip_bias_add skip_bias_add_qkv slow_but_exact unk_token_id",
        required={"apply_residual_connection_post_layernorm": False},
    ),
    row(
        "mpt",
        hf="MptForCausalLM, MPTForCausalLM",  # the second as its first files say
        gguf="mpt",
        outer={"embed": "transformer.wte.", "norm": "transformer.norm_f."},
        layer={
            "attn_norm": "norm_1.",
            "q k v": "attn.Wqkv.",
            "o": "attn.out_proj.",
            "mlp_norm": "norm_2.",
            "up": "ffn.up_proj.",
            "down": "ffn.down_proj.",
        },
        prefix="transformer.blocks.{}.",
        facts=LAYER_NORM
        | TIED
        | _PLAIN_MLP
        | {
            "norm_eps": number("layer_norm_epsilon", default=1e-5),
            "mixer.slopes": slopes("num_attention_heads", largest="attn_config.alibi_bias_max"),
            "ffn.size": product("expansion_ratio", "hidden_size"),
            "ffn.activation": "gelu",
        },
        ropes={"full": "none"},
        aliases={
            "d_model": "hidden_size",
            "n_heads": "num_attention_heads",
            "n_layers": "num_hidden_layers",
            "max_seq_len": "max_position_embeddings",
        },
        defaults={"expansion_ratio": 4},
        refused_keys="attn_config.attn_uses_sequence_id attn_config.clip_qkv attn_config.prefix_lm "
        "attn_config.qk_ln attn_config.softmax_scale logit_scale",
        # For training, or of kernels.
        ignored_keys="attn_config.attn_impl attn_config.attn_pdrop attn_config.model_type "
        "emb_pdrop embedding_fraction init_config init_device learned_pos_emb name norm_type "
        "tokenizer_name verbose",
        required={
            "attn_config.alibi": True,
            "attn_config.attn_type": "multihead_attention",
            "expansion_ratio": 4,
            "no_bias": True,
        },
        in_gguf={
            "facts": {"mixer.qkv_bias": has("attn_qkv.bias")},
            "refused_keys": "attention.clamp_kqv",
        },
    ),
)
