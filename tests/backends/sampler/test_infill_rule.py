"""The sampler for the middle of a text, against llama.cpp's loops in plain floats."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.backends.sampler.rule import Row, narrowed, sample
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, TokenRules

TEXTS = (b"", b"", b"a", b"ab", b"abc", b"b", b"ba", b" ", b" a", b"x")
ENDS = (0, 1)
RULES = TokenRules(texts=TEXTS, ends=ENDS)


def plainly(ids: list[int], weights: list[int]) -> dict[int, float]:
    """Tokens and their probabilities, step by step as llama.cpp does it; an end alone has 1."""
    total = sum(weights)
    order = sorted(range(len(ids)), key=lambda i: (-weights[i], ids[i]))
    tokens, probs = [ids[i] for i in order], [weights[i] / total for i in order]
    of_ends = sum(p for token, p in zip(tokens, probs, strict=True) if token in ENDS)
    of_texts = sum(p for token, p in zip(tokens, probs, strict=True) if token not in ENDS)
    if 3 * of_ends * len(tokens) > of_texts:
        kept = [(t, p) for t, p in zip(tokens, probs, strict=True) if t in ENDS]
        return {token: p / of_ends for token, p in kept}
    for i in range(len(tokens)):
        for j in range(len(tokens)):
            if probs[i] == 0:
                break
            if i == j or probs[j] == 0 or not TEXTS[tokens[i]]:
                continue
            if TEXTS[tokens[j]][: len(TEXTS[tokens[i]])] == TEXTS[tokens[i]]:
                into, out_of = (j, i) if probs[j] > probs[i] else (i, j)
                probs[into] += probs[out_of]
                probs[out_of] = 0
    kept = [
        (t, p)
        for t, p in zip(tokens, probs, strict=True)
        if (t in ENDS and p > 0) or p >= 0.2 - 1e-12
    ]
    num_texts = sum(token not in ENDS for token, _ in kept)
    if not num_texts:
        return {ENDS[0]: 1.0}
    total_p = sum(p for _, p in kept)
    least = 1 / (num_texts + 1) - 1e-12
    kept = [(t, p / total_p) for t, p in kept if t in ENDS or p / total_p >= least]
    total_p = sum(p for _, p in kept)
    return {token: p / total_p for token, p in kept}


@given(
    st.dictionaries(st.integers(0, len(TEXTS) - 1), st.integers(1, 2000), min_size=1).map(
        lambda found: sorted(found.items())
    )
)
def test_what_is_left_is_what_llama_cpp_leaves(found: list[tuple[int, int]]) -> None:
    ids, weights = [token for token, _ in found], [weight for _, weight in found]
    left, heavy = narrowed(ids, weights, RULES)
    expected = plainly(ids, weights)
    assert left == sorted(expected)
    for token, weight in zip(left, heavy, strict=True):
        assert math.isclose(weight / sum(heavy), expected[token], rel_tol=1e-9)


def test_each_rule_acts() -> None:
    assert narrowed([0, 2, 5], [60, 400, 60], RULES) == ([0], [60]), "an end is likely enough"
    assert narrowed([0, 2, 5], [1, 400, 600], RULES) == ([0, 2, 5], [1, 400, 600])
    assert narrowed([2, 3, 9], [300, 400, 300], RULES) == ([3], [700]), "ab takes a's; x has less"
    assert narrowed([5, 7, 8], [30, 20, 20], RULES) == ([5, 7], [30, 40]), "a space begins another"
    assert narrowed([4, 5, 7, 9], [100, 100, 100, 100], RULES)[0] == [4, 5, 7, 9]
    assert narrowed([2, 5, 7, 9, 6], [18, 18, 18, 18, 10], RULES._replace(ends=())) == (
        [2, 5, 7, 9],
        [18, 28, 18, 18],
    )
    many = TokenRules(texts=(b"", *(bytes([65 + i]) for i in range(9))), ends=(0,))
    assert narrowed([*range(1, 10)], [10] * 9, many) == ([0], [1]), "nothing stands out"
    assert narrowed([*range(1, 10)], [10] * 9, many._replace(ends=()))[0] == [*range(1, 10)]


def test_a_draw_is_from_what_is_left() -> None:
    logits = np.log(np.array([[1, 1, 300, 400, 1, 250, 1, 1, 1, 1]], np.float32))
    params = SamplingParams(top_k=3)
    drawn = {}
    for rules in (RULES, TokenRules()):
        rows = [Row(Sampling(params, 0, (), rules), seed, 0, ()) for seed in range(300)]
        drawn[bool(rules.texts)] = set(sample(logits, np.zeros(300, np.intp), rows))
    assert drawn[True] == {3}, "a is a beginning of ab, and b has less than its share"
    assert {2, 3, 5} <= drawn[False]
