"""What llama.cpp's converters make of dense families with LayerNorm: metadata and tensors.

Names are those of gguf-py's own map, not the ones of the code under test.
"""

from __future__ import annotations

import re
from typing import Any

import gguf
import numpy as np

ARCHITECTURES = {
    "StableLmForCausalLM": "stablelm",
    "CohereForCausalLM": "command-r",
    "Cohere2ForCausalLM": "cohere2",
    "PhiForCausalLM": "phi2",
    "Starcoder2ForCausalLM": "starcoder2",
    "GPTNeoXForCausalLM": "gptneox",
    "FalconForCausalLM": "falcon",
    "GPT2LMHeadModel": "gpt2",
    "BloomForCausalLM": "bloom",
    "MptForCausalLM": "mpt",
}
_NUMBERS = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
# Metadata without the architecture to keys of config.json, of which one is there.
_KEYS = {
    "embedding_length": ("hidden_size", "n_embd", "d_model"),
    "block_count": ("num_hidden_layers", "n_layer", "n_layers"),
    "context_length": ("max_position_embeddings", "n_positions", "seq_length", "max_seq_len"),
    "attention.head_count": ("num_attention_heads", "n_head", "n_heads"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"),
}


def converted(
    config: dict[str, Any], weights: dict[str, np.ndarray]
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return metadata and tensors of a GGUF file for a config.json and its float weights."""
    arch = ARCHITECTURES[config["architectures"][0]]
    values = {
        key: next(config[name] for name in names if config.get(name) is not None)
        for key, names in _KEYS.items()
    }
    hidden, heads = values["embedding_length"], values["attention.head_count"]
    if arch in ("gpt2", "phi2", "falcon", "bloom", "mpt"):
        values["feed_forward_length"] = 4 * hidden
    else:
        values["feed_forward_length"] = config["intermediate_size"]
    if arch in ("stablelm", "command-r", "cohere2", "starcoder2"):
        values["attention.head_count_kv"] = config["num_key_value_heads"]
    if arch in ("stablelm", "phi2", "gptneox"):
        rope = config.get("rope_parameters") or {}
        share = config.get("rotary_pct") or rope.get("partial_rotary_factor", 1.0)
        values["rope.dimension_count"] = int(share * (hidden // heads))
    if arch in ("stablelm", "gptneox"):
        values["use_parallel_residual"] = True  # that is StableLM's default: see the table
    if arch == "mpt":
        values["attention.max_alibi_bias"] = float(config["attn_config"]["alibi_bias_max"])
    kv_heads = heads
    if arch == "falcon":
        values["tensor_data_layout"] = "jploski"
        kv_heads = config["num_kv_heads"] if config.get("new_decoder_architecture") else 1
        values["attention.head_count_kv"] = kv_heads
    if arch == "starcoder2":
        values["rope.freq_base"] = 10_000.0
    if arch in ("command-r", "cohere2"):
        values["logit_scale"] = config["logit_scale"]
        values["rope.freq_base"] = 10_000.0
        values["rope.scaling.type"] = "none"
    if arch == "cohere2":
        values["attention.sliding_window"] = config["sliding_window"]
        values["rope.dimension_count"] = hidden // heads
        values["vocab_size"] = config["vocab_size"]
    names = gguf.get_tensor_name_map(_NUMBERS[arch], values["block_count"])
    raw = {}
    for name, array in weights.items():
        if arch == "bloom":
            name = name.removeprefix("transformer.")
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        if arch == "gpt2" and re.search(r"\.c_\w+\.weight", name):
            array = np.ascontiguousarray(array.T)
        if "query_key_value" in name:
            served = heads // kv_heads  # by a key head, with which its queries and values stand
            of_head = array.reshape(kv_heads, served + 2, hidden // heads, *array.shape[1:])
            parts = (of_head[:, :served], of_head[:, served], of_head[:, served + 1])
            array = np.concatenate([part.reshape(-1, *array.shape[1:]) for part in parts])
        raw[new_name] = array
    metadata = {f"{arch}.{key}": value for key, value in values.items()}
    return {"general.architecture": arch} | metadata, raw
