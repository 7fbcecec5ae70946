"""Where top-k and top-p end, without a sort: the last logit's key, and among equal ones its id.

A key has eight digits of four bits. A pass tallies, for each piece of a row, the tokens that share
the digits known so far by their next one: their number for top-k, their weights for top-p. The next
pass reads the tallies of all pieces, takes the greatest digit at which enough is reached from
above, and goes on below it. Tallies are whole numbers, so pieces may be counted in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ridgeline.backends.cuda.kernels.draws.weights import OF_A_STEP, is_kept, key_of, weight_of

DIGITS = 8  # of four bits
WARPS = 16


@triton.jit
def is_wanted(top_k, share, vocabulary, BY_WEIGHT: tl.constexpr):
    """Return whether a draw has this filter and it may drop something; greedy has none."""
    return (share != 0) & (top_k != 1) if BY_WEIGHT else (top_k > 1) & (top_k < vocabulary)


@triton.jit
def amount(tallies, row, pieces, top_k, share, BY_WEIGHT: tl.constexpr, PIECES: tl.constexpr):
    """Return what kept tokens must reach: ``top_k``, or the share of the first pass's sum."""
    result = top_k
    if BY_WEIGHT:
        i = tl.arange(0, PIECES * 16)
        first = tl.load(tallies + row * pieces * 16 + i, mask=i < pieces * 16, other=0)
        total = tl.sum(first, axis=0).to(tl.uint64)
        result = tl.maximum(tl.umulhi(total, share.to(tl.uint64)).to(tl.int64), 1)
    return result


@triton.jit
def next_digit(tally, prefix, above, wanted, pieces, PIECES: tl.constexpr):
    """Return the digits known now, and what all greater keys reach; ``tally`` is one pass's row."""
    piece, digit = tl.arange(0, PIECES), tl.arange(0, 16)
    at = piece[:, None] * 16 + digit[None, :]
    sums = tl.sum(tl.load(tally + at, mask=(piece < pieces)[:, None], other=0), axis=0)
    reached = above + tl.sum(sums, axis=0) - tl.cumsum(sums, axis=0) + sums
    found = tl.max(tl.where(reached >= wanted, digit, 0), axis=0)
    return prefix * 16 + found, above + tl.sum(tl.where(digit > found, sums, 0), axis=0)


@triton.jit(do_not_specialize=["draws", "nth"], do_not_specialize_on_alignment=OF_A_STEP)
def tally_kernel(
    logits, row_of, factors, top_ks, shares, tops, is_bad, limit_keys, limit_ids,
    tallies, prefixes, aboves, draws, pieces, vocabulary, stride, nth,
    BY_WEIGHT: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Tally a piece's tokens by the digit ``nth`` of their keys."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top_k, share = tl.load(top_ks + row), tl.load(shares + row)
    if tl.load(is_bad + row) | (is_wanted(top_k, share, vocabulary, BY_WEIGHT) == 0):
        return
    digits = draws * pieces * 16  # numbers of one pass
    prefix, above = row * 0, row * 0
    if nth > 0:
        wanted = amount(tallies, row, pieces, top_k, share, BY_WEIGHT, PIECES)
        tally = tallies + (nth - 1) * digits + row * pieces * 16
        prefix = tl.load(prefixes + (nth - 1) * draws + row)
        above = tl.load(aboves + (nth - 1) * draws + row)
        prefix, above = next_digit(tally, prefix, above, wanted, pieces, PIECES)
    if piece == 0:
        tl.store(prefixes + nth * draws + row, prefix)
        tl.store(aboves + nth * draws + row, above)
    ids = piece * PIECE + tl.arange(0, PIECE)
    line = logits + tl.load(row_of + row) * stride
    x = tl.load(line + ids, mask=ids < vocabulary, other=0.0)
    key = key_of(x)
    counts = is_kept(key, ids, tl.load(limit_keys + row), tl.load(limit_ids + row))
    counts = counts & (ids < vocabulary) & (key >> (32 - 4 * nth) == prefix)
    weights = tl.where(counts, 1, 0).to(tl.int64)
    if BY_WEIGHT:
        weight = weight_of(x, tl.load(tops + row), tl.load(factors + row))
        weights = tl.where(counts, weight, 0)
    digit = key >> (28 - 4 * nth) & 15
    to = tallies + nth * digits + (row * pieces + piece) * 16
    for j in tl.static_range(16):
        tl.store(to + j, tl.sum(tl.where(digit == j, weights, 0), axis=0))


@triton.jit(do_not_specialize=["draws"], do_not_specialize_on_alignment=OF_A_STEP)
def limit_kernel(
    logits, row_of, factors, top_ks, shares, tops, is_bad, limit_keys, limit_ids,
    tallies, prefixes, aboves, draws, pieces, vocabulary, stride,
    LAST: tl.constexpr, BY_WEIGHT: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Find the last digit, and the id up to which tokens with the key are kept."""
    row = tl.program_id(0).to(tl.int64)
    top_k, share = tl.load(top_ks + row), tl.load(shares + row)
    if tl.load(is_bad + row) | (is_wanted(top_k, share, vocabulary, BY_WEIGHT) == 0):
        return
    wanted = amount(tallies, row, pieces, top_k, share, BY_WEIGHT, PIECES)
    tally = tallies + (LAST * draws + row) * pieces * 16
    prefix, above = tl.load(prefixes + LAST * draws + row), tl.load(aboves + LAST * draws + row)
    key, above = next_digit(tally, prefix, above, wanted, pieces, PIECES)
    i = tl.arange(0, PIECES)
    equal = tl.load(tally + i * 16 + key % 16, mask=i < pieces, other=0)
    reached = above + tl.cumsum(equal, axis=0)
    piece = tl.min(tl.where(reached >= wanted, i, PIECES - 1), axis=0)
    before = tl.sum(tl.where(i < piece, equal, 0), axis=0) + above
    ids = piece * PIECE + tl.arange(0, PIECE)
    x = tl.load(logits + tl.load(row_of + row) * stride + ids, mask=ids < vocabulary, other=0.0)
    found = key_of(x)
    same = is_kept(found, ids, tl.load(limit_keys + row), tl.load(limit_ids + row))
    same = same & (found == key) & (ids < vocabulary)
    each = tl.where(same, 1, 0).to(tl.int64)
    if BY_WEIGHT:
        weight = weight_of(x, tl.load(tops + row), tl.load(factors + row))
        each = tl.where(same, weight, 0)
    reaches = same & (before + tl.cumsum(each, axis=0) >= wanted)
    tl.store(limit_ids + row, tl.min(tl.where(reaches, ids, vocabulary), axis=0))
    tl.store(limit_keys + row, key)


def narrow(given, tops, is_bad, limits, vocabulary, piece):
    """Narrow ``limits`` (keys and ids, ``[R]`` int64) of draws that have top-k, then top-p.

    ``given`` are the first arguments of both kernels: logits and how each draw is made.
    """
    logits, row_of = given[:2]
    draws, pieces = len(row_of), triton.cdiv(vocabulary, piece)
    numbers = torch.empty(
        DIGITS * draws * (16 * pieces + 2), dtype=torch.int64, device=logits.device
    )
    parts = [DIGITS * draws * size for size in (16 * pieces, 1, 1)]
    arguments = (
        *given, tops, is_bad, *limits, *numbers.split(parts), draws, pieces, vocabulary,
        logits.stride(0),
    )  # fmt: skip
    options = {
        "PIECES": triton.next_power_of_2(pieces), "PIECE": piece, "num_warps": WARPS,
        "enable_fp_fusion": False,
    }  # fmt: skip
    for by_weight in (False, True):
        for nth in range(DIGITS):
            tally_kernel[(draws, pieces)](*arguments, nth, BY_WEIGHT=by_weight, **options)
        limit_kernel[(draws,)](*arguments, LAST=DIGITS - 1, BY_WEIGHT=by_weight, **options)
