"""Rotary embedding of a model from its configuration: every published scaling as divisors.

``Rope`` has one idea of scaling, a divisor per pair of channels; this module turns the names and
numbers of configs into it, and knows nothing else of a model.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.rope_tables import log, power
from ridgeline.model.shape.model import Rope

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
# Of an object that describes a scaling. Only pictures and sounds have positions in sections.
_KEYS = frozenset((
    "alpha", "attention_factor", "beta_fast", "beta_slow", "factor", "finetuned",
    "high_freq_factor", "llama_4_scaling_beta", "long_factor", "long_mscale", "low_freq_factor",
    "max_position_embeddings", "mrope_interleaved", "mrope_section", "mscale", "mscale_all_dim",
    "original_max_position_embeddings", "partial_rotary_factor", "rope_theta", "rope_type",
    "short_factor", "short_mscale", "truncate", "type",
))  # fmt: skip
_OF_ROPE = ("attention_factor", "long_divisors", "original_max_position")  # of a GGUF file


def rope_from_config(config: ConfigReader, head_dim: int) -> tuple[Rope, int]:
    """Return the rotary embedding that a config describes, and the context length in tokens.

    Reads the older keys (``rope_theta`` and ``rope_scaling``) and the newer ``rope_parameters``,
    and what a GGUF file says beyond them.

    Raises:
        ModelFileError: a scaling that is not supported, or values out of range.
    """
    rope, max_position = _rope(config, head_dim)
    beyond = config.beyond
    if not beyond:
        return rope, max_position
    divisors = beyond.get("divisors", rope.divisors)
    if "divisors" in beyond and rope.divisors:
        divisors = tuple(a * b for a, b in zip(divisors, rope.divisors, strict=True))
    said = {key: beyond[key] for key in _OF_ROPE if key in beyond}
    # What a GGUF file calls the context is that after its extension.
    return replace(rope, **said | {"divisors": divisors}), config.integer("max_position_embeddings")


def _rope(config: ConfigReader, head_dim: int) -> tuple[Rope, int]:
    scaling = _scaling(config)
    theta = scaling.number("rope_theta", 10_000.0)
    share = scaling.number("partial_rotary_factor", 1.0)
    dim = int(head_dim * share)
    rotary_dim = config.integer("rotary_dim", dim)  # of MiniMax
    if scaling.get("partial_rotary_factor") is None:
        dim = rotary_dim
    dim = checked_dim(scaling, dim, head_dim)
    max_position = config.integer("max_position_embeddings")
    original = scaling.integer("original_max_position_embeddings", max_position, low=2)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "su" or scaling.get("short_factor") is not None:
        if kind == "default":  # transformers would turn by none of them
            scaling.fail('short_factor is there without rope_type: add "rope_type": "longrope"')
        kind = "longrope"  # its first published names were "su" and, in Phi-3, "yarn"
    if kind == "dynamic" and scaling.get("alpha") and dim > 2:
        # HunYuan's: another base, which the length of a text does not change.
        theta *= power(scaling.number("alpha"), Fraction(dim, dim - 2))
        kind = "default"
    if kind == "mrope":  # of Qwen2-VL: positions in sections, which are equal for text
        kind = "default"
    if kind not in _KINDS:
        scaling.fail(f"rope scaling {kind!r} is not supported; supported: {', '.join(_KINDS)}")
    growth = 0.0
    if scaling.get("llama_4_scaling_beta") is not None:  # of Ministral 3
        growth = scaling.number("llama_4_scaling_beta")
        if kind != "yarn":
            scaling.fail(f"llama_4_scaling_beta beside rope_type {kind!r} is not supported")
    if kind in ("default", "dynamic"):  # which is that of longer texts than the context
        return Rope(theta, dim), max_position
    factor = scaling.number("factor", max_position / original)
    if kind == "linear":
        return Rope(theta, dim, (factor,) * (dim // 2)), max_position
    if kind == "proportional":  # frequencies of the whole head, of which the lowest are not used
        turning, still = int(share * head_dim // 2), math.inf
        divisors = (factor,) * turning + (still,) * (head_dim // 2 - turning)
        return Rope(theta, head_dim, divisors), max_position
    if kind == "llama3":
        return Rope(theta, dim, _llama3(scaling, theta, dim, factor, original)), max_position
    if kind == "yarn":
        divisors = _yarn(scaling, theta, dim, factor, original)
        attention_factor = scaling.number("attention_factor", _yarn_attention(scaling, factor))
        rope = Rope(
            theta, dim, divisors, attention_factor,
            original_max_position=original, query_growth=growth,
        )  # fmt: skip
        # Published configs often leave the length as it was before the extension.
        return rope, max(max_position, int(original * factor))
    growth = max(0.0, log(factor)) / log(original)
    magnitude = scaling.number("long_mscale", math.sqrt(1 + growth))
    if scaling.number("short_mscale", magnitude) != magnitude:
        scaling.fail("short_mscale and long_mscale differ, which is not supported")
    rope = Rope(
        theta,
        dim,
        scaling.numbers("short_factor", dim // 2),
        scaling.number("attention_factor", magnitude),
        scaling.numbers("long_factor", dim // 2),
        original,
    )
    return rope, max_position


def yarn_score_factor(config: ConfigReader) -> float:
    """Return what a config.json's YaRN multiplies scores by, beside cosine and sine.

    Latent attention turns only a part of its heads, so the temperature of the whole score is no
    part of the rotation ("mscale_all_dim"; DeepSeek-V2, 2024).
    """
    scaling = _scaling(config)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "default" or not scaling.get("mscale_all_dim"):
        return 1.0
    return magnitude(scaling.number("factor"), scaling.number("mscale_all_dim")) ** 2


def _scaling(config: ConfigReader) -> ConfigReader:
    """Return what a config says of rope, wherever its version of the format keeps it."""
    scaling: Any = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if type(scaling) is not dict or any(type(value) is dict for value in scaling.values()):
        config.fail("rope_scaling must be one flat object; one per kind of layer is not supported")
    for key, value in scaling.items():
        if key not in _KEYS and value is not None:
            config.fail(
                f"rope_scaling has {key} {reprlib.repr(value)}, which is not supported: it is not "
                f"known whether it changes what the model computes"
            )
    outer = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
    return ConfigReader({key: config.get(key) for key in outer} | scaling, config.where)


def checked_dim(config: ConfigReader, dim: int, head_dim: int) -> int:
    """Return how many of a head's channels turn; raise ModelFileError unless they fit."""
    if not 2 <= dim <= head_dim or dim % 2:
        config.fail(f"rope over {dim} of a head's {head_dim} channels; it must be even and fit")
    return dim


def _blend(dim: int, factor: float, share_of: Callable[[int], float]) -> tuple[float, ...]:
    """Return divisors that keep a pair's frequency where its share is 1 and divide it at 0."""
    shares = (min(1.0, max(0.0, share_of(pair))) for pair in range(dim // 2))
    return tuple(1 / (share + (1 - share) / factor) for share in shares)


def _llama3(
    scaling: ConfigReader, theta: float, dim: int, factor: float, original: int
) -> tuple[float, ...]:
    """Keep pairs that turn often within the original context, divide those that turn seldom."""
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low > high:
        scaling.fail(f"low_freq_factor {low} is above high_freq_factor {high}")

    def share_of(pair: int) -> float:
        turns: float = original / (2 * math.pi * power(theta, Fraction(2 * pair, dim)))
        return (turns - low) / (high - low) if high > low else float(turns >= low)

    return _blend(dim, factor, share_of)


def _yarn(
    config: ConfigReader, theta: float, dim: int, factor: float, original: int
) -> tuple[float, ...]:
    """YaRN (Peng et al., 2023): a ramp between the pairs of two numbers of turns."""
    if theta <= 1:
        config.fail(f"YaRN needs a rope base above 1, found {theta}")

    def pair_with(turns: float) -> float:
        return dim * log(original / (turns * 2 * math.pi)) / (2 * log(theta))

    begin = pair_with(config.number("beta_fast", 32.0))
    end = pair_with(config.number("beta_slow", 1.0))
    if config.flag("truncate", True):
        begin, end = math.floor(begin), math.ceil(end)
    begin, end = max(begin, 0), min(end, dim - 1)
    width = max(end - begin, 0.001)
    return _blend(dim, factor, lambda pair: 1 - (pair - begin) / width)


def _yarn_attention(scaling: ConfigReader, factor: float) -> float:
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        weights = scaling.number("mscale"), scaling.number("mscale_all_dim")
        return magnitude(factor, weights[0]) / magnitude(factor, weights[1])
    return magnitude(factor)


def magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's correction of the attention's temperature, applied to cosine and sine."""
    return 1.0 + 0.1 * weight * log(factor) if factor > 1 else 1.0
