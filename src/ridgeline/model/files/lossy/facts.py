"""An architecture as the keys of a GGUF file: each fact by the reader that will read it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ridgeline.model.files.families import Family
from ridgeline.model.files.families.fields import FieldReader
from ridgeline.model.files.families.gguf_config import STANDS_STILL
from ridgeline.model.files.rope.scaling import magnitude
from ridgeline.model.shape.model import Attention, Experts, Layer, ModelArch, Rope

Values = dict[str, Any]
_AS_IT_IS = ("integer", "number", "count", "cap", "optional", "flag")


def values_of(arch: ModelArch, family: Family) -> Values:
    """Return keys, without the architecture in front of them, and values."""
    mixers = [layer.known_attention for layer in arch.layers]
    values: Values = {
        "block_count": arch.num_layers,
        "context_length": arch.max_position,
        "vocab_size": arch.vocab_size,
        "attention.head_count_kv": mixers[0].num_kv_heads,
        "attention.key_length": mixers[0].head_dim,
        "attention.value_length": mixers[0].head_dim,
        "feed_forward_length": arch.layers[0].ffn.size,
    }
    for name, reader in family.facts.items():
        part, _, fact = name.rpartition(".")
        value = getattr(_part(arch, part), fact, None)
        if reader.keys and value is not None:
            values |= _stored(reader, value)
    return values | _windows(arch, mixers, family) | _ropes(mixers, family)


def _part(arch: ModelArch, name: str) -> object:
    """Return what has the facts of this part of a family's table."""
    last: Layer = arch.layers[-1]
    ffn = last.ffn if isinstance(last.ffn, Experts) else None
    return {
        "": arch,
        "layer": last,
        "mixer": last.mixer,
        "ffn": last.ffn,
        "dense": arch.layers[0].ffn,
        "shared": ffn and ffn.shared,
        "beside": ffn and ffn.beside,
    }.get(name)


def _stored(reader: FieldReader, value: Any) -> Values:
    """Return the key and the value that a reader makes this fact of; nothing where it is made of
    other keys, or where 0 says that there is none."""
    key = reader.keys[0]
    match reader.kind:
        case _ if value == 0 and reader.kind != "flag":
            return {}
        case kind if kind in _AS_IT_IS:
            return {key: value}
        case "inverse":
            return {key: 1.0 / value}
        case "either":
            return {key: value == reader.options["yes"]}
        case "numbered":
            by_word = {word: number for number, word in reader.options["among"].items()}
            return {key: by_word[value]} if value in by_word else {}
    return {}


def _windows(arch: ModelArch, mixers: list[Attention], family: Family) -> Values:
    """Return how far layers see, where files of the family say it."""
    windows = [mixer.window for mixer in mixers]
    if family.windows == "none" or not any(windows):
        return {}
    values: Values = {"attention.sliding_window": max(window or 0 for window in windows)}
    if family.windows == "pattern" and not family.pattern:
        values["attention.sliding_window_pattern"] = [window is not None for window in windows]
    return values


def _ropes(mixers: list[Attention], family: Family) -> Values:
    """Return how positions turn, in layers that see everything and in those with a window."""
    of_full = next((m.rope for m in mixers if m.rope and not m.window), None)
    of_sliding = next((m.rope for m in mixers if m.rope and m.window), None)
    rope = of_full or of_sliding
    if rope is None:
        return {}
    values = _rope(rope)
    if "sliding" in family.ropes and of_sliding is not None:
        values["rope.freq_base_swa"] = of_sliding.theta
    return values


def _rope(rope: Rope) -> Values:
    values: Values = {"rope.freq_base": rope.theta, "rope.dimension_count": rope.dim}
    scaling = {"rope.scaling.original_context_length": rope.original_max_position}
    if rope.long_divisors:
        return values | scaling | {"rope.scaling.attn_factor": rope.attention_factor}
    if rope.original_max_position:  # YaRN: the slowest pairs are divided by the whole factor
        factor = max(rope.divisors, default=1.0)
        values |= scaling | {"rope.scaling.type": "yarn", "rope.scaling.factor": factor}
        own = rope.attention_factor / magnitude(factor)
        return values | ({} if math.isclose(own, 1.0) else {"rope.scaling.attn_factor": own})
    if rope.divisors and len(set(rope.divisors)) == 1:
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope.divisors[0]}
    return values


def rope_tensors(arch: ModelArch) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Return the divisors that files have as tensors, by name: Llama 3's and LongRoPE's."""
    ropes = [m.rope for m in arch.attentions if m.rope is not None and m.rope.divisors]
    if not ropes:
        return {}
    rope = ropes[0]
    if rope.long_divisors:
        named = {"short": rope.divisors, "long": rope.long_divisors}
        return {f"rope_factors_{name}.weight": _finite(one) for name, one in named.items()}
    if rope.original_max_position or len(set(rope.divisors)) == 1:
        return {}
    return {"rope_freqs.weight": _finite(rope.divisors)}


def _finite(divisors: tuple[float, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.minimum(np.array(divisors, np.float64), STANDS_STILL).astype(np.float32)
