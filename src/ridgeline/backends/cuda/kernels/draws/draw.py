"""The draw of ``backends.sampler.rule``: temperature, top-k, top-p and min-p, in pieces of a row.

One program for each row is too few for a GPU. Greatest logits and sums of whole-number weights can
be combined from pieces of a row in any order, so each piece has a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.backends.cuda import tiles
from ridgeline.backends.cuda.kernels.draws.filters import narrow
from ridgeline.backends.cuda.kernels.draws.weights import (
    OF_A_STEP,
    is_kept,
    key_of,
    random_bits,
    weight_of,
)

WARPS = 16


@triton.jit(do_not_specialize_on_alignment=OF_A_STEP)
def survey_kernel(
    logits, row_of, piece_tops, piece_ids, piece_bad, vocabulary, stride,
    ADJUSTED: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Find a piece's greatest logit and its first id, and whether one is not finite.

    ADJUSTED rows may have minus infinity.
    """
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = piece * PIECE + tl.arange(0, PIECE)
    inside = ids < vocabulary
    x = tl.load(logits + tl.load(row_of + row) * stride + ids, mask=inside, other=float("-inf"))
    size = x if ADJUSTED else tl.abs(x)
    unsound = inside & ((size < float("inf")) == 0)
    top = tl.max(x, axis=0)
    at = row * tl.num_programs(1) + piece
    tl.store(piece_tops + at, top)
    tl.store(piece_ids + at, tl.min(tl.where(x == top, ids, vocabulary), axis=0))
    tl.store(piece_bad + at, tl.max(unsound.to(tl.int32), axis=0))


@triton.jit(do_not_specialize_on_alignment=OF_A_STEP)
def join_kernel(
    piece_tops, piece_ids, piece_bad, tops, likeliest, is_bad, limit_keys, limit_ids,
    vocabulary, pieces, PIECES: tl.constexpr,
):  # fmt: skip
    """Put together what the pieces of a row found; nothing is dropped yet."""
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, PIECES)
    at, live = row * pieces + i, i < pieces
    found = tl.load(piece_tops + at, mask=live, other=float("-inf"))
    ids = tl.load(piece_ids + at, mask=live, other=0)
    top = tl.max(found, axis=0)
    tl.store(tops + row, top)
    tl.store(likeliest + row, tl.min(tl.where(live & (found == top), ids, vocabulary), axis=0))
    tl.store(is_bad + row, tl.max(tl.load(piece_bad + at, mask=live, other=0), axis=0))
    tl.store(limit_keys + row, -1)
    tl.store(limit_ids + row, 0)


@triton.jit
def kept_weights(line, ids, vocabulary, top, factor, least, limit_key, limit_id):
    """Return the weights of tokens that all filters keep, 0 for the others."""
    x = tl.load(line + ids, mask=ids < vocabulary, other=0.0)
    kept = (ids < vocabulary) & is_kept(key_of(x), ids, limit_key, limit_id)
    weights = weight_of(x, top, factor)
    return tl.where(kept & (weights >= least), weights, 0)


@triton.jit(do_not_specialize_on_alignment=OF_A_STEP)
def weigh_kernel(
    logits, row_of, factors, top_ks, leasts, tops, is_bad, limit_keys, limit_ids, sums,
    vocabulary, stride, PIECE: tl.constexpr,
):  # fmt: skip
    """Sum the weights of a piece's kept tokens."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(is_bad + row) | (tl.load(top_ks + row) == 1):
        return
    weights = kept_weights(
        logits + tl.load(row_of + row) * stride, piece * PIECE + tl.arange(0, PIECE), vocabulary,
        tl.load(tops + row), tl.load(factors + row), tl.load(leasts + row),
        tl.load(limit_keys + row), tl.load(limit_ids + row),
    )  # fmt: skip
    tl.store(sums + row * tl.num_programs(1) + piece, tl.sum(weights, axis=0))


@triton.jit(do_not_specialize_on_alignment=OF_A_STEP)
def pick_kernel(
    logits, row_of, factors, top_ks, leasts, seeds, positions, tops, likeliest, is_bad,
    limit_keys, limit_ids, sums, picked, finite, vocabulary, stride, pieces,
    PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Find the first token of a row whose running sum passes the mark; -1 if there is none."""
    row = tl.program_id(0).to(tl.int64)
    bad = tl.load(is_bad + row)
    tl.store(finite + row, 1 - bad)
    if bad != 0:
        tl.store(picked + row, -1)
    elif tl.load(top_ks + row) == 1:
        is_there = tl.load(tops + row) > float("-inf")
        tl.store(picked + row, tl.where(is_there, tl.load(likeliest + row), -1))
    else:
        i = tl.arange(0, PIECES)
        found = tl.load(sums + row * pieces + i, mask=i < pieces, other=0)
        seed = tl.load(seeds + row).to(tl.uint64)
        bits = random_bits(seed, tl.load(positions + row).to(tl.uint64))
        mark = tl.umulhi(bits, tl.sum(found, axis=0).to(tl.uint64)).to(tl.int64)
        passes = tl.cumsum(found, axis=0) > mark
        piece = tl.min(tl.where(passes, i, pieces - 1), axis=0)
        before = tl.sum(tl.where(i < piece, found, 0), axis=0)
        ids = piece * PIECE + tl.arange(0, PIECE)
        weights = kept_weights(
            logits + tl.load(row_of + row) * stride, ids, vocabulary, tl.load(tops + row),
            tl.load(factors + row), tl.load(leasts + row), tl.load(limit_keys + row),
            tl.load(limit_ids + row),
        )  # fmt: skip
        passes = before + tl.cumsum(weights, axis=0) > mark
        token = tl.min(tl.where(passes, ids, vocabulary), axis=0)
        tl.store(picked + row, tl.where(token < vocabulary, token, -1))  # none has a weight


def draw(
    logits, row_of, factors, top_k, shares, least, seeds, positions, *,
    has_filters=True, is_adjusted=False,
):  # fmt: skip
    """Draw a token for each row: see the twin."""
    draws, vocabulary, stride, piece = len(row_of), logits.shape[1], logits.stride(0), tiles.PIECE
    pieces = triton.cdiv(vocabulary, piece)

    def numbers(dtype, *shape):
        return torch.empty(shape, dtype=dtype, device=logits.device)

    tops, piece_tops = numbers(torch.float32, draws), numbers(torch.float32, draws, pieces)
    likeliest, is_bad, picked, finite = numbers(torch.int32, 4, draws)
    piece_ids, piece_bad = numbers(torch.int32, 2, draws, pieces)
    limits, sums = numbers(torch.int64, 2, draws), numbers(torch.int64, draws, pieces)
    padded, grid = triton.next_power_of_2(pieces), (draws, pieces)
    exactly = {"PIECE": piece, "num_warps": WARPS, "enable_fp_fusion": False}
    survey_kernel[grid](
        logits, row_of, piece_tops, piece_ids, piece_bad, vocabulary, stride,
        ADJUSTED=is_adjusted, PIECE=piece, num_warps=WARPS,
    )  # fmt: skip
    join_kernel[(draws,)](
        piece_tops, piece_ids, piece_bad, tops, likeliest, is_bad, *limits, vocabulary, pieces,
        PIECES=padded, num_warps=1,
    )  # fmt: skip
    if has_filters:
        given = (logits, row_of, factors, top_k, shares)
        narrow(given, tops, is_bad, limits, vocabulary, piece)
    weigh_kernel[grid](
        logits, row_of, factors, top_k, least, tops, is_bad, *limits, sums, vocabulary, stride,
        **exactly,
    )  # fmt: skip
    pick_kernel[(draws,)](
        logits, row_of, factors, top_k, least, seeds, positions, tops, likeliest, is_bad, *limits,
        sums, picked, finite, vocabulary, stride, pieces, PIECES=padded, **exactly,
    )  # fmt: skip
    return picked, finite
