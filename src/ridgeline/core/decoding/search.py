"""Searches: which one a request asks for, and what it does. They know nothing of blocks and models.

Beams say which beginnings of an answer are worth going on with. The semantics are those of Hugging
Face's ``generate(num_beams=...)``. A round is over when the likeliest tokens after each beam are
known; ``advance`` then says which beam each of the next ones continues, in whichever order beams
are computed.

A contrastive search finds tokens that are likely, but not like what the text has said already. The
semantics are those of Su et al., "A Contrastive Framework for Neural Text Generation" (2022) and of
Hugging Face's ``generate(penalty_alpha=..., top_k=...)``. A round looks one token ahead: the model
computes each candidate, and says how similar its final state is to those of all tokens before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal, NamedTuple

from ridgeline.core.params import SamplingParams
from ridgeline.core.request import Request
from ridgeline.core.step import Candidates, TokenLogprobs

Answer = list[TokenLogprobs]
# What a search takes. Whatever else is set, it refuses.
_BOTH = (
    *("n", "seed", "stop_token_ids", "max_tokens", "min_tokens", "ignore_eos", "logprobs"),
    *("prediction", "skip_special_tokens", "truncate_prompt_tokens"),
)
_OF_BEAMS = ("length_penalty", "early_stopping")
_WITH = {
    "use_beam_search": (
        *(*_BOTH, *_OF_BEAMS),
        *("best_of", "structured_outputs", "use_beam_search"),
    ),
    "penalty_alpha": (*_BOTH, "stop", "include_stop_str_in_output", "top_k", "penalty_alpha"),
}
_SAME_AS_DEFAULT = {"temperature": 0, "top_k": -1, "logit_bias": {}}  # to a search


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


def with_recommended(recommended: Mapping[str, Any], **changes: Any) -> SamplingParams:
    """Return the sampling that a model recommends, with ``changes``. Raises ValueError.

    A search draws nothing, so recommendations do not apply to it.
    """
    searches = changes.get("use_beam_search") or changes.get("penalty_alpha") is not None
    return SamplingParams(**{**({} if searches else recommended), **changes})


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


def check_search(params: SamplingParams, *, is_stream: bool = False) -> None:
    """Raise ValueError, which begins with a field's name, for what contradicts a search.

    Searches draw nothing, so all that changes a distribution is refused; temperatures 0 and 1 are
    the same to them. Answers that are chosen when they are complete cannot be streamed.
    """
    if not isinstance(params.early_stopping, bool) and params.early_stopping != "never":
        raise ValueError("early_stopping must be true, false or 'never'")
    search = "use_beam_search" if params.use_beam_search else "penalty_alpha"
    for field in fields(params):
        name, value = field.name, getattr(params, field.name)
        if value in (field.default, _SAME_AS_DEFAULT.get(name, field.default)):
            continue
        if params.searches and name not in _WITH[search]:
            raise ValueError(f"{name} is {value!r:.80}: {search} excludes it")
        if not params.use_beam_search and name in _OF_BEAMS:
            raise ValueError(f"{name} is {value!r}: it needs use_beam_search")
    if params.penalty_alpha:
        _check_contrastive(params)
    elif params.penalty_alpha == 0 and params.temperature:
        raise ValueError(f"temperature is {params.temperature}: penalty_alpha 0 means greedy")
    elif is_stream and (params.use_beam_search or params.num_answers > params.n):
        name = "use_beam_search" if params.use_beam_search else "best_of"
        raise ValueError(f"stream is not possible: {name} chooses among complete answers")


def _check_contrastive(params: SamplingParams) -> None:
    if params.top_k < 2:
        raise ValueError(
            f"penalty_alpha is {params.penalty_alpha}: it needs top_k, at least 2, which says "
            f"how many candidates of each token are compared"
        )
    if params.n > 1:
        raise ValueError(f"n is {params.n}: penalty_alpha has one answer")


def new_search(request: Request) -> Beams | Contrastive | None:
    """Return the search that a request's parameters ask for, None if it draws its tokens.

    Raises ValueError if they contradict it.
    """
    params = request.params
    check_search(params)
    num_ranked = params.logprobs or 0
    if params.penalty_alpha:
        return Contrastive(
            params.penalty_alpha,
            params.top_k,
            request.stop_ids,
            min_tokens=params.min_tokens,
            num_ranked=num_ranked,
        )
    if not params.use_beam_search:
        return None
    return Beams(
        params.num_seqs,
        request.max_len - len(request.prompt),
        request.stop_ids,
        num_answers=params.n,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
        min_tokens=params.min_tokens,
        num_ranked=num_ranked,
    )
