"""The sampling fields, for programs that let people set them: defaults, bounds, descriptions."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from ridgeline.core.decoding.search import with_recommended
from ridgeline.core.params import SamplingParams
from ridgeline.serve.dialects.openai.protocol import ChatRequest

# What most people set comes first, then all others in the order in which they act.
_SHOWN = (
    *("max_tokens", "temperature", "top_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n"),
    *("dry_sequence_breakers", "bad_words", "top_k", "typical_p", "min_p", "top_n_sigma"),
    *("xtc_probability", "xtc_threshold", "min_tokens", "stop"),
)
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum")
_FAR = 1 << 31  # a bound this large only says what a field can hold
_KINDS = ("array", "integer", "number")


def sampler_list(recommended: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each field with its type and bounds, its default and what it does.

    ``recommended`` is what a model's files recommend: their defaults. None is a default too: such
    a field does nothing unless it is given.
    """
    defaults = with_recommended(recommended, max_tokens=None)
    schema = ChatRequest.model_json_schema()
    about = _descriptions()
    return [
        {
            "name": name,
            **_type_and_bounds(schema, schema["properties"][name]),
            "default": getattr(defaults, name),
            "description": about.get(name, ""),
        }
        for name in _SHOWN
    ]


def _type_and_bounds(schema: dict[str, Any], field: dict[str, Any]) -> dict[str, Any]:
    """Return what a schema says of a field that may be null: of a list or a text, of the list."""
    kinds = {one.get("type"): one for one in field["anyOf"]}
    kind = next(kind for kind in _KINDS if kind in kinds)
    bounds = {n: kinds[kind][n] for n in _BOUNDS if abs(kinds[kind].get(n, _FAR)) < _FAR}
    return {"type": kind, **bounds}


def _descriptions() -> dict[str, str]:
    """Return what ``SamplingParams`` says of each of its attributes; nothing without docstrings."""
    _, _, attributes = (inspect.getdoc(SamplingParams) or "").partition("Attributes:\n")
    entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", attributes, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}
