"""Products with matrices of 16 or 32 bits. Every tile adds a row's inputs in the same order.

On Hopper the matrix unit adds 16 inputs at a time, in order, whatever the tile, the instruction and
the path of the loads (on an H200: docs/results.md#gpu). So one table of tiles serves single tokens
and prompts. Libraries' products are not used, because their order changes with the batch.

Few rows: outputs lie on the matrix unit's long side, and tokens on the other, so that one token
wastes nothing. Many rows: the copy engine (TMA) loads, and programs stay for several tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ridgeline.backends.cuda import tiles
from ridgeline.backends.cuda.kernels.launching import has_copy_engine, launch, num_processors

BAND = 16  # tiles of rows that are computed beside each other, so that weights stay in the L2


@triton.jit
def tile_sums(
    weight_at, x_at, in_n, in_m, K,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Return ``weight x^T`` of a tile, ``[OUTPUTS, ROWS]`` float32: inputs are added in order."""
    k = tl.arange(0, INPUTS)
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(0, K, INPUTS):
        in_k = start + k < K
        w_mask, x_mask = in_n[:, None] & in_k[None, :], in_m[None, :] & in_k[:, None]
        w = tl.load(weight_at + (start + k)[None, :], mask=w_mask, other=0.0)
        rows = tl.load(x_at + (start + k)[:, None], mask=x_mask, other=0.0)
        acc = tl.dot(w, rows, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["M"])
def product_kernel(
    x, weight, bias, out, M, N, K, x_stride, weight_stride, out_stride,
    BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of ``out^T = weight x^T``."""
    tiles_m = tl.cdiv(M, ROWS)
    n = tl.program_id(0) // tiles_m * OUTPUTS + tl.arange(0, OUTPUTS)
    m = tl.program_id(0) % tiles_m * ROWS + tl.arange(0, ROWS)
    in_n, in_m = n < N, m < M
    weight_at = weight + n[:, None].to(tl.int64) * weight_stride
    x_at = x + m[None, :].to(tl.int64) * x_stride
    acc = tile_sums(weight_at, x_at, in_n, in_m, K, ROWS, OUTPUTS, INPUTS)
    if BIAS:
        acc = acc + tl.load(bias + n, mask=in_n, other=0.0)[:, None]
    at = m[None, :].to(tl.int64) * out_stride + n[:, None]
    tl.store(out + at, acc, mask=in_n[:, None] & in_m[None, :])


@triton.jit(do_not_specialize=["M"])
def streamed_kernel(
    x, weight, bias, out, M, N, K, out_stride,
    BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    BAND: tl.constexpr,
):  # fmt: skip
    """Compute tiles of ``out = x weight^T``; ``x`` and ``weight`` are the copy engine's."""
    tiles_m, tiles_n = tl.cdiv(M, ROWS), tl.cdiv(N, OUTPUTS)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        first = tile // (BAND * tiles_n) * BAND
        height = tl.minimum(tiles_m - first, BAND)
        place = tile % (BAND * tiles_n)
        m0, n0 = (first + place % height) * ROWS, place // height * OUTPUTS
        acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
        for start in range(0, K, INPUTS):
            rows, w = x.load([m0, start]), weight.load([n0, start])
            acc = tl.dot(rows, w.T, acc, input_precision="ieee")
        m, n = m0 + tl.arange(0, ROWS), n0 + tl.arange(0, OUTPUTS)
        if BIAS:
            acc = acc + tl.load(bias + n, mask=n < N, other=0.0)[None, :]
        at = m[:, None].to(tl.int64) * out_stride + n[None, :]
        tl.store(out + at, acc, mask=(m < M)[:, None] & (n < N)[None, :])


def product(x, weight, bias, dtype=None):
    """Return ``x W^T + bias``: see the twin."""
    M, N = len(x), len(weight)
    out = torch.empty((M, N), dtype=dtype or x.dtype, device=x.device)
    tile = tiles.product_tile(
        M, N, can_stream=can_stream(x) and can_stream(weight), is_float32=x.dtype == torch.float32
    )
    compute = _stream if tile.streams else _load
    compute(x, weight, bias, out, tile)
    return out


def can_stream(matrix):
    """Return whether a copy engine can load a matrix: its rows begin at multiples of 16 bytes."""
    if not has_copy_engine(matrix.device):
        return False
    row_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.data_ptr() % 16 == row_bytes % 16 == 0 and matrix.stride(1) == 1


def _load(x, weight, bias, out, tile):
    M, (N, K) = len(x), weight.shape
    launch(
        product_kernel, (triton.cdiv(N, tile.outputs) * triton.cdiv(M, tile.rows),),
        x, weight, bias, out, M, N, K, x.stride(0), weight.stride(0), out.stride(0),
        BIAS=bias is not None, ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _stream(x, weight, bias, out, tile):
    M, (N, K) = len(x), weight.shape
    num_tiles = triton.cdiv(N, tile.outputs) * triton.cdiv(M, tile.rows)
    per_processor = 1 if tile is tiles.LARGE_TILE else num_tiles  # small ones come and go
    launch(
        streamed_kernel, (min(num_tiles, num_processors(x.device) * per_processor),),
        TensorDescriptor.from_tensor(x, [tile.rows, tile.inputs]),
        TensorDescriptor.from_tensor(weight, [tile.outputs, tile.inputs]),
        bias, out, M, N, K, out.stride(0),
        BIAS=bias is not None, ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs,
        BAND=BAND, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
