"""Typical sampling, top-n-sigma, XTC and forbidden tokens: their edges, their order, their coin."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ridgeline.backends.sampler.rule import exclude_top, keep, rule, sample, spread
from ridgeline.backends.sampler.step_output import Sampled, finish
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, TokenRules, Work
from tests.backends.sampler.test_rule import draw, make_row, survivors, uniform

HALVES = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625])).astype(np.float32)
OFF: dict[str, Any] = {
    "typical_p": 1.0,
    "top_n_sigma": 0.0,
    "xtc_probability": 0.0,
    "xtc_threshold": 0.0,
    "dry_multiplier": 0.0,
    "dry_allowed_length": 1,
}
ON: dict[str, Any] = {
    "typical_p": 0.4,
    "top_n_sigma": 0.5,
    "xtc_probability": 1.0,
    "xtc_threshold": 0.1,
}


def test_values_that_switch_off_make_the_rule_of_a_request_without_them() -> None:
    for kind in ({}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9}, {"temperature": 0}):
        plain = SamplingParams(**kind)
        assert rule(replace(plain, **OFF)) == rule(plain)
        assert rule(replace(plain, top_n_sigma=-1.0)) == rule(plain)
        assert rule(replace(plain, xtc_probability=1.0, xtc_threshold=0.51)) == rule(plain)
        assert not replace(plain, **OFF).needs_history
    assert not SamplingParams(dry_multiplier=1.0, dry_penalty_last_n=0).needs_history


def test_greedy_knows_no_filters() -> None:
    greedy = SamplingParams(temperature=0)
    assert rule(replace(greedy, **ON)) == rule(greedy)
    assert draw(HALVES, make_row(replace(greedy, **ON))) == 0
    assert make_row(replace(greedy, **ON)).is_plain_greedy


def test_greedy_honours_what_is_forbidden_and_repeated() -> None:
    greedy = SamplingParams(temperature=0)
    assert draw(HALVES, make_row(greedy, banned=(0, 2))) == 1
    assert draw(HALVES, make_row(greedy, repeats=((0, 1.0),))) == 1
    assert draw(HALVES, make_row(greedy)._replace(mask=b"\x0c")) == 2
    assert draw(HALVES, make_row(greedy, banned=(2,))._replace(mask=b"\x0c")) == 3
    assert draw(HALVES, make_row(greedy, banned=(0, 1, 2, 3, 4))) is None


# --- typical ---------------------------------------------------------------------------------


def test_typical_keeps_what_surprises_as_expected() -> None:
    """Their surprise is 1, 2, 3, 4 and 4 bits; 1.875 are expected."""
    assert survivors(HALVES, typical_p=0.2) == [1]
    assert survivors(HALVES, typical_p=0.24) == [1]
    assert survivors(HALVES, typical_p=0.26) == [0, 1]
    assert survivors(HALVES, typical_p=0.8) == [0, 1, 2]
    assert survivors(HALVES, typical_p=0.9) == [0, 1, 2, 3]  # of equals the first
    assert survivors(HALVES, typical_p=0.0) == [1]
    assert survivors([0.0] * 7, typical_p=0.5) == [0, 1, 2, 3]


# --- top-n-sigma -----------------------------------------------------------------------------


def test_the_spread_is_the_standard_deviation_of_what_can_be_chosen() -> None:
    logits = np.random.default_rng(1).normal(3, 2.5, 10_001).astype(np.float32)
    assert spread(logits) == pytest.approx(np.std(logits.astype(np.float64)), rel=1e-12)
    some = logits.copy()
    some[::3] = -np.inf
    left = some[some > -np.inf].astype(np.float64)
    assert spread(some) == pytest.approx(np.std(left), rel=1e-12)
    assert spread(np.full(5, 7, np.float32)) == 0


def test_top_n_sigma_cuts_below_the_greatest() -> None:
    logits = [4.0, 2.0, 0.0, -2.0, -4.0]  # their deviation is 2.83
    assert survivors(logits, top_n_sigma=0.5) == [0]
    assert survivors(logits, top_n_sigma=1.0) == [0, 1]
    assert survivors(logits, top_n_sigma=2.0) == [0, 1, 2]
    for temperature in (0.5, 2.0):  # it scales the deviation too
        assert survivors(logits, top_n_sigma=1.0, temperature=temperature) == [0, 1]
    assert survivors([1.0, 1.0], top_n_sigma=1e-9) == [0, 1]


# --- XTC ---------------------------------------------------------------------------------------


def excluded(logits: Any, threshold: float, **filters: Any) -> list[int]:
    values = np.asarray(logits, np.float32)
    ids, weights = keep(values, rule(SamplingParams(**filters)))
    return list(exclude_top(values, ids, weights, int(threshold * 2.0**64))[0])


def test_xtc_keeps_the_least_likely_of_the_likely() -> None:
    assert excluded(HALVES, 0.2) == [1, 2, 3, 4]
    assert excluded(HALVES, 0.1) == [2, 3, 4]
    assert excluded(HALVES, 0.3) == [0, 1, 2, 3, 4]  # only one is as likely
    assert excluded(HALVES, 0.06) == [4]  # of equals the last
    assert excluded(HALVES, 0.0) == [4]
    assert excluded([0.0, 0.0, -9.0], 0.3) == [1, 2]


def test_the_coin_belongs_to_seed_and_position() -> None:
    params = SamplingParams(xtc_probability=0.3, xtc_threshold=0.1, top_k=3)
    acted = 0
    for seed in range(1, 400):
        row = make_row(params, seed=seed, prompt=(1, 2, 3))
        acts = uniform(seed, 3, stream=1) < 0.3
        left = [2] if acts else [0, 1, 2]
        assert draw(HALVES, row) in left
        acted += acts
    assert 80 < acted < 160
    always = replace(params, xtc_probability=1.0)
    assert {draw(HALVES, make_row(always, seed=i)) for i in range(99)} == {2}


# --- the order ---------------------------------------------------------------------------------


def test_penalties_come_before_dry() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    row = make_row(params, prompt=(0,), repeats=((0, 1.0),))
    assert draw([4.1, 1.2, 0.0], row) == 1  # 1.05; the other way round it were 1.55
    assert draw([4.1, 1.0, 0.0], row) == 0


def test_no_bias_brings_back_what_is_forbidden() -> None:
    params = SamplingParams(logit_bias={0: 100.0}, temperature=0)
    assert draw(HALVES, make_row(params)) == 0
    assert draw(HALVES, make_row(params, banned=(0,))) == 1
    assert draw(HALVES, make_row(params)._replace(mask=b"\xfe")) == 1


def test_filters_look_at_what_those_before_them_left() -> None:
    # Of two tokens the likelier is the typical one, of all five the second.
    assert survivors(HALVES, top_k=2, typical_p=0.2) == [0]
    # Top-p counts in what is typical: 0.25 is all of it.
    assert survivors(HALVES, typical_p=0.26, top_p=0.6) == [0]
    assert survivors(HALVES, typical_p=0.26, top_p=0.7) == [0, 1]
    # Min-p and top-n-sigma count from the likeliest that is left.
    low = np.log([0.05, *[0.0475] * 20]).astype(np.float32)
    assert survivors(HALVES, typical_p=0.2, min_p=1.0) == [1]
    assert survivors(HALVES, typical_p=0.2, top_n_sigma=1e-9) == [1]
    assert survivors(low, typical_p=0.1, min_p=0.96) == [1, 2, 3]
    # XTC's threshold is a share of what is left: of three, 0.125 has 0.14.
    assert excluded(HALVES, 0.13) == [1, 2, 3, 4]
    assert excluded(HALVES, 0.13, top_k=3) == [2]
    assert excluded(HALVES, 0.13, min_p=0.2) == [2]


# --- what a step's work makes of the parameters ----------------------------------------------


def asked(work: Work) -> list[Any]:
    """Return the rows that are drawn for an item."""
    rows: list[Any] = []

    def head(asks: list[Any]) -> list[Sampled]:
        rows.extend(row for ask in asks for row in ask.draws)
        return [Sampled([(0, None)] * len(ask.draws), True) for ask in asks]

    finish((work,), head, lambda: ())
    return rows


def test_each_row_behind_drafts_has_its_own_history() -> None:
    params = SamplingParams(dry_multiplier=1.0, dry_base=2.0, bad_words=["x"])
    rules = TokenRules(bad={2: ((2, 9),)}, allowed=b"\xff\x03")
    sampling = Sampling(params, 3, (), rules)
    history = (1, 2, 3, 1)
    masks = (b"\x0f\xff", b"", b"\xf0")
    work = Work((0, 0), 3, (1, 2, 3), (0,), (7,), sampling, history, (), 2, masks)
    rows = asked(work)
    assert [row.position for row in rows] == [4, 5, 6]
    assert [row.history for row in rows] == [(1, 2, 3, 1), (1, 2, 3, 1, 2), (1, 2, 3, 1, 2, 3)]
    assert [row.banned for row in rows] == [(), (9,), ()]
    assert [row.repeats for row in rows] == [(), ((3, 1.0),), ((1, 2.0),)]
    assert [row.mask for row in rows] == [b"\x0f\x03", b"\xff\x03", b"\xf0"]


def test_a_mask_is_as_long_as_it_needs_to_be() -> None:
    row = make_row(SamplingParams(temperature=1e-6))
    logits = np.zeros((1, 30), np.float32)
    for token in (0, 7, 8, 29):
        mask = (1 << token).to_bytes(token // 8 + 1, "little")
        assert sample(logits, np.zeros(1, np.intp), [row._replace(mask=mask)]) == [token]
        assert not row._replace(mask=mask).allows(token + 8)
