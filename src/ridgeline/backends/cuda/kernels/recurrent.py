"""Recurrent layers: convolutions over the last tokens, and memories, one token after another.

A program holds one sequence's memory of some channels of one head in its registers, and goes
through the sequence's tokens. So a row's sums have one order, wherever its text was cut. A step's
lists are read from the device, so a captured graph may hold it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ITEM, CUT = 5, 4  # words: see ``step.cache``
CHANNELS = 256  # of a program that convolves
ROWS = 32  # channels of a head in a program
OF_A_STEP = ["items", "num_items", "cuts", "num_cuts", "item_of"]


@triton.jit
def input_at(rows, windows, at, first, source, c, inside, C, row_stride, KERNEL: tl.constexpr):
    """Return the inputs of a token, of this step or of the window that was kept; else zeros."""
    new = tl.load(rows + at.to(tl.int64) * row_stride + c, mask=inside & (at >= first), other=0.0)
    place = source.to(tl.int64) * (KERNEL - 1) + (at - first + KERNEL - 1)
    is_old = inside & (at < first) & (source >= 0)
    return new + tl.load(windows + place * C + c, mask=is_old, other=0.0)


@triton.jit(do_not_specialize_on_alignment=OF_A_STEP)
def convolve_kernel(
    rows, weight, bias, windows, out, item_of, items, C, row_stride,
    KERNEL: tl.constexpr, BIAS: tl.constexpr, CHANNELS: tl.constexpr, ITEM: tl.constexpr,
):  # fmt: skip
    """Convolve some channels of one token."""
    token = tl.program_id(0)
    item = tl.load(item_of + token)
    if item < 0:
        return
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < C
    first, source = tl.load(items + item * ITEM), tl.load(items + item * ITEM + 2)
    acc = tl.zeros([CHANNELS], tl.float32)
    for i in tl.static_range(KERNEL):
        at = token - (KERNEL - 1) + i
        x = input_at(rows, windows, at, first, source, c, inside, C, row_stride, KERNEL)
        acc += x * tl.load(weight + c * KERNEL + i, mask=inside, other=0.0).to(tl.float32)
    if BIAS:
        acc += tl.load(bias + c, mask=inside, other=0.0)
    tl.store(out + tl.cast(token, tl.int64) * C + c, acc, mask=inside)


@triton.jit(do_not_specialize_on_alignment=OF_A_STEP)
def window_kernel(
    rows, windows, cuts, num_cuts, C, row_stride,
    KERNEL: tl.constexpr, CHANNELS: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Keep the last inputs behind each cut: programs stride over cuts."""
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside = c < C
    for nth in range(tl.program_id(0), tl.load(num_cuts), tl.num_programs(0)):
        cut = cuts + nth * CUT
        first, count, source = tl.load(cut), tl.load(cut + 1), tl.load(cut + 2)
        target = tl.load(cut + 3).to(tl.int64)
        for j in tl.static_range(KERNEL - 1):
            at = first + count - (KERNEL - 1) + j
            x = input_at(rows, windows, at, first, source, c, inside, C, row_stride, KERNEL)
            tl.store(windows + (target * (KERNEL - 1) + j) * C + c, x, mask=inside)


def convolve(rows, weight, bias, windows, plan):
    """Return weighted sums over last tokens: see the twin."""
    C, kernel = weight.shape
    out = torch.zeros(rows.shape, dtype=torch.float32, device=rows.device)
    pieces = triton.cdiv(C, CHANNELS)
    convolve_kernel[(len(rows), pieces)](
        rows, weight, bias, windows, out, plan.item_of, plan.items, C, rows.stride(0),
        KERNEL=kernel, BIAS=bias is not None, CHANNELS=CHANNELS, ITEM=ITEM,
    )  # fmt: skip
    window_kernel[(plan.programs, pieces)](
        rows, windows, plan.cuts, plan.num_cuts, C, rows.stride(0),
        KERNEL=kernel, CHANNELS=CHANNELS, CUT=CUT,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=OF_A_STEP)
def scan_kernel(
    x, b, c, pace, kept, skip, memory, out, items, num_items, cuts,
    H: tl.constexpr, G: tl.constexpr, P: tl.constexpr, N: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, ITEM: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Take ROWS channels of one head through a sequence: a memory of ``[ROWS, N]``."""
    if tl.program_id(0) >= tl.load(num_items):
        return
    item, head = items + tl.program_id(0) * ITEM, tl.program_id(1)
    p, n = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, PADDED)
    at = (head * P + p)[:, None] * N + n[None, :]
    inside = (p < P)[:, None] & (n < N)[None, :]
    first, source = tl.load(item), tl.load(item + 2).to(tl.int64)
    state = tl.load(memory + source * H * P * N + at, mask=inside & (source >= 0), other=0.0)
    jump = tl.load(skip + head)
    begin, cut = first, cuts + tl.load(item + 3) * CUT
    for _ in range(tl.load(item + 4)):
        end = first + tl.load(cut + 1)
        for token in range(begin, end):
            t = tl.cast(token, tl.int64)
            group = (t * G + head // (H // G)) * N + n
            taken = tl.load(x + (t * H + head) * P + p, mask=p < P, other=0.0)
            read = tl.load(c + group, mask=n < N, other=0.0)
            given = taken * tl.load(pace + t * H + head)
            state = state * tl.load(kept + t * H + head)
            state += given[:, None] * tl.load(b + group, mask=n < N, other=0.0)[None, :]
            made = tl.sum(state * read[None, :], axis=1) + taken * jump
            tl.store(out + (t * H + head) * P + p, made, mask=p < P)
        target = tl.load(cut + 3).to(tl.int64)
        tl.store(memory + target * H * P * N + at, state, mask=inside)
        begin, cut = end, cut + CUT


def scan(x, b, c, pace, decay, skip, memory, plan):
    """Return a state-space scan: see the twin."""
    H, P, N = memory.shape[1:]
    out = torch.zeros_like(x)
    scan_kernel[(plan.programs, H, triton.cdiv(P, ROWS))](
        x, b, c, pace, decay, skip, memory, out, plan.items, plan.num_items, plan.cuts,
        H=H, G=b.shape[1], P=P, N=N, PADDED=triton.next_power_of_2(N),
        ROWS=ROWS, ITEM=ITEM, CUT=CUT,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize_on_alignment=OF_A_STEP)
def remember_kernel(
    q, k, v, strength, kept, memory, out, items, num_items, cuts,
    H: tl.constexpr, KEY_HEADS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BY_TURNS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    ITEM: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Take ROWS channels of a value head through a sequence: a memory of ``[K, ROWS]``."""
    if tl.program_id(0) >= tl.load(num_items):
        return
    item, head = items + tl.program_id(0) * ITEM, tl.program_id(1)
    key_head = head * KEY_HEADS // H
    if BY_TURNS:
        key_head = head % KEY_HEADS
    j, i = tl.arange(0, PADDED), tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    at = (head * K + j)[:, None] * V + i[None, :]
    inside = (j < K)[:, None] & (i < V)[None, :]
    first, source = tl.load(item), tl.load(item + 2).to(tl.int64)
    state = tl.load(memory + source * H * K * V + at, mask=inside & (source >= 0), other=0.0)
    begin, cut = first, cuts + tl.load(item + 3) * CUT
    for _ in range(tl.load(item + 4)):
        end = first + tl.load(cut + 1)
        for token in range(begin, end):
            t = tl.cast(token, tl.int64)
            of_key, of_head = (t * KEY_HEADS + key_head) * K + j, t * H + head
            key = tl.load(k + of_key, mask=j < K, other=0.0)
            query = tl.load(q + of_key, mask=j < K, other=0.0)
            value = tl.load(v + of_head * V + i, mask=i < V, other=0.0)
            state = state * tl.load(kept + of_head)
            error = (value - tl.sum(state * key[:, None], axis=0)) * tl.load(strength + of_head)
            state += key[:, None] * error[None, :]
            tl.store(out + of_head * V + i, tl.sum(state * query[:, None], axis=0), mask=i < V)
        target = tl.load(cut + 3).to(tl.int64)
        tl.store(memory + target * H * K * V + at, state, mask=inside)
        begin, cut = end, cut + CUT


def remember(q, k, v, strength, decay, memory, by_turns, plan):
    """Return the gated delta rule: see the twin."""
    H, K, V = memory.shape[1:]
    out = torch.zeros_like(v)
    remember_kernel[(plan.programs, H, triton.cdiv(V, ROWS))](
        q, k, v, strength, decay, memory, out, plan.items, plan.num_items, plan.cuts,
        H=H, KEY_HEADS=q.shape[1], K=K, V=V, BY_TURNS=by_turns,
        PADDED=triton.next_power_of_2(K), ROWS=ROWS, ITEM=ITEM, CUT=CUT,
    )  # fmt: skip
    return out
