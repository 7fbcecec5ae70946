"""A transformers model written as GGUF, with names, order and metadata as llama.cpp expects."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from tests.model.files.gguf_dense import ARCHITECTURES as LAYER_NORMED
from tests.model.files.gguf_dense import converted
from tests.parity.tiny import torch
from tests.parity.tiny_configs import VOCAB

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "block_sparse_moe.router": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
}
_POST = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_AROUND = _POST | {"pre_feedforward_layernorm": "ffn_norm"}
_LFM2 = {
    "operator_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "self_attn.out_proj": "attn_output",
    "self_attn.q_layernorm": "attn_q_norm",
    "self_attn.k_layernorm": "attn_k_norm",
    "conv.in_proj": "shortconv.in_proj",
    "conv.conv": "shortconv.conv",
    "conv.out_proj": "shortconv.out_proj",
    "feed_forward.w1": "ffn_gate",
    "feed_forward.w3": "ffn_up",
    "feed_forward.w2": "ffn_down",
}
_GEMMA_4 = _AROUND | {
    "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
    "post_feedforward_layernorm_1": "post_ffw_norm_1",
    "post_feedforward_layernorm_2": "post_ffw_norm_2",
    "router.proj": "ffn_gate_inp",
    "router": "ffn_gate_inp",
    "per_layer_input_gate": "inp_gate",
    "per_layer_projection": "proj",
    "post_per_layer_input_norm": "post_norm",
}
# What else stands where, by family, and what GGUF calls the family.
NAMES_OF = {
    "qwen2_moe": {
        "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
        "mlp.shared_expert.up_proj": "ffn_up_shexp",
        "mlp.shared_expert.down_proj": "ffn_down_shexp",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    },
    "gemma2": _AROUND,
    "gemma3_text": _AROUND,
    "gemma4_text": _GEMMA_4,
    "gpt_oss": {"post_attention_layernorm": "post_attention_norm"},
    "granitemoeshared": {"shared_mlp.output_linear": "ffn_down_shexp"},
    "lfm2": _LFM2,
    "lfm2_moe": _LFM2 | {"feed_forward.gate": "ffn_gate_inp"},
    "olmo2": _POST,
    "olmo3": _POST,
}
ARCHITECTURES = {
    "lfm2_moe": "lfm2moe",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gpt_oss": "gpt-oss",
    "granitemoeshared": "granitemoe",
    "mixtral": "llama",
    "olmo3": "olmo2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
}
INTERLEAVED = ("llama", "granite", "granitemoe", "granitemoeshared", "mixtral", "smollm3")
OTHER_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "model.embedding_norm": "token_embd_norm",
    "lm_head": "output",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
}


def write_gguf(model: Any, path: Path) -> Path:
    """Write ``model`` in float32 to ``path``; return it."""
    config = model.config
    if type(model).__name__ in LAYER_NORMED:
        return _write_converted(model, path)
    family = config.model_type
    config.allow_global_per_layer_attribute_access = True  # of Gemma 4: what its files also say
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer = gguf.GGUFWriter(path, ARCHITECTURES.get(family, family))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(heads)
    if family in ("lfm2", "lfm2_moe"):
        kinds = config.layer_types
        writer.add_feed_forward_length(model.model.layers[0].feed_forward.w1.out_features)
        writer.add_head_count_kv([kv_heads if kind == "full_attention" else 0 for kind in kinds])
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_layer_norm_rms_eps(config.norm_eps)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if family == "gemma4_text":
        _add_heads_by_layer(writer, model)
    elif family not in ("lfm2", "lfm2_moe"):
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(kv_heads)
    if family != "gemma4_text":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_vocab_size(VOCAB)
    _add_specials(writer, config)
    _add_rope(writer, model, head_dim)
    add_vocabulary(writer)
    for name, parameter in model.named_parameters():
        array = parameter.detach().numpy()
        if name.endswith("conv.conv.weight"):
            array = array[:, 0]
        if family in ("gemma", "gemma2", "gemma3_text") and "norm" in name:
            array = array + 1
        if name.endswith("per_expert_scale"):
            writer.add_tensor(f"blk.{name.split('.')[2]}.ffn_down_exps.scale", array)
            continue
        if ".experts." in name:
            ways = {"by_turns": family == "gpt_oss", "joined": family == "gemma4_text"}
            for part, of_experts in _experts(name, array, **ways).items():
                writer.add_tensor(f"blk.{name.split('.')[2]}.{part}", of_experts)
            continue
        if family in INTERLEAVED and (".q_proj." in name or ".k_proj." in name):
            halves = array.reshape(heads if ".q_proj." in name else kv_heads, 2, head_dim // 2, -1)
            array = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)
        if name.endswith("shared_mlp.input_linear.weight"):
            for part, half in zip(("gate", "up"), np.split(array, 2), strict=True):
                writer.add_tensor(f"blk.{name.split('.')[2]}.ffn_{part}_shexp.weight", half)
            continue
        if name.endswith("shared_expert_gate.weight"):
            array = array[0]  # converters write a vector
        writer.add_tensor(_gguf_name(name, NAMES_OF.get(family, {})), array)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            place = f"blk.{name.split('.')[2]}.layer_output_scale.weight"
            writer.add_tensor(place, buffer.numpy())
        if name.endswith("expert_bias"):
            writer.add_tensor(f"blk.{name.split('.')[2]}.exp_probs_b.bias", buffer.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_converted(model: Any, path: Path) -> Path:
    config = model.config.to_dict() | {"architectures": [type(model).__name__]}
    weights = {name: one.detach().numpy() for name, one in model.named_parameters()}
    return write_file(path, *converted(config, weights))


def write_file(path: Path, metadata: dict[str, Any], raw: dict[str, Any]) -> Path:
    """Write a file of metadata and tensors, in float32, with the tests' vocabulary."""
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture"))
    adders = {int: "add_uint32", float: "add_float32", bool: "add_bool", str: "add_string"}
    adders[list] = "add_array"
    for key, value in metadata.items():
        getattr(writer, adders[type(value)])(key, value)
    add_vocabulary(writer)
    for name, array in raw.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _experts(
    name: str, array: np.ndarray, *, by_turns: bool, joined: bool
) -> dict[str, np.ndarray]:
    """Return the tensors of all experts that one of transformers holds, by their GGUF names."""
    kind = "bias" if name.endswith("bias") else "weight"
    if by_turns and kind == "weight":
        array = array.swapaxes(1, 2)  # (experts, in, out)
    if ".down_proj" in name:
        return {f"ffn_down_exps.{kind}": np.ascontiguousarray(array)}
    if joined:
        return {f"ffn_gate_up_exps.{kind}": array}
    halves = np.split(array, 2, axis=1)
    if by_turns:
        halves = [array[:, ::2], array[:, 1::2]]
    return {
        f"ffn_{part}_exps.{kind}": np.ascontiguousarray(half)
        for part, half in zip(("gate", "up"), halves, strict=True)
    }


def _add_heads_by_layer(writer: gguf.GGUFWriter, model: Any) -> None:
    """Add what llama.cpp's converter writes for Gemma 4 where other files have one number."""
    config, layers = model.config, model.model.layers
    of_layer = [config.per_layer_config[i] for i in range(config.num_hidden_layers)]
    slides = [kind == "sliding_attention" for kind in config.layer_types]
    dims = dict(zip(slides, (one.head_dim for one in of_layer), strict=True))
    writer.add_feed_forward_length([layer.mlp.intermediate_size for layer in layers])
    writer.add_head_count_kv([one.num_key_value_heads for one in of_layer])
    writer.add_key_length(dims[False])
    writer.add_value_length(dims[False])
    writer.add_key_length_swa(dims[True])
    writer.add_value_length_swa(dims[True])
    writer.add_rope_dimension_count_swa(dims[True])
    writer.add_sliding_window_pattern(slides)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_float32(
        "gemma4.rope.freq_base_swa", config.rope_parameters["sliding_attention"]["rope_theta"]
    )
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def _add_specials(writer: gguf.GGUFWriter, config: Any) -> None:
    """Add what only some families have."""
    family = config.model_type
    if family in ("phi3", "phimoe", "olmo3", "gpt_oss", "gemma2", "gemma3_text", "gemma4_text"):
        writer.add_sliding_window(config.sliding_window or 0)
    if family == "gemma3_text":
        writer.add_sliding_window_pattern([kind[0] == "s" for kind in config.layer_types])
        local = config.rope_parameters["sliding_attention"]["rope_theta"]
        writer.add_float32("gemma3.rope.freq_base_swa", local)
    if family == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if family in ("granite", "granitemoe", "granitemoeshared"):
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_attention_scale(config.attention_multiplier)
    num_experts = getattr(config, "num_local_experts", getattr(config, "num_experts", 0))
    if num_experts and family != "gemma4_text":
        writer.add_expert_count(num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if family == "lfm2_moe":
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
    if family in ("lfm2_moe", "qwen2_moe", "qwen3_moe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if family == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if family == "granitemoeshared":
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)


def _gguf_name(name: str, others: dict[str, str]) -> str:
    if name.endswith(".sinks"):
        return f"blk.{name.split('.')[2]}.attn_sinks.weight"
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, inner = stem.split(".", 3)
        return f"blk.{layer}.{(LAYER_NAMES | others)[inner]}.{kind}"
    return f"{OTHER_NAMES[stem]}.{kind}"


def _add_rope(writer: gguf.GGUFWriter, model: Any, head_dim: int) -> None:
    config, rope = model.config, model.config.rope_parameters
    rope = rope.get("full_attention", rope)
    dim = int(head_dim * rope.get("partial_rotary_factor", 1.0))
    if rope["rope_type"] == "proportional":  # of the head where a layer sees everything
        last = config.num_hidden_layers - 1
        dim = config.per_layer_config[last].head_dim
        turning = int(rope["partial_rotary_factor"] * dim / 2)
        still = [1e30] * (dim // 2 - turning)
        writer.add_tensor("rope_freqs.weight", np.array([1.0] * turning + still, np.float32))
    writer.add_rope_dimension_count(dim)
    writer.add_rope_freq_base(rope["rope_theta"])
    kind, original = rope["rope_type"], rope.get("original_max_position_embeddings")
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    elif kind == "llama3":  # no metadata: the divisors themselves are a tensor
        plain = rope["rope_theta"] ** -(torch.arange(0, dim, 2) / dim)
        writer.add_tensor("rope_freqs.weight", (plain / model.model.rotary_emb.inv_freq).numpy())
    elif kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(original)
        stretch = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(stretch) / math.log(original)))
        for length in ("long", "short"):
            factors = np.array(rope[f"{length}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{length}.weight", factors)


def add_vocabulary(writer: gguf.GGUFWriter) -> None:
    """Add the least SentencePiece vocabulary: three specials and pieces that nobody types."""
    special = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"w{i}" for i in range(3, VOCAB))])
    writer.add_token_scores([-float(i) for i in range(VOCAB)])
    writer.add_token_types(special + [gguf.TokenType.NORMAL] * (VOCAB - 3))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
