"""Makers of small models with recurrent layers, under Hugging Face names spelled out again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models

from tests.model.files.tiny import Config, Raw

Shapes = dict[str, tuple[int, ...]]
_COMMON: Config = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "intermediate_size": 48,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LFM2: Config = _COMMON | {
    "architectures": ["Lfm2ForCausalLM"],
    "norm_eps": 1e-5,
    "block_auto_adjust_ff_dim": False,
    "conv_L_cache": 3,
    "full_attn_idxs": [1],
    "rope_theta": 1e6,
}
QWEN: Config = _COMMON | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "head_dim": 16,
    "full_attention_interval": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 5,
    "rope_theta": 1e7,
    "tie_word_embeddings": True,
}
MAMBA: Config = {
    "architectures": ["Mamba2ForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 16,
    "state_size": 6,
    "n_groups": 2,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "hidden_act": "silu",
    "time_step_limit": [0.0, float("inf")],
    "eos_token_id": 2,
}


def _attention(head_dim: int, q_size: int, names: str, norm: str) -> Shapes:
    return {
        "self_attn.q_proj.weight": (q_size, 32),
        "self_attn.k_proj.weight": (2 * head_dim, 32),
        "self_attn.v_proj.weight": (2 * head_dim, 32),
        f"self_attn.{names}.weight": (32, 4 * head_dim),
        f"self_attn.q_{norm}.weight": (head_dim,),
        f"self_attn.k_{norm}.weight": (head_dim,),
    }


def lfm2() -> Shapes:
    conv: Shapes = {
        "conv.in_proj.weight": (96, 32),
        "conv.conv.weight": (32, 1, 3),
        "conv.out_proj.weight": (32, 32),
    }
    layers = [conv, _attention(8, 32, "out_proj", "layernorm"), conv]
    every: Shapes = {
        "operator_norm.weight": (32,),
        "ffn_norm.weight": (32,),
        "feed_forward.w1.weight": (48, 32),
        "feed_forward.w3.weight": (48, 32),
        "feed_forward.w2.weight": (32, 48),
    }
    return _named("model.layers.{}.", layers, every) | {
        "model.embed_tokens.weight": (40, 32),
        "model.embedding_norm.weight": (32,),
    }


def qwen(*, fused: bool = False) -> Shapes:
    """Qwen3.5's names; ``fused`` stands for what Qwen3-Next has in one tensor."""
    keys, values = 2 * 4, 6 * 5
    delta: Shapes = {
        "linear_attn.conv1d.weight": (2 * keys + values, 1, 4),
        "linear_attn.dt_bias": (6,),
        "linear_attn.A_log": (6,),
        "linear_attn.norm.weight": (5,),
        "linear_attn.out_proj.weight": (32, values),
    }
    if fused:
        delta["linear_attn.in_proj_qkvz.weight"] = (2 * keys + 2 * values, 32)
        delta["linear_attn.in_proj_ba.weight"] = (12, 32)
    else:
        delta["linear_attn.in_proj_qkv.weight"] = (2 * keys + values, 32)
        delta["linear_attn.in_proj_z.weight"] = (values, 32)
        delta["linear_attn.in_proj_b.weight"] = delta["linear_attn.in_proj_a.weight"] = (6, 32)
    layers = [delta, delta, _attention(16, 128, "o_proj", "norm")]
    every: Shapes = {"input_layernorm.weight": (32,), "post_attention_layernorm.weight": (32,)}
    if fused:
        every["mlp.gate.weight"] = (3, 32)
        every["mlp.shared_expert_gate.weight"] = (1, 32)
    for prefix in (
        ["mlp.shared_expert", *(f"mlp.experts.{e}" for e in range(3))] if fused else ["mlp"]
    ):
        every[f"{prefix}.gate_proj.weight"] = every[f"{prefix}.up_proj.weight"] = (48, 32)
        every[f"{prefix}.down_proj.weight"] = (32, 48)
    return _named("model.layers.{}.", layers, every) | {
        "model.embed_tokens.weight": (40, 32),
        "model.norm.weight": (32,),
    }


def mamba() -> Shapes:
    inner, conv = 64, 64 + 2 * 2 * 6
    layer: Shapes = {
        "norm.weight": (32,),
        "mixer.in_proj.weight": (inner + conv + 4, 32),
        "mixer.conv1d.weight": (conv, 1, 4),
        "mixer.conv1d.bias": (conv,),
        "mixer.dt_bias": (4,),
        "mixer.A_log": (4,),
        "mixer.D": (4,),
        "mixer.norm.weight": (inner,),
        "mixer.out_proj.weight": (32, inner),
    }
    return _named("backbone.layers.{}.", [layer, layer], {}) | {
        "backbone.embeddings.weight": (40, 32),
        "backbone.norm_f.weight": (32,),
        "lm_head.weight": (40, 32),
    }


def _named(prefix: str, layers: list[Shapes], every: Shapes) -> Shapes:
    return {
        prefix.format(i) + name: shape
        for i, layer in enumerate(layers)
        for name, shape in (layer | every).items()
    }


def weights(shapes: Shapes) -> Raw:
    """Random values, small enough that a state does not grow."""
    rng = np.random.default_rng(3)
    return {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def save(directory: Path, config: Config, raw: Raw) -> Path:
    """Write a directory as Hugging Face does, with a word for each id."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(raw, directory / "model.safetensors")
    words = Tokenizer(models.BPE({f"w{i}": i for i in range(config["vocab_size"])}, []))
    words.decoder = decoders.ByteLevel()
    words.save(str(directory / "tokenizer.json"))
    return directory
