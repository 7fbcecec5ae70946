"""Values of the cache in 4 bits: rotated, one of 16 levels each, and a scale for each token.

    V: [4 of 4 tokens][D / 16][8 channels][4 tokens], a byte for a channel and the eighth behind it

A head's values are multiplied by a Hadamard matrix first (QuaRot; Ashkboos et al., 2024), in blocks
of the largest power of two that divides D. That spreads a large channel over all others, and what
comes out is nearly normally distributed, so one scale serves a whole head and the levels are those
of a normal distribution, not evenly spaced. A sum of values is rotated back once, when it is done.

Both nibbles of a byte are of one token: tokens side by side may be written by different threads.
"""

from __future__ import annotations

from itertools import pairwise

from ridgeline.backends.cpu.kernels.ir import I8, I32, Function, Value, maximum, select, vec
from ridgeline.backends.cpu.kernels.isa import Dot, lookup
from ridgeline.backends.cpu.kernels.rows import FLOATS, hadamard, to_integers
from ridgeline.backends.cpu.layout.shapes import AttentionLayout

# Of a normal distribution's 64 values, scaled so that the largest is 127: what errs least, by
# Lloyd's iteration (1982). Negative ones mirror them.
_UPPER = (6, 19, 32, 46, 60, 76, 95, 121)
_LEVELS = (*(-level for level in reversed(_UPPER)), *_UPPER)
_BETWEEN = [(a + b) // 2 for a, b in pairwise(_UPPER)]


def store_narrow_values(
    fn: Function,
    heads: AttentionLayout,
    v: list[Value],
    inverse: Value,
    record: Value,
    token: Value,
) -> None:
    """Store a token's values, rotated, whose scale has this ``inverse``."""
    column = record + heads.values_at + (token >> 2) * (heads.size * 2) + (token & 3)
    for i, value in enumerate(v):
        places = _places(fn, to_integers(value, inverse))
        low, high = (places.shuffle(range(first, first + 8)) for first in (0, 8))
        both = (low | (high << 4)).signed(I8)
        for j in range(8):
            fn.store(both.lane(j), column + (8 * i + j) * 4, 1)


def _places(fn: Function, integers: Value) -> Value:
    """Return the place of the nearest level for each of 16 x i32, -127 to 127."""
    zero = fn.lanes(I32, [0] * 16)
    size = maximum(integers, zero - integers)
    above = fn.lanes(I32, [8] * 16)
    for border in _BETWEEN:
        above = above + (size > border).unsigned(I32)
    return select(integers < 0, 15 - above, above)


def load_narrow_values(fn: Function, form: Dot, address: Value) -> Value:
    """Return 16 channels of 4 tokens, 64 x s8, from the 32 bytes at ``address``."""
    packed = fn.load(address, vec(I8, 32), 32)
    places = (packed & 15).shuffle(range(64), packed >> 4)
    return lookup(form, fn.lanes(I8, list(_LEVELS) * 4), places)


def rotate_back(fn: Function, heads: AttentionLayout, head: Value) -> None:
    """Rotate the sum of a head's values at ``head``, floats, back to its channels."""
    at = [head + 64 * i for i in range(heads.size // 16)]
    share = 1.0 / (heads.size & -heads.size)
    for place, value in zip(at, hadamard(fn, [fn.load(a, FLOATS, 4) for a in at]), strict=True):
        fn.store(value * share, place, 4)
