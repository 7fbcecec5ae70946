"""Whole-number weights of logits, keys that order them, and random bits.

Weights are integers, so the order of their sums does not matter. Every float64 operation is one
that IEEE 754 defines, so kernels that use these are compiled without fused multiply-adds, which
round once where the rule rounds twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ridgeline.backends.sampler.rule import LEAST_EXPONENT, POLYNOMIAL, WEIGHT_BITS

# Read one number at a time, at any alignment: otherwise a kernel for each alignment
# would have to be compiled while answers wait.
OF_A_STEP = [
    "row_of", "factors", "top_ks", "shares", "leasts", "seeds", "positions", "tops", "likeliest",
    "is_bad", "limit_keys", "limit_ids", "piece_ids", "piece_bad", "picked", "finite", "prefixes",
    "aboves", "masks", "mask_of", "edit_rows", "edit_ids", "amounts",
]  # fmt: skip

LEAST = tl.constexpr(LEAST_EXPONENT)
ONE = tl.constexpr(2.0**WEIGHT_BITS)
C0, C1, C2, C3, C4, C5, C6, C7 = map(tl.constexpr, POLYNOMIAL)


@triton.jit
def weight_of(x, top, factor):
    """Return ``floor(2**40 * 2**z)``, z = (x - top) * factor: ``rule.exponents``, ``powers``."""
    z = (x.to(tl.float64) - top.to(tl.float64)) * factor
    z = tl.where(z > LEAST, z, LEAST)
    whole = tl.floor(z)
    f = z - whole
    p = f * 0.0 + C7
    p = p * f + C6
    p = p * f + C5
    p = p * f + C4
    p = p * f + C3
    p = p * f + C2
    p = p * f + C1
    p = p * f + C0
    return (p * ONE).to(tl.int64) >> (-whole).to(tl.int64)


@triton.jit
def key_of(x):
    """Return a number from 0 to 2**32 - 1 in the same order as the logits; -0.0 is 0.0."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.uint32, bitcast=True).to(tl.int64)
    return tl.where(bits >= 0x80000000, 0xFFFFFFFF - bits, bits + 0x80000000)


@triton.jit
def is_kept(key, ids, limit_key, limit_id):
    """Return which tokens a limit keeps: keys above its own, and that key up to its id."""
    return (key > limit_key) | ((key == limit_key) & (ids <= limit_id))


@triton.jit
def random_bits(seed, position):
    """Return the 53 bits of (seed, position), on top of 64: ``rule.uniform_bits``, stream 0."""
    k0, k1 = (seed & 0xFFFFFFFF).to(tl.uint32), (seed >> 32).to(tl.uint32)
    x0, x1 = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    x2, x3 = x0 * 0, x1 * 0
    for _ in tl.static_range(10):
        a = x0.to(tl.uint64) * 0xD2511F53
        b = x2.to(tl.uint64) * 0xCD9E8D57
        y0 = (b >> 32).to(tl.uint32) ^ x1 ^ k0
        y2 = (a >> 32).to(tl.uint32) ^ x3 ^ k1
        x1, x3 = (b & 0xFFFFFFFF).to(tl.uint32), (a & 0xFFFFFFFF).to(tl.uint32)
        x0, x2 = y0, y2
        k0 = (k0.to(tl.uint64) + 0x9E3779B9).to(tl.uint32)
        k1 = (k1.to(tl.uint64) + 0xBB67AE85).to(tl.uint32)
    return ((x0.to(tl.uint64) << 21) ^ (x1.to(tl.uint64) >> 11)) << 11
