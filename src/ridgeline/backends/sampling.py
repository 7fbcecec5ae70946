"""From logits to tokens: penalties, filters and the draw, in numpy.

Each row is sampled by itself, from its own logits, parameters, seed and position; nothing is
shared between rows, so a row's token cannot depend on its neighbours. It knows no sequences.

The order of tokens, wherever one is needed, is by falling logit, and by id where logits are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.core.step import Sampling, TokenLogprobs

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Ints = NDArray[np.intp]

_FIRST_LOOK = 1024  # most draws are settled among so many tokens; sorting them all is slow


class Row(NamedTuple):
    """One draw: how, with which seed, for which position, after which tokens."""

    sampling: Sampling
    seed: int
    position: int
    history: tuple[int, ...]

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the likeliest token of the raw logits is the answer."""
        params = self.sampling.params
        untouched = not (params.penalises or params.logit_bias or self.suppresses)
        return params.temperature == 0 and untouched

    @property
    def suppresses(self) -> bool:
        """Whether stop ids cannot be chosen yet."""
        least = self.sampling.prompt_len + self.sampling.params.min_tokens
        return self.position < least


def sample(logits: Floats, row_of: Ints, rows: Sequence[Row]) -> list[int | None]:
    """Draw one token for each of ``rows``, whose logits are ``logits[row_of[i]]``.

    Returns None where logits are not finite or no token may be chosen.
    """
    finite = np.isfinite(logits).all(axis=1).take(row_of).tolist()
    likeliest = logits.argmax(axis=1).take(row_of).tolist()
    picks: list[int | None] = []
    for i, row in enumerate(rows):
        if not finite[i]:
            picks.append(None)
        elif row.is_plain_greedy:
            picks.append(likeliest[i])
        else:
            picks.append(_draw(adjust(logits[row_of[i]], row), row))
    return picks


def adjust(logits: Floats, row: Row) -> Doubles:
    """Return logits after penalties and bias, with suppressed stop ids at minus infinity."""
    params, prompt_len = row.sampling.params, row.sampling.prompt_len
    out = logits.astype(np.float64)
    if row.history:
        seen = np.unique(np.array(row.history))
        scale = params.repetition_penalty
        out[seen] = np.where(out[seen] > 0, out[seen] / scale, out[seen] * scale)
        answer, count = np.unique(np.array(row.history[prompt_len:], int), return_counts=True)
        out[answer] -= params.frequency_penalty * count + params.presence_penalty
    if params.logit_bias:
        out[list(params.logit_bias)] += list(params.logit_bias.values())
    if row.suppresses:
        out[list(row.sampling.suppressed)] = -np.inf
    return out


def _draw(logits: Doubles, row: Row) -> int | None:
    if not np.isfinite(logits.max()):
        return None
    params = row.sampling.params
    if params.temperature == 0:
        return int(logits.argmax())
    kept, weights = keep(logits, params.temperature, params.top_k, params.top_p, params.min_p)
    total = np.cumsum(weights)
    index = np.searchsorted(total, uniform(row.seed, row.position) * total[-1], side="right")
    return int(kept[min(int(index), len(kept) - 1)])


def keep(
    logits: Doubles, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[Ints, Doubles]:
    """Return the ids that survive temperature, top-k, top-p and min-p, in order, and weights.

    Weights are probabilities up to a common factor.
    """
    with np.errstate(over="ignore"):  # near temperature 0 the others fall to -inf: weight 0
        weights = np.exp((logits - logits.max()) / temperature)
    if 0 < top_k < len(logits):
        ids = _first(logits, top_k)
        ids = _reach(ids, weights, top_p * weights[ids].sum()) if top_p < 1 else ids
    elif top_p < 1:
        # The likeliest few usually hold all of top-p; only if not, sort the whole vocabulary.
        share = top_p * weights.sum()
        ids = _reach(_first(logits, _FIRST_LOOK), weights, share)
        if weights[ids].sum() < share:
            ids = _reach(_first(logits, len(logits)), weights, share)
    else:
        ids = _first(logits, len(logits))
    candidates = weights[ids]
    alive = (candidates > 0) & (candidates >= min_p * candidates[0])
    return ids[alive], candidates[alive]


def _reach(ids: Ints, weights: Doubles, share: float) -> Ints:
    """Return the fewest of ``ids``, from the front, whose weights reach ``share``; at least one."""
    below = np.cumsum(weights[ids]) < share
    return ids[: np.count_nonzero(below) + 1]


def _first(logits: Doubles, size: int) -> Ints:
    """Return the ids of the ``size`` largest logits, in order."""
    if size < len(logits):
        threshold = np.partition(logits, len(logits) - size)[len(logits) - size]
        ids = np.flatnonzero(logits >= threshold)
    else:
        ids = np.arange(len(logits))
    order: Ints = ids[np.argsort(-logits[ids], kind="stable")]
    return order[:size]


def rank_tokens(logits: Floats, tokens: Sequence[int], top: int) -> Iterator[TokenLogprobs]:
    """Yield each row's log-probability of its token and of its ``top`` likeliest tokens.

    Log-probabilities are the model's own: of the raw logits, at temperature 1.
    """
    for row, token in zip(logits.astype(np.float64), tokens, strict=True):
        logprobs = row - row.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        ahead = int(np.count_nonzero(row > row[token]))
        ahead += int(np.count_nonzero(row[:token] == row[token]))
        likeliest = _first(row, min(top, len(row))) if top else np.arange(0)
        pairs = tuple(zip(likeliest.tolist(), logprobs[likeliest].tolist(), strict=True))
        yield TokenLogprobs(token, float(logprobs[token]), ahead + 1, pairs)


def uniform(seed: int, position: int) -> float:
    """Return the number in [0, 1) that belongs to (seed, position): Philox4x32-10.

    A counter-based generator has no state to share or to lose: the draw for a position is the
    same in any batch, after any preemption (Salmon et al., SC 2011).
    """
    x0, x1, x2, x3 = position & 0xFFFFFFFF, position >> 32, 0, 0
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        a, b = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1, x2, x3 = (b >> 32) ^ x1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ x3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return ((x0 << 21) ^ (x1 >> 11)) / (1 << 53)
