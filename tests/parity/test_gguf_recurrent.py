"""GGUF files of families that keep states, as llama.cpp's converter writes them.

Names are those of its own table (``gguf.tensor_mapping``); what it does to values is written down
here a second time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.tensors import ModelFileError
from tests.parity import tiny, tiny_configs
from tests.parity.compare import check
from tests.parity.gguf_files import add_vocabulary

KINDS = {
    "falcon_h1": gguf.MODEL_ARCH.FALCON_H1,
    "granitemoehybrid": gguf.MODEL_ARCH.GRANITE_HYBRID,
    "mamba2": gguf.MODEL_ARCH.MAMBA2,
    "nemotron_h": gguf.MODEL_ARCH.NEMOTRON_H,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
    "qwen3_5_text": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe_text": gguf.MODEL_ARCH.QWEN35MOE,
}
# Where converters know experts they know no dense network.
_OF_EXPERTS = ["linear_attention", "moe", "linear_attention", "full_attention", "moe"]
Floats = NDArray[np.float32]
Named = Iterator[tuple[str, Floats]]


def write_gguf(
    model: Any, path: Path, *, num_guessing: int = 0, without: str = "", **changed: Floats
) -> Path:
    """Write ``model`` in float32; ``changed`` replaces tensors, by names with _ for dots."""
    config = model.config
    kind = KINDS[config.model_type]
    if "moe" in (getattr(config, "layers_block_type", None) or ()):
        kind = gguf.MODEL_ARCH.NEMOTRON_H_MOE
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[kind])
    writer.add_block_count(config.num_hidden_layers + num_guessing)
    writer.add_embedding_length(config.hidden_size)
    writer.add_vocab_size(tiny_configs.VOCAB)
    add_facts(writer, config)
    add_vocabulary(writer)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    learnt = [pair for pair in model.named_buffers() if pair[0].endswith("correction_bias")]
    for name, parameter in [*model.named_parameters(), *learnt]:
        for theirs, array in converted(name, parameter.detach().numpy(), config):
            ours = names.get_name(theirs, try_suffixes=(".weight", ".bias")) or theirs
            array = changed.get(ours.replace(".", "_"), array)
            if ours != without:
                writer.add_tensor(ours, np.ascontiguousarray(array, np.float32))
    if num_guessing:
        writer.add_nextn_predict_layers(num_guessing)
        writer.add_tensor(f"blk.{config.num_hidden_layers}.nextn.enorm.weight", np.ones(4, "f"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_facts(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add what the converter reads in the config of each family."""
    kind = config.model_type
    if kind == "mamba2":
        writer.add_context_length(2**20)
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
        facts = (config.conv_kernel, config.state_size, config.n_groups)
        num_heads, head_dim = config.num_heads, config.head_dim
    elif kind == "nemotron_h":
        facts = (config.conv_kernel, config.ssm_state_size, config.n_groups)
        num_heads, head_dim = config.mamba_num_heads, config.mamba_head_dim
        add_nemotron_h(writer, config)
    else:
        writer.add_context_length(config.max_position_embeddings)
        writer.add_feed_forward_length(getattr(config, "intermediate_size", 0))
        writer.add_head_count(config.num_attention_heads)
        if kind != "granitemoehybrid":
            writer.add_head_count_kv(config.num_key_value_heads)
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if kind == "granitemoehybrid":
        add_granite(writer, config)
    if kind in ("falcon_h1", "granitemoehybrid"):
        facts = (config.mamba_d_conv, config.mamba_d_state, config.mamba_n_groups)
        num_heads, head_dim = config.mamba_n_heads, config.mamba_d_head
    if kind.startswith("qwen"):
        writer.add_rope_dimension_count(config.head_dim // 4)
        writer.add_full_attention_interval(2)
        kernel, keys = config.linear_conv_kernel_dim, config.linear_key_head_dim
        facts = (kernel, keys, config.linear_num_key_heads)
        num_heads, head_dim = config.linear_num_value_heads, config.linear_value_head_dim
    if kind.startswith("qwen3_5"):
        writer.add_rope_dimension_sections([1, 1, 0, 0])
    if hasattr(config, "num_experts"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    writer.add_ssm_conv_kernel(facts[0])
    writer.add_ssm_state_size(facts[1])
    writer.add_ssm_group_count(facts[2])
    writer.add_ssm_time_step_rank(num_heads)
    writer.add_ssm_inner_size(num_heads * head_dim)


def add_granite(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add the scales of Granite 4, its experts, and which of its layers have attention."""
    kv_heads = config.num_key_value_heads
    kinds = config.layer_types
    writer.add_head_count_kv([kv_heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_rope_scaling_finetuned(config.position_embedding_type == "rope")
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)
    writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    if config.num_local_experts:
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)


def add_nemotron_h(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add what says of each layer of Nemotron-H which half of one it is."""
    kinds = config.layers_block_type
    has_experts = "moe" in kinds
    network, width = ("mlp", config.intermediate_size)
    if has_experts:
        network, width = ("moe", config.moe_intermediate_size)
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(width)
        writer.add_expert_shared_feed_forward_length(config.moe_shared_expert_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_group_count(config.n_group)
        writer.add_expert_group_used_count(config.topk_group)
    writer.add_context_length(2**20)
    writer.add_feed_forward_length([width if kind == network else 0 for kind in kinds])
    heads = config.num_key_value_heads
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_head_count(config.num_attention_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_scaling_finetuned(False)
    writer.add_layer_norm_rms_eps(config.layer_norm_epsilon)
    writer.add_layer_norm_eps(config.layer_norm_epsilon)


def of_granite(name: str, array: Floats, config: Any) -> Named:
    """Yield what becomes of Granite 4's experts and MLP, whose gates and ups are one tensor."""
    block, end = f"blk.{name.split('.')[2]}.ffn_", ""
    if "shared_mlp" in name and config.num_local_experts:
        end = "_shexp"
    elif ".experts." in name:
        end = "_exps"
    if ".router." in name:
        yield f"{block}gate_inp.weight", array
    elif "input_linear" in name or "gate_up_proj" in name:
        for part, half in zip(("gate", "up"), np.split(array, 2, axis=-2), strict=True):
            yield f"{block}{part}{end}.weight", half
    else:
        yield f"{block}down{end}.weight", array


def converted(name: str, array: Floats, config: Any) -> Named:
    """Yield what a parameter becomes, under the names that the table maps."""
    kind = config.model_type
    if kind == "falcon_h1":
        array = multiplied(name, array, config)
    if kind.startswith("qwen3_5") and "linear_attn." in name:
        array = by_turns(name, array, config)
    if kind == "granitemoehybrid" and (".shared_mlp." in name or ".block_sparse_moe." in name):
        yield from of_granite(name, array, config)
        return
    if kind == "granitemoehybrid" and (".q_proj." in name or ".k_proj." in name):
        # As of Llama, though nothing turns: scores do not depend on the order of channels.
        heads = config.num_attention_heads if ".q_proj." in name else config.num_key_value_heads
        halves = array.reshape(heads, 2, -1, array.shape[1])
        array = halves.swapaxes(1, 2).reshape(array.shape)
    if kind == "nemotron_h":
        name = name.replace("model.", "backbone.", 1)
        if ".mixer.experts." in name:
            name = name.replace("backbone.", "model.", 1).replace(".mixer.", ".mlp.") + ".weight"
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
    if name.endswith(".A_log"):
        array = -np.exp(array)
    if "conv1d.weight" in name:
        array = array[:, 0]
    if name.endswith(".dt_bias"):
        name = name.removesuffix("dt_bias") + "dt_proj.bias"
    if kind in ("mamba2", "falcon_h1", "granitemoehybrid", "nemotron_h"):
        if name.endswith((".A_log", ".D")):
            array = array[:, None]
        if name.endswith(("mixer.norm.weight", "mamba.norm.weight")):
            array = array.reshape(2, -1)  # groups
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        array = array + 1
    if ".in_proj_qkvz." in name:
        yield from split(name, array, config)
    elif name.endswith("experts.gate_up_proj"):
        stem = name.removesuffix("gate_up_proj")
        for part, half in zip(("gate", "up"), np.split(array, 2, axis=1), strict=True):
            yield f"{stem}{part}_proj.weight", half
    else:
        yield name + (".weight" if name.endswith("experts.down_proj") else ""), array


def split(name: str, array: Floats, config: Any) -> Named:
    """Yield queries, keys and values of all heads one after another, and the gates apart."""
    heads, keys = config.linear_num_key_heads, config.linear_key_head_dim
    values = config.linear_num_value_heads // heads * config.linear_value_head_dim
    ends = np.cumsum([keys, keys, values])
    q, k, v, z = np.split(array.reshape(heads, -1, array.shape[1]), ends, axis=1)
    block = f"blk.{name.split('.')[2]}"
    rows = [part.reshape(-1, array.shape[1]) for part in (q, k, v)]
    yield f"{block}.attn_qkv.weight", np.concatenate(rows)
    yield f"{block}.attn_gate.weight", z.reshape(-1, array.shape[1])


def by_turns(name: str, array: Floats, config: Any) -> Floats:
    """Return a tensor with value heads in the order in which key heads serve them by turns."""
    heads = config.linear_num_key_heads
    served = config.linear_num_value_heads // heads

    def turned(rows: Floats) -> Floats:
        in_runs = rows.reshape(heads, served, -1, *rows.shape[1:])
        return in_runs.swapaxes(0, 1).reshape(rows.shape)

    if ".in_proj_qkv." in name or ".conv1d." in name:
        first = 2 * heads * config.linear_key_head_dim
        return np.concatenate([array[:first], turned(array[first:])])
    if ".out_proj." in name:
        return turned(array.T).T
    if name.endswith((".norm.weight",)):
        return array
    return turned(array)


def multiplied(name: str, array: Floats, config: Any) -> Floats:
    """Return a weight of Falcon-H1 with its multiplier within."""
    attention = config.attention_in_multiplier
    scales = {
        "down_proj": config.mlp_multipliers[1],
        "gate_proj": config.mlp_multipliers[0],
        "k_proj": config.key_multiplier * attention,
        "q_proj": attention,
        "v_proj": attention,
        "o_proj": config.attention_out_multiplier,
        "mamba.out_proj": config.ssm_out_multiplier,
        "lm_head": config.lm_head_multiplier,
        "embed_tokens": config.embedding_multiplier,
    }
    if ".in_proj." in name:
        inner, shared = config.mamba_d_ssm, config.mamba_n_groups * config.mamba_d_state
        sizes = (inner, inner, shared, shared, len(array) - 2 * inner - 2 * shared)
        of_rows = np.repeat(np.array(config.ssm_multipliers, np.float32), sizes)
        return array * config.ssm_in_multiplier * of_rows[:, None]
    return array * next((s for part, s in scales.items() if f".{part}." in f".{name}"), 1.0)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("mamba2", {}),
        ("falcon-h1-plain", {"tie_word_embeddings": False}),
        ("granite-hybrid", {}),
        ("granite-hybrid-moe", {}),
        ("nemotron-h", {"use_bias": False, "mlp_bias": False}),
        ("nemotron-h-moe", {"layers_block_type": _OF_EXPERTS}),
        ("qwen3.5", {}),
        ("qwen3.5", {"linear_num_value_heads": 6, "num_hidden_layers": 3, "layer_types": None}),
        ("qwen3.5-moe", {}),
        ("qwen3-next", {}),
    ],
)
def test_family(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    if "layer_types" in more:
        more = more | {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    model = tiny.make_model(name, **more)
    answers = [tiny.answer(model, ids) for ids in tiny.prompts(12, 20)]
    check(write_gguf(model, tmp_path / "tiny.gguf"), answers)


def test_blocks_that_guess_tokens_ahead_are_left_out(tmp_path: Path) -> None:
    model = tiny.make_model("qwen3.5")
    answers = [tiny.answer(model, ids) for ids in tiny.prompts(9)]
    check(write_gguf(model, tmp_path / "tiny.gguf", num_guessing=1), answers)
    model = tiny.make_model("qwen3.5", num_hidden_layers=0, layer_types=[])
    path = write_gguf(model, tmp_path / "all.gguf", num_guessing=5)
    with pytest.raises(ModelFileError, match="nextn_predict_layers is 5, of all blocks"):
        load_checkpoint(path)


def test_what_is_damaged_or_not_told_is_named(tmp_path: Path) -> None:
    model = tiny.make_model("mamba2")
    path = write_gguf(model, tmp_path / "a.gguf", blk_1_ssm_a=np.zeros((8, 1), np.float32))
    with pytest.raises(ModelFileError, match=r"'blk\.1\.ssm_a' has values that are not below 0"):
        load_checkpoint(path)
    path = write_gguf(model, tmp_path / "b.gguf", without="blk.0.ssm_dt.bias")
    with pytest.raises(ModelFileError, match=r"'blk\.0\.ssm_dt\.bias' of shape \(8,\) is missing"):
        load_checkpoint(path)
    # Of a norm beside Falcon-H1's gate the file does not say whether it comes first.
    path = write_gguf(tiny.make_model("falcon-h1"), tmp_path / "c.gguf")
    with pytest.raises(ModelFileError, match=r"'blk\.0\.ssm_norm\.weight' is not part"):
        load_checkpoint(path)
