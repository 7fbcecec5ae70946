"""Models whose weights are blocks: logits are the reference's, which reads the same blocks."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from ridgeline.backends.cpu.layout.pack import pack
from ridgeline.model.files.tensors import Checkpoint, Tensor
from tests.backends.cpu import twins
from tests.backends.runners import FORMATS, TOKENS, WIDE, Make, error, make, reference
from tests.tiny import changed, checkpoint, random_arrays

__all__ = ["make"]  # a fixture


def test_four_bits(make: Make) -> None:
    """The reference has the same weights, rounded: what is left is the activations' rounding."""
    arrays = {name: rounded(name, array) for name, array in random_arrays(WIDE).items()}
    wanted = reference(checkpoint(WIDE, arrays)).prompt_logits(TOKENS)
    got = make(checkpoint(WIDE), "int4").prompt_logits(TOKENS)
    assert error(got, wanted) < FORMATS["int4"].error


def rounded(name: str, array: NDArray[np.float32]) -> NDArray[np.float32]:
    """What 4 bits leave of a matrix; of the head, which asks for more, 8 bits."""
    if array.ndim == 1 or name == "embed":
        return array
    tensor = Tensor(name, "F32", array.shape, array.view(np.uint8))
    packed = pack(tensor, "auto" if name == "head" else "int4")
    weights = twins.weights(packed.kind, packed.data)[: len(array), : array.shape[1]]
    return weights.astype(np.float32)


def blocks_of_32(dtypes: dict[str, str]) -> Checkpoint:
    """A model whose matrices are encoded, by the last part of their names."""
    tensors = {}
    for name, array in random_arrays(WIDE).items():
        dtype = dtypes.get(name.split(".")[-1], "F32")
        kind = gguf.GGMLQuantizationType[dtype]
        data = np.atleast_2d(array if dtype == "F32" else gguf.quants.quantize(array, kind))
        tensors[name] = Tensor(name, dtype, array.shape, data.view(np.uint8))
    return Checkpoint(Path("tiny"), WIDE, tensors, (2,), 1, (), None, {})


@pytest.mark.parametrize("head", ["Q4_0", "Q8_0"])
def test_the_files_own_blocks(make: Make, head: str) -> None:
    """The reference reads the same blocks."""
    dtypes = {"q": "Q4_0", "k": "Q4_1", "v": "Q5_0", "o": "Q4_1", "gate": "Q8_0", "up": "Q4_0"}
    model = blocks_of_32(dtypes | {"down": "Q5_0", "embed": "Q8_0", "head": head})
    wanted = reference(model).prompt_logits(TOKENS[:40])
    runner = make(model)
    assert set(runner.weights.kinds) == {"w4", "s4", "s5", "w8"}
    assert error(runner.prompt_logits(TOKENS[:40]), wanted) < 0.06


BROAD = changed(WIDE, hidden_size=256, size=512, num_heads=8)


def blocks_of_256(dtypes: dict[str, str]) -> Checkpoint:
    """A model of random blocks, whose weights are about as large as a model's."""
    rng, tensors = np.random.default_rng(3), {}
    for name, array in random_arrays(BROAD).items():
        dtype = dtypes.get(name.split(".")[-1], "F32")
        data = np.atleast_2d(array).view(np.uint8)
        if dtype != "F32":
            block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]][1]
            shape = (len(array), array.shape[1] // 256, block_bytes)
            blocks = rng.integers(0, 256, shape, np.uint8)
            middle = {"Q4_K": 7.5, "Q5_K": 15.5}.get(dtype)  # offsets take it off again
            scales = np.float16([4e-5] if middle is None else [2e-3 / middle, 2e-3])
            blocks[:, :, slice(208, 210) if middle is None else slice(4)] = scales.view(np.uint8)
            data = blocks.reshape(len(array), -1)
        tensors[name] = Tensor(name, dtype, array.shape, data)
    return Checkpoint(Path("tiny"), BROAD, tensors, (2,), 1, (), None, {})


def test_the_files_own_blocks_of_256(make: Make) -> None:
    """Also the reference reads them. A head in 6 bits is widened: only so it has a proxy."""
    dtypes = {"q": "Q4_K", "k": "Q5_K", "v": "Q6_K", "o": "Q6_K", "gate": "Q4_K", "up": "Q5_K"}
    model = blocks_of_256(dtypes | {"down": "Q6_K", "head": "Q6_K"})
    wanted = reference(model).prompt_logits(TOKENS[:40])
    runner = make(model)
    assert set(runner.weights.kinds) == {"k4", "k5", "k6", "w8", "s5"}
    assert error(runner.prompt_logits(TOKENS[:40]), wanted) < 0.06


@pytest.mark.parametrize(
    ("head", "kind"), [("Q4_0", "s4"), ("Q4_1", "w4"), ("Q8_0", "w8"), ("F32", "w8")]
)
def test_four_bits_for_the_head_only_if_the_file_has_them(make: Make, head: str, kind: str) -> None:
    assert make(blocks_of_32({"head": head}), "int4").weights.head.kind == kind
