"""Penalties, bias and masks of ``backends.sampler.rule``, on copies of rows of logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.backends.cuda import tiles
from ridgeline.backends.cuda.kernels.draws.weights import OF_A_STEP
from ridgeline.backends.sampler.rule import MAX_LOGIT

GREATEST = tl.constexpr(MAX_LOGIT)
WARPS = 16
EDITS = 128  # of a program


@triton.jit
def is_masked_out(masks, mask, ids, mask_stride, inside):
    """Return which ids have no bit in a mask; none of them where there is no mask (-1)."""
    has_mask = mask >= 0
    at = masks + tl.maximum(mask, 0) * mask_stride + ids // 8
    bits = tl.load(at, mask=inside & has_mask, other=255).to(tl.int32)
    return (bits >> (ids % 8)) & 1 == 0


@triton.jit(do_not_specialize_on_alignment=OF_A_STEP)
def mask_kernel(
    logits, row_of, masks, mask_of, out, vocabulary, stride, mask_stride, PIECE: tl.constexpr
):
    """Copy a piece of a row under its mask, with NaN for what is not finite."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = piece * PIECE + tl.arange(0, PIECE)
    inside = ids < vocabulary
    x = tl.load(logits + tl.load(row_of + row) * stride + ids, mask=inside, other=0.0)
    hidden = is_masked_out(masks, tl.load(mask_of + row), ids, mask_stride, inside)
    made = tl.where(hidden, float("-inf"), x)
    made = tl.where(tl.abs(x) < float("inf"), made, float("nan"))
    tl.store(out + row * vocabulary + ids, made, mask=inside)


@triton.jit
def rounded(x):
    """Return float64 numbers as float32, at most its greatest number."""
    return tl.minimum(tl.maximum(x, -GREATEST), GREATEST).to(tl.float32).to(tl.float64)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=OF_A_STEP)
def edit_kernel(edit_rows, edit_ids, amounts, out, count, vocabulary, EDITS: tl.constexpr):
    """Change logits that can be chosen: ``adjust`` says how."""
    i = tl.program_id(0) * EDITS + tl.arange(0, EDITS)
    inside = i < count
    at = out + tl.load(edit_rows + i, mask=inside, other=0) * vocabulary
    at += tl.load(edit_ids + i, mask=inside, other=0)
    old = tl.load(at, mask=inside, other=0.0)
    scale = tl.load(amounts + 4 * i, mask=inside, other=1.0)
    first = tl.load(amounts + 4 * i + 1, mask=inside, other=0.0)
    second = tl.load(amounts + 4 * i + 2, mask=inside, other=0.0)
    added = tl.load(amounts + 4 * i + 3, mask=inside, other=0.0)
    x = old.to(tl.float64)
    x = rounded(tl.where(x > 0.0, x / scale, x * scale))
    x = rounded(rounded(rounded(x - first) - second) + added)
    made = tl.where(added > float("-inf"), x.to(tl.float32), float("-inf"))
    stays = (tl.abs(old) < float("inf")) == 0  # masked out, or NaN
    tl.store(at, tl.where(stays, old, made), mask=inside)


def adjust(logits, row_of, masks, mask_of, edit_rows, edit_ids, amounts):
    """Return rows after penalties, bias and masks: see the twin."""
    rows, vocabulary, edits = len(row_of), logits.shape[1], len(edit_rows)
    out = torch.empty((rows, vocabulary), dtype=torch.float32, device=logits.device)
    mask_kernel[(rows, triton.cdiv(vocabulary, tiles.PIECE))](
        logits, row_of, masks, mask_of, out, vocabulary, logits.stride(0), masks.stride(0),
        PIECE=tiles.PIECE, num_warps=WARPS,
    )  # fmt: skip
    if edits:
        edit_kernel[(triton.cdiv(edits, EDITS),)](
            edit_rows, edit_ids, amounts, out, edits, vocabulary, EDITS=EDITS,
            enable_fp_fusion=False,
        )  # fmt: skip
    return out
