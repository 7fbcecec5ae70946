"""Drafts of a simulation, which has no texts: of each it is drawn whether it is right.

How often drafts are right depends on texts, so it is a parameter: the chance of each one, given
that those before it were right. The draws are a function of request and position, so a simulation
stays a function of its load. Nothing is known of what making a draft costs: by looking up what
stood before it costs nearly nothing, by a smaller model it costs that model's step.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Listing
from typing import NamedTuple

from ridgeline.core.request import Request, Sequence
from ridgeline.core.scheduling.speculate import MOST_DRAFTS, Guess
from ridgeline.core.step import Work

_WRONG = -2  # a token that is never drawn
_BITS = (1 << 64) - 1


class Drafts(NamedTuple):
    """How many tokens are guessed for each sequence in a step, and how often one is right."""

    most: int
    acceptance: float


def parse_drafts(text: str) -> Drafts:
    """Read ``4:0.6``. Raises ValueError, which says what there is."""
    most, _, share = text.partition(":")
    try:
        drafts = Drafts(int(most), float(share))
    except ValueError:
        drafts = Drafts(0, 0.0)
    if not (1 <= drafts.most <= MOST_DRAFTS and 0 <= drafts.acceptance <= 1):
        raise ValueError(
            f"--drafts {text}: write NUMBER:SHARE, such as 4:0.6, with 1 to {MOST_DRAFTS} "
            "draft tokens and a share from 0 to 1 of right ones"
        )
    return drafts


class SimDrafter:
    """Guesses that are right as often as was asked for."""

    def __init__(self, acceptance: float, token: Callable[[Sequence, int], int]) -> None:
        """Ask ``token`` for what a sequence's token of a number will be; 1 is the answer's first.

        ``acceptance`` is the chance that a guess is that, given that those before it were.
        """
        self._acceptance, self._token = acceptance, token

    def draft(self, wanted: Listing[tuple[Sequence, int]]) -> list[Guess]:
        """Return a guess for each sequence, of just the number of tokens beside it."""
        return [Guess(self._guess(seq, most), 1) for seq, most in wanted]

    def _guess(self, seq: Sequence, most: int) -> tuple[int, ...]:
        number = len(seq.tokens) - len(seq.request.prompt)
        drafts: list[int] = []
        for i in range(1, most + 1):
            if _share(*seq.id, number + i) >= self._acceptance:
                return (*drafts, *[_WRONG] * (most - len(drafts)))
            drafts.append(self._token(seq, number + i))
        return tuple(drafts)

    def note_draws(self, work: Work, draws: tuple[int, ...]) -> None:
        """Nothing is learnt from what was drawn."""

    def forget(self, request: Request) -> None:
        """Nothing is kept of a request."""


def _share(*values: int) -> float:
    """Return a number from 0 to 1 that looks drawn (SplitMix64; Steele et al., OOPSLA 2014)."""
    state = 0
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _BITS
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _BITS
        state ^= state >> 31
    return state / (1 << 64)
