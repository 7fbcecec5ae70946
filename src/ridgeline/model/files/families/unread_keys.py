"""Every key of a file is read, or refused, or changes no answer by all that is known of it.

Trainers, tools that merge models, and people write keys of their own into config.json. What a key
of a stranger does can only be told from the tables of families and from its name.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Collection, Mapping, Set
from typing import Any

import numpy as np

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.families.family import Family

_MOST_NAMES = 20  # of keys, in a line
# Words in the names of keys that change what a model computes, in all families that are known.
_FACTORS = frozenset((
    "factor", "mult", "multiplier", "multipliers", "ratio", "scale", "scales", "scaling",
    "temperature",
))  # fmt: skip
_COMPUTES = _FACTORS | {
    "act", "activation", "alibi", "attention", "attn", "bias", "biases", "bidirectional", "causal",
    "clip", "conv", "embed", "embedding", "embeddings", "eps", "epsilon", "expert", "experts",
    "gate", "gated", "glu", "head", "heads", "layer", "layers", "logit", "logits", "mamba", "moe",
    "ntk", "parallel", "position", "positional", "positions", "qk", "residual", "rope", "rotary",
    "routed", "router", "scalar", "scaled", "sink", "sinks", "sliding", "softcap", "sparse", "ssm",
    "theta", "window", "windows", "yarn",
}  # fmt: skip
_COMPUTES_TOO = re.compile(
    ".*(?:norm|norms|normed|cap|capping)|quanti[sz].*|normali[sz].*"
).fullmatch
# Words beside those which say that a key is of training, or of how something is computed.
_OF_TRAINING = frozenset((
    "backend", "coef", "coeff", "drop", "dropout", "impl", "implementation", "init", "initializer",
    "loss", "pdrop",
))  # fmt: skip

# Of a rope: what only some architectures go by: transformers passes over it in others' configs.
_OF_SOME = ("alpha", "llama_4_scaling_beta", "partial_rotary_factor")
_OF_KINDS = ("full_attention", "sliding_attention")


def unsaid(note: str) -> None:
    """Pass a note over, where nobody reads them."""


def refuse_keys(config: ConfigReader, family: Family, *more: str) -> None:
    """Refuse keys that are set, of the family's or some more, and values that are not supported.

    Raises ModelFileError that names the first.
    """
    for key in (*family.refused_keys, *more):
        value = config.get(key)
        if isinstance(value, np.ndarray) or value:  # an array has no truth value of its own
            config.fail(f"{config.prefix}{key} is set, which is not supported")
    require(config, family.required)
    _refuse_ropes_of_others(config, family.rope_keys)


def _refuse_ropes_of_others(config: ConfigReader, own: Collection[str]) -> None:
    """Raise ModelFileError for a number of rope that only models of other architectures go by.

    ``own`` has those that this architecture's go by.
    """
    objects: list[Mapping[str, Any]] = [config.values]
    for said in objects:  # grows by what stands within
        objects += [
            said[key]
            for key in ("rope_scaling", "rope_parameters", *_OF_KINDS)
            if type(said.get(key)) is dict
        ]
        # A proportional rope is made of this share, of whatever family the model is.
        goes_by = {*own, "partial_rotary_factor"} if _is_proportional(said) else own
        for key in _OF_SOME:
            if key not in goes_by and said.get(key) not in (None, 1.0):
                kind = said.get("rope_type")
                of_rope = f" with rope_type {reprlib.repr(kind)}" if kind else " without rope_type"
                beside = of_rope if kind or said is not config.values else ""
                config.fail(
                    f"{key} is {reprlib.repr(said[key])}, which is not supported{beside}: no model "
                    f"of this architecture uses it"
                )


def _is_proportional(said: Mapping[str, Any]) -> bool:
    return said.get("rope_type") == "proportional"


def require(config: ConfigReader, must: Mapping[str, Any]) -> None:
    """Refuse another value of a key than the only one that is supported."""
    for key, value in must.items():
        is_off = value is True and config.is_null(key)  # as transformers reads null
        if is_off or config.get(key) not in (None, value):
            config.fail(
                f"{config.prefix}{key} is {config.get(key)!r}, which is not supported; "
                f"supported: {value}"
            )


def refuse_unread_keys(
    config: ConfigReader, harmless: Set[str], changing: Set[str], note: Callable[[str], None]
) -> None:
    """Refuse a key that was not read and that changes what the model computes, by all we know.

    It does if some family of models has it, or by its name, unless its value says nothing. Any
    other is taken; ``note`` is told their names in a line.

    Args:
        config: of which those keys count that have its prefix.
        harmless: keys that change nothing, whatever they are called.
        changing: keys by which some family goes.
        note: is told of keys that are in neither, and of a rope that serves no layer.
    """
    taken = []
    for key, value in config.values.items():
        name = key.removeprefix(config.prefix)
        if not key.startswith(config.prefix) or key in config.read_keys or name in harmless:
            continue
        if _is_neutral(name, value):
            continue
        if name in changing or _sounds_like_computation(name):
            config.fail(
                f"{key} is {reprlib.repr(value)}, which is not supported: by its name it changes "
                f"what the model computes; if this model was made without it, take that key out"
            )
        taken.append(reprlib.repr(key)[1:-1])
    if taken:
        shown = ", ".join(taken[:_MOST_NAMES])
        more = f" and {len(taken) - _MOST_NAMES} more" if len(taken) > _MOST_NAMES else ""
        note(f"keys of which nothing is known are taken to change nothing: {shown}{more}")
    if line := _rope_of_no_layer(config):
        note(line)


def _rope_of_no_layer(config: ConfigReader) -> str:
    """Return what to say of a rope beside those of each kind of layer, which serves none; or "".

    transformers 5 saves such a file of OLMo 3 if the one that it read had one rope for all.
    """
    stored = config.get("rope_parameters")
    if type(stored) is not dict or not stored.keys() & {*_OF_KINDS}:
        return ""
    beside = sorted(map(str, stored.keys() - {*_OF_KINDS, "rope_theta", "rope_type"}))
    said = (
        f"rope_parameters names kinds of layers, so what is beside serves none: {', '.join(beside)}"
    )
    return said if beside else ""


def _is_neutral(name: str, value: Any) -> bool:
    """Return whether a value is nothing, none of something, or once as much."""
    if isinstance(value, np.ndarray):  # which has no truth value of its own
        return False
    is_one = type(value) in (int, float) and value == 1
    return not value or (is_one and bool(_words(name) & _FACTORS))


def _sounds_like_computation(name: str) -> bool:
    words = _words(name)
    return bool(words & _COMPUTES or any(map(_COMPUTES_TOO, words))) and not words & _OF_TRAINING


def _words(name: str) -> frozenset[str]:
    """Return the words of a name that has them in lower case, with capitals or with dots."""
    return frozenset(re.findall("[a-z0-9]+", re.sub("(?<=[a-z])(?=[A-Z])", "_", name).lower()))
