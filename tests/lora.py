"""Random adapters, on disk and as canonical arrays, and the same merged into weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from ridgeline.model.files.adapters import AdapterWeights, LowRank
from ridgeline.model.shape.model import ModelArch

Floats = NDArray[np.float32]
Pairs = dict[str, tuple[Floats, Floats]]  # A and B by module

PEFT = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "tiny",
    "r": 4,
    "lora_alpha": 6,
    "lora_dropout": 0.1,
    "target_modules": None,
    "bias": "none",
    "fan_in_fan_out": False,
    "init_lora_weights": True,
    "inference_mode": True,
    "modules_to_save": None,
    "use_dora": False,
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "layers_to_transform": None,
    "loftq_config": {},
}


def random_pairs(shapes: Mapping[str, tuple[int, int]], rank: int = 4, seed: int = 0) -> Pairs:
    """A and B for modules of these shapes (out, in); what they add is as large as weights."""
    rng = np.random.default_rng(seed)
    return {
        module: (
            rng.normal(0, 1 / np.sqrt(columns), (rank, columns)).astype(np.float32),
            rng.normal(0, 0.5, (rows, rank)).astype(np.float32),
        )
        for module, (rows, columns) in shapes.items()
    }


def llama_shapes(config: Mapping[str, Any], *, fused: bool = False) -> dict[str, tuple[int, int]]:
    """Shapes of all matrices of layers, by Hugging Face's names of modules."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = hidden // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * head_dim
    attention = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden)}
    mlp = {"gate": (inner, hidden), "up": (inner, hidden)}
    if fused:
        attention, mlp = {"qkv": (hidden + 2 * kv, hidden)}, {"gate_up": (2 * inner, hidden)}
    named = {f"self_attn.{n}_proj": s for n, s in (attention | {"o": (hidden, hidden)}).items()}
    named |= {f"mlp.{n}_proj": s for n, s in (mlp | {"down": (hidden, inner)}).items()}
    return {
        f"model.layers.{i}.{name}": shape
        for i in range(config["num_hidden_layers"])
        for name, shape in named.items()
    }


def write_peft(path: Path, pairs: Pairs, **config: Any) -> Path:
    """Write an adapter as PEFT does; keyword arguments change its config."""
    path.mkdir(parents=True)
    targets = sorted({module.rpartition(".")[2] for module in pairs})
    rank = next(iter(pairs.values()))[0].shape[0]
    values = PEFT | {"target_modules": targets, "r": rank} | config
    (path / "adapter_config.json").write_text(json.dumps(values))
    tensors = {
        f"base_model.model.{module}.lora_{side}.weight": matrix
        for module, pair in pairs.items()
        for side, matrix in zip("AB", pair, strict=True)
    }
    save_file(tensors, path / "adapter_model.safetensors")
    return path


def write_gguf_adapter(path: Path, arch: str, pairs: Pairs, alpha: float, **changes: Any) -> Path:
    """Write an adapter as llama.cpp's converter does, by GGUF's names of tensors."""
    writer = gguf.GGUFWriter(path, arch)
    keys = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": alpha}
    for key, value in (keys | changes).items():
        if isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
    for module, (a, b) in pairs.items():
        writer.add_tensor(f"{module}.lora_a", a)
        writer.add_tensor(f"{module}.lora_b", b)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def merged(raw: Mapping[str, Floats], pairs: Pairs, scale: float) -> dict[str, Floats]:
    """Weights under Hugging Face's names, with an adapter added in float64."""
    found = dict(raw)
    for module, (a, b) in pairs.items():
        name = f"{module}.weight"
        added = scale * (b.astype(np.float64) @ a.astype(np.float64))
        found[name] = (found[name] + added).astype(np.float32)
    return found


def random_adapter(
    arch: ModelArch, rank: int = 4, seed: int = 0, names: tuple[str, ...] = ()
) -> AdapterWeights:
    """An adapter in memory of all matrices of layers, or of those that ``names`` lists."""
    rng = np.random.default_rng(seed)
    wanted = names or ("q", "k", "v", "o", "gate", "up", "down")
    parts = {}
    for name, shape in arch.matrix_shapes().items():
        if name.startswith("layers.") and name.rpartition(".")[2] in wanted:
            rows, columns = shape
            a = rng.normal(0, 1 / np.sqrt(columns), (rank, columns)).astype(np.float32)
            b = rng.normal(0, 0.5, (rows, rank)).astype(np.float32)
            parts[name] = LowRank(a, b)
    return AdapterWeights(seed.to_bytes(16, "little"), parts)


def merged_arrays(arrays: Mapping[str, Floats], adapter: AdapterWeights) -> dict[str, Floats]:
    """Canonical arrays with an adapter added in float64."""
    found = dict(arrays)
    for name, part in adapter.parts.items():
        added = part.b.astype(np.float64) @ part.a.astype(np.float64)
        found[name] = (found[name] + added).astype(np.float32)
    return found
