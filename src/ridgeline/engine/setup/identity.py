"""The fingerprint of a server: with the same one, equal requests get equal answers, bit for bit.

It covers contents, not names: the model's files, the template in use, the recommended sampling
parameters, formats, our code, and the libraries that tokens pass through. Threads, processors,
batches and caches do not count, because answers do not depend on them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ridgeline.engine.setup.resolve import EngineConfig
from ridgeline.engine.text_processor import TextProcessor
from ridgeline.model.shape.model import ModelArch
from ridgeline.system.machine import digest_of_sources

# Of the package: all that stands between a request and its answer.
_ROOMS = (
    *("model/shape", "model/cost", "model/files"),
    *("core", "backends", "engine", "text", "trust", "serve"),
)
_LIBRARIES = {
    "": ("gguf", "jinja2", "llguidance", "numpy", "tokenizers"),
    "cpu": ("llvmlite",),
    "cuda": ("torch", "triton"),
}
_NUM_HEX = 16


def facts(
    contents: str, arch: ModelArch, config: EngineConfig, text: TextProcessor
) -> dict[str, Any]:
    """Return all that an answer depends on beside its request, by name.

    Args:
        contents: digest of the model's files.
        arch: what the model looks like; the rope of some depends on the longest context.
        config: the formats.
        text: the template in use, how messages are read, and what is recommended of sampling.
    """
    ropes = [one.rope.divisors_for(config.max_model_len) for one in arch.attentions if one.rope]
    return {
        "model": contents,
        "ropes": ropes,
        "formats": [config.backend, config.dtype, config.kv_cache_dtype],
        "template": hashlib.sha256(text.chat_template.sources.encode()).hexdigest(),
        "parsers": [text.tool_format.name, text.reasoning],
        "recommended": sorted(text.generation_defaults.items()),
        "code": code_digest(),
        "libraries": list(_versions(config.backend)),
    }


def fingerprint(facts: Mapping[str, Any]) -> str:
    """Return the name of these facts."""
    return "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:_NUM_HEX]


def with_adapter(fingerprint: str, digest: bytes) -> str:
    """Return the fingerprint of answers of the model with an adapter; empty is the digest of none.

    It is as long as the model's own.
    """
    if not digest:
        return fingerprint
    name = hashlib.sha256(fingerprint.encode() + digest).hexdigest()
    return f"fp_{name}"[: len(fingerprint)]


@cache
def code_digest() -> str:
    """Return the digest of our code that a request passes on its way to an answer."""
    return digest_of_sources(Path(__file__).parents[2], _ROOMS)


def _versions(backend: str) -> Iterator[str]:
    for library in (*_LIBRARIES[""], *_LIBRARIES.get(backend, ())):
        try:
            yield f"{library} {version(library)}"
        except PackageNotFoundError:  # it came without metadata
            yield library
