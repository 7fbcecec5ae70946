"""Beam search: which beginnings of an answer are worth going on with.

The semantics are those of Hugging Face's ``generate(num_beams=...)``. A round is over when the
likeliest tokens after each beam are known; ``advance`` then says which beam each of the next ones
continues. It knows nothing of blocks, models and the order in which beams are computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from ridgeline.core.step import Candidates, TokenLogprobs

Answer = list[TokenLogprobs]


class _Beam(NamedTuple):
    """The beginning of an answer, and the sum of its log-probabilities."""

    score: float
    tokens: Answer


class Beams:
    """The search for one request. It begins with one beam, which has no token."""

    def __init__(
        self,
        width: int,
        max_tokens: int,
        stop_ids: frozenset[int],
        *,
        num_answers: int = 1,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        min_tokens: int = 0,
        num_ranked: int = 0,
    ) -> None:
        """Follow ``width`` beams to answers of at most ``max_tokens`` tokens.

        An answer ends with one of ``stop_ids``, but not before ``min_tokens`` other tokens, or at
        its greatest length. Its score is the sum of its log-probabilities divided by its number of
        tokens to the power of ``length_penalty``. With ``early_stopping`` True the search is over
        as soon as ``width`` answers are complete; with False when no beam is better than these at
        its present length; with "never" when none can become better. ``answers`` gives
        ``num_answers`` of them, with ``num_ranked`` likeliest tokens in the place of each.
        """
        self._width = width
        self._max_tokens = max_tokens
        self._stop_ids = stop_ids
        self._num_answers = num_answers
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._min_tokens = min_tokens
        self._num_ranked = num_ranked
        self.settled: Answer = []  # nothing is, before the end
        self._running = [_Beam(0.0, [])]  # best first
        self._complete: list[_Beam] = []  # best first, at most ``width``, by their final scores

    @property
    def num_candidates(self) -> int:
        """How many likeliest tokens after each beam are needed.

        ``width`` beams may go on with tokens of the same one, and each stop id takes a place.
        """
        return max(self._width + len(self._stop_ids), self._num_ranked)

    def advance(
        self, ranked: Sequence[Candidates], similarities: Sequence[float] = ()
    ) -> list[tuple[int, int]]:
        """Take the candidates of all beams; return the next beams, none if the search is over.

        Among the first ``width`` candidates of all beams, those that end are complete answers. The
        first ``width`` that do not end go on. Of equal ones the better beam's come first. A beam is
        the place of the one that it continues, and the token that it adds. Similarities mean
        nothing here.
        """
        length = len(self._running[0].tokens) + 1
        running: list[_Beam] = []
        moves: list[tuple[int, int]] = []
        for place, (score, parent, rank) in enumerate(self._sorted(ranked, length)):
            token, logprob = ranked[parent][rank]
            ends = token in self._stop_ids or length >= self._max_tokens
            if place >= self._width and (ends or len(moves) == self._width):
                continue
            top = tuple(ranked[parent][: self._num_ranked])
            entry = TokenLogprobs(token, logprob, rank + 1, top)
            tokens = [*self._running[parent].tokens, entry]
            if not ends:
                running.append(_Beam(score, tokens))
                moves.append((parent, token))
            else:
                self._complete.append(_Beam(score / length**self._length_penalty, tokens))
        self._complete.sort(key=lambda beam: -beam.score)  # stable: first come
        del self._complete[self._width :]
        self._running = running
        return [] if self._is_over(length) else moves

    def _sorted(self, ranked: Sequence[Candidates], length: int) -> list[tuple[float, int, int]]:
        """Return score, beam and rank of each candidate, best first."""
        may_stop = length > self._min_tokens
        continuations = [
            (-beam.score - logprob, parent, rank)
            for parent, (beam, candidates) in enumerate(zip(self._running, ranked, strict=True))
            for rank, (token, logprob) in enumerate(candidates)
            if may_stop or token not in self._stop_ids
        ]
        return [(-cost, parent, rank) for cost, parent, rank in sorted(continuations)]

    def _is_over(self, length: int) -> bool:
        """Return whether no beam can go on, or none of them can become one of the answers."""
        if not self._running:
            return True
        if len(self._complete) < self._width:
            return False
        if self._early_stopping is True:
            return True
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._max_tokens
        best: float = self._running[0].score / length**self._length_penalty
        return best <= self._complete[-1].score

    def answers(self) -> list[Answer]:
        """Return the answers of a search that is over, best first."""
        return [beam.tokens for beam in self._complete[: self._num_answers]]
