"""``--speculative-config``: how drafts are made, in vLLM's words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ridgeline.core.scheduling.speculate import MOST_DRAFTS

_METHODS = ("ngram", "suffix", "draft_model", "lookahead")
_RANGES = {
    "num_speculative_tokens": (1, MOST_DRAFTS),
    "prompt_lookup_min": (1, 64),
    "prompt_lookup_max": (1, 64),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """What the JSON of ``--speculative-config`` may say.

    Attributes:
        method: "ngram" guesses what followed the same tokens before; "suffix" also in earlier
            answers to the same API key; "draft_model" asks a smaller model; "lookahead" guesses
            what was drawn behind wrong drafts.
        model: the draft model, named as any model; it needs the same vocabulary.
        num_speculative_tokens: most drafts of a sequence in a step.
        prompt_lookup_min: fewest tokens that must be the same as before.
        prompt_lookup_max: most that are compared.
        always: verify every draft, also where that does not pay: for tests and comparisons.
    """

    method: str = "ngram"
    model: str | None = None
    num_speculative_tokens: int = 7
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 32
    always: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is not one of those above."""
        if self.method not in _METHODS:
            raise ValueError(
                f"--speculative-config: method {self.method!r} is not one of "
                f"{', '.join(_METHODS)}; 'off' in place of the JSON switches speculative "
                "decoding off"
            )
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ValueError(
                    f"--speculative-config: {name} is {value!r}, not a whole number from {low} to "
                    f"{high}"
                )
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"--speculative-config: prompt_lookup_min ({self.prompt_lookup_min}) is more than "
                f"prompt_lookup_max ({self.prompt_lookup_max})"
            )
        if (self.method == "draft_model") != isinstance(self.model, str):
            raise ValueError(
                "--speculative-config: draft_model needs a model"
                if self.model is None
                else f"--speculative-config: model is {self.model!r}, but it must be the name or "
                f"path of a model, and the method draft_model"
            )
        looked_up = self.prompt_lookup_min, self.prompt_lookup_max
        if self.method in ("draft_model", "lookahead") and looked_up != (2, 32):
            raise ValueError(
                f"--speculative-config: prompt_lookup_min and prompt_lookup_max are for ngram and "
                f"suffix: {self.method} looks nothing up"
            )
        if type(self.always) is not bool:
            raise ValueError(f"--speculative-config: always is {self.always!r}, not true or false")


def parse_speculative(value: str | Mapping[str, Any] | None) -> SpeculativeConfig | None:
    """Return what ``--speculative-config`` says; None for "off", the defaults for None.

    Raises ValueError, which names what is wrong.
    """
    if value is None:
        return SpeculativeConfig()
    if value == "off":
        return None
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(
                f"--speculative-config is {value!r}, neither JSON nor 'off': write for example "
                f'\'{{"method": "ngram", "num_speculative_tokens": 4}}\''
            ) from None
    if not isinstance(value, Mapping):
        raise ValueError(f"--speculative-config is {value!r}: write a JSON object, or 'off'")
    known = [field.name for field in fields(SpeculativeConfig)]
    for key in value:
        if key not in known:
            raise ValueError(
                f"--speculative-config has no {key!r}; it has {', '.join(known)}; the number "
                "of drafts that pays is measured while it runs"
            )
    return SpeculativeConfig(**value)
