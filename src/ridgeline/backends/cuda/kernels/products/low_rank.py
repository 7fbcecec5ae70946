"""What adapters add to products (LoRA; Hu et al., 2021), for rows of any adapters side by side.

Tiles are those of ``grouped``: each has rows of one adapter. Where its matrices lie is read from a
table on the device, so a captured graph serves adapters that come later. A row adds its inputs in
one order, as in ``product``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.backends.cuda.kernels.launching import launch
from ridgeline.backends.cuda.kernels.products.plain import tile_sums

OUTPUTS = 64
RANKS, SHRINK_INPUTS, EXPAND_INPUTS = 64, 128, 64
WARPS, STAGES = 4, 4
MANY_WARPS = 8  # which expand takes for more than 16 rows: four would spill what they add to


@triton.jit
def matrix_words(words, slot, number):
    """Return where the words of an adapter's matrix are: ``model.adapters.WORDS``."""
    return tl.load(words + slot).to(tl.pointer_type(tl.int64)) + number * 3


@triton.jit(do_not_specialize=["first"])
def shrink_kernel(
    x, low, words, order, offsets, tile_expert, tile_begin, first, K, x_stride, low_stride, room,
    ROWS: tl.constexpr, RANKS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of ``low^T = A x^T`` of one of some matrices, by rows of tokens."""
    slot = tl.load(tile_expert + tl.program_id(1)).to(tl.int64)
    if slot < 0:
        return
    at = matrix_words(words, slot, first + tl.program_id(2))
    rank = tl.load(at) * 16
    r = tl.program_id(0) * RANKS + tl.arange(0, RANKS)
    in_r = r < rank
    place = tl.load(tile_begin + tl.program_id(1)) + tl.arange(0, ROWS)
    in_m = place < tl.load(offsets + slot + 1)
    token = tl.load(order + place, mask=in_m, other=0).to(tl.int64)
    a = tl.multiple_of(tl.load(at + 1).to(x.dtype), 16)
    a_at, x_at = a + r[:, None].to(tl.int64) * K, x + token[None, :] * x_stride
    acc = tile_sums(a_at, x_at, in_r, in_m, K, ROWS, RANKS, INPUTS)
    to = low + token[None, :] * low_stride + tl.program_id(2) * room + r[:, None]
    tl.store(to, acc, mask=in_r[:, None] & in_m[None, :])


@triton.jit(do_not_specialize=["number", "low_begin", "begin"])
def expand_kernel(
    low, out, words, order, offsets, tile_expert, tile_begin, number, N, low_stride, low_begin,
    out_stride, begin, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Add a tile of ``B low^T`` to the columns of ``out`` that begin at ``begin``."""
    slot = tl.load(tile_expert + tl.program_id(1)).to(tl.int64)
    if slot < 0:
        return
    at = matrix_words(words, slot, number)
    rank = tl.load(at) * 16
    if rank == 0:  # this adapter leaves the matrix as it is
        return
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    place = tl.load(tile_begin + tl.program_id(1)) + tl.arange(0, ROWS)
    in_n, in_m = n < N, place < tl.load(offsets + slot + 1)
    token = tl.load(order + place, mask=in_m, other=0).to(tl.int64)
    b = tl.multiple_of(tl.load(at + 2).to(low.dtype), 16)
    b_at, low_at = b + n[:, None] * rank, low + token[None, :] * low_stride + low_begin
    acc = tile_sums(b_at, low_at, in_n, in_m, rank, ROWS, OUTPUTS, INPUTS)
    to = out + token[None, :] * out_stride + begin + n[:, None]
    inside = in_n[:, None] & in_m[None, :]
    tl.store(to, tl.load(to, mask=inside, other=0.0).to(tl.float32) + acc, mask=inside)


def add_low_rank(out, x, met, plan, first, sizes):
    """Add what adapters do to rows of some products: see the twin.

    ``met`` also has tiles, as of ``grouped_product``; of ``plan`` are read ``words`` and
    ``max_lora_rank``.
    """
    room = triton.cdiv(plan.max_lora_rank, 16) * 16
    low = torch.empty((len(x), len(sizes) * room), dtype=x.dtype, device=x.device)
    lists = plan.words, met.order, met.offsets, met.tile_expert, met.tile_begin
    tiles, narrow = len(met.tile_expert), x.element_size() // 2  # float32 takes twice the room
    launch(
        shrink_kernel, (triton.cdiv(room, RANKS), tiles, len(sizes)),
        x, low, *lists, first, x.shape[1], x.stride(0), low.stride(0), room,
        ROWS=met.rows, RANKS=RANKS, INPUTS=SHRINK_INPUTS // max(1, narrow),
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    begin = 0
    for i, size in enumerate(sizes):
        launch(
            expand_kernel, (triton.cdiv(size, OUTPUTS), tiles),
            low, out, *lists, first + i, size, low.stride(0), i * room, out.stride(0), begin,
            ROWS=met.rows, OUTPUTS=OUTPUTS, INPUTS=EXPAND_INPUTS // max(1, narrow),
            num_warps=WARPS if met.rows == 16 else MANY_WARPS, num_stages=STAGES,
        )  # fmt: skip
        begin += size
