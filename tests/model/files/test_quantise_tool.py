"""tools/quantise.py: what it writes is read as weights near the ones that it was given."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from tools.quantise import FORMATS

from ridgeline.model.files.safetensors_dir import load_directory
from tests.model.files.quantizers import Example
from tests.model.files.test_quantized import Maker, directory, model

# Root mean square of what is lost, over that of normal weights.
MOST = {
    "gptq-8": 0.01, "w8a8": 0.01, "int8": 0.01, "fp8": 0.035, "fp8-blocks": 0.035,
    "gptq-4": 0.13, "awq": 0.12, "w4a16": 0.13, "nf4": 0.11, "hqq": 0.12, "mxfp4": 0.14,
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_read_is_near_what_was_given(name: str, make_directory: Maker) -> None:
    given: list[NDArray[np.float32]] = []

    def make(rng: np.random.Generator, shape: tuple[int, int]) -> Example:
        given.append(rng.normal(0, 0.02, shape).astype(np.float32))
        parts, config = FORMATS[name](given[-1])
        return Example(parts, given[-1], config)

    config, stored, wanted = model(make)
    found = load_directory(directory(make_directory, config, stored, "m"))
    assert found.quantization
    matrices = [t for n, t in found.tensors.items() if n.startswith("layers") and len(t.shape) > 1]
    assert len(matrices) == len(given) == 7
    for tensor in matrices:
        lost = tensor.to_f32() - wanted[tensor.name]
        share = float(np.sqrt((lost**2).mean() / (wanted[tensor.name] ** 2).mean()))
        assert MOST[name] / 4 < share < MOST[name]
