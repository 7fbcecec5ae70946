"""Which layers share a block table, of published models and of small ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ridgeline.core.cache.kvcache import KVCache
from ridgeline.model.files.families import arch_from_config
from ridgeline.model.shape.cache_groups import CacheGroup, cache_groups, one_group, places, spans
from ridgeline.model.shape.model import ModelArch
from tests.model.files.test_published import CONFIGS, OTHERS
from tests.tiny import ARCHS, BY_LAYER, ENCODERS, PLAIN, RECURRENT, changed


def published(name: str) -> ModelArch:
    config = {**(CONFIGS | OTHERS)[name]["config"]}
    config.pop("quantization_config", None)
    return arch_from_config(config, {}, name)


def test_models_of_one_reach_have_one_group() -> None:
    assert cache_groups(PLAIN) == one_group(PLAIN) == (CacheGroup(None, (0, 1)),)
    assert cache_groups(changed(PLAIN, windows=(5, 5))) == (CacheGroup(5, (0, 1)),)


def test_layers_of_a_reach_that_need_more_than_a_block_form_several_groups() -> None:
    arch = changed(PLAIN, windows=(5, None, 5, 5, None, 7, 5))
    assert cache_groups(arch) == (
        CacheGroup(None, (1,)),
        CacheGroup(None, (4,)),
        CacheGroup(7, (5,)),
        *(CacheGroup(5, (i,)) for i in (0, 2, 3, 6)),
    )
    arch = changed(PLAIN, windows=(5, None, 5, 5, None, 5, 5))
    assert cache_groups(arch) == (
        CacheGroup(None, (1, 4)),
        CacheGroup(5, (0, 2)),
        CacheGroup(5, (3, 5)),
        CacheGroup(5, (6,)),
    )


def test_a_block_holds_the_largest_layer() -> None:
    small = replace(PLAIN.layers[0].known_attention, num_kv_heads=1)
    layers = changed(PLAIN, windows=(5, 5, 5)).layers
    arch = replace(PLAIN, layers=(replace(PLAIN.layers[0], mixer=small), *layers))
    assert cache_groups(arch) == (CacheGroup(None, (0,)), *(CacheGroup(5, (i,)) for i in (1, 2, 3)))


def test_a_layer_that_reads_anothers_keys_counts_for_its_reach() -> None:
    arch = BY_LAYER["shared keys and values"]
    groups = cache_groups(arch)
    assert groups == (CacheGroup(None, (1,)), CacheGroup(5, (0,)), CacheGroup(5, (2,)))
    assert places(groups, arch) == [1, 0, 2, 0, 2, 0]
    wide = replace(arch.layers[4].known_attention, window=9)
    arch = replace(
        arch, layers=(*arch.layers[:4], replace(arch.layers[4], mixer=wide), arch.layers[5])
    )
    assert CacheGroup(9, (2,)) in cache_groups(arch)
    wide = replace(wide, window=None)
    arch = replace(
        arch, layers=(*arch.layers[:4], replace(arch.layers[4], mixer=wide), arch.layers[5])
    )
    assert [group.window for group in cache_groups(arch)] == [None, None, 5]


@pytest.mark.parametrize("name", [*ARCHS, *BY_LAYER, *RECURRENT, *ENCODERS])
def test_every_cached_layer_is_in_one_group_and_blocks_are_large_enough(name: str) -> None:
    arch = (ARCHS | BY_LAYER | RECURRENT | ENCODERS)[name]
    groups = cache_groups(arch)
    assert sorted(i for group in groups for i in group.layers) == [*arch.cached_layers]
    for group in groups:
        for i in group.layers:
            window = arch.layers[i].known_attention.window
            assert group.window is None or (window is not None and window <= group.window)
    if arch.num_state_values or arch.reads_whole:
        assert groups == one_group(arch)


@pytest.mark.parametrize(
    ("name", "count", "at_once", "in_pieces"),
    [
        ("gemma-3-1b", 7, 4.42, 5.46),
        ("gemma-3-4b-it", 7, 4.34, 5.30),
        ("gemma-2-2b", 2, 1.68, 1.75),
        ("gemma-4-31b", 11, 5.66, 7.46),
        ("gpt-oss-20b", 2, 1.87, 1.96),
        ("olmo-3-7b", 4, 2.56, 2.81),
        ("command-r7b", 4, 2.56, 2.81),
        ("mistral-7b-v0.1", 1, 5.32, 7.09),
    ],
)
def test_how_much_less_cache_32k_tokens_take(
    name: str, count: int, at_once: float, in_pieces: float
) -> None:
    """Against one table of all layers; with steps of 2,048 tokens and of 512."""
    arch = published(name)
    groups = cache_groups(arch)
    assert len(groups) == count
    for step, ratio in ((2048, at_once), (512, in_pieces)):
        values = [
            max(sum(arch.layers[i].known_attention.kv_size for i in group.layers) for group in of)
            * KVCache(0, 16, windows=tuple(g.window for g in of)).most_blocks(32_768, step)
            for of in (one_group(arch), groups)
        ]
        assert values[0] / values[1] == pytest.approx(ratio, abs=0.01)


def test_parts_of_a_group_lie_behind_each_other_and_each_group_begins_anew() -> None:
    groups = (CacheGroup(None, (0, 2)), CacheGroup(8, (1, 3, 4)))
    found = spans(groups, {0: 5, 1: 2, 2: 7, 3: 3, 4: 1})
    assert found == {0: (0, 5), 2: (5, 12), 1: (0, 2), 3: (2, 5), 4: (5, 6)}
