"""Contrastive search by itself: scores, ties, stops; and what it takes and refuses."""

from __future__ import annotations

from dataclasses import fields
from math import log
from typing import Any

import pytest

from ridgeline.core.decoding.search import Contrastive, check_search
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Candidates
from tests.core.decoding.test_beams import CHANGES, FORM, refused

ROW: Candidates = ((5, log(0.5)), (7, log(0.3)), (2, log(0.1)), (9, log(0.05)))


def test_the_likeliest_candidates_are_looked_at() -> None:
    search = Contrastive(0.6, 3, frozenset())
    assert search.num_candidates == 3
    assert search.advance([ROW], [0.9]) == [(0, 5), (0, 7), (0, 2)]
    assert search.settled == []


@pytest.mark.parametrize(
    ("alpha", "similarities", "token"),
    [
        (0.6, [0.9, 0.9, 0.9], 5),  # equally alike: the likeliest
        (0.6, [0.9, 0.5, 0.9], 7),  # 0.4 * 0.3 - 0.6 * 0.5 is the greatest
        (0.1, [0.9, 0.5, 0.9], 5),  # 0.9 * 0.5 - 0.09 is
        (1.0, [0.2, 0.1, -0.5], 2),  # only likeness counts
        (1.0, [0.5, 0.5, 0.5], 5),  # equal scores: the likelier
        (0.5, [0.5, 0.3, 0.3], 5),  # 0.5 * 0.5 - 0.25 = 0.5 * 0.3 - 0.15
    ],
)
def test_a_candidate_is_settled_by_its_score(
    alpha: float, similarities: list[float], token: int
) -> None:
    search = Contrastive(alpha, 3, frozenset(), num_ranked=2)
    search.advance([ROW], [0.0])
    rows = [tuple((10 * i + t, p) for t, p in ROW) for i in range(3)]
    moves = search.advance(rows, similarities)
    place = [5, 7, 2].index(token)
    assert moves == [(place, 10 * place + t) for t in (5, 7, 2)]
    (entry,) = search.settled
    assert (entry.token, entry.rank) == (token, place + 1)
    assert entry.logprob == ROW[place][1]
    assert entry.top == ROW[:2]
    assert search.answers() == [[entry]]


def test_the_likeliest_in_its_place_are_those_behind_what_was_settled() -> None:
    search = Contrastive(1.0, 2, frozenset(), num_ranked=1)
    search.advance([ROW], [0.0])
    search.advance([ROW, ROW[1:]], [0.9, 0.0])
    search.advance([ROW, ROW], [0.0, 0.0])
    assert [entry.token for entry in search.settled] == [7, 7]
    assert search.settled[1].top == ROW[1:2]


def test_no_stop_id_before_min_tokens() -> None:
    search = Contrastive(0.6, 2, frozenset({5}), min_tokens=1)
    assert search.num_candidates == 3
    assert search.advance([ROW], [0.0]) == [(0, 7), (0, 2)]
    assert search.advance([ROW, ROW], [0.0, 0.0]) == [(0, 5), (0, 7)]
    assert search.settled[0].rank == 2
    assert search.num_candidates == 2


def test_penalty_alpha_takes_or_refuses_every_parameter() -> None:
    taken: dict[str, Any] = {
        "penalty_alpha": 0.5, "top_k": 4, "seed": 1, "stop": "x", "stop_token_ids": [1],
        "max_tokens": 4, "logprobs": 3, "prediction": "x", "temperature": 0,
        "include_stop_str_in_output": True, "skip_special_tokens": False,
        "truncate_prompt_tokens": 8,
    }  # fmt: skip
    check_search(SamplingParams(**taken), is_stream=True)
    ends: dict[str, Any] = {"min_tokens": 2, "ignore_eos": True}
    check_search(SamplingParams(**taken | ends))
    changes = CHANGES | {"use_beam_search": True, "best_of": 3, "n": 2}
    changes |= {"length_penalty": 2.0, "early_stopping": True, "structured_outputs": FORM}
    assert {field.name for field in fields(SamplingParams)} == {*changes, *taken, *ends}
    for name in {*changes} - {*taken}:
        message = refused(**taken | {name: changes[name]})
        assert "exclude" in message or "one answer" in message, name


@pytest.mark.parametrize("top_k", [0, -1, 1])
def test_it_needs_candidates(top_k: int) -> None:
    message = refused(penalty_alpha=0.6, top_k=top_k)
    assert message.startswith("penalty_alpha is 0.6: it needs top_k")


def test_alpha_0_is_greedy() -> None:
    params = SamplingParams(penalty_alpha=0, top_k=4)
    assert params.temperature == 0
    assert not params.searches
    check_search(params, is_stream=True)
    assert refused(penalty_alpha=0, temperature=0.5).startswith("temperature is 0.5")
