"""Files whose layers are halves of ours: a mixer, or what each token goes through by itself.

A half of the second kind belongs to the mixer before it. So of "M-M*E" (Nemotron-H) the three
layers are a mixer with an MLP, one without, and attention with experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ridgeline.model.files.facts import Facts
from ridgeline.model.files.families.table import Family
from ridgeline.model.shape.model import ModelArch

_LETTERS = {"M": "recurrent", "*": "full", "-": "dense", "E": "experts"}
_NAMES = {
    "attention": "full", "full_attention": "full", "linear_attention": "recurrent",
    "mamba": "recurrent", "mlp": "dense", "moe": "experts",
}  # fmt: skip
_MIXERS = ("recurrent", "full")


class Halves(NamedTuple):
    """A layer: its mixer, "recurrent" or "full", and "dense", "experts" or nothing behind it."""

    mixer: str
    network: str = ""


def halves_of_config(config: Facts) -> list[Halves]:
    """Return the layers that a config names by halves. Raises ModelFileError if they are none."""
    key = "layers_block_type"
    names: Any = config.get(key)
    letters: Any = config.get("hybrid_override_pattern")
    if names is None:
        key, names = "hybrid_override_pattern", letters
    if names is None:
        config.fail(f"layers_block_type, or {key}, is missing")
    known = _LETTERS if type(names) is str else _NAMES
    if type(names) not in (list, str) or any(name not in known for name in names):
        config.fail(f"{key} must name each layer, as one of {', '.join(known)}")
    if config.integer("num_hidden_layers", len(names)) != len(names):
        config.fail(f"{key} names {len(names)} layers, not num_hidden_layers of them")
    return _joined(config, key, [known[name] for name in names])


def halves_of_gguf(meta: Facts, family: Family, num_layers: int) -> tuple[Facts, list[Halves]]:
    """Return metadata with one number where the file has one for each half, and the layers.

    A half has heads, or a width, or neither: then it keeps a state.

    Raises:
        ModelFileError: the file does not say which, or layers of one kind differ.
    """
    keys = ("attention.head_count_kv", "feed_forward_length")
    heads, widths = (_numbers(meta, key)[:num_layers] for key in keys)
    network = "experts" if family.has_experts else "dense"
    names = [
        network if width else "full" if head else "recurrent"
        for head, width in zip(heads, widths, strict=True)
    ]
    layers = _joined(meta, keys[1], names)
    of_all = {meta.prefix + key: max(of) for key, of in zip(keys, (heads, widths), strict=True)}
    return replace(meta, values={**meta.values, **of_all}), layers


def _numbers(meta: Facts, key: str) -> list[int]:
    stored: Any = meta.get(key)
    numbers = [int(value) for value in stored] if isinstance(stored, np.ndarray | list) else []
    if (
        len(numbers) != meta.integer("block_count")
        or len({number for number in numbers if number}) > 1
    ):
        meta.fail(f"{meta.prefix}{key} must have one number, or 0, for each of the layers")
    return numbers


def _joined(facts: Facts, key: str, names: Sequence[str]) -> list[Halves]:
    """Return the layers of halves. Raises ModelFileError where one has no mixer before it."""
    layers: list[Halves] = []
    for i, name in enumerate(names):
        if name in _MIXERS:
            layers.append(Halves(name))
        elif not layers or layers[-1].network:
            facts.fail(f"{facts.prefix}{key}: layer {i} has no mixer before it: not supported")
        else:
            layers[-1] = Halves(layers[-1].mixer, name)
    if not any(layer.mixer == "full" for layer in layers):
        facts.fail(f"{facts.prefix}{key} has no layer with attention, which is not supported")
    return layers


def number_in_file(arch: ModelArch, family: Family, index: int, part: str) -> int:
    """Return the number of the layer of a file that has a part of our layer ``index``."""
    if not family.by_halves:
        return index
    layer = arch.layers[index]
    before = sum(2 if one.ffn.size else 1 for one in arch.layers[:index])
    is_behind = part == "mlp_norm" or part in layer.ffn.shapes(arch.hidden_size)
    return before + is_behind
