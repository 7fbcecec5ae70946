"""Sequences in a cache without scheduler or backend: computing is only said to have happened."""

from __future__ import annotations

from collections.abc import Sequence as Listing
from typing import Any

from ridgeline.core.cache.kvcache import KVCache
from ridgeline.core.request import Sequence
from tests.core.harness import make_request

NEW_ID = iter(range(10**6))


def new(tokens: Listing[int], *, root: bytes = b"", **params: Any) -> Sequence:
    return make_request(next(NEW_ID), tokens, cache_root=root, **params).sequences[0]


def compute(kv: KVCache, seq: Sequence, upto: int | None = None) -> None:
    """Pretend that a backend has computed the tokens before ``upto`` (all, if not said)."""
    end = len(seq.tokens) if upto is None else upto
    seq.num_pending -= end - seq.num_computed
    seq.num_computed = end
    if end >= seq.publish_at:
        kv.publish(seq)


def admitted(kv: KVCache, tokens: Listing[int], **params: Any) -> Sequence:
    """Return a sequence that is admitted and computed whole."""
    seq = new(tokens, **params)
    assert kv.admit(seq, len(tokens))
    compute(kv, seq)
    return seq


def forked(kv: KVCache, parent: Sequence) -> Sequence:
    child = Sequence(parent.request, 1, list(parent.tokens), (0,))
    kv.fork(parent, child)
    return child


def append(seq: Sequence, token: int) -> None:
    seq.tokens.append(token)
    seq.num_pending += 1


def state(kv: KVCache, *seqs: Sequence) -> tuple[object, ...]:
    """Return everything that a refused call must leave as it was."""
    pool = kv.pool
    numbers = (
        *("table", "others", "num_computed", "num_pending", "capacity"),
        "publish_at",
    )
    of_seqs = [[len(seq.chain), *(getattr(seq, name) for name in numbers)] for seq in seqs]
    content = list(pool.content)
    index = [dict(of_group) for of_group in pool.index]
    return list(pool.refs), list(pool.free), index, content, list(kv.copies), of_seqs
