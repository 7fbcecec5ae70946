"""Files whose layers are halves of ours: a mixer, or what each token goes through by itself.

A half of the second kind belongs to the mixer before it. So of "M-M*E" (Nemotron-H) the three
layers are a mixer with an MLP, one without, and attention with experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ridgeline.model.files.config import ConfigReader

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


def halves_of_config(config: ConfigReader) -> list[Halves]:
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


def _joined(config: ConfigReader, key: str, names: Sequence[str]) -> list[Halves]:
    """Return the layers of halves. Raises ModelFileError where one has no mixer before it."""
    layers: list[Halves] = []
    for i, name in enumerate(names):
        if name in _MIXERS:
            layers.append(Halves(name))
        elif not layers or layers[-1].network:
            config.fail(f"{config.name(key)}: layer {i} has no mixer before it: not supported")
        else:
            layers[-1] = Halves(layers[-1].mixer, name)
    if not any(layer.mixer == "full" for layer in layers):
        config.fail(f"{config.name(key)} has no layer with attention, which is not supported")
    return layers
