"""Configs with names of their own: counted against published models, and refused."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.model.cost.shapes import active_params, weight_params
from ridgeline.model.files.counting import shape_of_config

# The fields that say sizes, as the models' config.json on the hub have them; parameters as the hub
# or transformers count them; bytes of keys and values of a token in all layers, at 16 bits.
PUBLISHED: dict[str, tuple[dict[str, Any], int, int]] = {
    "openai-community/gpt2": (
        {
            "model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12,
            "n_positions": 1024, "vocab_size": 50257, "n_inner": None, "resid_pdrop": 0.1,
            "embd_pdrop": 0.1, "summary_use_proj": True, "activation_function": "gelu_new",
        },
        124_439_808, 36_864,
    ),
    "bigcode/starcoder": (
        {
            "model_type": "gpt_bigcode", "n_embd": 6144, "n_head": 48, "n_inner": 24576,
            "n_layer": 40, "n_positions": 8192, "vocab_size": 49152, "multi_query": True,
            "pre_allocate_kv_cache": True, "scale_attn_weights": True,
        },
        15_517_456_384, 20_480,
    ),
    "EleutherAI/gpt-j-6b": (
        {
            "model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_inner": None, "n_layer": 28,
            "n_positions": 2048, "vocab_size": 50400, "rotary": True, "rotary_dim": 64,
            "tie_word_embeddings": False,
        },
        6_050_882_784, 458_752,
    ),
    "EleutherAI/pythia-160m": (
        {
            "model_type": "gpt_neox", "hidden_size": 768, "intermediate_size": 3072,
            "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 50304,
            "max_position_embeddings": 2048, "rotary_pct": 0.25, "rotary_emb_base": 10000,
            "use_parallel_residual": True, "tie_word_embeddings": False,
        },
        162_322_944, 36_864,
    ),
    "facebook/opt-125m": (
        {
            "model_type": "opt", "hidden_size": 768, "ffn_dim": 3072, "num_attention_heads": 12,
            "num_hidden_layers": 12, "vocab_size": 50272, "max_position_embeddings": 2048,
            "word_embed_proj_dim": 768, "do_layer_norm_before": True, "layerdrop": 0.0,
            "_remove_final_layer_norm": False, "prefix": "</s>",
        },
        125_239_296, 36_864,
    ),
    "bigscience/bloom-560m": (
        {
            "model_type": "bloom", "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16,
            "vocab_size": 250880, "seq_length": 2048, "offset_alibi": 100,
            "hidden_dropout": 0.0, "attention_softmax_in_fp32": True,
        },
        559_214_592, 98_304,
    ),
    "tiiuae/falcon-7b": (
        {
            "model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71,
            "num_hidden_layers": 32, "num_kv_heads": 71, "multi_query": True, "alibi": False,
            "new_decoder_architecture": False, "parallel_attn": True, "bias": False,
            "vocab_size": 65024,
        },
        6_921_720_704, 8_192,
    ),
    "tiiuae/falcon-40b": (
        {
            "model_type": "falcon", "hidden_size": 8192, "num_attention_heads": 128,
            "num_hidden_layers": 60, "num_kv_heads": 8, "multi_query": True, "alibi": False,
            "new_decoder_architecture": True, "parallel_attn": True, "bias": False,
            "vocab_size": 65024,
        },
        41_303_293_952, 122_880,
    ),
    "tiiuae/falcon-rw-1b": (
        {
            "model_type": "falcon", "hidden_size": 2048, "num_attention_heads": 32,
            "num_hidden_layers": 24, "multi_query": False, "alibi": True,
            "new_decoder_architecture": False, "parallel_attn": False, "bias": True,
            "vocab_size": 50304,
        },
        1_311_625_216, 196_608,
    ),
    "microsoft/phi-2": (
        {
            "model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240,
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
            "vocab_size": 51200, "max_position_embeddings": 2048, "partial_rotary_factor": 0.4,
            "qk_layernorm": False, "tie_word_embeddings": False,
        },
        2_779_683_840, 327_680,
    ),
    "THUDM/chatglm3-6b": (
        {
            "model_type": "chatglm", "add_bias_linear": False, "add_qkv_bias": True,
            "ffn_hidden_size": 13696, "hidden_size": 4096, "kv_channels": 128,
            "multi_query_attention": True, "multi_query_group_num": 2, "num_attention_heads": 32,
            "num_layers": 28, "padded_vocab_size": 65024, "seq_length": 8192, "rmsnorm": True,
            "post_layer_norm": True, "tie_word_embeddings": False, "layernorm_epsilon": 1e-5,
            "apply_query_key_layer_scaling": True, "original_rope": True,
        },
        6_243_584_000, 28_672,
    ),
}  # fmt: skip
MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "head_dim": 128,
    "hidden_size": 3072, "intermediate_size": 1536, "mlp_intermediate_size": 8192,
    "attn_type_list": [1] * 62, "num_attention_heads": 48, "num_experts_per_tok": 8,
    "num_hidden_layers": 62, "num_key_value_heads": 8, "num_local_experts": 256,
    "num_mtp_modules": 3, "mtp_transformer_layers": 1, "use_mtp": True, "rotary_dim": 64,
    "qk_norm_type": "per_layer", "use_qk_norm": True, "use_routing_bias": True,
    "shared_intermediate_size": 0, "shared_moe_mode": "sigmoid", "sliding_window": None,
    "vocab_size": 200064, "tie_word_embeddings": False, "max_position_embeddings": 196608,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_model_has_its_published_parameters(name: str) -> None:
    config, num_params, kv_bytes = PUBLISHED[name]
    shape = shape_of_config(config)
    assert weight_params(shape) == num_params
    assert 2 * sum(layer.cache.values_per_token() for layer in shape.layers) == kv_bytes
    assert not shape.assumptions  # it is known, and not taken for a Llama


def test_minimax_m2_has_230_b_parameters_of_which_10_are_active() -> None:
    shape = shape_of_config(MINIMAX_M2)
    assert weight_params(shape) == 228_689_764_864  # "230 B" by its card
    assert active_params(shape) == pytest.approx(10e9, rel=0.12)
    assert weight_params(shape_of_config(MINIMAX_M2 | {"model_type": "minimax"})) == (
        weight_params(shape)
    )


def of(name: str, **changes: Any) -> dict[str, Any]:
    return PUBLISHED[name][0] | changes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (of("openai-community/gpt2", n_embd=None), "hidden_size is missing"),
        (
            of("openai-community/gpt2", n_inner="wide"),
            "intermediate_size is 'wide', not an ",
        ),
        (of("openai-community/gpt2", state_size=4), "state_size is 4, which may change"),
        (of("facebook/opt-125m", word_embed_proj_dim=512), "word_embed_proj_dim is 512, but"),
        (of("facebook/opt-125m", do_layer_norm_before=False), "do_layer_norm_before is False"),
        (
            of("facebook/opt-125m", layer_norm_elementwise_affine=False),
            "layer_norm_elementwise_affine is False",
        ),
        (of("tiiuae/falcon-40b", num_kv_heads=7), "128 heads cannot share 7"),
        (of("microsoft/phi-2", qk_layernorm=True), "qk_layernorm is True"),
        (of("THUDM/chatglm3-6b", num_layers=None), "num_hidden_layers is missing"),
        (of("THUDM/chatglm3-6b", add_bias_linear=True), "add_bias_linear is True"),
        (of("THUDM/chatglm3-6b", rmsnorm=False), "rmsnorm is False"),
        (MINIMAX_M2 | {"attn_type_list": [0, 1] * 31}, "attn_type_list has layers of linear"),
        (MINIMAX_M2 | {"qk_norm_type": "per_head"}, "qk_norm_type is 'per_head'"),
        (MINIMAX_M2 | {"use_qk_norm": False}, "use_qk_norm is False"),
    ],
)
def test_what_cannot_be_counted_is_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=r"my\.json: ") as caught:
        shape_of_config(config, "my.json")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_shared_expert_of_minimax_is_counted() -> None:
    wide = shape_of_config(MINIMAX_M2 | {"shared_intermediate_size": 512})
    more = weight_params(wide) - weight_params(shape_of_config(MINIMAX_M2))
    assert more >= 62 * 3 * 3072 * 512
