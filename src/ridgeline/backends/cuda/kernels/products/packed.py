"""Products with matrices of 8 and 4 bits. The layout is that of ``packed``.

A weight is made in float32 and rounded once to the type of the tokens. A matrix's inputs are summed
in parts, cut by its shape alone, and the parts are added in order: by one program where there are
rows enough to fill the processors, else each part by a program of its own. The bits are the same.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.backends.cuda import tiles
from ridgeline.backends.cuda.kernels.launching import launch, num_processors

OUTPUTS = 64  # rows of a warpgroup's product: mma.sync would permute narrow types' inputs
WARPS, STAGES = 4, 3


@triton.jit
def factors(array, groups, in_n, num_groups, OUTPUTS: tl.constexpr, COUNT: tl.constexpr):
    """Return a number for each weight of COUNT groups of 32 inputs, loaded once a group."""
    mask = in_n[:, None] & (groups < num_groups)[None, :]
    one = tl.load(array + groups[None, :], mask=mask, other=0.0).to(tl.float32)
    many = tl.broadcast_to(one[:, :, None], (OUTPUTS, COUNT, 32))
    return tl.reshape(many, (OUTPUTS, COUNT * 32))


@triton.jit
def part_sum(
    x, values, scales, least, in_n, in_m, low, high, K,
    BITS: tl.constexpr, LEAST: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):  # fmt: skip
    """Return products with the inputs from ``low`` to ``high``, ``[OUTPUTS, ROWS]``.

    ``x`` has a column of pointers for each row of tokens; the others a row for each output.
    """
    HALVES: tl.constexpr = 8 // BITS
    COUNT: tl.constexpr = INPUTS // HALVES // 32  # groups in a product
    j = tl.arange(0, INPUTS // HALVES)
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in range(low, high, INPUTS):
        at = start // HALVES + j
        mask = in_n[:, None] & (at < K // HALVES)[None, :]
        packed = tl.load(values + at[None, :], mask=mask, other=0)
        for half in tl.static_range(HALVES):
            if BITS == 8:
                k, numbers = at, packed.to(tl.float32)
            else:  # byte j of a run of 64 inputs has inputs j and j + 32
                k = start + j // 32 * 64 + half * 32 + j % 32
                numbers = ((packed >> (4 * half)) & 15).to(tl.float32)
            groups = start // 32 + tl.arange(0, COUNT) * HALVES + half
            w = numbers * factors(scales, groups, in_n, K // 32, OUTPUTS, COUNT)
            if LEAST:
                w = w + factors(least, groups, in_n, K // 32, OUTPUTS, COUNT)
            x_mask = in_m[None, :] & (k < K)[:, None]
            rows = tl.load(x + k[:, None], mask=x_mask, other=0.0)
            acc = tl.dot(w.to(rows.dtype), rows, acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["M"])
def packed_kernel(
    x, values, scales, least, bias, out, sums, M, N, K, part_inputs, x_stride, out_stride,
    BITS: tl.constexpr, LEAST: tl.constexpr, BIAS: tl.constexpr, PARTS: tl.constexpr,
    SHARED_OUT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of ``out^T = W x^T``; or, SHARED_OUT, of one part's ``sums [part, M, N]``."""
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    in_n, in_m = n < N, m < M
    row = n[:, None].to(tl.int64)
    x_at = x + m[None, :].to(tl.int64) * x_stride
    values_at = values + row * (K // (8 // BITS))
    scales_at, least_at = scales + row * (K // 32), least + row * (K // 32)
    inside = in_n[:, None] & in_m[None, :]
    if SHARED_OUT:
        low = tl.program_id(2) * part_inputs
        acc = part_sum(
            x_at, values_at, scales_at, least_at, in_n, in_m, low,
            tl.minimum(low + part_inputs, K), K, BITS, LEAST, ROWS, OUTPUTS, INPUTS,
        )  # fmt: skip
        to = (tl.program_id(2).to(tl.int64) * M + m[None, :]) * N + n[:, None]
        tl.store(sums + to, acc, mask=inside)
    else:
        total = tl.zeros([OUTPUTS, ROWS], tl.float32)
        for part in range(PARTS):
            low = part * part_inputs
            total += part_sum(
                x_at, values_at, scales_at, least_at, in_n, in_m, low,
                tl.minimum(low + part_inputs, K), K, BITS, LEAST, ROWS, OUTPUTS, INPUTS,
            )  # fmt: skip
        if BIAS:
            total = total + tl.load(bias + n, mask=in_n, other=0.0)[:, None]
        tl.store(out + m[None, :].to(tl.int64) * out_stride + n[:, None], total, mask=inside)


@triton.jit(do_not_specialize=["M"])
def add_parts_kernel(
    sums, bias, out, M, N, out_stride,
    BIAS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the parts of BLOCK outputs of one row in order, from zero on as one program would."""
    m, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(sums + (tl.cast(part, tl.int64) * M + m) * N + n, mask=n < N, other=0.0)
    if BIAS:
        total = total + tl.load(bias + n, mask=n < N, other=0.0)
    tl.store(out + m * out_stride + n, total, mask=n < N)


def packed_product(x, packed, bias, dtype=None):
    """Return ``x W^T + bias``: see the twin."""
    M, (N, K) = len(x), packed.shape
    out = torch.empty((M, N), dtype=dtype or x.dtype, device=x.device)
    inputs, rows = tiles.INPUTS_PER_STEP[packed.bits], tiles.packed_rows(M)
    parts = tiles.num_parts(packed.num_outputs or N, K)
    part_inputs = triton.cdiv(triton.cdiv(K, parts), inputs) * inputs
    programs = (triton.cdiv(N, OUTPUTS), triton.cdiv(M, rows))
    is_shared_out = parts > 1 and programs[0] * programs[1] < 2 * num_processors(x.device)
    sums = None
    if is_shared_out:
        sums = torch.empty((parts, M, N), dtype=torch.float32, device=x.device)
    launch(
        packed_kernel, (*programs, parts if is_shared_out else 1),
        x, packed.values, packed.scales, packed.scales if packed.least is None else packed.least,
        bias, out, sums, M, N, K, part_inputs, x.stride(0), out.stride(0),
        BITS=packed.bits, LEAST=packed.least is not None, BIAS=bias is not None, PARTS=parts,
        SHARED_OUT=is_shared_out, ROWS=rows, OUTPUTS=OUTPUTS, INPUTS=inputs,
        num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    if is_shared_out:
        add_parts_kernel[(M, triton.cdiv(N, 512))](
            sums, bias, out, M, N, out.stride(0), BIAS=bias is not None, PARTS=parts, BLOCK=512,
        )  # fmt: skip
    return out
