"""What a block of the KV cache holds, once it is published."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, eq=False, weakref_slot=True)
class Content:
    """What a published block holds: these tokens, after the content of the parent block.

    A first block has its request's root for a parent (``Request.cache_root``). Content is known
    while anybody holds it, as a child does: a window may leave a block without its parent's.
    """

    key: bytes
    parent: Content | bytes
    tokens: tuple[int, ...]
