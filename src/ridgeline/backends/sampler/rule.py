"""From logits to tokens: penalties, filters and the draw, stated plainly in numpy.

This is the rule that every backend follows to the bit, whatever computes it and in what order:

* Logits are float32. Penalties, DRY, bias, suppressed ids and a mask change them one after the
  other, each computed in float64 and rounded to float32.
* A token's weight is a whole number, ``floor(2**40 * 2**z)``, where z = (logit - greatest) *
  log2(e) / temperature. It is made of float64 operations that IEEE 754 defines, none of them fused.
  Whole numbers add up to the same sum in any order.
* Filters take tokens by falling logit, and by id where logits are equal: top-k by number, top-p by
  sums of weights. Typical sampling takes them by the distance of z from its mean. min-p and
  top-n-sigma compare weights with a least one, XTC with a share of their sum.
* What stands in the middle of a text may be narrowed once more (``narrowed``).
* The draw takes the number that belongs to (seed, position), scales it to the sum of the weights
  that are left, and finds the first token, by id, whose running sum passes it.

So a row's token depends on its logits, parameters, history, seed and position alone. A row is
sampled by itself; this module knows nothing of sequences.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.sampler.penalties import has
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, TokenLogprobs, TokenRules

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
_SHARES = 5  # in the middle of a text a candidate with less than this part of the whole is dropped


class Row(NamedTuple):
    """One draw: how, with which seed, for which position, after which tokens."""

    sampling: Sampling
    seed: int
    position: int
    history: tuple[int, ...]
    mask: bytes = b""  # a bit for each id that may be chosen; none allows all
    banned: tuple[int, ...] = ()  # ids that cannot be chosen
    repeats: tuple[tuple[int, float], ...] = ()  # ids, and what DRY subtracts from their logits

    @property
    def is_plain_greedy(self) -> bool:
        """Whether the likeliest token of the raw logits is the answer, if the mask allows it."""
        params = self.sampling.params
        changes = params.penalises or self.repeats or params.logit_bias or self.suppresses
        return params.temperature == 0 and not changes

    def allows(self, token: int) -> bool:
        """Whether the mask has a token, and it is not banned."""
        return (not self.mask or has(self.mask, token)) and token not in self.banned

    @property
    def suppresses(self) -> bool:
        """Whether stop ids cannot be chosen yet."""
        min_length = self.sampling.prompt_len + self.sampling.params.min_tokens
        return self.position < min_length


class Rule(NamedTuple):
    """Temperature and filters, as the numbers that a draw needs. Shares are in 2 ** -64."""

    factor: float  # log2(e) / temperature
    top_k: int  # 0 keeps all
    share: int  # top_p; 0 keeps all
    least: int  # weight, if the likeliest has 2 ** 40; tokens with less are dropped
    typical: int = 0  # share; 0 keeps all
    sigmas: float = 0.0  # top_n_sigma; 0 keeps all
    chance: int = 0  # of XTC, in 2 ** -53
    threshold: int = 0  # share from which on XTC excludes


def rule(params: SamplingParams) -> Rule:
    """Return the rule of some parameters; greedy means keeping one token."""
    if params.temperature == 0:
        return Rule(1.0, 1, 0, 1)
    excludes = params.xtc_probability > 0 and params.xtc_threshold <= 0.5
    return Rule(
        factor=min(LOG2_E / params.temperature, _MOST_FACTOR),
        top_k=max(params.top_k, 0),
        share=_share(params.top_p),
        least=max(1, math.ceil(params.min_p * 2.0**WEIGHT_BITS)),
        typical=_share(params.typical_p),
        sigmas=max(params.top_n_sigma, 0.0),
        chance=math.ceil(params.xtc_probability * 2.0**53) if excludes else 0,
        threshold=int(params.xtc_threshold * 2.0**64) if excludes else 0,
    )


def _share(probability: float) -> int:
    """Return it in 2 ** -64, at least one; 0 for all."""
    return max(1, int(probability * 2.0**64)) if probability < 1 else 0


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
    if row.history and params.penalises:
        history = np.unique(np.array(row.history))
        old, scale = out[history].astype(np.float64), params.repetition_penalty
        out[history] = _rounded(np.where(old > 0, old / scale, old * scale))
        answer, count = np.unique(np.array(row.history[prompt_len:], int), return_counts=True)
        penalty = params.frequency_penalty * count + params.presence_penalty
        out[answer] = _rounded(out[answer].astype(np.float64) - penalty)
    for token, amount in row.repeats:
        out[token] = _rounded(out[token].astype(np.float64) - amount)
    if params.logit_bias:
        ids, biases = list(params.logit_bias), list(params.logit_bias.values())
        out[ids] = _rounded(out[ids].astype(np.float64) + biases)
    if row.suppresses:
        out[list(row.sampling.suppressed)] = -np.inf
    out[list(row.banned)] = -np.inf
    if row.mask:
        out[~_has_bit(row.mask, len(out))] = -np.inf
    return out


def _has_bit(mask: bytes, count: int) -> NDArray[np.bool_]:
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=count, bitorder="little")
    return bits.view(np.bool_)


def _rounded(values: NDArray[np.float64]) -> Floats:
    return np.clip(values, -MAX_LOGIT, MAX_LOGIT).astype(np.float32)


def _draw(logits: Floats, row: Row) -> int | None:
    ids, weights = _chances(logits, row)
    if not len(ids):
        return None
    reached = np.cumsum(weights)
    mark = uniform_bits(row.seed, row.position) * int(reached[-1]) >> 53
    return int(ids[np.searchsorted(reached, mark, side="right")])


def _chances(logits: Floats, row: Row) -> tuple[Ints, Weights]:
    """Return the ids that may be drawn, ascending, and their weights; ``logits`` are adjusted."""
    wanted = rule(row.sampling.params)
    ids, weights = keep(logits, wanted)
    if not len(ids):
        return ids, weights
    if wanted.chance and uniform_bits(row.seed, row.position, stream=1) < wanted.chance:
        ids, weights = exclude_top(logits, ids, weights, wanted.threshold)
    if row.sampling.tokens.texts:
        few, heavy = narrowed(ids.tolist(), weights.tolist(), row.sampling.tokens)
        ids, weights = np.array(few), np.array(heavy)
    return ids, weights


def keep(logits: Floats, rule: Rule) -> tuple[Ints, Weights]:
    """Return the ids that survive all filters but XTC, ascending, and their weights, above 0."""
    z = exponents(logits.astype(np.float64), float(logits.max()), rule.factor)
    weights = powers(z)
    ids = np.arange(len(logits))
    if rule.top_k or rule.share:
        ids = np.argsort(-logits, kind="stable")
    if rule.top_k:
        ids = ids[: rule.top_k]
    if rule.typical:
        ids = ids[_are_typical(ids, z[ids], weights[ids], rule.typical)]
    if rule.share:
        ids = ids[: _reaching(weights[ids], rule.share)]
    min_weight = max(1, rule.least * int(weights[ids].max()) >> WEIGHT_BITS)
    if rule.sigmas:
        lowest = np.array([float(logits[ids].max()) - rule.sigmas * spread(logits)])
        z = exponents(lowest, float(logits.max()), rule.factor)
        min_weight = max(min_weight, int(powers(z)[0]))
    ids = np.sort(ids[weights[ids] >= min_weight])
    return ids, weights[ids]


def _reaching(weights: Weights, share: int) -> int:
    """Return how many weights, from the first on, reach a share of their sum; at least one."""
    reached = np.cumsum(weights)
    wanted = max(1, int(reached[-1]) * share >> 64)
    return int(np.searchsorted(reached, wanted)) + 1


def _are_typical(
    ids: Ints, z: NDArray[np.float64], weights: Weights, share: int
) -> NDArray[np.bool_]:
    """Return which tokens typical sampling keeps (Meister et al., 2022).

    A token's surprise is -z, but for a constant and a factor; the expected surprise is its mean.
    """
    total = int(weights.sum())
    mean = -np.float64((weights * -z).astype(np.int64).sum()) / np.float64(max(total, 1))
    distance = np.abs(z - mean).astype(np.float32)
    order = np.lexsort((ids, distance))
    typical = np.zeros(len(ids), bool)
    typical[order[: _reaching(weights[order], share)]] = True
    return typical & (weights > 0) if total else typical


def exclude_top(
    logits: Floats, ids: Ints, weights: Weights, threshold: int
) -> tuple[Ints, Weights]:
    """Return what XTC leaves: of tokens that have a share of ``threshold`` the least likely."""
    min_weight = max(1, int(weights.sum()) * threshold >> 64)
    top = np.flatnonzero(weights >= min_weight)
    if len(top) > 1:
        values = logits[ids[top]]
        last = top[np.flatnonzero(values == values.min())[-1]]
        left = (weights < min_weight) | (np.arange(len(ids)) == last)
        ids, weights = ids[left], weights[left]
    return ids, weights


def spread(logits: Floats) -> float:
    """Return the standard deviation of the logits above minus infinity.

    Distances from the greatest are added up in 16 sums, of every 16th logit, which are then joined
    by halves; so are their squares.
    """
    is_there = logits > -np.inf
    with np.errstate(invalid="ignore"):
        depth = np.where(is_there, np.float64(logits.max()) - logits.astype(np.float64), 0.0)
    depth = np.pad(depth, (0, -len(depth) % 16)).reshape(-1, 16)
    count = max(1, int(is_there.sum()))
    mean, square = (_sum_of_rows(part) / count for part in (depth, depth * depth))
    return math.sqrt(square - mean * mean)


def _sum_of_rows(rows: NDArray[np.float64]) -> float:
    sums = np.cumsum(rows, axis=0)[-1]
    for width in (8, 4, 2, 1):
        sums = sums[:width] + sums[width:]
    return float(sums[0])


def weigh(logits: Floats, factor: float) -> Weights:
    """Return the tokens' weights; all 0 if no logit is above minus infinity."""
    return powers(exponents(logits.astype(np.float64), float(logits.max()), factor))


@np.errstate(invalid="ignore", over="ignore")
def exponents(logits: NDArray[np.float64], greatest: float, factor: float) -> NDArray[np.float64]:
    """Return z of each logit, at least -41."""
    z = (logits - np.float64(greatest)) * factor
    return np.where(z > LEAST_EXPONENT, z, LEAST_EXPONENT)  # not a number: nothing is left


def powers(z: NDArray[np.float64]) -> Weights:
    """Return ``floor(2**40 * 2**z)``, for z from -41 to 0."""
    whole = np.floor(z)
    fraction = z - whole
    power = np.full_like(z, POLYNOMIAL[-1])
    for coefficient in POLYNOMIAL[-2::-1]:
        power = power * fraction + coefficient
    weights: Weights = (power * 2.0**WEIGHT_BITS).astype(np.int64) >> (-whole).astype(np.int64)
    return weights


def rank_tokens(
    logits: Floats, tokens: Sequence[int], top: int, mask: bytes = b""
) -> Iterator[TokenLogprobs]:
    """Yield each row's log-probability of its token and of its ``top`` likeliest tokens.

    Log-probabilities are the model's own: of the raw logits, at temperature 1. Those of logits that
    are not finite are not a number. A ``mask`` leaves out tokens whose bits are not set, and
    changes no probability.
    """
    for row, token in zip(logits, tokens, strict=True):
        if not np.isfinite(row).all():
            yield TokenLogprobs(token, math.nan, 1, ())
            continue
        ahead = int(np.count_nonzero(row > row[token]))
        ahead += int(np.count_nonzero(row[:token] == row[token]))
        likeliest = _likeliest(row, top, mask)
        norm = log_sum_exp(float(row.max()), int(weigh(row, LOG2_E).sum()))
        pairs = zip(likeliest.tolist(), row[likeliest].tolist(), strict=True)
        yield ranked(token, float(row[token]), ahead, norm, pairs)


def rank_draw(logits: Floats, row: Row, token: int, top: int) -> TokenLogprobs:
    """Return log-probabilities of the draw of ``token``, and of its ``top`` likeliest rivals.

    They are of the weights that penalties, temperature and filters leave, whose sum is 1: tokens
    that cannot be drawn are not among them.
    """
    ids, weights = _chances(adjust(logits, row), row)
    order = np.argsort(-weights, kind="stable")
    logprobs = np.log(weights[order] / weights.sum()).tolist()
    ranking = list(zip(ids[order].tolist(), logprobs, strict=True))
    place = [one for one, _ in ranking].index(token)
    return TokenLogprobs(token, ranking[place][1], place + 1, tuple(ranking[:top]))


def _likeliest(row: Floats, top: int, mask: bytes) -> Ints:
    """Return the ids of the ``top`` greatest logits that a mask allows, then by id."""
    ids = np.flatnonzero(_has_bit(mask, len(row))) if mask else np.arange(len(row))
    if 0 < top < len(ids):
        lowest = np.partition(row[ids], len(ids) - top)[len(ids) - top]
        ids = ids[row[ids] >= lowest]
    return ids[np.argsort(-row[ids], kind="stable")[:top]]


def log_sum_exp(greatest: float, total: int) -> float:
    """Return the logarithm of a row's sum of exponentials, of its greatest logit and its weight."""
    return greatest + math.log(total / 2.0**WEIGHT_BITS)


def ranked(
    token: int, logit: float, ahead: int, norm: float, likeliest: Iterable[tuple[int, float]]
) -> TokenLogprobs:
    """Return log-probabilities of a token, with ``ahead`` likelier ones, and of the likeliest."""
    top = tuple((likely_id, value - norm) for likely_id, value in likeliest)
    return TokenLogprobs(token, logit - norm, ahead + 1, top)


def uniform_bits(seed: int, position: int, stream: int = 0) -> int:
    """Return the number of 53 bits that belongs to (seed, position, stream): Philox4x32-10.

    A counter-based generator has no state to share or to lose: the draw for a position is the
    same in any batch, after any preemption (Salmon et al., SC 2011). Stream 0 draws the token, 1
    says whether XTC acts.
    """
    x0, x1, x2, x3 = position & 0xFFFFFFFF, position >> 32, stream, 0
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF
    for _ in range(10):
        a, b = x0 * 0xD2511F53, x2 * 0xCD9E8D57
        x0, x1, x2, x3 = (b >> 32) ^ x1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ x3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return (x0 << 21) ^ (x1 >> 11)


def narrowed(
    ids: Sequence[int], weights: Sequence[int], rules: TokenRules
) -> tuple[list[int], list[int]]:
    """Return the candidates that are left, ascending, and their weights.

    llama.cpp's sampler for the middle of a text (Gerganov, 2024): few tokens are left to draw from.
    It ends an answer early: code that an editor shows must rather be short than wrong.

    If the ends together weigh more than a third of the other candidates' mean, only they stay. Else
    what begins with another candidate, or is its beginning, adds its weight to the heavier of the
    two. Of these, those with a fifth of the whole stay, and of those, those with a fair share of
    what stays. Ends stay; where nothing else does, the first of all ends is left alone.

    Args:
        ids: candidates.
        weights: of each, above 0.
        rules: texts of tokens, and which end a text.
    """
    order = sorted(zip(ids, weights, strict=True), key=lambda pair: (-pair[1], pair[0]))
    total = sum(weights)
    ends = {token: weight for token, weight in order if token in rules.ends}
    num_ends = sum(ends.values())
    if 3 * num_ends * len(order) > total - num_ends:
        return _ascending(ends)
    merged = _merged(order, rules)
    left = {i: weight for i, weight in merged.items() if i in ends or weight * _SHARES >= total}
    num_texts = len(left.keys() - ends.keys())
    if not num_texts:
        return ([rules.ends[0]], [1]) if rules.ends else _ascending(merged)
    total, share = sum(left.values()), num_texts + 1
    return _ascending({i: w for i, w in left.items() if i in ends or w * share >= total})


def _merged(order: Sequence[tuple[int, int]], rules: TokenRules) -> dict[int, int]:
    """Return candidates, heaviest first, without those whose weight another one has taken."""
    texts, left = rules.texts, dict(order)
    for first, _ in order:
        for second, _ in order:
            if first not in left:
                break
            if first == second or second not in left or not texts[first]:
                continue
            if texts[second].startswith(texts[first]):
                heavy, light = (second, first) if left[second] > left[first] else (first, second)
                left[heavy] += left.pop(light)
    return left


def _ascending(candidates: dict[int, int]) -> tuple[list[int], list[int]]:
    ids = sorted(candidates)
    return ids, [candidates[token] for token in ids]
