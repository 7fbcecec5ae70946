"""A plan of a mix counts each matrix in the type in which ``quantize`` writes it."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from ridgeline.engine.quantise.job import QuantiseOptions, quantise_file
from ridgeline.engine.quantise.source import read_source
from ridgeline.engine.quantise.targets import TARGETS, mix_of_file, types_of
from ridgeline.model.cost.format_bytes import storage_of_dtype
from ridgeline.model.files.counting import shape_of_config
from ridgeline.model.files.families import GGUF_FAMILIES, TABLES, Family
from ridgeline.model.files.families.weight_names import names_in_file
from ridgeline.model.files.gguf.file import read_gguf
from ridgeline.model.files.tensors import Tensor
from ridgeline.model.shape.model import Experts, ModelArch
from ridgeline.planner.plan import plan
from tests.answers.tiny_families import family_and_arch, tiny_config, write_model
from tests.model.files.vocabularies import byte_level
from tests.parity.tiny_configs import CONFIGS, NEWER

WIDE = {
    "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "num_hidden_layers": 3,
    "num_key_value_heads": 1,
}  # fmt: skip
WRITTEN: dict[str, dict[str, Any]] = {
    "llama2": {},
    "llama-tied": {"intermediate_size": 288},  # no whole blocks of 256, but of 32
    "qwen3": {"intermediate_size": 40},  # nor of these
    "phi3-window": {},
    "mixtral": {"num_local_experts": 8, "intermediate_size": 256},
    "qwen2-moe": {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 64},
    # What 70B is: 80 layers, and 8 queries to a key.
    "mistral": {"num_attention_heads": 8, "num_hidden_layers": 80, "hidden_size": 64},
}
# How many tensors are wider as 256 does not divide their rows, not as the mix wants it.
WIDER = {("llama-tied", "q4_k_m"): 3, ("mixtral", "q4_k_m"): 0, ("llama-tied", "q8_0"): 0}
IN_FILE = {
    "embed_tokens": "token_embd", "lm_head": "output", "q_proj": "attn_q", "k_proj": "attn_k",
    "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up",
    "down_proj": "ffn_down", "router": "ffn_gate_inp",
}  # fmt: skip
IN_PHI = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attn_qkv") | {"gate_proj": "ffn_up"}


def in_file(name: str, full_name: str) -> str:
    """The name that GGUF has for a matrix of a tiny model."""
    steps = full_name.split(".")
    part = (IN_FILE | (IN_PHI if name.startswith("phi3") else {}))[steps[-1]]
    kind = {"experts": "_exps", "shared_experts": "_shexp"}.get(steps[-2], "") if steps[1:] else ""
    layer = f"blk.{steps[steps.index('layers') + 1]}." if "layers" in steps else ""
    return f"{layer}{part}{kind}.weight"


def directory(path: Path, config: dict[str, Any]) -> Path:
    """A model in 16 bits, with a tokenizer of which a GGUF file can tell."""
    weights = write_model(path, config) / "model.safetensors"
    save_file({name: a.astype(np.float16) for name, a in load_file(weights).items()}, weights)
    (path / "tokenizer.json").write_text(json.dumps(byte_level()))
    return path


@pytest.mark.parametrize(
    ("name", "target"),
    [(n, target) for n in WRITTEN for target in TARGETS if n != "mistral" or target == "q4_k_m"],
)
def test_a_file_has_the_types_and_the_size_of_its_plan(
    name: str, target: str, tmp_path: Path
) -> None:
    config = tiny_config(name) | WIDE | WRITTEN[name]
    source, out = directory(tmp_path / "model", config), tmp_path / "out.gguf"
    options = QuantiseOptions(target, (), {}, {}, 1)
    done = quantise_file(read_source(source), out, options, lambda *_: None)
    _, raw = read_gguf(out)
    shape = shape_of_config(config)
    storage = storage_of_dtype(target, shape)
    planned = {
        in_file(name, full_name): storage.of(full_name, matrix).name.upper()
        for full_name, matrix in shape.matrices()
        if matrix.columns > 1
    }
    written = {name: tensor.dtype for name, tensor in raw.items() if len(tensor.shape) > 1}
    assert written.pop("blk.0.ffn_gate_inp_shexp.weight", "F32") == "F32"  # a vector in plans
    assert {name: kind for name, kind in written.items() if "_inp_shexp" not in name} == planned
    if (name, target) in WIDER:
        assert done.instead == WIDER[name, target]
    size = sum(tensor.nbytes for tensor in raw.values())
    for model in (config, source):
        ledger = plan(model, on="l4", dtype=target).best.ledger
        assert ledger.weights_bytes == pytest.approx(size, abs=8), model


# Layers of these are halves of the planned ones, and have other numbers.
NUMBERED_OTHERWISE = ("nemotron-h", "nemotron-h-moe")
# Of what is not quantised converters make 32 bits of these, and of vectors.
WIDENED = ("ffn_gate_inp.weight", "inp_shexp.weight", "conv1d.weight", "shortconv.conv.weight",
           "position_embd.weight")  # fmt: skip


def gguf_family(name: str) -> Family | None:
    """The family of the files that a tiny model becomes; None if there are no such files."""
    values = tiny_config(name)
    _, arch = family_and_arch(values)
    kind = values["architectures"][0]
    has_experts = any(isinstance(layer.ffn, Experts) for layer in arch.layers)
    names = [f"{kind} of experts"] * has_experts + [kind]
    known = [TABLES.gguf_of_class[one] for one in names if one in TABLES.gguf_of_class]
    return GGUF_FAMILIES[known[0]] if known else None


def unquantised(arch: ModelArch, family: Family) -> dict[str, Tensor]:
    """The tensors of a converter's file, without content."""
    shapes, raw = arch.matrix_shapes(), {}
    for name, parts in names_in_file(arch, family, ()).items():
        if family.plain_head_norms and parts[0].endswith(("q_norm", "k_norm")):
            continue  # which the reader adds
        shape = (sum(shapes[part][0] for part in parts), *shapes[parts[0]][1:])
        dtype = "F32" if len(shape) < 2 or name.endswith(WIDENED) else "F16"
        raw[name] = Tensor(name, dtype, shape, np.zeros((1, 1), np.uint8))
    return raw


OF_FILES = [n for n in CONFIGS | NEWER if n not in NUMBERED_OTHERWISE and gguf_family(n)]


@pytest.mark.parametrize("name", OF_FILES)
def test_every_family_is_planned_in_the_types_of_its_files(name: str) -> None:
    """Of each layer, and of what is outside of them, as many weights have each type."""
    values, family = tiny_config(name), gguf_family(name)
    assert family is not None
    _, arch = family_and_arch(values)
    raw, shape = unquantised(arch, family), shape_of_config(values)
    for target in TARGETS:
        storage = storage_of_dtype(target, shape)
        planned, found = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
        for full_name, matrix in shape.matrices():
            _, _, layer = full_name.partition(".layers.")
            kind = storage.of(full_name, matrix).name.replace("bf16", "f16")
            planned[layer.partition(".")[0], kind] += matrix.num_params
        for tensor_name, kind in types_of(mix_of_file(target, raw, arch), raw).items():
            layer = tensor_name.split(".")[1] if tensor_name.startswith("blk.") else ""
            found[layer, kind.lower()] += math.prod(raw[tensor_name].shape)
        assert found == planned, target
