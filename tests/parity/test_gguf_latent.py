"""GGUF files of DeepSeek, as older and newer converters write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from tests.parity import tiny, tiny_configs
from tests.parity.compare import check
from tests.parity.gguf_files import OTHER_NAMES, add_vocabulary

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
}
# llama.cpp has no word for two weights of the temperature: both are the same.
YARN = {**tiny_configs.YARN_ROPE, "mscale": 0.7, "mscale_all_dim": 0.7}


def metadata(config: Any, *, splits: bool) -> dict[str, Any]:
    """What stands in the file, but for the vocabulary; ``splits`` as newer converters do."""
    rope, rank = config.rope_parameters, config.kv_lora_rank
    turning = config.qk_rope_head_dim
    key, value = config.qk_nope_head_dim + turning, config.v_head_dim
    is_v3 = config.model_type != "deepseek_v2"
    written: dict[str, Any] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "leading_dense_block_count": getattr(config, "first_k_dense_replace", 1),
        "vocab_size": tiny_configs.VOCAB,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": 1 if splits else config.num_attention_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + turning if splits else key,
        "attention.value_length": rank if splits else value,
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": config.routed_scaling_factor,
        "rope.dimension_count": turning,
        "rope.freq_base": rope["rope_theta"],
    }
    if config.q_lora_rank:
        written["attention.q_lora_rank"] = config.q_lora_rank
    if splits:
        written |= {"attention.key_length_mla": key, "attention.value_length_mla": value}
    if is_v3:
        written |= {"expert_gating_func": 2, "expert_weights_norm": config.norm_topk_prob}
        written |= {
            "expert_group_count": config.n_group,
            "expert_group_used_count": config.topk_group,
        }
    if rope["rope_type"] == "yarn":
        written |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
            "rope.scaling.yarn_beta_fast": rope["beta_fast"],
            "rope.scaling.yarn_beta_slow": rope["beta_slow"],
            "rope.scaling.yarn_log_multiplier": 0.1 * rope["mscale_all_dim"],
        }
    return written


def write(model: Any, path: Path, *, splits: bool) -> Path:
    """Write ``model`` in float32 to ``path``; return it."""
    config = model.config
    writer = gguf.GGUFWriter(path, "deepseek2")
    adds = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
            bool: writer.add_bool}  # fmt: skip
    for key, value in metadata(config, splits=splits).items():
        adds[type(value)](f"deepseek2.{key}", value)
    add_vocabulary(writer)
    for name, parameter in model.named_parameters():
        array, (stem, _) = parameter.detach().numpy(), name.rsplit(".", 1)
        if not stem.startswith("model.layers."):
            writer.add_tensor(f"{OTHER_NAMES[stem]}.weight", array)
            continue
        _, _, layer, inner = name.split(".", 3)
        for part, of_part in tensors(inner, array, config, splits=splits).items():
            writer.add_tensor(f"blk.{layer}.{part}.weight", np.ascontiguousarray(of_part))
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            writer.add_tensor(f"blk.{name.split('.')[2]}.exp_probs_b.bias", buffer.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(inner: str, array: np.ndarray, config: Any, *, splits: bool) -> dict[str, np.ndarray]:
    """One of transformers' tensors of a layer under the file's names."""
    if inner == "mlp.experts.gate_up_proj":
        gate, up = np.split(array, 2, axis=1)
        return {"ffn_gate_exps": gate, "ffn_up_exps": up}
    if inner == "mlp.experts.down_proj":
        return {"ffn_down_exps": array}
    stem = inner.removesuffix(".weight")
    if stem == "self_attn.kv_b_proj" and splits:
        by_head = array.reshape(config.num_attention_heads, -1, config.kv_lora_rank)
        k_b, v_b = np.split(by_head, [config.qk_nope_head_dim], axis=1)
        return {"attn_k_b": k_b.swapaxes(1, 2), "attn_v_b": v_b}
    return {NAMES[stem]: array}


@pytest.mark.parametrize(
    ("name", "changes", "splits"),
    [
        ("deepseek-v2", {"rope_parameters": YARN}, False),
        ("deepseek-v3", {"rope_parameters": YARN}, True),
        ("glm4-moe-lite", {}, True),
    ],
)
def test_family(name: str, changes: dict[str, Any], splits: bool, tmp_path: Path) -> None:
    model = tiny.make_model(name, **changes)
    answers = [tiny.answer(model, ids) for ids in tiny.prompts(12, 40)]
    check(write(model, tmp_path / "tiny.gguf", splits=splits), answers)
