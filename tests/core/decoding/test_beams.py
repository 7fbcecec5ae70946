"""Beam search against a plain one over whole rows of log-probabilities, written as transformers'
is: arrays of scores with -1e9 where nothing is, merged and sorted in each round."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from ridgeline.core.decoding.search import Beams, check_search
from ridgeline.core.params import SamplingParams
from ridgeline.core.structured import StructuredOutputsParams

NOTHING = -1e9
Model = Callable[[tuple[int, ...]], list[float]]
Scored = tuple[float, tuple[int, ...]]


def random_model(seed: int, vocab_size: int, sharpness: float) -> Model:
    """Log-probabilities of the next token that depend on all tokens before."""

    def logprobs(text: tuple[int, ...]) -> list[float]:
        dice = random.Random(f"{seed} {text}")
        logits = [dice.gauss(0, sharpness) for _ in range(vocab_size)]
        norm = math.log(sum(map(math.exp, logits)))
        return [logit - norm for logit in logits]

    return logprobs


def plain_search(
    model: Model,
    width: int,
    most: int,
    stops: frozenset[int],
    length_penalty: float,
    early_stopping: Any,
    min_tokens: int = 0,
) -> list[Scored]:
    """Answers with their scores, best first."""
    running: list[Scored] = [(0.0, ())] + [(NOTHING, ())] * (width - 1)
    done: list[Scored] = [(NOTHING, ())] * width
    for length in range(1, most + 1):
        found: list[Scored] = []
        for score, text in running:
            row = model(text)
            for token, logprob in enumerate(row):
                if token in stops and length <= min_tokens:
                    logprob = -math.inf
                found.append((score + logprob, (*text, token)))
        found.sort(key=lambda pair: -pair[0])
        found = found[: max(2, 1 + len(stops)) * width]
        ends = [text[-1] in stops or length == most for _, text in found]
        open_ = [(s + NOTHING * end, t) for (s, t), end in zip(found, ends, strict=True)]
        running = sorted(open_, key=lambda pair: -pair[0])[:width]
        is_full = all(score > NOTHING / 2 for score, _ in done)
        closed = [
            (score / length**length_penalty, text)
            for place, ((score, text), end) in enumerate(zip(found, ends, strict=True))
            if end and place < width and not (is_full and early_stopping is True)
        ]
        done = sorted([*done, *closed], key=lambda pair: -pair[0])[:width]
        is_full = all(score > NOTHING / 2 for score, _ in done)
        reach = most if early_stopping == "never" and length_penalty > 0 else length
        better = running[0][0] / reach**length_penalty > (done[-1][0] if is_full else NOTHING)
        if not better or (is_full and early_stopping is True):
            break
    return [pair for pair in done if pair[0] > NOTHING / 2]


def search(beams: Beams, model: Model) -> list[Scored]:
    """Run a search to its end, with no more candidates than it asks for."""
    texts: list[tuple[int, ...]] = [()]
    while True:
        ranked = []
        for text in texts:
            row = model(text)
            order = sorted(range(len(row)), key=lambda token: (-row[token], token))
            ranked.append(tuple((token, row[token]) for token in order[: beams.num_candidates]))
        moves = beams.advance(ranked)
        if not moves:
            break
        texts = [(*texts[parent], token) for parent, token in moves]
    return [
        (sum(entry.logprob for entry in answer), tuple(entry.token for entry in answer))
        for answer in beams.answers()
    ]


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [0.0, 0.5, 1.0, 2.0, -0.5])
def test_answers_are_those_of_the_plain_search(early_stopping: Any, length_penalty: float) -> None:
    dice = random.Random(f"{early_stopping} {length_penalty}")
    for seed in range(60):
        vocab_size = dice.choice((8, 12, 24))
        model = random_model(seed, vocab_size, dice.choice((0.5, 1.5, 4.0)))
        width, most = dice.randint(1, 4), dice.randint(1, 9)
        stops = frozenset(dice.sample(range(vocab_size), dice.choice((0, 1, 1, 2))))
        least = dice.choice((0, 0, 0, 2))
        beams = Beams(
            width,
            most,
            stops,
            num_answers=width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            min_tokens=least,
        )
        expected = plain_search(model, width, most, stops, length_penalty, early_stopping, least)
        found = search(beams, model)
        assert [text for _, text in found] == [text for _, text in expected]
        for (total, text), (score, _) in zip(found, expected, strict=True):
            assert total / len(text) ** length_penalty == pytest.approx(score, abs=1e-9)
        assert len(found) == width


def test_one_beam_is_greedy() -> None:
    for seed in range(20):
        model = random_model(seed, 12, 1.0)
        stops = frozenset((3,))
        ((_, text),) = search(Beams(1, 12, stops), model)
        greedy: tuple[int, ...] = ()
        while len(greedy) < 12 and 3 not in greedy:
            row = model(greedy)
            greedy += (row.index(max(row)),)
        assert text == greedy


def test_of_equal_candidates_the_better_beam_and_the_lower_id_come_first() -> None:
    beams = Beams(3, 2, frozenset(), num_answers=3)
    assert beams.advance([((0, -1.0), (1, -1.0), (2, -1.0))]) == [(0, 0), (0, 1), (0, 2)]
    even = ((5, -2.0), (6, -2.0), (7, -2.0))
    assert beams.advance([even, even, even]) == []
    tokens = [[entry.token for entry in answer] for answer in beams.answers()]
    assert tokens == [[0, 5], [0, 6], [0, 7]]


def test_a_beam_that_can_only_become_equal_ends_the_search() -> None:
    beams = Beams(1, 9, frozenset((3,)), length_penalty=0.0)
    assert beams.advance([((3, -1.0), (5, -1.0))]) == []
    assert [entry.token for entry in beams.answers()[0]] == [3]


def test_tokens_come_with_their_ranks_and_the_likeliest_in_their_place() -> None:
    beams = Beams(2, 2, frozenset(), num_answers=1, num_ranked=5)
    assert beams.num_candidates == 5
    first = tuple((token, -1.0 - token) for token in range(5))
    assert beams.advance([first]) == [(0, 0), (0, 1)]
    second = tuple((token, -0.1 - token) for token in range(5))
    third = tuple((token + 3, -5.0 - token) for token in range(5))
    assert beams.advance([third, second]) == []
    (answer,) = beams.answers()
    assert [(entry.token, entry.rank, entry.top) for entry in answer] == [
        (1, 2, first),
        (0, 1, second),
    ]


# --- what a search takes -----------------------------------------------------------------------

CHANGES: dict[str, Any] = {
    "temperature": 0.5,
    "top_k": 1,
    "top_p": 0.0,
    "min_p": 0.5,
    "typical_p": 0.5,
    "top_n_sigma": 1.0,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.2,
    "dry_multiplier": 0.5,
    "dry_base": 2.0,
    "dry_allowed_length": 3,
    "dry_penalty_last_n": 8,
    "dry_sequence_breakers": ["x"],
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {1: 1.0},
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "stop": "x",
    "include_stop_str_in_output": True,
    "prompt_logprobs": 0,
    "penalty_alpha": 0.0,
    "pool": "last",
    "post_sampling_probs": True,
}
TAKEN: dict[str, Any] = {
    "n": 2,
    "best_of": 3,
    "use_beam_search": True,
    "length_penalty": -2.0,
    "early_stopping": "never",
    "seed": 4,
    "stop_token_ids": [1],
    "max_tokens": 4,
    "min_tokens": 2,
    "ignore_eos": True,
    "logprobs": 3,
    "prediction": "x",
    "skip_special_tokens": False,
    "truncate_prompt_tokens": 8,
}
FORM = StructuredOutputsParams(regex="x")  # says when to end, so it excludes some of those


def refused(*, is_stream: bool = False, **params: Any) -> str:
    """Return the message with which a search refuses these parameters."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (every test looks at the message)
        check_search(SamplingParams(**params), is_stream=is_stream)
    return str(caught.value)


@pytest.mark.parametrize("name", CHANGES)
def test_beams_refuse_what_changes_probabilities(name: str) -> None:
    check_search(SamplingParams(**{name: CHANGES[name]}))
    message = refused(use_beam_search=True, **{name: CHANGES[name]})
    assert message.startswith(f"{name} is ")
    assert message.endswith("use_beam_search excludes it")


def test_beams_take_or_refuse_every_parameter() -> None:
    names = {field.name for field in fields(SamplingParams)}
    assert names == {*CHANGES, *TAKEN, "structured_outputs"}
    check_search(SamplingParams(**TAKEN))
    check_search(SamplingParams(use_beam_search=True, structured_outputs=FORM))
    void: dict[str, Any] = {"temperature": 0.0, "top_k": -1, "logit_bias": {}, "stop": []}
    check_search(SamplingParams(use_beam_search=True, **void))


def test_what_belongs_to_beams_needs_them() -> None:
    assert refused(length_penalty=2.0) == "length_penalty is 2.0: it needs use_beam_search"
    assert refused(early_stopping=True) == "early_stopping is True: it needs use_beam_search"
    for wrong in ("always", 1, None):
        assert refused(use_beam_search=True, early_stopping=wrong).startswith("early_stopping must")


def test_what_is_chosen_at_the_end_is_not_streamed() -> None:
    for params in ({"use_beam_search": True}, {"n": 2, "best_of": 3}):
        message = refused(is_stream=True, **params)
        assert message.startswith("stream is not possible: ")
        assert next(reversed(params)) in message
    check_search(SamplingParams(n=2, best_of=2), is_stream=True)
