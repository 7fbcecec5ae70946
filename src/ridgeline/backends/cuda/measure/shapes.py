"""Shapes of real models, and runners over random weights that are made on the device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ridgeline.backends.cuda.measure.part import Part
from ridgeline.backends.cuda.model.weights import build
from ridgeline.backends.cuda.ranks.shard import Shard
from ridgeline.backends.cuda.runner import CudaRunner
from ridgeline.backends.interface import Setup
from ridgeline.model.shape.latent import Latent
from ridgeline.model.shape.model import Attention, Experts, Layer, Mlp, ModelArch, Rope
from ridgeline.model.shape.recurrent import Conv, Delta, Ssm

BLOCK_SIZE = 16


class Shape(NamedTuple):
    """Sizes of a model whose layers are equal."""

    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    vocab: int
    qkv_bias: bool = False

    @property
    def of_heads(self) -> tuple[int, int, int]:
        """Query heads, key heads, channels."""
        return self.heads, self.kv_heads, self.head_dim

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Return outputs and inputs of the matrices that a token goes through."""
        return {
            "qkv": ((self.heads + 2 * self.kv_heads) * self.head_dim, self.hidden),
            "o": (self.hidden, self.heads * self.head_dim),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "head": (self.vocab, self.hidden),
        }

    def arch(self) -> ModelArch:
        """Return the model."""
        rope = Rope(5e5, self.head_dim)
        mixer = Attention(
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rope=rope,
            qkv_bias=self.qkv_bias,
        )
        layers = (Layer(mixer, Mlp(self.inner)),) * self.layers
        return ModelArch(layers, self.hidden, self.vocab, 131072, 1e-5)


def _small(*layers: Layer) -> ModelArch:
    return ModelArch(layers, hidden_size=128, vocab_size=1000, max_position=131072, norm_eps=1e-5)


TINY = {
    "tiny": Shape(
        hidden=128, inner=256, heads=8, kv_heads=2, head_dim=16, layers=2, vocab=1000, qkv_bias=True
    )
}
_ATTENTION = Attention(8, 2, 16, Rope(1e4, 16))
_LATENT = Attention(8, 1, 48, Rope(1e4, 16), scale=0.15, latent=Latent(64, 64, 32, 32))
_RECURRENT = (
    Ssm(num_heads=8, head_dim=32, state_dim=16, num_groups=2, kernel=4),
    Delta(num_key_heads=2, num_value_heads=4, key_dim=32, value_dim=32, kernel=4),
    Conv(3),
)
_MIXTURE = Experts(8, 2, 64, shared=Mlp(64))
# Small models that together need every operation there is.
SMALL_ARCHS = {
    "tiny": TINY["tiny"].arch(),
    "latents and experts": _small(Layer(_LATENT, Mlp(256)), Layer(_LATENT, _MIXTURE)),
    "states": _small(*(Layer(one, Mlp(256)) for one in (*_RECURRENT, _ATTENTION))),
}
MODELS = {
    "llama3-8b": Shape(
        hidden=4096, inner=14336, heads=32, kv_heads=8, head_dim=128, layers=32, vocab=128256
    ),
    "qwen2.5-7b": Shape(
        hidden=3584,
        inner=18944,
        heads=28,
        kv_heads=4,
        head_dim=128,
        layers=28,
        vocab=152064,
        qkv_bias=True,
    ),
    "smollm2-1.7b": Shape(
        hidden=2048, inner=8192, heads=32, kv_heads=32, head_dim=64, layers=24, vocab=49152
    ),
}


def models(part: Part, *names: str) -> dict[str, Shape]:
    """Return the shapes of models by name, or a tiny one's."""
    return TINY if part.is_tiny else {name: MODELS[name] for name in names or MODELS}


def setup_of(
    dtype: str,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    num_blocks: int,
) -> Setup:
    """Return settings of a runner."""
    return Setup(
        dtype=dtype,
        kv_cache_dtype="f32" if dtype == "f32" else "bf16",
        block_size=BLOCK_SIZE,
        threads=1,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
    )


def random_runner(part: Part, shape: Shape, setup: Setup) -> CudaRunner:
    """Return a runner whose weights and cache are random: zeros would be faster to multiply."""
    arch = shape.arch()
    shapes = arch.matrix_shapes()

    def random(name: str) -> Tensor:
        size = shapes[name]
        if name.endswith("norm"):
            return torch.ones(size, device=part.device)
        return part.normal(*size, scale=0.5 / size[-1] ** 0.5)

    weights = build(arch, random, setup.dtype, part.device)
    runner = CudaRunner(Shard(arch), weights, setup, ops=part.ops)
    runner.cache.blocks.normal_()
    return runner
