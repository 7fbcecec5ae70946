"""Fields of samplers that OpenAI's API does not know: llama.cpp's and vLLM's names and ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.request_body import wrong

MAX_BIASES = 1 << 15
_MOST_KEYS_SHOWN = 8  # of those that are wrong

Share = Annotated[float, Field(ge=0, le=1)]
Sigmas = Annotated[float, Field(ge=-1, le=100)]
Multiplier = Annotated[float, Field(ge=0, le=100)]
Base = Annotated[float, Field(ge=1, le=100)]
AllowedLength = Annotated[int, Field(ge=1, le=1024)]
LastN = Annotated[int, Field(ge=-1, lt=1 << 31)]
Breakers = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=256)]], Field(max_length=64, fail_fast=True)
]
Words = Annotated[
    list[Annotated[str, Field(min_length=1, max_length=256)]],
    Field(max_length=1024, fail_fast=True),
]
TokenIds = Annotated[list[int], Field(min_length=1, max_length=1 << 18, fail_fast=True)]

# Fields that the engine knows by the same name.
NAMES = (
    *("typical_p", "top_n_sigma", "xtc_probability", "xtc_threshold", "dry_multiplier", "dry_base"),
    *("dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers"),
    *("allowed_token_ids", "bad_words"),
)


# llama.cpp's names of samplers in the order in which they act here, and what switches each off.
_IN_ORDER: Mapping[str, Mapping[str, float]] = {
    "penalties": {
        "repetition_penalty": 1.0,
        "repeat_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    },
    "dry": {"dry_multiplier": 0.0},
    "temperature": {"temperature": 1.0},
    "top_k": {"top_k": 0},
    "typ_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "top_n_sigma": {"top_n_sigma": -1.0},
    "xtc": {"xtc_probability": 0.0},
    "infill": {},  # it does not act unless it is named
}


def switched_off(names: Sequence[str] | None) -> dict[str, float]:
    """Return the fields, with values, that switch off all samplers but those of llama.cpp's list.

    Without a list none is switched off. Raises ApiError for an unknown sampler, and for any order
    but ours.
    """
    if names is None:
        return {}
    if list(names) != [name for name in _IN_ORDER if name in names]:
        samplers = ", ".join(_IN_ORDER)
        message = f"samplers is wrong: it may name these, each once, in this order: {samplers}"
        raise ApiError(400, message, param="samplers", code="unsupported_parameter")
    off = (values for name, values in _IN_ORDER.items() if name not in names)
    return {field: value for values in off for field, value in values.items()}


def check_biases(biases: Any) -> Any:
    """Drop nulls, and raise for the first wrong pair, or for too many: pydantic would list all."""
    if not isinstance(biases, dict):
        return biases
    if len(biases) > MAX_BIASES:
        raise ValueError(f"it has {len(biases)} tokens, at most {MAX_BIASES} are allowed")
    # One of 0 changes nothing, whatever its key is.
    biases = {key: bias for key, bias in biases.items() if bias is not None and not _is_none(bias)}
    if others := [key for key in biases if not is_token(key)]:
        shown = ", ".join(f"{key!r:.40}" for key in others[:_MOST_KEYS_SHOWN])
        raise ValueError(f"it has the key {shown}: keys are token ids")
    for key, bias in biases.items():
        if not is_bias(bias):
            raise wrong("invalid_value", key, "is wrong: it must be a number from -100 to 100")
    return biases


def _is_none(bias: Any) -> bool:
    return is_bias(bias) and bias == 0


def is_token(key: str) -> bool:
    """Whether a key of JSON is a token's id."""
    return key.isascii() and key.isdigit() and len(key) < 10


def is_bias(bias: Any) -> bool:
    """Whether a value of JSON is what may be added to a token's logit."""
    return type(bias) in (int, float) and -100 <= bias <= 100
