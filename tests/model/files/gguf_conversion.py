"""What llama.cpp's converters make of families from 2025 on: metadata and tensors.

Names are those of gguf-py's own map, not the ones of the code under test.
"""

from __future__ import annotations

import re
from typing import Any

import gguf
import numpy as np

ARCHITECTURES = {
    "GlmForCausalLM": "chatglm",
    "Glm4ForCausalLM": "glm4",
    "Glm4MoeForCausalLM": "glm4moe",
    "Exaone4ForCausalLM": "exaone4",
    "Ernie4_5ForCausalLM": "ernie4_5",
    "Ernie4_5_MoeForCausalLM": "ernie4_5-moe",
    "SeedOssForCausalLM": "seed_oss",
    "MiniMaxM2ForCausalLM": "minimax-m2",
    "Dots1ForCausalLM": "dots1",
    "HunYuanDenseV1ForCausalLM": "hunyuan-dense",
    "ArceeForCausalLM": "arcee",
    "Ministral3ForCausalLM": "mistral3",
    "NemotronForCausalLM": "nemotron",
    "OlmoForCausalLM": "olmo",
    "Llama4ForCausalLM": "llama4",
    "GptOssForCausalLM": "gpt-oss",
}
_NUMBERS = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
# Metadata without the architecture to keys of config.json, of which one may be there.
_KEYS = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.value_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
}
_OF_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
Arrays = dict[str, np.ndarray]


def converted(
    config: dict[str, Any], weights: Arrays, arch: str = ""
) -> tuple[dict[str, Any], Arrays]:
    """Return metadata and tensors of a GGUF file for a config.json and its float weights.

    ``arch`` is the file's architecture, if it does not follow from the config's.
    """
    arch = arch or ARCHITECTURES[config["architectures"][0]]
    num_layers = config["num_hidden_layers"]
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    values = {"block_count": num_layers, **_said(config)}
    names = gguf.get_tensor_name_map(_NUMBERS[arch], values["block_count"])
    raw = {}
    if arch == "gpt-oss":
        weights = _gates_apart(weights, config["num_local_experts"])
    for name, array in _turned(_stacked(weights)).items():
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        new_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new_name is not None, name
        if arch in ("arcee", "mistral3", "olmo") and re.search("attn_[qk]", new_name):
            array = _by_neighbours(array, head_dim)
        if arch == "nemotron" and name.endswith("norm.weight"):
            array = array + 1
        raw[new_name] = array.squeeze()
    values |= _of(arch, config)
    metadata = {f"{arch}.{key}": value for key, value in values.items() if value is not None}
    return {"general.architecture": arch} | metadata, raw


def _said(config: dict[str, Any]) -> dict[str, Any]:
    """Return what all converters write."""
    found = {}
    for key, names in _KEYS.items():
        value = next((config[name] for name in names if config.get(name) is not None), None)
        if value is not None:
            found[key] = value
    found["rope.freq_base"] = config["rope_parameters"]["rope_theta"]
    return found


def _of(arch: str, config: dict[str, Any]) -> dict[str, Any]:
    """Return what the converter of an architecture writes beside; None for what it leaves out."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    share = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    turning = {"rope.dimension_count": int(head_dim * share)}
    match arch:
        case "chatglm":  # of the epsilon and the context it reads keys that newer configs lack
            unsaid = dict.fromkeys(("attention.key_length", "attention.value_length"))
            context = {"context_length": config["hidden_size"]}
            return turning | unsaid | context | {"attention.layer_norm_rms_epsilon": 1e-5}
        case "glm4":
            return turning
        case "glm4moe":
            return turning | _like_deepseek(config)
        case "dots1":
            return _like_deepseek(config)
        case "exaone4" if config.get("sliding_window"):
            slides = [kind == "sliding_attention" for kind in config["layer_types"]]
            window = config["sliding_window"]
            return {"attention.sliding_window": window, "attention.sliding_window_pattern": slides}
        case "ernie4_5-moe":
            return {
                "expert_count": config["moe_num_experts"],
                "expert_used_count": config["moe_k"],
                "expert_feed_forward_length": config["moe_intermediate_size"],
                "expert_shared_count": config["moe_num_shared_experts"],
                "expert_shared_feed_forward_length": (
                    config["intermediate_size"] // config["num_key_value_heads"]
                ),
                "interleave_moe_layer_step": config.get("moe_layer_interval", 1),
                "leading_dense_block_count": config["moe_layer_start_index"],
            }
        case "hunyuan-dense":
            rope = config["rope_parameters"]
            base = rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2))
            return {"rope.freq_base": base, "rope.scaling.type": "none"}
        case "nemotron":
            return turning | {
                "attention.layer_norm_epsilon": config["norm_eps"],
                "rope.scaling.type": "none",
            }
        case "mistral3":
            return _of_mistral3(config["rope_parameters"], head_dim)
        case "llama4":
            return turning | _of_llama4(config)
        case "olmo":
            return {"attention.layer_norm_epsilon": 1e-5}
        case "qwen2vl" | "qwen3vl" | "qwen3vlmoe":
            return {
                "expert_feed_forward_length": config.get("moe_intermediate_size"),
                "n_deepstack_layers": None if arch == "qwen2vl" else 3,
                "rope.dimension_sections": [4, 2, 2, 0],
            }
        case "gpt-oss":  # there is no key for "truncate"
            rope = config["rope_parameters"]
            return {
                "attention.sliding_window": config["sliding_window"],
                "expert_feed_forward_length": config["intermediate_size"],
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": rope["factor"],
                "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
                "rope.scaling.yarn_beta_fast": rope["beta_fast"],
                "rope.scaling.yarn_beta_slow": rope["beta_slow"],
            }
        case "minimax-m2":
            return {
                "expert_feed_forward_length": config["intermediate_size"],
                "expert_gating_func": 2,
                "rope.dimension_count": config["rotary_dim"],
            }
    return {}


def _of_mistral3(rope: dict[str, Any], head_dim: int) -> dict[str, Any]:
    return {
        "attention.temperature_scale": rope["llama_4_scaling_beta"],
        "rope.dimension_count": head_dim,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        "rope.scaling.yarn_beta_slow": rope["beta_slow"],
        "rope.scaling.yarn_log_multiplier": rope["mscale_all_dim"],
    }


def _of_llama4(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "feed_forward_length": config["intermediate_size_mlp"],
        "expert_feed_forward_length": config["intermediate_size"],
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
    }


def _by_neighbours(array: np.ndarray, head_dim: int) -> np.ndarray:
    """Return rows of queries or keys, stored for halves that turn, in the order of neighbours."""
    halves = array.reshape(-1, 2, head_dim // 2, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


def _like_deepseek(config: dict[str, Any]) -> dict[str, Any]:
    """Return what converters say of experts that are chosen as in DeepSeek V3."""
    return {
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "leading_dense_block_count": config["first_k_dense_replace"],
        "expert_gating_func": 2,
        "expert_weights_scale": config.get("routed_scaling_factor"),
        "expert_weights_norm": config.get("norm_topk_prob"),
    }


def _turned(weights: Arrays) -> Arrays:
    """Return the weights with experts' of Llama 4, which have inputs first, as of other models."""
    found: Arrays = {}
    for name, array in weights.items():
        if name.endswith("experts.gate_up_proj"):
            for part, half in zip(("gate", "up"), np.split(array, 2, axis=2), strict=True):
                found[name.replace("gate_up", part) + ".weight"] = half.swapaxes(1, 2).copy()
        elif name.endswith("experts.down_proj"):
            found[f"{name}.weight"] = array.swapaxes(1, 2).copy()
        else:
            found[name] = array
    return found


def _stacked(weights: Arrays) -> Arrays:
    """Return the weights with those of experts in one tensor of each kind and layer."""
    found: Arrays = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, array in weights.items():
        if match := _OF_EXPERT.fullmatch(name):
            where, number, part = match.groups()
            experts.setdefault(f"{where}.{part}.weight", {})[int(number)] = array
        else:
            found[name] = array
    for name, by_number in experts.items():
        found[name] = np.stack([by_number[i] for i in range(len(by_number))])
    return found


def _gates_apart(weights: Arrays, num_experts: int) -> Arrays:
    """Return the weights with gpt-oss's experts, whose gates and ups stand by turns, in stacks."""
    found: Arrays = {}
    for name, array in weights.items():
        stem, _, kind = name.partition("_proj")
        if ".experts." not in name:
            found[f"{name}.weight" if name.endswith(".sinks") else name] = array
            continue
        stack = array.reshape(num_experts, -1, *array.shape[1:])
        kind = ".bias" if kind == "_bias" else ".weight"
        is_pair = stem.endswith("gate_up")
        for i, part in enumerate(("gate", "up") if is_pair else ("down",)):
            half = np.ascontiguousarray(stack[:, i::2]) if is_pair else stack
            found[f"{stem.rpartition('.')[0]}.{part}_proj{kind}"] = half
    return found
