"""Families whose weights and cache are counted, and that do not run. Literal tables.

A row has no names of tensors, and no fact that changes no size. What runs in the place of such a
family stands in ``nearest``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ridgeline.models.families.deepseek import FAMILIES as _DEEPSEEK
from ridgeline.models.families.hf import FAMILIES as _RUN
from ridgeline.models.families.hf_parts import BIASES, GEMMA, MODEL
from ridgeline.models.families.table import (
    Family,
    Reader,
    const,
    count,
    either,
    flag,
    integer,
    rank,
)

_GPT = {
    "norm_bias": const(True),
    "ffn.size": integer("intermediate_size", times_hidden=4),
    "ffn.gated": const(False),
    "ffn.bias": const(True),
}
_MAMBA = {
    "hidden_size": integer("hidden_size", "d_model"),
    "vocab_size": integer("vocab_size"),
    "tied_embeddings": flag("tie_word_embeddings", default=True),
    "recurrent.num_heads": integer("intermediate_size", times_hidden=2),
    "recurrent.head_dim": const(1),
    "recurrent.num_groups": const(1),
    "recurrent.state_dim": integer("state_size"),
    "recurrent.kernel": integer("conv_kernel", default=4),
    "recurrent.step_rank": rank("time_step_rank"),
    "recurrent.bias": flag("use_bias"),
    "recurrent.conv_bias": flag("use_conv_bias", default=True),
    "ffn.size": const(0),
}
_JAMBA = MODEL | {
    "recurrent.num_heads": integer("mamba_d_inner", times_hidden=2),
    "recurrent.head_dim": const(1),
    "recurrent.num_groups": const(1),
    "recurrent.state_dim": integer("mamba_d_state", default=16),
    "recurrent.kernel": integer("mamba_d_conv", default=4),
    "recurrent.step_rank": rank("mamba_dt_rank"),
    "recurrent.bias": flag("mamba_proj_bias"),
    "recurrent.conv_bias": flag("mamba_conv_bias", default=True),
    "recurrent.part_norms": const(True),
}
_SPARSE = {
    "ffn.num": integer("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "ffn.per_token": integer("num_experts_per_tok", "experts_per_token", "moe_topk"),
    "ffn.size": integer("moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size"),
    "shared.size": count("shared_expert_intermediate_size", "shared_intermediate_size"),
    "dense.size": integer("intermediate_size"),
}


def _row(facts: dict[str, Reader], **others: Any) -> Family:
    return Family({}, {}, "", facts, **others)


_JAMBA_KINDS = {
    "recurrent": "ssm",
    "attention_layers": "attn_layer_period",
    "defaults": {"attn_layer_period": 8, "attn_layer_offset": 4},
    "must": {"mamba_expand": 2},
    "unused": ("num_experts", "num_experts_per_tok", "expert_layer_period", "expert_layer_offset"),
}
_FALCON, _GPT2 = _RUN["FalconForCausalLM"], _RUN["GPT2LMHeadModel"]
_OF_GROUPS = _RUN["FalconForCausalLM of groups"]
_LATENT = _DEEPSEEK["DeepseekV2ForCausalLM"]
_OF_KERNELS = (*_GPT2.unused, "multi_query", "pre_allocate_kv_cache")
_OF_HEADS = replace(  # a key for each head, as in the first of them, of 1B
    _FALCON,
    facts={
        **_FALCON.facts,
        "layer.norms": either("parallel_attn", yes="beside", no="before", default=True),
    },
    defaults={"max_position_embeddings": 2048},
    must={},
    unused=("num_kv_heads", "n_head_kv"),
)
_OF_LATENTS = MODEL | {
    name: reader
    for name, reader in _LATENT.facts.items()
    if name.startswith("latent.") or name == "mixer.head_dim"
}
_UNKNOWN = MODEL | BIASES | {"ffn.bias": flag("mlp_bias")}
FAMILIES = {
    "GPTBigCodeForCausalLM": replace(
        _GPT2,
        defaults={"num_key_value_heads": 1},
        unused=_OF_KERNELS,
    ),
    "GPTBigCodeForCausalLM of keys by head": replace(_GPT2, unused=_OF_KERNELS),
    "GPTJForCausalLM": _row(
        MODEL | _GPT | {"head_bias": const(True), "layer.norms": const("beside")},
        aliases={**_GPT2.aliases, "n_ctx": "max_position_embeddings"},
    ),
    "FalconForCausalLM of keys by head": _OF_HEADS,
    "RWForCausalLM": replace(_FALCON, unused=("num_kv_heads", "n_head_kv")),
    "RWForCausalLM of keys by head": _OF_HEADS,
    "RWForCausalLM of groups": replace(
        _OF_GROUPS, aliases={**_OF_GROUPS.aliases, "n_head_kv": "num_key_value_heads"}
    ),
    "ChatGLMModel": _row(
        MODEL
        | {
            "mixer.head_dim": integer("head_dim", default=128),
            "mixer.qkv_bias": flag("add_qkv_bias"),
        },
        aliases={
            "padded_vocab_size": "vocab_size",
            "num_layers": "num_hidden_layers",
            "multi_query_group_num": "num_key_value_heads",
            "kv_channels": "head_dim",
            "ffn_hidden_size": "intermediate_size",
            "seq_length": "max_position_embeddings",
        },
        must={
            "add_bias_linear": False,
            "multi_query_attention": True,
            "post_layer_norm": True,
            "rmsnorm": True,
        },
    ),
    "Gemma3nForCausalLM": _row(
        MODEL | BIASES | GEMMA | {"mixer.qk_norm": const("head")}, windows="pattern", pattern=5
    ),
    "MambaForCausalLM": _row(_MAMBA, recurrent="ssm", unused=("expand", "d_inner", "n_layer")),
    "JambaForCausalLM": _row(_JAMBA, **_JAMBA_KINDS),
    "JambaForCausalLM of many experts": _row(
        _JAMBA | _SPARSE,
        **_JAMBA_KINDS,
        has_experts=True,
        dense_layers="mlp_only_layers",
        experts_every="expert_layer_period",
    ),
    # Of a family that is in no table: a Llama with the sizes of its config.
    "unknown": _row(_UNKNOWN, windows="named"),
    "unknown of many experts": _row(
        _UNKNOWN | _SPARSE,
        windows="named",
        has_experts=True,
        dense_layers="mlp_only_layers",
        experts_every="decoder_sparse_step",
    ),
    "unknown of latents": _row(_OF_LATENTS, unused=_LATENT.unused),
    "unknown of latent experts": replace(_LATENT, must={}),
}
FAMILIES["FalconMambaForCausalLM"] = FAMILIES["MambaForCausalLM"]
