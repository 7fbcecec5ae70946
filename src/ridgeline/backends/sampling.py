"""From logits to tokens: penalties, filters and the draw, stated plainly in numpy.

This is the rule that every backend follows to the bit, whatever computes it and in what order:

* Logits are float32. Penalties, bias, suppressed ids and a mask change them one after the other,
  each computed in float64 and rounded to float32.
* A token's weight is a whole number, ``floor(2**40 * 2**z)``, where z = (logit - greatest) *
  log2(e) / temperature. It is made of float64 operations that IEEE 754 defines, none of them fused.
  Whole numbers add up to the same sum in any order.
* Filters take tokens by falling logit, and by id where logits are equal: top-k by number, top-p by
  sums of weights. min-p compares weights.
* The draw takes the number that belongs to (seed, position), scales it to the sum of the weights
  that are left, and finds the first token, by id, whose running sum passes it.

So a row's token depends on its logits, parameters, history, seed and position alone. A row is
sampled by itself; this module knows no sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, TokenLogprobs

Floats = NDArray[np.float32]
Ints = NDArray[np.intp]
Weights = NDArray[np.int64]

LOG2_E = 1.4426950408889634
WEIGHT_BITS = 40  # the likeliest token's weight is 2 ** 40; sums of 2 ** 19 tokens fit 64 bits
LEAST_EXPONENT = -41.0  # at this and below, weights are 0
MAX_LOGIT = float(np.finfo(np.float32).max)
# 2 ** f for f from 0 to 1, least power first: the greatest relative error is 1e-10. All
# coefficients are positive, so it never falls, rounded or not; it is 1 at 0 and below 2 at 1.
POLYNOMIAL = (
    1.0,
    0.6931471843442172,
    0.240226405116416,
    0.05550502301900871,
    0.009614283176155432,
    0.0013419015661020896,
    0.00014377207654887598,
    2.143051516720808e-05,
)
_MOST_FACTOR = 1e300  # temperatures next to 0 would make it infinite


class Row(NamedTuple):
    """One draw: how, with which seed, for which position, after which tokens."""

    sampling: Sampling
    seed: int
    position: int
    history: tuple[int, ...]
    mask: bytes = b""  # a bit for each id that may be chosen; none allows all

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the likeliest token of the raw logits is the answer, if the mask allows it."""
        params = self.sampling.params
        untouched = not (params.penalises or params.logit_bias or self.suppresses)
        return params.temperature == 0 and untouched

    def allows(self, token: int) -> bool:
        """Whether the mask has a token."""
        return not self.mask or bool(self.mask[token >> 3] >> (token & 7) & 1)

    @property
    def suppresses(self) -> bool:
        """Whether stop ids cannot be chosen yet."""
        least = self.sampling.prompt_len + self.sampling.params.min_tokens
        return self.position < least


class Rule(NamedTuple):
    """Temperature and filters, as the numbers that a draw needs."""

    factor: float  # log2(e) / temperature
    top_k: int  # 0 keeps all
    share: int  # top_p in units of 2 ** -64; 0 keeps all
    least: int  # weight; tokens with less are dropped


def rule(params: SamplingParams) -> Rule:
    """Return the rule of some parameters; greedy means keeping one token."""
    if params.temperature == 0:
        return Rule(1.0, 1, 0, 1)
    factor = min(LOG2_E / params.temperature, _MOST_FACTOR)
    share = int(params.top_p * 2.0**64) if params.top_p < 1 else 0
    keeps_one = params.top_p < 1 and share == 0
    least = max(1, math.ceil(params.min_p * 2.0**WEIGHT_BITS))
    return Rule(factor, 1 if keeps_one else max(params.top_k, 0), share, least)


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
        elif row.is_plain_greedy and row.allows(likeliest[i]):
            picks.append(likeliest[i])
        else:
            picks.append(_draw(adjust(logits[row_of[i]], row), row))
    return picks


def adjust(logits: Floats, row: Row) -> Floats:
    """Return logits after penalties and bias, at minus infinity where ids cannot be chosen."""
    params, prompt_len = row.sampling.params, row.sampling.prompt_len
    out = logits.copy()
    if row.history:
        seen = np.unique(np.array(row.history))
        old, scale = out[seen].astype(np.float64), params.repetition_penalty
        out[seen] = _rounded(np.where(old > 0, old / scale, old * scale))
        answer, count = np.unique(np.array(row.history[prompt_len:], int), return_counts=True)
        penalty = params.frequency_penalty * count + params.presence_penalty
        out[answer] = _rounded(out[answer].astype(np.float64) - penalty)
    if params.logit_bias:
        ids, biases = list(params.logit_bias), list(params.logit_bias.values())
        out[ids] = _rounded(out[ids].astype(np.float64) + biases)
    if row.suppresses:
        out[list(row.sampling.suppressed)] = -np.inf
    if row.mask:
        bits = np.unpackbits(np.frombuffer(row.mask, np.uint8), bitorder="little")
        out[bits[: len(out)] == 0] = -np.inf
    return out


def _rounded(values: NDArray[np.float64]) -> Floats:
    return np.clip(values, -MAX_LOGIT, MAX_LOGIT).astype(np.float32)


def _draw(logits: Floats, row: Row) -> int | None:
    ids, weights = keep(logits, rule(row.sampling.params))
    if not len(ids):
        return None
    reached = np.cumsum(weights)
    mark = uniform_bits(row.seed, row.position) * int(reached[-1]) >> 53
    return int(ids[np.searchsorted(reached, mark, side="right")])


def keep(logits: Floats, rule: Rule) -> tuple[Ints, Weights]:
    """Return the ids that survive the filters, ascending, and their weights, all above 0."""
    weights = weigh(logits, rule.factor)
    ids = np.arange(len(logits))
    if rule.top_k or rule.share:
        ids = np.argsort(-logits, kind="stable")
    if rule.top_k:
        ids = ids[: rule.top_k]
    if rule.share:
        reached = np.cumsum(weights[ids])
        wanted = int(reached[-1]) * rule.share >> 64
        ids = ids[: int(np.searchsorted(reached, wanted)) + 1]
    ids = np.sort(ids[weights[ids] >= rule.least])
    return ids, weights[ids]


@np.errstate(invalid="ignore", over="ignore")
def weigh(logits: Floats, factor: float) -> Weights:
    """Return the tokens' weights; all 0 if no logit is above minus infinity."""
    z = (logits.astype(np.float64) - np.float64(logits.max())) * factor
    z = np.where(z > LEAST_EXPONENT, z, LEAST_EXPONENT)  # not a number: nothing is left
    whole = np.floor(z)
    fraction = z - whole
    power = np.full_like(z, POLYNOMIAL[-1])
    for coefficient in POLYNOMIAL[-2::-1]:
        power = power * fraction + coefficient
    weights: Weights = (power * 2.0**WEIGHT_BITS).astype(np.int64) >> (-whole).astype(np.int64)
    return weights


def rank_tokens(logits: Floats, tokens: Sequence[int], top: int) -> Iterator[TokenLogprobs]:
    """Yield each row's log-probability of its token and of its ``top`` likeliest tokens.

    Log-probabilities are the model's own: of the raw logits, at temperature 1. Those of logits that
    are not finite are not a number.
    """
    for row, token in zip(logits, tokens, strict=True):
        if not np.isfinite(row).all():
            yield TokenLogprobs(token, math.nan, 1, ())
            continue
        ahead = int(np.count_nonzero(row > row[token]))
        ahead += int(np.count_nonzero(row[:token] == row[token]))
        likeliest = np.argsort(-row, kind="stable")[:top]
        norm = log_sum_exp(float(row.max()), int(weigh(row, LOG2_E).sum()))
        pairs = zip(likeliest.tolist(), row[likeliest].tolist(), strict=True)
        yield ranked(token, float(row[token]), ahead, norm, pairs)


def log_sum_exp(greatest: float, total: int) -> float:
    """Return the logarithm of a row's sum of exponentials, of its greatest logit and its weight."""
    return greatest + math.log(total / 2.0**WEIGHT_BITS)


def ranked(
    token: int, logit: float, ahead: int, norm: float, likeliest: Iterable[tuple[int, float]]
) -> TokenLogprobs:
    """Return log-probabilities of a token, with ``ahead`` likelier ones, and of the likeliest."""
    top = tuple((other, value - norm) for other, value in likeliest)
    return TokenLogprobs(token, logit - norm, ahead + 1, top)


def uniform_bits(seed: int, position: int) -> int:
    """Return the number of 53 bits that belongs to (seed, position): Philox4x32-10.

    A counter-based generator has no state to share or to lose: the draw for a position is the
    same in any batch, after any preemption (Salmon et al., SC 2011).
    """
    x0, x1, x2, x3 = position & 0xFFFFFFFF, position >> 32, 0, 0
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        a, b = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1, x2, x3 = (b >> 32) ^ x1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ x3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return (x0 << 21) ^ (x1 >> 11)
