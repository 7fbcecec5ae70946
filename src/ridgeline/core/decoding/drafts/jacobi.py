"""Lookahead in chain form: what the model draws behind wrong drafts is its next guess there.

Generating k tokens at once is a system of equations; repeating "draw all of them from the guesses
before" solves it in at most k rounds (Jacobi iteration; Santilli et al., 2023). Lookahead decoding
(Fu et al., 2024) also collects the n-grams of successive rounds and tries them. Its window has many
rows; here one chain per sequence serves for both. No other model and no repetition is needed, but
guesses are seldom right. It knows tokens alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Listing

from ridgeline.core.request import Request, Sequence
from ridgeline.core.scheduling.speculate import Guess
from ridgeline.core.step import SeqId, Work

_NGRAM = 4  # tokens, one of each round


class _Rounds:
    """The latest rounds of a sequence: rows of tokens, each with its first position."""

    def __init__(self) -> None:
        self.draws: tuple[int, tuple[int, ...]] = (0, ())
        self._drafts: deque[tuple[int, tuple[int, ...]]] = deque(maxlen=_NGRAM - 1)
        self.pool: dict[int, tuple[int, ...]] = {}  # by its first token: the rest of an n-gram

    def add(self, begin: int, drafts: tuple[int, ...], draws: tuple[int, ...]) -> None:
        """Take the drafts of a round and its draws, both from position ``begin`` on."""
        self._drafts.appendleft((begin, drafts))
        self.draws = (begin, draws)
        for j in range(1, len(draws)):
            ngram = [draws[j]]
            for position, (first, row) in enumerate(self._drafts, start=1):
                k = begin + j - position - first
                if not 0 <= k < len(row):
                    break
                ngram.append(row[k])
            *followers, key = ngram
            self.pool[key] = tuple(reversed(followers))

    def guess(self, tokens: list[int], most: int) -> Guess:
        """Return ``most`` tokens: an n-gram, then the last draws there, then what was said last."""
        drafts = self.pool.get(tokens[-1], ())[:most]
        begin, draws = self.draws
        drafts += draws[max(0, len(tokens) + len(drafts) - begin) :][: most - len(drafts)]
        missing = most - len(drafts)
        return Guess(drafts + tuple(tokens[max(0, len(tokens) - missing) :]), 2)


class Lookahead:
    """The drafter: rounds of each sequence."""

    def __init__(self) -> None:
        """Begin without sequences."""
        self._rounds: dict[SeqId, _Rounds] = {}

    def draft(self, wanted: Listing[tuple[Sequence, int]]) -> list[Guess]:
        """Return a guess for each sequence, of at most the number of tokens beside it."""
        return [
            self._rounds.setdefault(seq.id, _Rounds()).guess(seq.tokens, most)
            for seq, most in wanted
        ]

    def note_draws(self, work: Work, draws: tuple[int, ...]) -> None:
        """Take what was drawn in a step behind the drafts of a sequence."""
        begin = len(work.tokens) - work.drafts
        if rounds := self._rounds.get(work.seq_id):  # else it has ended meanwhile
            rounds.add(work.start + begin, work.tokens[begin:], draws)

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that has ended."""
        for seq in request.sequences:
            self._rounds.pop(seq.id, None)
