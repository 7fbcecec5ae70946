"""The twins with sums of one order, like those of kernels on a GPU: slow.

Torch's own products sum in an order that depends on the number of rows. Here a sum has the same
bits in any batch, so that tests can compare bits of rows in different ones.
"""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location

import torch
from torch import Tensor

from ridgeline.backends.cuda.measure.twins import layers
from ridgeline.backends.cuda.measure.twins.draws import adjust, draw, rank
from ridgeline.backends.cuda.measure.twins.recurrent import convolve, remember, scan

_MOST_PRODUCTS = 1 << 24  # that are there at a time


def dots(a: Tensor, b: Tensor) -> Tensor:
    """Return the sums of ``a`` ``[..., M, K]`` times ``b`` ``[..., N, K]``, ``[..., M, N]``."""
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


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype | None = None
) -> Tensor:
    """Return ``x W^T + bias`` as the twin does."""
    out = dots(x.float(), weight.float())
    return (out if bias is None else out + bias).to(dtype or x.dtype)


# The twins' own text again, over these sums: the twins themselves stay as they are.
_spec = spec_from_file_location(f"{__name__}_layers", layers.__file__)
assert _spec is not None
assert _spec.loader is not None
_layers = module_from_spec(_spec)
_spec.loader.exec_module(_layers)
vars(_layers).update(dots=dots, product=product)

add_low_rank, add_norm = _layers.add_low_rank, _layers.add_norm
attend, copy_blocks, gate = _layers.attend, _layers.copy_blocks, _layers.gate
grouped_product, norm = _layers.grouped_product, _layers.norm
packed_product, rope_and_cache = _layers.packed_product, _layers.rope_and_cache

__all__ = [
    "add_low_rank", "add_norm", "adjust", "attend", "convolve", "copy_blocks", "draw", "gate",
    "grouped_product", "norm", "packed_product", "product", "rank", "remember", "rope_and_cache",
    "scan",
]  # fmt: skip
