"""Products of rows with rows, as twins make them: by torch, or always in the same order.

Torch's own products sum in an order that depends on the number of rows. The kernels on a GPU do not
(docs/log/gpu.md). Where tests compare bits of rows in different batches, twins must not either.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from ridgeline.backends.cuda.device import ORDERED, TWINS

_MOST_PRODUCTS = 1 << 24  # that are there at a time


def are_ordered() -> bool:
    """Whether a sum is to have the same bits in any batch: slow, for tests."""
    return os.environ.get(TWINS) == ORDERED


def dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the sums of ``a`` ``[..., M, K]`` times ``b`` ``[..., N, K]``, ``[..., M, N]``."""
    if not are_ordered():
        return a @ b.mT
    at_once = max(1, _MOST_PRODUCTS // max(1, a.numel()))
    parts = [by_halves(a[..., :, None, :] * c[..., None, :, :]) for c in b.split(at_once, -2)]
    return torch.cat(parts, -1)


def by_halves(x: Tensor) -> Tensor:
    """Return the sums of the last axis, whose halves are added up until one number is left."""
    size = x.shape[-1]
    x = torch.nn.functional.pad(x, (0, (1 << (size - 1).bit_length()) - size))
    while x.shape[-1] > 1:
        first, second = x.chunk(2, -1)
        x = first + second
    return x[..., 0]
