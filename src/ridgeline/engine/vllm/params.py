"""Prompts and parameters as programs use them, by vLLM's names.

Parameters are made, copied, and changed afterwards. Any dictionary with a prompt's keys will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict

from ridgeline.core.params import SamplingParams as FrozenParams


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str


class TokensPrompt(TypedDict):
    """A prompt as token ids."""

    prompt_token_ids: Sequence[int]


_NAMES = tuple(field.name for field in fields(FrozenParams))


class SamplingParams(FrozenParams):
    """Sampling and stopping rules of one request, which can be assigned to.

    A value is checked when it is assigned, and all of them together when a prompt is asked: a
    request takes a copy, which later changes do not reach.
    """

    __slots__ = ()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set one value. Raises ValueError if it is out of range, AttributeError for no name."""
        if name not in _NAMES:
            raise AttributeError(f"SamplingParams has no {name!r}")
        checked = FrozenParams(**{"max_tokens": None, name: value})  # so min_tokens may come first
        object.__setattr__(self, name, getattr(checked, name))

    def __eq__(self, other: object) -> bool:
        """Whether the values are the same, also those of a request."""
        if not isinstance(other, FrozenParams):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _NAMES)

    __hash__ = None  # type: ignore[assignment]  # its values change

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Return parameters, of which those that are None have their defaults."""
        return cls(**{name: value for name, value in values.items() if value is not None})


@dataclass(frozen=True)
class PoolingParams:
    """How ``LLM.embed`` shapes vectors, by vLLM's names.

    Attributes:
        dimensions: how many first values to keep; None keeps all.
        use_activation: scale vectors to length 1; None does what the model's files say, else true.
    """

    dimensions: int | None = None
    use_activation: bool | None = None


def frozen(params: FrozenParams) -> FrozenParams:
    """Return a copy that cannot be assigned to. Raises ValueError for a contradiction in it."""
    return FrozenParams(**_values(params)) if isinstance(params, SamplingParams) else params


def assignable(params: FrozenParams) -> SamplingParams:
    """Return a copy that can be assigned to."""
    return SamplingParams(**_values(params))


def _values(params: FrozenParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in _NAMES}
