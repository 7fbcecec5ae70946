"""Copies of whole cache blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096


@triton.jit
def move_kernel(
    source, target, source_of, target_of, count, source_stride, target_stride,
    GATHERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move BLOCK values of one block: out of the cache if GATHERS, else into it."""
    nth = tl.program_id(0).to(tl.int64)
    old, new = nth, nth
    if GATHERS:
        old = tl.load(source_of + nth)
    else:
        new = tl.load(target_of + nth)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + old * source_stride + i, mask=i < count)
    tl.store(target + new * target_stride + i, values, mask=i < count)


def copy_blocks(cache, old, new):
    """Copy blocks, through a copy of all that are read: see the twin."""
    buffer = torch.empty((len(old), cache.shape[1]), dtype=cache.dtype, device=cache.device)
    for source, target, gathers in ((cache, buffer, True), (buffer, cache, False)):
        move_kernel[(len(old), triton.cdiv(cache.shape[1], BLOCK))](
            source, target, old, new, cache.shape[1], source.stride(0), target.stride(0),
            GATHERS=gathers, BLOCK=BLOCK,
        )  # fmt: skip
