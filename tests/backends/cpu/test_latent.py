"""Latent attention in the sizes of published models: what its cache takes, and its kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ridgeline.backends.cpu.layout.latent import num_groups
from ridgeline.backends.cpu.layout.model_sizes import model_sizes
from ridgeline.backends.cpu.layout.shapes import TOKENS
from ridgeline.model.cost.costs import kv_bytes_per_token
from ridgeline.model.files.families import arch_from_config
from ridgeline.model.shape.latent import Latent
from ridgeline.model.shape.model import Attention, Layer, Mlp, Rope
from tests.backends.runners import NUM_BLOCKS, Make, error, make, reference
from tests.backends.runners import TOKENS as TEXT
from tests.model.files.test_published import CONFIGS
from tests.tiny import PLAIN, checkpoint

__all__ = ["make"]  # a fixture
# Heads as in DeepSeek V2-Lite and V3.
PUBLISHED = Attention(
    5, 1, 192, Rope(1e4, 64), scale=0.05, latent=Latent(q_rank=0, kv_rank=512, nope_dim=128,
                                                         v_dim=128),
)  # fmt: skip


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-r1", "kimi-k2", "glm-4.7-flash"])
def test_a_token_takes_one_vector_of_a_published_model(name: str) -> None:
    """576 channels, stored once, and in int8 a scale for each 32 of them."""
    arch = arch_from_config(CONFIGS[name]["config"], {}, name)
    taken = {
        cache: sum(layer.cache_bytes for layer in model_sizes(arch, "auto", cache).layers)
        / TOKENS
        / arch.num_layers
        for cache in ("f32", "f16", "int8")
    }
    assert taken == {"f32": 4 * 576, "f16": 2 * 576, "int8": 576 + 4 * 576 // 32}
    for cache, value_bytes in (("f32", 4), ("f16", 2)):
        assert taken[cache] * arch.num_layers == kv_bytes_per_token(arch, value_bytes)


def test_heads_stand_in_as_few_groups_as_go() -> None:
    assert [num_groups(heads) for heads in (1, 2, 4, 5, 6, 7, 16, 20, 64, 128)] == [
        1, 1, 1, 5, 2, 7, 4, 5, 16, 32,
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["f32, f16 cache", "int8"])
def test_heads_as_large_as_published_ones(make: Make, kind: str) -> None:
    arch = replace(PLAIN, layers=(Layer(PUBLISHED, Mlp(40)),))
    model = checkpoint(arch)
    runner: Any = make(model, kind, threads=2)
    of_a_value = {"f32, f16 cache": 2, "int8": 1 + 4 / 32}[kind]
    assert runner.cache.nbytes == NUM_BLOCKS * 16 * 576 * of_a_value
    whole = runner.prompt_logits(TEXT)
    assert error(whole, reference(model).prompt_logits(TEXT)) < {2: 0.003}.get(of_a_value, 0.12)
    runner.cache[:] = 0
    parts = [runner.prompt_logits(TEXT[i : i + 3], i) for i in range(0, 96, 3)]
    assert (np.concatenate(parts) == whole).all()
