"""What is drawn and ranked on the device is what the rule says of copied logits, to the bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the cuda backend needs torch: make test-gpu")

import torch

from ridgeline.backends.cuda.measure import twins
from ridgeline.backends.cuda.measure.inputs.draws import asks_of, logits_of
from ridgeline.backends.cuda.step import draws as draws_
from ridgeline.backends.cuda.step.draws import Draws
from ridgeline.backends.cuda.step.ranks import keys_of, likeliest
from ridgeline.backends.sampler.rule import uniform_bits
from ridgeline.backends.sampler.step_output import LogitsRequest, Sampled, answered


def draws() -> Draws:
    return Draws(8, 200, twins, torch.device("cpu"))


def counted(monkeypatch: pytest.MonkeyPatch) -> list[LogitsRequest]:
    """Return a list of the asks that the rule itself will answer, of copied rows."""
    copied: list[LogitsRequest] = []

    def answer(row: Any, ask: LogitsRequest) -> Sampled:
        copied.append(ask)
        return answered(row, ask)

    monkeypatch.setattr(draws_, "answered", answer)
    return copied


def needs_the_rule(ask: LogitsRequest) -> bool:
    """Whether only the rule itself can answer an ask, of a whole row of logits."""
    if not ask.draws:
        return False
    params, rules = ask.draws[0].sampling.params, ask.draws[0].sampling.tokens
    acts = [
        uniform_bits(row.seed, row.position, stream=1) < params.xtc_probability * 2.0**53
        for row in ask.draws
    ]
    return bool(params.typical_p < 1 or params.top_n_sigma > 0 or rules.texts or any(acts))


@pytest.mark.parametrize("vocabulary", [90, 1003])
def test_answers_are_the_rule_s(vocabulary: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = counted(monkeypatch)
    for seed in range(6):
        random = np.random.default_rng(seed)
        asks, logits = asks_of(random, 50, vocabulary), logits_of(random, 50, vocabulary)
        copied.clear()
        found = draws().answers(torch.from_numpy(logits), asks)
        for row, ask, answer in zip(logits, asks, found, strict=True):
            assert answer == answered(row, ask), ask
        assert copied == [ask for ask in asks if needs_the_rule(ask)]
        assert 0 < len(copied) < 25


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_fails_alone(value: float) -> None:
    random = np.random.default_rng(3)
    asks, logits = asks_of(random, 40, 90), logits_of(random, 40, 90)
    logits[::3, 17] = value
    found = draws().answers(torch.from_numpy(logits), asks)
    assert [answer.is_finite for answer in found] == [i % 3 > 0 for i in range(40)]
    for row, ask, answer in zip(logits, asks, found, strict=True):
        if answer.is_finite:
            assert answer == answered(row, ask)
        else:
            assert not ask.draws or not answer.picks


def test_keys_order_logits_and_then_ids() -> None:
    x = torch.tensor([[0.0, -1.5, 3e38, -0.0, -3e38, 1e-40, -1e-40, 3e38]])
    order = keys_of(x).sort(1, descending=True).indices
    assert order.tolist() == [[2, 7, 5, 0, 3, 6, 1, 4]]


def test_the_likeliest_of_more_rows_than_are_done_at_once() -> None:
    logits = torch.from_numpy(logits_of(np.random.default_rng(1), 150, 60))
    found = likeliest(logits, range(149, -1, -1), [2] * 150, [b""] * 150)
    wanted = [likeliest(logits, [i], [2], [b""])[0] for i in range(149, -1, -1)]
    assert found == wanted
