"""Costs: the formulas against real arrays and against a forward pass that counts.

Counted is every matrix product of a plain numpy decoder: the linear maps, the head, and attention's
scores and weighted values, over the keys that are visible to each token.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ridgeline.model.cost import costs
from ridgeline.model.shape.model import Attention, Layer, Mlp, ModelArch, Rope
from tests.tiny import BY_LAYER

_ATTENTION = Attention(num_heads=4, num_kv_heads=2, head_dim=6, rope=Rope(theta=1e4, dim=6))
ARCH = ModelArch(
    layers=tuple(Layer(replace(_ATTENTION, window=window), Mlp(20)) for window in (None, 5, 1)),
    hidden_size=12,
    vocab_size=50,
    max_position=64,
    norm_eps=1e-5,
    tied_embeddings=True,
)
SMOLLM2 = ModelArch(
    layers=(Layer(Attention(9, 3, 64, Rope(theta=1e5, dim=64)), Mlp(1536)),) * 30,
    hidden_size=576,
    vocab_size=49152,
    max_position=8192,
    norm_eps=1e-5,
    tied_embeddings=True,
)


def with_attention(**facts: Any) -> ModelArch:
    layers = [replace(layer, mixer=replace(layer.mixer, **facts)) for layer in ARCH.layers]
    return replace(ARCH, layers=tuple(layers))


VARIANTS = [
    ARCH,
    replace(ARCH, tied_embeddings=False),
    with_attention(qkv_bias=True, o_bias=True),
    with_attention(qk_norm="head"),
    with_attention(v_is_k=True, v_norm=True),
    replace(
        ARCH,
        layers=(
            *ARCH.layers,
            replace(ARCH.layers[1], mixer=replace(ARCH.layers[1].mixer, kv_of=1)),
        ),
    ),
    replace(
        ARCH, layers=tuple(replace(layer, input_size=5, out_scale=True) for layer in ARCH.layers)
    ),
]
# (start, num_tokens, rows): decodes and chunks, short of, across and beyond the window of 5
WORKS = [
    [(0, 1, 1)],
    [(9, 1, 1), (3, 1, 1), (4, 1, 1)],
    [(0, 7, 1)],
    [(0, 3, 0), (3, 4, 0), (20, 11, 1), (6, 1, 1)],
    [(0, 6, 6)],
]


class Counter:
    """A decoder's matrix products, counted, and the keys and values that they read."""

    def __init__(self, arch: ModelArch) -> None:
        self.arch = arch
        self.flops = 0
        self.arrays = {
            name: np.zeros(shape, np.float32) for name, shape in arch.matrix_shapes().items()
        }
        self.kv_values_read = 0

    def matmul(self, a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float32]:
        (rows, inner), (_, columns) = a.shape, b.shape
        self.flops += 2 * rows * inner * columns
        return a @ b

    def linear(self, x: NDArray[np.float32], name: str) -> NDArray[np.float32]:
        return self.matmul(x, self.arrays[name].T)

    def step(self, work: list[tuple[int, int, int]]) -> None:
        """Run the shapes of one step; the values do not matter, so norms are left out."""
        arch = self.arch
        num_tokens, num_rows = (sum(w[i] for w in work) for i in (1, 2))
        x = np.zeros((num_tokens, arch.hidden_size), np.float32)
        if arch.input_size:
            self.linear(x, "inputs_proj")
        for i, layer in enumerate(arch.layers):
            mixer, window = layer.mixer, layer.mixer.window
            prefix = f"layers.{i}."
            q, *_ = (self.linear(x, prefix + name) for name in mixer.projections)
            q = q.reshape(num_tokens, mixer.num_heads, mixer.head_dim)
            row = 0
            for start, count, _ in work:
                seen: set[int] = set()
                for position in range(start, start + count):
                    visible = [
                        p
                        for p in range(start + count)
                        if p <= position and (window is None or position - p < window)
                    ]
                    seen.update(visible)
                    keys = np.zeros((len(visible), mixer.head_dim), np.float32)
                    for head in range(mixer.num_heads):
                        scores = self.matmul(q[row, head][None], keys.T)
                        self.matmul(scores, keys)
                    row += 1
                self.kv_values_read += 2 * len(seen) * mixer.kv_size
            self.linear(q.reshape(num_tokens, -1), prefix + "o")
            inner = self.linear(x, prefix + "gate") * self.linear(x, prefix + "up")
            x = self.linear(inner, prefix + "down")
            if layer.input_size:
                x = self.linear(self.linear(x, prefix + "input_gate"), prefix + "input_proj")
        if num_rows:
            self.linear(x[:num_rows], "embed" if arch.tied_embeddings else "head")


@pytest.mark.parametrize("arch", VARIANTS)
def test_weights_are_the_arrays(arch: ModelArch) -> None:
    arrays = [np.empty(shape, np.float16) for shape in arch.matrix_shapes().values()]
    assert costs.weight_params(arch) == sum(array.size for array in arrays)
    assert costs.weight_bytes(arch, 2) == sum(array.nbytes for array in arrays)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
def test_the_cache_is_its_array(dtype: type[np.generic]) -> None:
    num_tokens = 7
    cache = np.empty((ARCH.num_layers, 2, num_tokens, 2, 6), dtype)
    assert num_tokens * costs.kv_bytes_per_token(ARCH, cache.itemsize) == cache.nbytes


@pytest.mark.parametrize("arch", VARIANTS)
@pytest.mark.parametrize("work", WORKS)
def test_a_step_costs_what_a_forward_pass_counts(
    arch: ModelArch, work: list[tuple[int, int, int]]
) -> None:
    counter = Counter(arch)
    counter.step(work)
    num_tokens, num_rows = (sum(item[i] for item in work) for i in (1, 2))
    of_attention = [costs.attention_flops(arch, start, count) for start, count, _ in work]
    flops = costs.linear_flops(arch, num_tokens) + costs.head_flops(arch, num_rows)
    assert flops + sum(of_attention) == counter.flops
    read = [costs.kv_read_bytes(arch, start, count, 2) for start, count, _ in work]
    assert sum(read) == counter.kv_values_read * 2


def test_the_cache_has_the_layers_with_keys_and_values_of_their_own() -> None:
    arch = BY_LAYER["shared keys and values"]
    assert arch.cached_layers == (0, 1, 2)
    assert costs.kv_bytes_per_token(arch, 4) == 4 * 2 * (2 * 8 + 16 + 2 * 8)
    alone = [replace(layer, mixer=replace(layer.mixer, kv_of=None)) for layer in arch.layers]
    every = replace(arch, layers=tuple(alone))
    assert costs.kv_bytes_per_token(every, 4) == 2 * costs.kv_bytes_per_token(arch, 4)
    # What is read does not shrink.
    assert costs.kv_read_bytes(arch, 9, 3, 4) == costs.kv_read_bytes(every, 9, 3, 4)


def test_chunks_compute_what_the_whole_prompt_computes() -> None:
    whole = costs.attention_flops(ARCH, 0, 40)
    assert whole == sum(costs.attention_flops(ARCH, 8 * i, 8) for i in range(5))


def test_a_known_model_has_its_known_size() -> None:
    assert costs.weight_params(SMOLLM2) == 134_515_008
    assert costs.kv_bytes_per_token(SMOLLM2, 4) == 46_080
