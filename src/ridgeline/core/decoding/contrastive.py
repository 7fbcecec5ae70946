"""Contrastive search: tokens that are likely, but not like what the text has said already.

The semantics are those of Su et al., "A Contrastive Framework for Neural Text Generation" (2022)
and of Hugging Face's ``generate(penalty_alpha=..., top_k=...)``. A round looks one token ahead: the
model computes each candidate, and says how similar its final state is to those of all tokens
before. It knows nothing of blocks, models and states.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ridgeline.core.step import Candidates, TokenLogprobs


class Contrastive:
    """The search for one request. It begins with one beam, which has no token.

    Attributes:
        settled: the answer so far.
    """

    def __init__(
        self,
        penalty_alpha: float,
        top_k: int,
        stop_ids: frozenset[int],
        *,
        min_tokens: int = 0,
        num_ranked: int = 0,
    ) -> None:
        """Choose among ``top_k`` candidates of each token.

        A candidate's score is ``(1 - penalty_alpha)`` times its probability less ``penalty_alpha``
        times its similarity. None of ``stop_ids`` is one before ``min_tokens`` tokens are there.
        Each settled token comes with the ``num_ranked`` likeliest in its place.
        """
        self._penalty_alpha = penalty_alpha
        self._top_k = top_k
        self._stop_ids = stop_ids
        self._min_tokens = min_tokens
        self._num_ranked = num_ranked
        self.settled: list[TokenLogprobs] = []
        self._candidates: list[TokenLogprobs] = []  # of the next token, likeliest first

    @property
    def num_candidates(self) -> int:
        """How many likeliest tokens are needed; stop ids may take the places of some."""
        num_stops = len(self._stop_ids) if len(self.settled) < self._min_tokens else 0
        return max(self._top_k + num_stops, self._num_ranked)

    def advance(
        self, ranked: Sequence[Candidates], similarities: Sequence[float]
    ) -> list[tuple[int, int]]:
        """Settle the best candidate, which is a beam; return the beams that look beyond it.

        ``ranked`` and ``similarities`` are of the beams, as the call before ordered them. Of equal
        scores the likelier candidate's wins.
        """
        place = 0
        if self._candidates:
            alpha = self._penalty_alpha
            scores = [
                (1 - alpha) * math.exp(entry.logprob) - alpha * similarity
                for entry, similarity in zip(self._candidates, similarities, strict=True)
            ]
            place = scores.index(max(scores))
            self.settled.append(self._candidates[place])
        may_stop = len(self.settled) >= self._min_tokens
        top = tuple(ranked[place][: self._num_ranked])
        self._candidates = [
            TokenLogprobs(token, logprob, rank, top)
            for rank, (token, logprob) in enumerate(ranked[place], start=1)
            if may_stop or token not in self._stop_ids
        ][: self._top_k]
        return [(place, entry.token) for entry in self._candidates]

    def answers(self) -> list[list[TokenLogprobs]]:
        """Return the answer."""
        return [self.settled]
