"""What files of weights say of models that the engine does not run: sizes, and a GGUF's config.

Headers are read, tensors never. It knows names of tensors, and of what is in them nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ridgeline.models.facts import Facts
from ridgeline.models.tensors import ModelFileError, Tensor

_MOST_HEADER_BYTES = 64 << 20
_LAYER = re.compile(r"(?:^|\.)(?:layers|blk|h)\.(\d+)\.")
# The first that is in a tensor's name decides.
_GROUPS = (
    ("vision|visual|audio|mm_|multi_modal|projector", "other towers"),
    ("_scale_inv|_scales?$|qzeros|g_idx|\\.scales|absmax|_blocks_scales", "scales"),
    ("norm|ln_", "norms"),
    ("lm_head|^output\\.", "head"),
    ("embed|^token_embd", "embedding"),
    ("expert|_exps|_shexp|router|\\.gate\\.weight|ffn_gate_inp", "experts"),
    ("mamba|ssm|linear_attn|mixer", "state space"),
    ("attn|attention", "attention"),
    ("mlp|ffn|feed_forward", "MLP"),
)  # fmt: skip
# GGUF's architectures by Hugging Face's names, and its keys by config.json's.
_ARCHITECTURES = {
    "llama": "llama", "qwen2moe": "qwen2_moe", "qwen3moe": "qwen3_moe", "gemma": "gemma",
    "gemma2": "gemma2", "gemma3": "gemma3_text", "deepseek2": "deepseek_v3", "gpt-oss": "gpt_oss",
    "glm4moe": "glm4_moe", "olmo2": "olmo2", "olmoe": "olmoe", "starcoder2": "starcoder2",
    "command-r": "cohere", "cohere2": "cohere2", "granite": "granite", "smollm3": "smollm3",
    "phi3": "phi3", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2vl": "qwen2_vl",
}  # fmt: skip
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "leading_dense_block_count": "first_k_dense_replace",
    "nextn_predict_layers": "num_nextn_predict_layers",
}
_REFUSED = ("ssm.state_size", "attention.indexer.head_count", "attention.shared_kv_layers")


def sizes_of_directory(folder: Path, num_layers: int) -> dict[str, int]:
    """Return the bytes of a directory's safetensors by group.

    Layers beyond the model's own, which predict several tokens, are left out. Raises ModelFileError
    if a header is damaged or a file was cut short.
    """
    sizes: dict[str, int] = {}
    for path in sorted(folder.glob("*.safetensors")):
        if not path.name.startswith("consolidated"):  # the same weights once more
            sizes |= _header_sizes(path)
    return sizes_by_group(sizes.items(), num_layers)


def sizes_by_group(sizes: Iterable[tuple[str, int]], num_layers: int) -> dict[str, int]:
    """Return the sums of tensors' bytes by group, those of further layers left out."""
    by_group: dict[str, int] = {}
    for name, size in sizes:
        layer = _LAYER.search(name)
        if layer is None or int(layer[1]) < num_layers:
            group = next((g for words, g in _GROUPS if re.search(words, name)), "other")
            by_group[group] = by_group.get(group, 0) + size
    order = [group for _, group in _GROUPS]
    return dict(sorted(by_group.items(), key=lambda e: [*order, "other"].index(e[0])))


def _header_sizes(path: Path) -> dict[str, int]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, _MOST_HEADER_BYTES):
            raise ModelFileError(f"{path}: a header of {length} bytes in a file of {size}")
        text = file.read(length)
    sizes = {}
    try:
        header = json.loads(text)
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            if not 0 <= begin <= end <= size - 8 - length:
                raise ModelFileError(f"{path}: tensor {name!r} ends behind the file's end")
            sizes[name] = end - begin
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        if isinstance(error, ModelFileError):
            raise
        raise ModelFileError(f"{path}: its header is damaged ({error})") from error
    return sizes


def config_of_gguf(
    metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], where: str
) -> dict[str, Any]:
    """Return a GGUF header as a config.json: what shapes and the cache are counted from.

    Raises ModelFileError for an architecture, or a feature, that is not understood.
    """
    name = Facts(metadata, where).text("general.architecture")
    facts = Facts(metadata, where, prefix=f"{name}.")
    if name not in _ARCHITECTURES:
        facts.fail(f"architecture {name!r} is not understood: give the model's config.json")
    for key in _REFUSED:
        if facts.get(key):
            facts.fail(f"{name}.{key} is set, which is not understood: give its config.json")
    if "token_embd.weight" not in tensors:
        facts.fail("tensor 'token_embd.weight' is missing")
    config: dict[str, Any] = {
        "model_type": _ARCHITECTURES[name],
        "torch_dtype": "float16",
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
    }
    for key, theirs in _KEYS.items():
        value = facts.get(key)
        if isinstance(value, np.ndarray):  # one for each layer
            if len(set(value.tolist())) > 1:
                facts.fail(f"{name}.{key} differs from layer to layer, which is not understood")
            value = value.tolist()[0]
        if value is not None:
            config[theirs] = value
    if config.get("kv_lora_rank"):
        _latent(config, facts)
    if name == "llama" and config.get("num_experts"):
        config["model_type"] = "mixtral"
    return config


def _latent(config: dict[str, Any], facts: Facts) -> None:
    """Say heads of latent attention as config.json does: newer files call its length a key's."""
    rope = facts.integer("rope.dimension_count")
    key = facts.integer("attention.key_length_mla", config.pop("head_dim", None))
    value = facts.integer("attention.value_length_mla", facts.integer("attention.value_length"))
    heads = config["num_attention_heads"]
    config |= {"qk_rope_head_dim": rope, "qk_nope_head_dim": key - rope, "v_head_dim": value,
               "num_key_value_heads": heads}  # fmt: skip


def bits_per_weight(tensors: Iterable[Tensor]) -> float:
    """Return how many bits a weight takes on average."""
    sizes = [(tensor.nbytes, math.prod(tensor.shape)) for tensor in tensors]
    return 8 * sum(size for size, _ in sizes) / sum(count for _, count in sizes)
