"""Tensors whose rows hold nothing but their own number: what a reader makes of them shows its ways.

Where a file's rows go is told by the code that reads them; nothing here knows a family.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray

from ridgeline.model.files.tensors import Tensor

Ints = NDArray[np.int32]


def numbered(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return matrices ``[..., out, in]`` in F32 whose rows, all together, hold their number."""
    num_rows = int(np.prod(shape[:-1]))
    return Tensor.converted(name, "F32", shape, 4 * num_rows, partial(_numbers, num_rows))


def numbered_vector(name: str, size: int) -> Tensor:
    """Return a vector of F32 that counts its values from 0."""
    values = np.arange(size, dtype=np.float32)
    return Tensor(name, "F32", (size,), values.reshape(-1, 1).view(np.uint8))


def numbers_of(tensor: Tensor) -> Ints:
    """Return which rows of the file's tensor a reader has put into one that it made of it."""
    if tensor.make is None:
        return tensor.to_f32().reshape(-1).astype(np.int32)
    return tensor.data.view(np.int32).reshape(-1)


def _numbers(rows: int) -> NDArray[np.uint8]:
    return np.arange(rows, dtype=np.int32).reshape(-1, 1).view(np.uint8)
