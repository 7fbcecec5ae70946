"""A tiny model of any family as a directory of Hugging Face's, all of its weights random.

It is the inverse of what binds tensors: names and layouts come from the tables, so that they are no
test of these (``make test-parity`` is). Nothing here needs torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models

from ridgeline.model.files.families import Family, arch_from_config, family_of
from ridgeline.model.files.families.weight_names import number_in_file
from ridgeline.model.files.tensors import Tensor
from ridgeline.model.shape.model import Experts, ModelArch
from tests.parity.tiny_configs import CONFIGS, NEWER, SIZES, VOCAB
from tests.tiny import Arrays, random_arrays

# What transformers' own configs say unless told otherwise, and files therefore have.
_SAID: dict[str, dict[str, Any]] = {
    **{name: {"mamba_d_conv": 4} for name in ("FalconH1", "GraniteMoeHybrid", "Bamba")},
    "Mamba2": {"conv_kernel": 4},
}


def write_family(path: Path, name: str) -> Path:
    """Write the model of this name in the list of tiny configs; return ``path``."""
    return write_model(path, tiny_config(name))


def write_model(path: Path, values: dict[str, Any]) -> Path:
    """Write a model of this config; return ``path``."""
    family, arch = family_and_arch(values)
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(values))
    save_file(_in_file(arch, family, random_arrays(arch, seed=5)), path / "model.safetensors")
    words = Tokenizer(models.BPE({f"w{i}": i for i in range(VOCAB)}, []))
    words.decoder = decoders.ByteLevel()
    words.save(str(path / "tokenizer.json"))
    return path


def family_and_arch(values: dict[str, Any]) -> tuple[Family, ModelArch]:
    """Return what a config says, without its files."""
    family = _family(values)
    return family, arch_from_config(values, learnt_positions(values, family), "model")


def tiny_config(name: str) -> dict[str, Any]:
    """Return the config of this name in the list of tiny configs, as a file has it."""
    family, changes = (CONFIGS | NEWER)[name]
    suffix = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    values = SIZES | _SAID.get(family, {}) | changes
    values["architectures"] = [f"{family}{suffix}"]
    for key in (*changes.get("unused", ()), "unused", "attn_implementation"):
        values.pop(key, None)
    epsilons = dict.fromkeys(_family(values).facts["norm_eps"].keys[:1], 1e-5)
    return epsilons | {"tie_word_embeddings": False} | values


def _family(values: dict[str, Any]) -> Family:
    family = family_of(values)
    assert family is not None
    return family


def learnt_positions(values: dict[str, Any], family: Family) -> dict[str, Tensor]:
    """Return the tensor that says how many positions there are, where they are learnt.

    It has no values: what binds looks at shapes alone.
    """
    if "positions" not in family.outer:
        return {}
    longest = values.get("n_positions") or values["max_position_embeddings"]
    width = next(values[key] for key in ("hidden_size", "n_embd", "dim") if key in values)
    name, shape = family.outer["positions"], (longest + family.spare_positions, width)
    return {name: Tensor(name, "F32", shape, np.zeros((0, 0), np.uint8))}


def _in_file(arch: ModelArch, family: Family, arrays: Arrays) -> Arrays:
    """Return the tensors of a file that has these values in some order."""
    parts: dict[str, list[np.ndarray[Any, Any]]] = {}
    for name, array in arrays.items():
        if family.plain_norms and name.endswith("norm"):
            continue
        if family.plain_head_norms and name.endswith(("q_norm", "k_norm")):
            continue
        if name in family.outer:
            parts.setdefault(family.outer[name], []).append(array)
            continue
        _, index, part = name.split(".")
        ffn, in_file = arch.layers[int(index)].ffn, family.layer[part]
        if part in family.alternatives and not isinstance(ffn, Experts):
            in_file = family.alternatives[part]
        number = number_in_file(arch, family, int(index), part)
        in_file = family.prefix.format(number) + in_file if "{}" in family.prefix else in_file
        parts.setdefault(in_file, []).append(array)
    found = {}
    for name, some in parts.items():
        whole = np.concatenate(some)
        if family.transposed and whole.ndim == 2 and name not in family.outer.values():
            whole = whole.T
        if "{e}" not in name and not (family.experts_turned and ".experts." in name):
            found[name] = np.ascontiguousarray(whole)
            continue
        count = next(layer.ffn.num for layer in arch.layers if isinstance(layer.ffn, Experts))
        if family.experts_turned:  # (experts, in, out), gates before what they let through
            by_expert = [part.reshape(count, -1, part.shape[1]) for part in some]
            found[name] = np.ascontiguousarray(np.concatenate(by_expert, axis=1).swapaxes(1, 2))
            continue
        for e, rows in enumerate(np.split(whole, count)):
            found[name.format(e=e)] = np.ascontiguousarray(rows)
    return found
