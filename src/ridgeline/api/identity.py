"""The fingerprint of a server: with the same one, equal requests get equal answers, bit for bit.

It covers contents, not names: the model's files, the template in use, the recommended sampling
parameters, formats, our code, and the libraries that tokens pass through. Threads, processors,
batches and caches do not count, because answers do not depend on them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ridgeline.api.text_side import TextProcessor
from ridgeline.arch.model import ModelArch
from ridgeline.engine_setup.resolve import EngineConfig

# Of the package: all that stands between a request and its answer.
_ROOMS = (
    *("arch", "core", "decoding", "physics", "models", "backends", "engine_setup", "text", "api"),
    "server",
)
_LIBRARIES = {
    "": ("gguf", "jinja2", "llguidance", "numpy", "tokenizers"),
    "cpu": ("llvmlite",),
    "cuda": ("torch", "triton"),
}
_NUM_HEX = 16


def fingerprint(contents: str, arch: ModelArch, config: EngineConfig, text: TextProcessor) -> str:
    """Return the fingerprint of all that an answer depends on.

    Args:
        contents: digest of the model's files.
        arch: what the model looks like; the rope of some depends on the longest context.
        config: the formats.
        text: the template in use, how messages are read, and what is recommended of sampling.
    """
    ropes = [one.rope.divisors_for(config.max_model_len) for one in arch.attentions if one.rope]
    facts = (
        contents,
        ropes,
        (config.backend, config.dtype, config.kv_cache_dtype),
        (text.chat_template.source, text.tool_format.name, text.reasoning),
        sorted(text.generation_defaults.items()),
        code_digest(),
        list(_versions(config.backend)),
    )
    return "fp_" + hashlib.sha256(repr(facts).encode()).hexdigest()[:_NUM_HEX]


@cache
def code_digest() -> str:
    """Return the digest of our code that a request passes on its way to an answer."""
    digest, package = hashlib.sha256(), Path(__file__).parents[1]
    for room in _ROOMS:
        for source in sorted((package / room).rglob("*.py")):
            digest.update(source.relative_to(package).as_posix().encode() + b"\0")
            digest.update(source.read_bytes())
    return digest.hexdigest()


def _versions(backend: str) -> Iterator[str]:
    for library in (*_LIBRARIES[""], *_LIBRARIES.get(backend, ())):
        try:
            yield f"{library} {version(library)}"
        except PackageNotFoundError:  # it came without metadata
            yield library
