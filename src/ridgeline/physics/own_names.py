"""Configs with names of their own, said in the usual ones: GPT-2 and its like, and a few more.

Families from before Llama leave out what their class knows. Each function reads such names and
returns the usual ones; what it did not read stays as it was, so that a field which says a size is
still refused by name. It opens no file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ridgeline.physics.fields import Fields

_BIASED = {"attention_bias": True, "mlp_bias": True}


def in_usual_names(values: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return a config as most families write it; as it is, where it is of one of those.

    Raises ValueError: a key is missing or out of range, or says what is not understood.
    """
    read = _READERS.get(str(values.get("model_type")))
    if read is None:
        return values
    config = Fields(values, where)
    usual = read(config)
    return {**config.unread(), **usual}


def _sizes(config: Fields) -> dict[str, Any]:
    """Return what all of them have; the MLP is four times as wide as the model unless it says."""
    hidden = config.integer("n_embd", "hidden_size", "n_embed")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": config.integer("n_layer", "num_hidden_layers"),
        "num_attention_heads": config.integer("n_head", "num_attention_heads"),
        "intermediate_size": config.integer(
            "n_inner", "ffn_hidden_size", "ffn_dim", default=4 * hidden
        ),
    }


def _gpt2(config: Fields) -> dict[str, Any]:
    heads = config.integer("n_head", "num_attention_heads")
    is_shared = config.flag("multi_query", default=False)  # of GPT-BigCode
    config.get("pre_allocate_kv_cache", "n_ctx")
    return {
        **_sizes(config),
        **_BIASED,
        "num_key_value_heads": 1 if is_shared else heads,
        "max_position_embeddings": config.integer("n_positions"),
    }


def _gptj(config: Fields) -> dict[str, Any]:
    config.get("n_ctx")
    positions = config.integer("n_positions", default=0, low=0)
    return {**_sizes(config), "mlp_bias": True, "max_position_embeddings": positions}


def _gpt_neox(config: Fields) -> dict[str, Any]:
    return {"attention_bias": config.flag("attention_bias", default=True), "mlp_bias": True}


def _nemotron_h(config: Fields) -> dict[str, Any]:
    names = config.values.get("layers_block_type") or config.values.get("hybrid_override_pattern")
    count = len(names) if isinstance(names, list | str) else None
    return {"num_hidden_layers": config.integer("num_hidden_layers", default=count)}


def _opt(config: Fields) -> dict[str, Any]:
    sizes, width = _sizes(config), config.integer("word_embed_proj_dim", default=0, low=0)
    if width not in (0, sizes["hidden_size"]):
        config.fail(f"word_embed_proj_dim is {width}, not hidden_size, which is not understood")
    if not config.flag("do_layer_norm_before", default=True):
        config.fail("do_layer_norm_before is False, which is not understood")
    has_bias = config.flag("enable_bias", default=True)
    return {**sizes, "attention_bias": has_bias, "mlp_bias": has_bias}


def _bloom(config: Fields) -> dict[str, Any]:
    positions = config.integer("seq_length", default=0, low=0)
    config.get("bias_dropout_fusion", "skip_bias_add", "skip_bias_add_qkv")  # how it is computed
    return {**_sizes(config), **_BIASED, "max_position_embeddings": positions}


def _mpt(config: Fields) -> dict[str, Any]:
    hidden, ratio = config.integer("d_model"), config.integer("expansion_ratio", default=4)
    config.get("attn_config", "init_config", "norm_type", "learned_pos_emb")
    if not config.flag("no_bias", default=True):
        config.fail("no_bias is False, which is not understood")
    return {
        "hidden_size": hidden,
        "num_hidden_layers": config.integer("n_layers"),
        "num_attention_heads": config.integer("n_heads"),
        "intermediate_size": ratio * hidden,
        "max_position_embeddings": config.integer("max_seq_len", default=0, low=0),
    }


def _falcon(config: Fields) -> dict[str, Any]:
    sizes = _sizes(config)
    heads = config.integer("num_kv_heads", "n_head_kv", default=sizes["num_attention_heads"])
    is_newer = config.flag("new_decoder_architecture", default=False)
    if not is_newer:  # then the number of heads that it may say means nothing
        is_shared = config.flag("multi_query", default=True)
        heads = 1 if is_shared else sizes["num_attention_heads"]
    is_parallel = is_newer or config.flag("parallel_attn", default=True)
    has_bias = config.flag("bias", default=False)
    config.get("multi_query", "parallel_attn")
    return {
        **sizes,
        "num_key_value_heads": heads,
        "attention_bias": has_bias,
        "mlp_bias": has_bias,
        # Attention and MLP read the same row: through one norm, or through one each.
        "num_ln_in_parallel_attn": config.integer(
            "num_ln_in_parallel_attn", default=1 if is_parallel and not is_newer else 2
        ),
    }


def _phi(config: Fields) -> dict[str, Any]:
    if config.flag("qk_layernorm", default=False):
        config.fail("qk_layernorm is True, which is not understood")
    return _BIASED


def _stablelm(config: Fields) -> dict[str, Any]:
    if config.flag("qk_layernorm", default=False):
        config.fail("qk_layernorm is True, which is not understood")
    return {
        "attention_bias": config.flag("use_qkv_bias", default=False),
        "num_ln_in_parallel_attn": 1 if config.flag("use_parallel_residual", default=False) else 2,
    }


def _cohere2(config: Fields) -> dict[str, Any]:
    order = config.text("order_of_interleaved_layers", default="local_attn_first")
    if order != "local_attn_first":
        config.fail(f"order_of_interleaved_layers is {order!r}, which is not understood")
    if not config.flag("use_parallel_block", default=True):
        config.fail("use_parallel_block is False, which is not understood")
    return {}


def _chatglm(config: Fields) -> dict[str, Any]:
    if config.flag("add_bias_linear", default=False):
        config.fail("add_bias_linear is True, which is not understood")
    if not config.flag("rmsnorm", default=True):
        config.fail("rmsnorm is False, which is not understood")
    if not config.flag("post_layer_norm", default=True):
        config.fail("post_layer_norm is False, which is not understood")
    heads = config.integer("num_attention_heads")
    groups = config.integer("multi_query_group_num", default=1)
    return {
        "vocab_size": config.integer("padded_vocab_size", "vocab_size"),
        "num_hidden_layers": config.integer("num_layers"),
        "num_attention_heads": heads,
        "num_key_value_heads": (
            groups if config.flag("multi_query_attention", default=False) else heads
        ),
        "head_dim": config.integer("kv_channels", default=128),
        "intermediate_size": config.integer("ffn_hidden_size"),
        "attention_bias": config.flag("add_qkv_bias", default=False),
        "max_position_embeddings": config.integer("seq_length", default=0, low=0),
    }


def _minimax(config: Fields) -> dict[str, Any]:
    if 0 in (config.list_of(int, "attn_type_list") or []):
        config.fail("attn_type_list has layers of linear attention, which are not understood")
    if config.text("qk_norm_type", default="per_layer") != "per_layer":
        config.fail(f"qk_norm_type is {config.get('qk_norm_type')!r}, which is not understood")
    if not config.flag("use_qk_norm", default=True):
        config.fail("use_qk_norm is False, which is not understood")
    # Its files hold no weights for several tokens, and all its layers have experts.
    config.get("use_mtp", "num_mtp_modules", "mtp_transformer_layers", "mlp_intermediate_size")
    config.get("shared_moe_mode")
    return {
        "model_type": "minimax_m2",
        "shared_expert_intermediate_size": (
            config.integer("shared_intermediate_size", default=0, low=0) or None
        ),
        "use_expert_bias": config.flag("use_routing_bias", default=True),
    }


def _exaone4(config: Fields) -> dict[str, Any]:
    if config.has("layer_types"):
        config.get("sliding_window_pattern")  # says the same, in letters
    return {}


def _ernie_of_experts(config: Fields) -> dict[str, Any]:
    config.get("moe_layer_end_index", "moe_layer_interval", "moe_capacity")
    return {
        "num_experts_per_tok": config.integer("moe_k"),
        "n_shared_experts": config.integer("moe_num_shared_experts", default=0, low=0),
        "first_k_dense_replace": config.integer("moe_layer_start_index", default=1, low=0),
    }


def _dots1(config: Fields) -> dict[str, Any]:
    first = config.integer("max_window_layers", default=62, low=0)
    return {"use_sliding_window": True, "max_window_layers": first}


_READERS: Mapping[str, Callable[[Fields], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt2,
    "gptj": _gptj,
    "gpt_neox": _gpt_neox,
    "nemotron_h": _nemotron_h,
    "opt": _opt,
    "bloom": _bloom,
    "mpt": _mpt,
    "falcon": _falcon,
    "RefinedWeb": _falcon,
    "RefinedWebModel": _falcon,
    "phi": _phi,
    "stablelm": _stablelm,
    "cohere2": _cohere2,
    "chatglm": _chatglm,
    "minimax": _minimax,
    "minimax_m2": _minimax,
    "exaone4": _exaone4,
    "ernie4_5_moe": _ernie_of_experts,
    "dots1": _dots1,
}
