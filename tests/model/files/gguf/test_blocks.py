"""The bytes of blocks: what is read is written back bit for bit, in every type."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.model.files.gguf.blocks import k_numbers, k_rows, simple_numbers, simple_rows
from ridgeline.model.files.gguf.file import BLOCK_SIZES

ROWS, BLOCKS = 5, 3


def any_bytes(dtype: str) -> np.ndarray:
    size = BLOCK_SIZES[dtype][1]
    return np.random.default_rng(1).integers(0, 256, (ROWS, BLOCKS * size), np.uint8)


@pytest.mark.parametrize("dtype", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "IQ4_NL"])
def test_blocks_of_32_are_written_as_they_were_read(dtype: str) -> None:
    data = any_bytes(dtype)
    assert (simple_rows(dtype, *simple_numbers(dtype, data)) == data).all()


@pytest.mark.parametrize("dtype", ["Q4_K", "Q5_K", "Q6_K"])
def test_blocks_of_256_are_written_as_they_were_read(dtype: str) -> None:
    data = any_bytes(dtype)
    assert (k_rows(dtype, *k_numbers(dtype, data)) == data).all()
