"""What log-probabilities and ranks are made of: ``backends.sampler.rule.rank_tokens``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.backends.cuda import tiles
from ridgeline.backends.cuda.kernels.draws.draw import WARPS, survey_kernel, weigh_kernel
from ridgeline.backends.cuda.kernels.draws.weights import OF_A_STEP
from ridgeline.backends.sampler.rule import LOG2_E


@triton.jit(do_not_specialize_on_alignment=[*OF_A_STEP, "tokens", "values"])
def count_kernel(logits, row_of, tokens, values, counts, vocabulary, stride, PIECE: tl.constexpr):
    """Count a piece's tokens that are likelier than one token, or equal and of a smaller id."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    line, token = logits + tl.load(row_of + row) * stride, tl.load(tokens + row)
    value = tl.load(line + tl.maximum(token, 0))
    if piece == 0:
        tl.store(values + row, value)
    ids = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(line + ids, mask=ids < vocabulary, other=float("-inf"))
    is_ahead = (x > value) | ((x == value) & (ids < token))
    at = counts + row * tl.num_programs(1) + piece
    tl.store(at, tl.sum(tl.where((ids < vocabulary) & is_ahead, 1, 0), axis=0))


def rank(logits, row_of, tokens):
    """Return a token's logit, its rank, and the sum of its row: see the twin."""
    draws, vocabulary, stride, piece = len(row_of), logits.shape[1], logits.stride(0), tiles.PIECE
    grid = draws, triton.cdiv(vocabulary, piece)

    def numbers(dtype, *shape, value=0):
        return torch.full(shape, value, dtype=dtype, device=logits.device)

    piece_tops, values = numbers(torch.float32, *grid), numbers(torch.float32, draws)
    piece_ids, bad, counts = numbers(torch.int32, 3, *grid)
    survey_kernel[grid](
        logits, row_of, piece_tops, piece_ids, bad, vocabulary, stride,
        ADJUSTED=False, PIECE=piece, num_warps=WARPS,
    )  # fmt: skip
    count_kernel[grid](
        logits, row_of, tokens, values, counts, vocabulary, stride, PIECE=piece, num_warps=WARPS
    )
    tops, is_bad = piece_tops.amax(1), bad.amax(1)
    sums, limit_keys = numbers(torch.int64, *grid), numbers(torch.int64, draws, value=-1)
    factors, zeros = numbers(torch.float64, draws, value=LOG2_E), numbers(torch.int64, draws)
    weigh_kernel[grid](
        logits, row_of, factors, zeros, zeros, tops, is_bad, limit_keys, zeros, sums, vocabulary,
        stride, PIECE=piece, num_warps=WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return values, counts.sum(1), tops, sums.sum(1), 1 - is_bad
