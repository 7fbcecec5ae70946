"""Every key of a file is read, or refused, or known to change no answer."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Set
from typing import Any

import numpy as np

from ridgeline.models.facts import Facts


def refuse(facts: Facts, keys: tuple[str, ...]) -> None:
    """Refuse keys that are set. Raises ModelFileError that names the first."""
    for key in keys:
        value = facts.get(key)
        if isinstance(value, np.ndarray) or value:  # an array has no truth value of its own
            facts.fail(f"{facts.prefix}{key} is set, which is not supported")


def insist(facts: Facts, must: Mapping[str, Any]) -> None:
    """Refuse another value of a key than the only one that is supported."""
    for key, value in must.items():
        is_off = value is True and facts.is_null(key)  # as transformers reads null
        if is_off or facts.get(key) not in (None, value):
            facts.fail(
                f"{facts.prefix}{key} is {facts.get(key)!r}, which is not supported; "
                f"supported: {value}"
            )


def all_understood(facts: Facts, harmless: Set[str]) -> None:
    """Refuse a key that says something and was not read.

    Nothing, and none of something, change nothing; "false" may switch off what is on by default.
    """
    for key, value in facts.values.items():
        if not key.startswith(facts.prefix) or key in facts.seen:
            continue
        name = key.removeprefix(facts.prefix)
        says_something = isinstance(value, np.ndarray | bool) or bool(value)
        if says_something and name not in harmless:
            facts.fail(
                f"{key} is {reprlib.repr(value)}, which is not supported: it is not known whether "
                f"it changes what the model computes"
            )
