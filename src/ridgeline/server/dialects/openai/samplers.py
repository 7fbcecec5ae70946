"""Fields of samplers that OpenAI's API does not know: llama.cpp's and vLLM's names and ranges.

What there is not is refused by name, with what there is instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, LiteralString, NamedTuple

from pydantic import Field

from ridgeline.server.http.errors import ApiError
from ridgeline.server.http.request_model import Strict, wrong

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


class _Refused(NamedTuple):
    """Why a field is refused, and which values switch it off, in it or in another field."""

    why: LiteralString
    switch: str = ""  # the field that switches it on; its own, if there is none
    most_off: float | None = None  # numbers up to here switch it off


_MIROSTAT = "is not supported, as a draw must not depend on earlier ones: use top_n_sigma or min_p"
_DYNATEMP = "is not supported: use temperature with min_p or top_n_sigma"
_ADAPTIVE = "is not supported, as a draw must not depend on earlier ones: use xtc_probability"
REFUSED: Mapping[str, _Refused] = {
    "mirostat": _Refused(_MIROSTAT, most_off=0),
    "mirostat_tau": _Refused(_MIROSTAT, "mirostat", 0),
    "mirostat_eta": _Refused(_MIROSTAT, "mirostat", 0),
    "dynatemp_range": _Refused(_DYNATEMP, most_off=0),
    "dynatemp_exponent": _Refused(_DYNATEMP, "dynatemp_range", 0),
    "adaptive_target": _Refused(_ADAPTIVE, most_off=-1e-9),
    "adaptive_decay": _Refused(_ADAPTIVE, "adaptive_target", -1e-9),
    "smoothing_factor": _Refused(
        "is not supported: use temperature with min_p or top_n_sigma", most_off=0
    ),
    "samplers": _Refused(
        "is not supported, as the order of samplers is fixed: "
        "leave it out, and leave out those that are not wanted"
    ),
    "logits_processors": _Refused(
        "is not supported, as no code runs per request: "
        "use logit_bias, allowed_token_ids, bad_words or structured_outputs"
    ),
}


def refusal(name: str, values: Mapping[str, Any]) -> LiteralString | None:
    """Return why a field of ``REFUSED`` is refused; None where a value switches it off."""
    why, switch, most_off = REFUSED[name]
    value = values.get(switch or name)
    if most_off is None or isinstance(value, bool) or not isinstance(value, int | float):
        return why
    return None if value <= most_off else why


# llama.cpp's names of samplers in the order in which they act here, and what switches each off.
_IN_ORDER: Mapping[str, Mapping[str, float]] = {
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
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


def switched_off(names: Sequence[str]) -> dict[str, float]:
    """Return the fields, with values, that switch off all samplers but those of llama.cpp's list.

    Raises ApiError for a sampler that there is not, and for another order than that here.
    """
    if list(names) != [name for name in _IN_ORDER if name in names]:
        known = ", ".join(_IN_ORDER)
        message = f"samplers is wrong: it may name these, each once, in this order: {known}"
        raise ApiError(400, message, param="samplers", code="unsupported_parameter")
    off = (values for name, values in _IN_ORDER.items() if name not in names)
    return {field: value for values in off for field, value in values.items()}


class WithSamplers(Strict):
    """A body, or a part of one, that has fields of samplers."""

    @classmethod
    def _drops(cls, name: str, values: Mapping[str, Any]) -> bool:
        if name not in REFUSED:
            return super()._drops(name, values)
        if why := refusal(name, values):
            raise wrong("unsupported_parameter", name, why)
        return False
