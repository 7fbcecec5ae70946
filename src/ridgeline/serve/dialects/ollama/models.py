"""Models as Ollama lists and shows them."""

from __future__ import annotations

from typing import Any

from ridgeline.model.files.summary import Summary
from ridgeline.serve.dialects.ollama.response import time_of
from ridgeline.serve.dialects.ollama.schemas import LoadedEntry, ModelDetails, ModelEntry, Shown

VERSION = "0.12.11"  # of Ollama's API that is served here: clients require a lowest one
_NEVER = "9999-12-31T23:59:59Z"
_UNITS = ((1e9, "B"), (1e6, "M"), (1e3, "K"))


def entry(name: str, summary: Summary) -> ModelEntry:
    """Return a model as a list has it; names without a tag get Ollama's."""
    name = name if ":" in name else f"{name}:latest"
    return {
        "name": name,
        "model": name,
        "modified_at": time_of(summary.modified_s),
        "size": summary.num_bytes,
        "digest": summary.identity,
        "details": _details(summary),
    }


def loaded(
    name: str, summary: Summary, num_bytes: int, max_model_len: int, expires_s: float | None
) -> LoadedEntry:
    """Return a model as the list of those in memory has it.

    ``num_bytes`` is what its process has in memory, none of it on a GPU; ``expires_s`` is when it
    will be unloaded, in seconds since 1970, None for never.
    """
    expires = _NEVER if expires_s is None else time_of(expires_s)
    one = entry(name, summary)
    one["size"] = num_bytes
    return {**one, "size_vram": 0, "context_length": max_model_len, "expires_at": expires}


def shown(
    summary: Summary, template: str, sampling: dict[str, Any], capabilities: list[str]
) -> Shown:
    """Return all that is said of one model."""
    family = summary.family
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {value}" for name, value in sampling.items()),
        "template": template,
        "details": _details(summary),
        "model_info": {
            "general.architecture": family,
            "general.parameter_count": summary.num_parameters,
            f"{family}.context_length": summary.context_length,
            f"{family}.embedding_length": summary.embedding_length,
        },
        "capabilities": capabilities,
        "modified_at": time_of(summary.modified_s),
    }


def _details(summary: Summary) -> ModelDetails:
    return {
        "parent_model": "",
        "format": "gguf" if summary.is_gguf else "safetensors",
        "family": summary.family,
        "families": [summary.family],
        "parameter_size": _count(summary.num_parameters),
        "quantization_level": next(iter(summary.formats)),
    }


def _count(number: int) -> str:
    for unit, letter in _UNITS:
        if number >= unit:
            return f"{number / unit:.4g}{letter}"
    return str(number)
