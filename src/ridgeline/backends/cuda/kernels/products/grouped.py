"""Products of tokens with the matrices of their experts, plain or packed (``packed``).

Pairs of token and expert are sorted by expert, and a tile has rows of one expert. All lists lie on
the device, so a captured graph may hold it. A row adds its inputs in one order, as in ``product``;
those of a packed matrix are one part, as experts give programs enough.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.backends.cuda.kernels.launching import launch
from ridgeline.backends.cuda.kernels.products.packed import part_sum
from ridgeline.backends.cuda.kernels.products.plain import tile_sums
from ridgeline.backends.cuda.packed import Packed

OUTPUTS, INPUTS = 64, 64
WARPS, STAGES = 4, 4
PACKED_INPUTS, PACKED_STAGES = 128, 3  # of packed weights; the inputs of a step decide bits


@triton.jit
def grouped_kernel(
    x, weight, scales, least, bias, out, order, offsets, tile_expert, tile_begin, N, K, x_stride,
    PER_TOKEN: tl.constexpr, FIRST: tl.constexpr, BIAS: tl.constexpr,
    BITS: tl.constexpr, LEAST: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of one expert's rows, ``out^T = weight x^T``; tiles of no expert end.

    BITS is 0 for weights that are not packed.
    """
    expert = tl.load(tile_expert + tl.program_id(1)).to(tl.int64)
    if expert < 0:
        return
    place = tl.load(tile_begin + tl.program_id(1)) + tl.arange(0, ROWS)
    in_m = place < tl.load(offsets + expert + 1)
    pair = tl.load(order + place, mask=in_m, other=0)
    source, target = (pair // PER_TOKEN, place) if FIRST else (place, pair)
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    in_n = n < N
    row = expert * N + n[:, None]
    x_at = x + source[None, :].to(tl.int64) * x_stride
    if BITS:
        acc = part_sum(
            x_at, weight + row * (K // (8 // BITS)), scales + row * (K // 32),
            least + row * (K // 32), in_n, in_m, 0, K, K, BITS, LEAST, ROWS, OUTPUTS, INPUTS,
        )  # fmt: skip
    else:
        acc = tile_sums(weight + row * K, x_at, in_n, in_m, K, ROWS, OUTPUTS, INPUTS)
    if BIAS:
        acc = acc + tl.load(bias + expert * N + n, mask=in_n, other=0.0)[:, None]
    at = target[None, :].to(tl.int64) * N + n[:, None]
    tl.store(out + at, acc, mask=in_n[:, None] & in_m[None, :])


def grouped_product(x, weight, bias, met, first):
    """Return products of rows with their experts' matrices: see the twin.

    ``met`` also has, for each tile, ``tile_expert`` (its expert, -1 for none) and ``tile_begin``
    (its first place in ``order``); and ``rows``, how many places a tile has.
    """
    if isinstance(weight, Packed):
        N, K = weight.shape[0] // (len(met.offsets) - 1), weight.shape[1]
        bits, stages, has_least = weight.bits, PACKED_STAGES, weight.least is not None
        inputs = PACKED_INPUTS
        arrays = weight.values, weight.scales, weight.least if has_least else weight.scales
    else:
        (N, K), bits, stages, has_least = weight.shape[1:], 0, STAGES, False
        inputs = INPUTS // max(1, x.element_size() // 2)  # float32 takes twice the room
        arrays = weight, None, None
    out = torch.empty((len(met.order), N), dtype=x.dtype, device=x.device)
    launch(
        grouped_kernel, (triton.cdiv(N, OUTPUTS), len(met.tile_expert)),
        x, *arrays, bias, out, met.order, met.offsets, met.tile_expert, met.tile_begin,
        N, K, x.stride(0), PER_TOKEN=met.per_token, FIRST=first, BIAS=bias is not None,
        BITS=bits, LEAST=has_least, ROWS=met.rows, OUTPUTS=OUTPUTS, INPUTS=inputs,
        num_warps=WARPS, num_stages=stages,
    )  # fmt: skip
    return out
