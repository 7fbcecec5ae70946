"""What a cache forgets when its memory was given back: all that later prompts could share."""

from __future__ import annotations

import pytest

from ridgeline.core.cache.kvcache import KVCache
from tests.core.cache.test_states import caches, read_whole
from tests.core.kv import admitted, new


@pytest.mark.parametrize("windows", [(None,), (None, 6), (6,)])
def test_nothing_is_found_and_all_blocks_are_free(windows: tuple[int | None, ...]) -> None:
    kv = KVCache(32, 4, windows=windows)
    seq = admitted(kv, range(20))
    kv.release(seq)
    assert kv.num_cached(new(range(20))) > 0
    kv.forget()
    kv.check([])
    assert kv.num_cached(new(range(20))) == 0
    assert (len(kv.pool.free), kv.pool.num_indexed, len(kv.pool.by_key)) == (32, 0, 0)
    kv.release(admitted(kv, range(20)))
    assert kv.num_cached(new(range(20))) > 0
    kv.check([])


def test_states_are_forgotten_too() -> None:
    kv, states = caches(2, 4)
    read_whole(kv, range(40))
    assert states.checkpoints
    kv.forget()
    assert not states.checkpoints
    kv.check([])
    assert kv.num_cached(new(range(40))) == 0
    assert read_whole(kv, range(40)), "it is read and kept again"
