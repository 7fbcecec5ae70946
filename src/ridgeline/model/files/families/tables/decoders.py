"""Llama and what is like it: decoders of attention and an MLP with gates. Literal tables."""

from __future__ import annotations

from ridgeline.model.files.families.fields import choice, flag, has, integer, inverse, number
from ridgeline.model.files.families.gguf import QKV
from ridgeline.model.files.families.hf_names import (
    BEHIND,
    BIASES,
    GATE_UP_PROJ,
    HEAD_NORM,
    HEADS_OF_128,
    LAYER,
    LAYER_NORM,
    MLP_BIAS,
    OF_OTHER_HALVES,
    OUTER,
    PARTIAL,
    QKV_PROJ,
    SILU,
    TIED,
    activation,
)
from ridgeline.model.files.families.inherit import row

_TURNED = {"interleaved": True}  # llama.cpp's converter turns rows of queries and keys
ROWS = (
    row(
        "decoder",  # what rows are like that name no other
        like="",
        types="",
        outer=OUTER,
        layer=LAYER,
        prefix="model.layers.{}.",
        facts={
            "hidden_size": integer("hidden_size"),
            "vocab_size": integer("vocab_size"),
            "norm_eps": number("rms_norm_eps"),
            "tied_embeddings": flag("tie_word_embeddings"),
            "mixer.num_heads": integer("num_attention_heads"),
            "ffn.size": integer("intermediate_size"),
            "ffn.activation": choice("hidden_act", among=SILU, default="silu"),
        },
    ),
    row(
        "llama",
        hf="LlamaForCausalLM",
        gguf="llama",
        facts=BIASES | MLP_BIAS | activation("hidden_act", default="silu"),
        in_gguf=_TURNED | {"windows": "all", "default_window": 0},
    ),
    row(
        "mistral",
        hf="MistralForCausalLM",
        written_as="llama",
        facts=BIASES,
        windows="all",
        default_window=4096,
    ),
    row(  # its text half may be Ministral 3
        "mistral3",
        like="mistral",
        types="",
        hf="Mistral3ForConditionalGeneration",
        rope_keys="llama_4_scaling_beta",
    ),
    row("ministral", hf="MinistralForCausalLM", windows="all", default_window=4096),
    row(
        "ministral3",
        hf="Ministral3ForCausalLM",
        gguf="mistral3",
        facts=HEADS_OF_128,
        windows="all",
        rope_keys="llama_4_scaling_beta",
        defaults={
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "factor": 16.0,
                "original_max_position_embeddings": 16_384,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        },
        text_defaults={"head_dim": 128, "rms_norm_eps": 1e-5, "sliding_window": 0},
        in_gguf=_TURNED
        | {
            "windows": "none",
            "rope_keys": "rope.scaling.yarn_log_multiplier",
        },
    ),
    row(
        "phi3",
        hf="Phi3ForCausalLM",
        gguf="phi3",
        layer=QKV_PROJ | GATE_UP_PROJ,
        facts=BIASES,
        windows="all",
        rope_keys=PARTIAL,
        in_gguf={"layer": {"gate": "ffn_up."}},
    ),
    row(
        "qwen2",
        hf="Qwen2ForCausalLM",
        gguf="qwen2",
        facts={"mixer.qkv_bias": True},
        windows="switch",
        default_window=4096,
    ),
    row(  # their first configs describe both halves side by side
        "qwen2_vl",
        like="qwen2",
        types="qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text",
        hf="Qwen2VLForConditionalGeneration, Qwen2_5_VLForConditionalGeneration",
        gguf="qwen2vl",
        ignored_keys=OF_OTHER_HALVES,
        ignored_tensors="visual.",
        in_gguf={"ignored_keys": "rope.dimension_sections"},  # of pictures; of text all are alike
    ),
    row(
        "qwen3",
        hf="Qwen3ForCausalLM",
        gguf="qwen3",
        facts=BIASES | HEAD_NORM | HEADS_OF_128,
        windows="switch",
        default_window=4096,
    ),
    row(
        "qwen3_vl",
        like="qwen3",
        types="qwen3_vl_text",
        hf="Qwen3VLForConditionalGeneration",
        gguf="qwen3vl",
        windows="none",
        in_gguf={
            "ignored_keys": "attention.sliding_window n_deepstack_layers rope.dimension_sections",
        },
    ),
    row(
        "smollm3",
        hf="SmolLM3ForCausalLM",
        gguf="smollm3",
        facts=BIASES | MLP_BIAS | TIED,
        ropes={"no_rope_layers": "none"},
        defaults={"rope_theta": 2e6},
        # Which layers a window is of, transformers says in two ways that differ.
        refused_keys="mlp_bias sliding_window use_sliding_window",
        in_gguf=_TURNED,
    ),
    row(
        "granite",
        hf="GraniteForCausalLM",
        gguf="granite",
        facts=BIASES
        | MLP_BIAS
        | {
            "embed_scale": number("embedding_multiplier", default=1.0),
            "residual_scale": number("residual_multiplier", default=1.0),
            "logit_scale": inverse("logits_scaling", default=1.0),
            "mixer.scale": number("attention_multiplier", default=1.0),
        },
        refused_keys="mlp_bias",
        in_gguf=_TURNED
        | {
            "facts": {
                "embed_scale": number("embedding_scale", default=1.0),
                "residual_scale": number("residual_scale", default=1.0),
                "logit_scale": inverse("logit_scale", default=1.0),
                "mixer.scale": number("attention.scale", default=1.0),
            },
            # Granite 4's files say them also of models of attention and an MLP alone.
            "ignored_keys": "expert_shared_feed_forward_length ssm.conv_kernel ssm.group_count "
            "ssm.inner_size ssm.state_size ssm.time_step_rank",
        },
    ),
    row(
        "olmo",
        hf="OlmoForCausalLM",
        gguf="olmo",
        facts=BIASES | LAYER_NORM | {"norm_eps": 1e-5},
        plain_norms=True,
        refused_keys="clip_qkv",
        in_gguf=_TURNED
        | {
            "facts": {"norm_eps": number("attention.layer_norm_epsilon")},
            "refused_keys": "attention.clamp_kqv",
        },
    ),
    row(
        "olmo2",
        hf="Olmo2ForCausalLM",
        layer=BEHIND,
        facts=BIASES | {"layer.norms": "behind", "mixer.qk_norm": "width"},
    ),
    row(
        "olmo3",
        like="olmo2",
        hf="Olmo3ForCausalLM",
        gguf="olmo2",  # where OLMo 2 has no window
        windows="pattern",
        default_window=4096,
        pattern=4,
        ropes={"sliding": "rope_theta"},
        defaults={"rope_theta": 500_000.0},
        in_gguf={"default_window": 0, "ropes": {"sliding": "rope.freq_base"}},
    ),
    row(
        "exaone4",
        like="olmo3",
        hf="Exaone4ForCausalLM",
        gguf="exaone4",
        facts={"mixer.qkv_bias": None, "mixer.o_bias": None} | HEAD_NORM,
        ropes={"sliding": None, "full": "none beside windows"},
        defaults={"rope_theta": None},
        ignored_keys="sliding_window_pattern",  # letters, beside layer_types, which say it
        in_gguf={"ropes": {"sliding": None}},
    ),
    row(
        "seed_oss",
        hf="SeedOssForCausalLM",
        gguf="seed_oss",
        facts=HEADS_OF_128
        | MLP_BIAS
        | {
            "mixer.qkv_bias": flag("attention_bias", default=True),
            "mixer.o_bias": flag("attention_out_bias"),
        },
        refused_keys="mlp_bias",
        ignored_keys="residual_dropout",
        in_gguf={"layer": {"mlp_norm": "post_attention_norm."}},
    ),
    row(
        "ernie4_5",
        hf="Ernie4_5ForCausalLM",
        gguf="ernie4_5",
        facts=HEADS_OF_128 | TIED | {"norm_eps": number("rms_norm_eps", default=1e-5)},
        interleaved=True,
        defaults={"rope_theta": 500_000.0, "num_key_value_heads": 2},
    ),
    row(
        "helium",
        hf="HeliumForCausalLM",
        facts=HEADS_OF_128 | MLP_BIAS | {"mixer.qkv_bias": flag("attention_bias")},
        interleaved=True,
        defaults={"rms_norm_eps": 1e-8, "rope_theta": 100_000.0},
    ),
    row(
        "hunyuan_v1_dense",
        hf="HunYuanDenseV1ForCausalLM",
        gguf="hunyuan-dense",
        layer={"q_norm": "self_attn.query_layernorm.", "k_norm": "self_attn.key_layernorm."},
        facts=BIASES | HEAD_NORM | {"mixer.norm_turned": True},
        rope_keys="alpha",
        # Tokens of pictures and of other tasks, and what is said of parts that are switched off.
        ignored_keys="attention_head_dim cla_share_factor dense_list eod_token_id im_end_id "
        "im_newline_id im_start_id mask_init_id norm_type num_media_embeds org_vocab_size pad_id "
        "pool_type text_end_id text_start_id video_end_id video_start_id",
        required={
            "add_classification_head": False,
            "num_experts": 1,
            "position_embedding_xdrope": False,
            "skip_cls_token": False,
            "use_cla": False,
            "use_qk_norm": True,
            "use_rotary_pos_emb": True,
        },
    ),
    row(
        "arcee",
        hf="ArceeForCausalLM",
        gguf="arcee",
        facts=BIASES | MLP_BIAS | {"ffn.gated": False} | activation("hidden_act", default="relu2"),
        refused_keys="mlp_bias",
        in_gguf=_TURNED,
    ),
    row(
        "glm",
        hf="GlmForCausalLM",
        gguf="chatglm",
        layer=GATE_UP_PROJ,
        facts=HEADS_OF_128
        | {
            "norm_eps": number("rms_norm_eps", default=1.5625e-7),
            "mixer.qkv_bias": flag("attention_bias", default=True),
        },
        interleaved=True,
        rope_keys=PARTIAL,
        defaults={"partial_rotary_factor": 0.5, "num_key_value_heads": 2},
        in_gguf={
            "layer": {"gate": "ffn_up."},
            "facts": {"mixer.qkv_bias": True},
            "alternatives": QKV,  # of files with the model's own names
        },
    ),
    row(
        "glm4",
        like="glm",
        hf="Glm4ForCausalLM",
        gguf="glm4",
        layer={
            "attn_post_norm": "post_self_attn_layernorm.",
            "mlp_post_norm": "post_mlp_layernorm.",
        },
        facts={"layer.norms": "around"},
        in_gguf={"facts": {"mixer.qkv_bias": has("attn_q.bias")}},
    ),
)
