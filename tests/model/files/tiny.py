"""Makers of small models, in memory and on disk. Names and shapes are spelled out again here, so
that a wrong name in the code under test does not agree with itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from ridgeline.model.files.families import model_from_config, model_from_gguf
from ridgeline.model.files.tensors import Tensor
from ridgeline.model.shape.model import ModelArch

Config = dict[str, Any]
Raw = dict[str, np.ndarray]

CONFIG: Config = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def hf_weights(
    config: Config, *, fused: bool = False, biases: str = "", norms: bool = False
) -> Raw:
    """Random weights under Hugging Face names; ``biases`` lists projections out of "qkvo"."""
    rng = np.random.default_rng(7)
    hidden, mlp, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    q, kv = heads * head_dim, kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for i in range(config["num_hidden_layers"]):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.o_proj.weight": (hidden, q),
            "mlp.down_proj.weight": (hidden, mlp),
        }
        if fused:
            layer["self_attn.qkv_proj.weight"] = (q + 2 * kv, hidden)
            layer["mlp.gate_up_proj.weight"] = (2 * mlp, hidden)
        else:
            layer["self_attn.q_proj.weight"] = (q, hidden)
            layer["self_attn.k_proj.weight"] = (kv, hidden)
            layer["self_attn.v_proj.weight"] = (kv, hidden)
            layer["mlp.gate_proj.weight"] = layer["mlp.up_proj.weight"] = (mlp, hidden)
        for part in biases:
            size = {"q": q, "k": kv, "v": kv, "o": hidden}[part]
            layer[f"self_attn.{part}_proj.bias"] = (size,)
        if norms:
            layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (head_dim,)
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    return {name: rng.standard_normal(s).astype(np.float32) for name, s in shapes.items()}


def as_tensors(raw: Raw) -> dict[str, Tensor]:
    """The same arrays as the readers hand them out."""
    return {
        name: Tensor(
            name, "F32", a.shape, a.reshape(a.shape[0], -1).view(np.uint8).reshape(a.shape[0], -1)
        )
        for name, a in raw.items()
    }


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder rows of q or k as converters do for GGUF's "llama": halves become neighbours."""
    return rows.reshape(num_heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape).copy()


GGUF_NAMES = {
    "model.embed_tokens.": "token_embd.",
    "model.norm.": "output_norm.",
    "lm_head.": "output.",
    "model.layers.": "blk.",
    "input_layernorm.": "attn_norm.",
    "post_attention_layernorm.": "ffn_norm.",
    "self_attn.q_proj.": "attn_q.",
    "self_attn.k_proj.": "attn_k.",
    "self_attn.v_proj.": "attn_v.",
    "self_attn.o_proj.": "attn_output.",
    "self_attn.qkv_proj.": "attn_qkv.",
    "self_attn.q_norm.": "attn_q_norm.",
    "self_attn.k_norm.": "attn_k_norm.",
    "mlp.gate_proj.": "ffn_gate.",
    "mlp.up_proj.": "ffn_up.",
    "mlp.gate_up_proj.": "ffn_up.",
    "mlp.down_proj.": "ffn_down.",
}


def gguf_weights(config: Config, arch: str, **kinds: Any) -> Raw:
    """``hf_weights`` as a converter stores them in a GGUF file of ``arch``."""
    return converted(hf_weights(config, **kinds), config, arch)


def converted(weights: Raw, config: Config, arch: str) -> Raw:
    """Weights under Hugging Face names as a converter stores them in a GGUF file of ``arch``."""
    found: Raw = {}
    for name, array in weights.items():
        if arch == "llama" and ".q_proj." in name:
            array = interleave(array, config["num_attention_heads"])
        if arch == "llama" and ".k_proj." in name:
            array = interleave(array, config["num_key_value_heads"])
        for hf, short in GGUF_NAMES.items():
            name = name.replace(hf, short)
        found[name] = array
    return found


def gguf_metadata(config: Config, arch: str) -> dict[str, Any]:
    return {
        "general.architecture": arch,
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": config["rope_theta"],
    }


def vocabulary(kind: str = "gpt2") -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", "<|im_end|>", "<|endoftext|>", *(f"t{i}" for i in range(35))]
    return {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": tokens,
        # <|endoftext|> looks like an end, but is a normal token here.
        "tokenizer.ggml.token_type": [2, 3, 3, 3, *[1] * 36],
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.chat_template": "{{ messages }}",
    }


def write_gguf(path: Path, metadata: dict[str, Any], raw: Raw, dtype: str = "Q8_0") -> Path:
    """Write a GGUF file with the format's reference writer; matrices become ``dtype``."""
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        match value:
            case _ if key == "general.architecture":
                pass  # the writer has put it there
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    for name, array in raw.items():
        if array.ndim == 1:
            writer.add_tensor(name, array)
        else:
            kind = gguf.GGMLQuantizationType[dtype]
            writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def hf(config: dict[str, Any], **kinds: Any) -> tuple[ModelArch, dict[str, Tensor]]:
    return model_from_config(config, as_tensors(hf_weights(config, **kinds)), "model")


def arch_of(**changes: Any) -> ModelArch:
    """The architecture of the tiny Llama with ``changes`` to its config; None takes a key out."""
    config = {k: v for k, v in (CONFIG | changes).items() if v is not None}
    return hf(config)[0]


def from_gguf(
    changes: dict[str, Any], raw: dict[str, np.ndarray], arch: str = "llama"
) -> tuple[ModelArch, dict[str, Tensor]]:
    return model_from_gguf(gguf_metadata(CONFIG, arch) | changes, as_tensors(raw), "x.gguf")
