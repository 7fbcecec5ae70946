"""The tokens of a batch: what its answers say that they took, added up as OpenAI writes it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

# What an answer calls it: completions and vectors, and then responses.
_READ = ("prompt_tokens", "input_tokens")
_CACHED = ("prompt_tokens_details", "input_tokens_details")
_WRITTEN = ("completion_tokens", "output_tokens")
_THOUGHT = ("completion_tokens_details", "output_tokens_details")


def usage_of(lines: Iterable[bytes]) -> dict[str, Any]:
    """Return the usage of a batch whose output has these lines."""
    total: Counter[str] = Counter()
    for line in lines:
        usage = json.loads(line)["response"]["body"].get("usage") or {}
        total["read"] += _first(usage, _READ) or 0
        total["written"] += _first(usage, _WRITTEN) or 0
        total["cached"] += (_first(usage, _CACHED) or {}).get("cached_tokens", 0)
        total["thought"] += (_first(usage, _THOUGHT) or {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": total["read"],
        "input_tokens_details": {"cached_tokens": total["cached"]},
        "output_tokens": total["written"],
        "output_tokens_details": {"reasoning_tokens": total["thought"]},
        "total_tokens": total["read"] + total["written"],
    }


def _first(usage: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((usage[name] for name in names if name in usage), None)
