"""Questions to a ledger the other way round: how much context, how many sequences, which division.

They are answered by bisection over the same sum, so that what is said to fit does.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from ridgeline.planner.memory.ledger import Ledger, Setting

_MOST_TOKENS = 1 << 40
_MOST_SEQUENCES = 1 << 32


def max_context(ledger_of: Callable[[Setting], Ledger], setting: Setting) -> int | None:
    """Return the longest context, in whole blocks, with which all sequences fit; 0 if none does.

    None if there is no end to it, because no layer's cache grows.
    """
    size = setting.block_size

    def fits(num_blocks: int) -> bool:
        return ledger_of(replace(setting, context=num_blocks * size)).fits

    most = _MOST_TOKENS // size
    longest = _largest(fits, most)
    return None if longest == most else size * longest


def max_concurrency(ledger_of: Callable[[Setting], Ledger], setting: Setting) -> int:
    """Return the most sequences of the setting's context that fit; 0 if none does."""
    return _largest(lambda n: ledger_of(replace(setting, concurrency=n)).fits, _MOST_SEQUENCES)


def _largest(fits: Callable[[int], bool], limit: int) -> int:
    """Return the largest number from 0 to ``limit`` that fits, if what fits has no gaps."""
    if not fits(1):
        return 0
    low = 1
    while low < limit and fits(min(2 * low, limit)):
        low = min(2 * low, limit)
    high = min(2 * low, limit + 1)  # does not fit, or is beyond the limit
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def smallest_tp(
    ledger_of: Callable[[Setting], Ledger], setting: Setting, most_ranks: int
) -> int | None:
    """Return the least power of two of ranks, up to ``most_ranks``, on which it fits; or None.

    ``ledger_of`` raises ValueError for a number of ranks that cannot divide the model.
    """
    ranks = 1
    while ranks <= most_ranks:
        with suppress(ValueError):
            if ledger_of(replace(setting, tp=ranks)).fits:
                return ranks
        ranks *= 2
    return None


def widest_format(ledger_of_format: Callable[[str], Ledger], names: tuple[str, ...]) -> str | None:
    """Return the first of these formats, from the widest on, in which it fits."""
    return next((name for name in names if ledger_of_format(name).fits), None)
