"""Sampling against a plain statement of every filter. ``Plain`` below is that statement:
dictionaries, sorting and sums, one rule a line. Its probabilities are floats: where rounding may
decide, nothing is compared."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ridgeline.backends.sampler.rule import (
    LOG2_E,
    POLYNOMIAL,
    Row,
    adjust,
    keep,
    log_sum_exp,
    rank_draw,
    rank_tokens,
    rule,
    sample,
    uniform_bits,
    weigh,
)
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling

BORDER = 1e-8  # closer to a threshold than this, rounding may decide


class Plain:
    """What the parameters mean, token by token, in Python's own floats."""

    def __init__(self, logits: np.ndarray, row: Row) -> None:
        params, prompt_len = row.sampling.params, row.sampling.prompt_len
        answer = row.history[prompt_len:]
        self.logits = {token: float(logit) for token, logit in enumerate(logits)}
        for token in set(row.history):
            logit, penalty = self.logits[token], params.repetition_penalty
            self._set(token, logit / penalty if logit > 0 else logit * penalty)
        for token in set(answer):
            penalty = params.frequency_penalty * answer.count(token) + params.presence_penalty
            self._set(token, self.logits[token] - penalty)
        for token, amount in row.repeats:
            self._set(token, self.logits[token] - amount)
        for token, bias in (params.logit_bias or {}).items():
            self._set(token, self.logits[token] + bias)
        if row.position - prompt_len < params.min_tokens:
            for token in row.sampling.suppressed:
                self.logits[token] = -math.inf
        for token in row.banned:
            self.logits[token] = -math.inf
        self.is_at_border = False
        self.order = sorted(self.logits, key=lambda token: (-self.logits[token], token))
        self.kept = self._filter(params)
        self.chosen = self.kept
        if params.temperature and uniform(row.seed, row.position, 1) < params.xtc_probability:
            self.chosen = self._without_top(params.xtc_threshold)

    def _set(self, token: int, logit: float) -> None:
        self.logits[token] = float(np.float32(logit))

    def _filter(self, params: SamplingParams) -> dict[int, float]:
        """Probabilities of the tokens that survive, by id."""
        best = self.order[0]
        if params.temperature == 0:
            return {best: 1.0}
        weight = {t: self._weight(t, best, params.temperature) for t in self.order}
        left = self.order if params.top_k < 1 else self.order[: params.top_k]
        if params.typical_p < 1:
            left = self._typical(left, weight, params.typical_p)
        if params.top_p < 1:
            left = left[: self._nucleus([weight[t] for t in left], params.top_p)]
        least = weight[left[0]] * params.min_p
        if params.top_n_sigma > 0:
            spread = np.std([x for x in self.logits.values() if x > -math.inf])
            lowest = self.logits[left[0]] - params.top_n_sigma * spread
            least = max(least, math.exp((lowest - self.logits[best]) / params.temperature))
        self.is_at_border |= any(0 < abs(weight[t] - least) < BORDER for t in left)
        least = max(least, 2.0**-40)  # less than that is nothing
        return self._shares({t: weight[t] for t in sorted(left) if weight[t] >= least})

    def _shares(self, weight: dict[int, float]) -> dict[int, float]:
        total = math.fsum(weight.values())
        return {token: weight[token] / total for token in weight}

    def _typical(self, left: list[int], weight: dict[int, float], typical_p: float) -> list[int]:
        """Those whose surprise is closest to the expected one, likeliest first."""
        shares = self._shares({t: weight[t] for t in left if weight[t] >= 2.0**-40})
        expected = -math.fsum(p * math.log(p) for p in shares.values())
        far = {token: abs(-math.log(p) - expected) for token, p in shares.items()}
        order = sorted(far, key=lambda token: (far[token], token))
        num_kept = self._nucleus([shares[token] for token in order], typical_p)
        # Rounding may make equals, which are ordered by id: it matters at the end.
        for a, b in pairwise(order[num_kept - 1 : num_kept + 1]):
            is_close = far[b] - far[a] < 1e-6 * max(1.0, far[b])
            self.is_at_border |= is_close and self.logits[a] != self.logits[b]
        kept = set(order[:num_kept])
        return [token for token in left if token in kept]

    def _without_top(self, threshold: float) -> dict[int, float]:
        """Without those that have a share of the threshold, but for the last of them."""
        self.is_at_border |= any(0 < abs(p - threshold) < BORDER for p in self.kept.values())
        top = [t for t in self.order if self.kept.get(t, 0) >= max(threshold, 1e-30)]
        return self._shares({t: p for t, p in self.kept.items() if t not in top[:-1]})

    def _weight(self, token: int, best: int, temperature: float) -> float:
        weight = math.exp((self.logits[token] - self.logits[best]) / temperature)
        self.is_at_border |= abs(weight * 2.0**40 - 1) < 1e-6
        return weight

    def _nucleus(self, weights: list[float], top_p: float) -> int:
        """How many from the front it takes to reach ``top_p`` of the whole; at least one."""
        total, reached = math.fsum(weights), 0.0
        for count, weight in enumerate(weights, start=1):
            reached += weight / total
            self.is_at_border |= abs(reached - top_p) < BORDER
            if reached >= top_p:
                return count
        return len(weights)

    def draw(self, u: float) -> int:
        """Inverse of the cumulative distribution at ``u``, in the order of ids."""
        reached = 0.0
        for token, probability in self.chosen.items():
            reached += probability
            self.is_at_border |= abs(reached - u) < BORDER
            if u < reached:
                return token
        return list(self.chosen)[-1]


def make_row(
    params: SamplingParams,
    *,
    seed: int = 1,
    prompt: tuple[int, ...] = (),
    answer: tuple[int, ...] = (),
    suppressed: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
    repeats: tuple[tuple[int, float], ...] = (),
) -> Row:
    """A row as the backend makes it: history only where penalties need it."""
    history = prompt + answer if params.penalises else ()
    sampling = Sampling(params, len(prompt), suppressed)
    position = len(prompt) + len(answer)
    return Row(sampling, seed, position, history, b"", banned, repeats)


def draw(logits: Any, row: Row) -> int | None:
    (token,) = sample(np.asarray([logits], np.float32), np.zeros(1, np.intp), [row])
    return token


def survivors(logits: Any, **filters: Any) -> list[int]:
    return list(keep(np.asarray(logits, np.float32), rule(SamplingParams(**filters)))[0])


def uniform(seed: int, position: int, stream: int = 0) -> float:
    return uniform_bits(seed, position, stream) / 2.0**53


# --- every filter ------------------------------------------------------------------------------

# Quarters: ties are common, and sums are exact.
QUARTERS = st.integers(-24, 24).map(lambda quarters: quarters / 4)


@st.composite
def cases(draw_from: st.DrawFn) -> tuple[np.ndarray, Row]:
    size = draw_from(st.integers(1, 12))
    ids = st.integers(0, size - 1)
    logits = draw_from(st.lists(QUARTERS, min_size=size, max_size=size))
    params = SamplingParams(
        temperature=draw_from(st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5, 100.0])),
        top_k=draw_from(st.integers(-1, size + 3)),
        top_p=draw_from(st.just(1.0) | st.floats(0, 1)),
        min_p=draw_from(st.just(0.0) | st.floats(0, 1)),
        repetition_penalty=draw_from(st.sampled_from([1.0, 0.5, 1.25, 3.0])),
        presence_penalty=draw_from(st.sampled_from([0.0, -1.5, 0.75, 2.0])),
        frequency_penalty=draw_from(st.sampled_from([0.0, -0.5, 0.25, 2.0])),
        logit_bias=draw_from(st.none() | st.dictionaries(ids, QUARTERS, max_size=4)),
        min_tokens=draw_from(st.integers(0, 4)),
        typical_p=draw_from(st.just(1.0) | st.floats(0, 1)),
        top_n_sigma=draw_from(st.just(-1.0) | st.floats(0, 3)),
        xtc_probability=draw_from(st.sampled_from([0.0, 0.5, 1.0])),
        xtc_threshold=draw_from(st.floats(0, 0.6)),
    )
    amounts = st.sampled_from([0.5, 3.25, 1e30])
    row = make_row(
        params,
        seed=draw_from(st.integers(0, 2**64 - 1)),
        prompt=tuple(draw_from(st.lists(ids, max_size=5))),
        answer=tuple(draw_from(st.lists(ids, max_size=5))),
        suppressed=tuple(draw_from(st.sets(ids, max_size=max(0, size - 1)))),
        repeats=tuple(draw_from(st.dictionaries(ids, amounts, max_size=3)).items()),
    )
    left = sorted(set(range(size)) - set(row.sampling.suppressed))
    banned = draw_from(st.sets(st.sampled_from(left), max_size=len(left) - 1))
    row = row._replace(banned=tuple(banned))
    return np.array(logits, np.float32), row


@given(cases())
@settings(max_examples=600, deadline=None)
def test_all_filters_together(case: tuple[np.ndarray, Row]) -> None:
    logits, row = case
    plain = Plain(logits, row)
    wanted = plain.draw(uniform(row.seed, row.position))
    assume(not plain.is_at_border)
    assert list(adjust(logits, row)) == list(plain.logits.values())
    ids, weights = keep(adjust(logits, row), rule(row.sampling.params))
    assert list(ids) == list(plain.kept)
    np.testing.assert_allclose(weights / weights.sum(), list(plain.kept.values()), atol=1e-9)
    assert draw(logits, row) == wanted
    told = rank_draw(logits, row, wanted, len(logits))
    assert {one: math.exp(p) for one, p in told.top} == pytest.approx(plain.chosen, abs=1e-9)
    assert (told.token, told.logprob) == told.top[told.rank - 1]


LARGE = np.random.default_rng(0).normal(0, 2, 5000).astype(np.float32)
FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 3000},
    {"top_k": 3000, "top_p": 0.9},
    {"top_k": 6000, "top_p": 0.9},
    {"top_p": 0.1},  # settled among the first 1024
    {"top_p": 0.6},
    {"top_p": 0.999},  # not settled there
    {"top_p": 0.95, "temperature": 5.0},
    {"min_p": 0.05},
    {"top_p": 0.99, "min_p": 0.02, "repetition_penalty": 1.3, "frequency_penalty": 0.5},
    {"typical_p": 0.9},
    {"typical_p": 0.2, "temperature": 5.0},
    {"typical_p": 0.5, "top_k": 300, "top_p": 0.9, "min_p": 0.3},
    {"top_n_sigma": 1.5},
    {"top_n_sigma": 1.0, "temperature": 0.5, "xtc_probability": 1.0, "xtc_threshold": 0.001},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("ties", [False, True])
def test_a_large_vocabulary(filters: dict[str, Any], ties: bool) -> None:
    logits = np.round(LARGE * 2) / 2 if ties else LARGE
    params, num_compared = SamplingParams(**filters), 0
    for i in range(25):
        row = make_row(params, seed=i, prompt=(1, 2, 3), answer=(3, 4, 5 + i))
        plain = Plain(logits, row)
        ids, _ = keep(adjust(logits, row), rule(params))
        wanted = plain.draw(uniform(row.seed, row.position))
        if not plain.is_at_border:
            assert list(ids) == list(plain.kept)
            assert draw(logits, row) == wanted
            num_compared += 1
    assert num_compared > 20


@pytest.mark.parametrize("size", [1023, 1024, 1025, 2048])
def test_equal_logits_are_ordered_by_id_at_any_size(size: int) -> None:
    flat = np.zeros(size)
    assert survivors(flat) == list(range(size))
    assert survivors(flat, top_p=0.5) == list(range(math.ceil(size / 2)))
    assert survivors(flat, top_k=size // 3) == list(range(size // 3))


def test_top_p_reaches_exactly_and_counts_what_top_k_left() -> None:
    even = [0.0, 0.0, 0.0, 0.0]  # weights are exactly equal
    assert survivors(even, top_p=0.5) == [0, 1]
    assert survivors(even, top_p=0.500001) == [0, 1, 2]
    assert survivors(even, top_p=0.5, top_k=2) == [0]  # of half; of the whole it took two
    halves = np.log([0.5, 0.25, 0.125, 0.125])
    assert survivors(halves, top_p=0.49) == [0]
    assert survivors(halves, top_p=0.51) == [0, 1]
    assert survivors(halves, top_p=0.8) == [0, 1, 2]
    assert survivors([1.0, 1.0, 0.0], top_p=0.0) == [0]


def test_min_p_is_a_share_of_the_likeliest() -> None:
    halves = [0.0, math.log(0.5), math.log(0.25)]
    assert survivors(halves, min_p=0.4) == [0, 1]
    assert survivors([2.0, 2.0, 1.0], min_p=1.0) == [0, 1]


def test_repetition_sees_the_prompt_and_the_other_penalties_do_not() -> None:
    logits = np.array([2.0, -2.0, 2.0, 2.0], np.float32)
    both = {"prompt": (0, 1, 0), "answer": (2, 2)}
    repetition = make_row(SamplingParams(repetition_penalty=2.0), **both)
    assert list(adjust(logits, repetition)) == [1.0, -4.0, 1.0, 2.0]
    presence = make_row(SamplingParams(presence_penalty=0.5), **both)
    assert list(adjust(logits, presence)) == [2.0, -2.0, 1.5, 2.0]
    frequency = make_row(SamplingParams(frequency_penalty=0.5), **both)
    assert list(adjust(logits, frequency)) == [2.0, -2.0, 1.0, 2.0]


# --- the edges ---------------------------------------------------------------------------------


@pytest.mark.parametrize("u_of", range(20))
def test_one_token_left_is_taken_whatever_the_draw(u_of: int) -> None:
    logits = np.linspace(-1, 1, 10)
    bias = {token: -100.0 for token in range(10) if token != 3}
    assert draw(logits, make_row(SamplingParams(logit_bias=bias), seed=u_of)) == 3
    assert draw(logits, make_row(SamplingParams(temperature=1e-6), seed=u_of)) == 9
    assert draw(logits, make_row(SamplingParams(top_p=0.0), seed=u_of)) == 9
    assert draw(logits, make_row(SamplingParams(top_k=1), seed=u_of)) == 9


def test_a_high_temperature_is_nearly_even() -> None:
    rows = [make_row(SamplingParams(temperature=100.0), seed=seed) for seed in range(3000)]
    picks = sample(np.array([[0.0, 3.0]], np.float32), np.zeros(3000, np.intp), rows)
    assert abs(picks.count(1) / 3000 - 1 / (1 + math.exp(-0.03))) < 0.03


def test_greedy_takes_the_first_of_equals() -> None:
    tie = [0.0, 7.0, 7.0]
    assert draw(tie, make_row(SamplingParams(temperature=0))) == 1
    assert draw(tie, make_row(SamplingParams(temperature=0, logit_bias={2: 0.5}))) == 2
    penalised = SamplingParams(temperature=0, presence_penalty=0.5)
    assert draw(tie, make_row(penalised, answer=(1,))) == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stop_ids_cannot_come_before_min_tokens(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, min_tokens=2)
    logits = [0.0, 90.0, 0.5]
    for answer, wanted in [((), {0, 2}), ((0,), {0, 2}), ((0, 0), {1})]:
        row = make_row(params, prompt=(0,), answer=answer, suppressed=(1,))
        assert draw(logits, row) in wanted
    assert draw([0.0, 1.0], make_row(params, suppressed=(0, 1))) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_damaged_row_fails_alone(bad: float) -> None:
    logits = np.random.default_rng(1).normal(size=(6, 40)).astype(np.float32)
    kinds = [SamplingParams(temperature=t, top_p=p) for t, p in [(0, 1), (1, 1), (1, 0.5)]] * 2
    rows = [make_row(params, seed=i) for i, params in enumerate(kinds)]
    before = sample(logits, np.arange(6), rows)
    assert None not in before
    damaged = logits.copy()
    damaged[2, 7] = bad
    assert sample(damaged, np.arange(6), rows) == [*before[:2], None, *before[3:]]
    forbidden = make_row(SamplingParams(min_tokens=1), suppressed=tuple(range(40)))
    blocked = sample(logits, np.arange(6), [*rows[:4], forbidden, rows[5]])
    assert blocked == [*before[:4], None, before[5]]


def test_no_row_is_no_answer() -> None:
    assert sample(np.empty((0, 8), np.float32), np.zeros(0, np.intp), []) == []


# --- the draw ----------------------------------------------------------------------------------


WIDE = np.round(np.random.default_rng(7).normal(0, 2, 200), 2).astype(np.float32)
MANY: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 12},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.95, "temperature": 0.8},
    {"top_k": 30, "min_p": 0.02},
    {"top_p": 0.9, "min_p": 0.03, "temperature": 1.5},
    {"top_k": 60, "top_p": 0.97, "min_p": 0.004, "temperature": 1.3},
    {"logit_bias": {3: 2.0, 5: -100.0}, "repetition_penalty": 1.2, "presence_penalty": 0.5},
    {"typical_p": 0.7},
    {"top_n_sigma": 1.2, "temperature": 1.5},
    {"typical_p": 0.8, "top_n_sigma": 1.5, "top_p": 0.95},
]


@pytest.mark.parametrize("filters", MANY, ids=str)
def test_draws_follow_the_probabilities(filters: dict[str, Any]) -> None:
    """Chi-square over tokens, rare ones together, and Kolmogorov-Smirnov over ids."""
    count, params = 5000, SamplingParams(**filters)
    history = (1, 2, 3) if params.penalises else ()
    sampling = Sampling(params, 1, ())
    rows = [Row(sampling, 123, position, history) for position in range(count)]
    wanted = Plain(WIDE, rows[0]).chosen
    found = Counter(sample(WIDE[None], np.zeros(count, np.intp), rows))
    assert set(found) <= set(wanted)
    cells = {token: p for token, p in wanted.items() if p * count >= 5}
    rare = 1 - math.fsum(cells.values())
    counts = Counter({token: found[token] for token in cells})
    if rare > 1e-3:
        cells[-1], counts[-1] = rare, count - counts.total()
    assert chi_square(counts, cells) < limit(len(cells) - 1)
    shares = np.cumsum([wanted.get(token, 0) for token in range(len(WIDE))])
    seen = np.cumsum([found[token] for token in range(len(WIDE))]) / count
    assert np.abs(seen - shares).max() < 1.95 / math.sqrt(count)  # one in a thousand


def chi_square(found: Counter[Any], wanted: dict[Any, float]) -> float:
    total = found.total()
    return sum((found[x] - total * p) ** 2 / (total * p) for x, p in wanted.items())


def limit(freedom: int) -> float:
    """Far beyond what chance would do: mean and four and a half standard deviations."""
    return freedom + 4.5 * math.sqrt(2 * freedom)


def test_a_row_does_not_see_its_neighbours() -> None:
    logits = np.random.default_rng(2).normal(0, 2, (8, 60)).astype(np.float32)
    params = [SamplingParams(temperature=t, top_k=k) for t in (0.0, 1.2) for k in (0, 5)] * 2
    rows = [make_row(p, seed=i, answer=(i,)) for i, p in enumerate(params)]
    together = sample(logits, np.arange(8), rows)
    assert together == [draw(logits[i], row) for i, row in enumerate(rows)]
    order = np.random.default_rng(3).permutation(8)
    assert sample(logits, order, [rows[i] for i in order]) == [together[i] for i in order]


# --- weights -----------------------------------------------------------------------------------


def test_weights_are_whole_numbers_that_follow_a_softmax() -> None:
    logits = np.random.default_rng(8).normal(0, 3, 40_000).astype(np.float32)
    weights = weigh(logits, LOG2_E / 0.7)
    exact = np.exp((logits.astype(np.float64) - logits.max()) / 0.7)
    assert weights.dtype == np.int64
    assert weights.max() == weights[logits.argmax()] == 2**40
    np.testing.assert_allclose(weights, exact * 2.0**40, rtol=1.1e-10, atol=1)


def test_the_polynomial_never_falls_and_stays_below_2() -> None:
    """So a kernel may take its mantissa for it, and a likelier token never has less weight."""
    fractions = np.linspace(0, 1, 1_000_001)
    power = np.full_like(fractions, POLYNOMIAL[-1])
    for coefficient in POLYNOMIAL[-2::-1]:
        power = power * fractions + coefficient
    assert all(coefficient > 0 for coefficient in POLYNOMIAL)
    assert (np.diff(power) >= 0).all()
    assert power[0] == 1
    assert power[-1] < 2
    assert np.abs(power / 2**fractions - 1).max() < 1e-10


@given(st.lists(st.floats(-(2.0**120), 2.0**120, width=32), min_size=2, max_size=20))
@settings(deadline=None)
def test_weights_follow_the_order_of_logits(logits: list[float]) -> None:
    for factor in (0.01, 1.0, 1e6, 1e300):
        weights = weigh(np.sort(np.array(logits, np.float32)), factor)
        assert (np.diff(weights) >= 0).all()
        assert weights[-1] == 2**40


def test_the_log_of_the_sum_is_that_of_the_exponentials() -> None:
    row = np.random.default_rng(9).normal(0, 4, 3000).astype(np.float32)
    found = log_sum_exp(float(row.max()), int(weigh(row, LOG2_E).sum()))
    exact = float(row.max()) + math.log(np.exp(row.astype(np.float64) - row.max()).sum())
    assert found == pytest.approx(exact, abs=1e-8)


# --- logprobs ----------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_logits_and_ties_rank_by_id() -> None:
    logits = np.array([[0.0, 2.0, 1.0, 2.0], [3.0, 3.0, 3.0, 3.0]], np.float32)
    first, second = rank_tokens(logits, [3, 2], top=3)
    norm = math.log(1 + 2 * math.exp(2) + math.exp(1))
    assert (first.token, first.rank) == (3, 2)
    assert first.logprob == pytest.approx(2 - norm, abs=1e-9)
    assert [token for token, _ in first.top] == [1, 3, 2]
    top = [2 - norm, 2 - norm, 1 - norm]
    assert [logprob for _, logprob in first.top] == pytest.approx(top, abs=1e-9)
    assert (second.rank, [token for token, _ in second.top]) == (3, [0, 1, 2])
    assert [logprob for _, logprob in second.top] == pytest.approx([math.log(0.25)] * 3, abs=1e-9)


@given(st.lists(QUARTERS, min_size=1, max_size=20), st.data())
@settings(deadline=None)
def test_a_mask_leaves_out_tokens_and_changes_no_probability(
    logits: list[float], data: Any
) -> None:
    allowed = data.draw(st.sets(st.integers(0, len(logits) - 1)))
    top = data.draw(st.integers(0, len(logits) + 2))
    mask = sum(1 << token for token in allowed).to_bytes(3, "little")
    row = np.array([logits], np.float32)
    (every,) = rank_tokens(row, [0], len(logits))
    (masked,) = rank_tokens(row, [0], top, mask)
    assert masked.top == tuple(pair for pair in every.top if pair[0] in allowed)[:top]


@given(st.lists(QUARTERS, min_size=1, max_size=9), st.data())
@settings(deadline=None)
def test_the_rank_of_a_token_is_its_place_among_the_top(logits: list[float], data: Any) -> None:
    token, top = data.draw(st.integers(0, len(logits) - 1)), data.draw(st.integers(0, 12))
    (entry,) = rank_tokens(np.array([logits], np.float32), [token], top)
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    assert entry.rank == order.index(token) + 1
    assert [t for t, _ in entry.top] == order[:top]
    assert all(math.exp(logprob) <= 1 + 1e-9 for _, logprob in entry.top)
