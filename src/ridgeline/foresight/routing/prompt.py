"""A prompt as a router sees it: bytes, cut into pieces with chained keys. It has no tokenizer.

Prompts that begin alike have the same first keys, as blocks of tokens have in the engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

PIECE_BYTES = 512  # that a key stands for: about eight blocks of a cache
_MAX_KEYS = 4096  # of one prompt: 2 MiB of it
# What becomes a prompt, in the words of all dialects, as chat templates order it.
_FIELDS = (
    *("tools", "system", "instructions", "messages", "input_prefix", "input", "prompt"),
    *("query", "documents", "text_1", "text_2", "content", "suffix"),
)


class PromptKeys(NamedTuple):
    """How much there is to read, and what it begins with.

    Attributes:
        size: of the prompt, in any unit; a key stands for as many as ``Placement`` was told.
        keys: one for each whole piece; each depends on all that is before it.
    """

    size: int
    keys: tuple[bytes, ...] = ()


NOTHING = PromptKeys(0)


def prompt_of(fields: Mapping[str, Any], salt: str = "") -> PromptKeys:
    """Return what a request's body becomes a prompt of, in bytes.

    Prompts with another ``salt`` have no key in common.
    """
    data = b"\x1e".join(_parts(fields))
    key, keys = salt.encode(), list[bytes]()
    end = min(len(data) // PIECE_BYTES, _MAX_KEYS) * PIECE_BYTES
    for begin in range(0, end, PIECE_BYTES):
        key = blake2b(key + data[begin : begin + PIECE_BYTES], digest_size=16).digest()
        keys.append(key)
    return PromptKeys(len(data), tuple(keys))


def _parts(fields: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield the texts of a body that are read; of a list, each entry is a part."""
    for name in _FIELDS:
        value = fields.get(name)
        entries: Iterable[Any] = value if isinstance(value, list) else (value,)
        for one in entries:
            if one is not None:
                text = one if isinstance(one, str) else json.dumps(one, separators=(",", ":"))
                yield text.encode(errors="surrogatepass")
