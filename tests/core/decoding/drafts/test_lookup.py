"""Lookup: what followed the longest earlier match, and nothing that costs an answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.decoding.drafts.lookup import Lookup, PromptLookup
from ridgeline.core.scheduling.speculate import Guess
from tests.core.harness import make_request

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


def test_what_followed_the_last_time_is_guessed() -> None:
    assert Lookup().guess([5, 6, 7, 8, 9, 1, 5, 6], 3) == Guess((7, 8, 9), 2)


def test_a_longer_match_wins_over_a_newer_one() -> None:
    tokens = [1, 2, 3, 40, 0, 2, 3, 50, 0, 1, 2, 3]
    assert Lookup().guess(tokens, 1) == Guess((40,), 3)


def test_of_equal_matches_the_newest_wins() -> None:
    assert Lookup().guess([2, 3, 40, 1, 2, 3, 50, 0, 2, 3], 1) == Guess((50,), 2)


def test_nothing_is_guessed_from_nothing() -> None:
    assert Lookup().guess([1], 4) == Guess((), 0)
    assert Lookup().guess([1, 2, 3, 4], 4) == Guess((), 0)


def test_matches_may_be_long_or_short_as_asked() -> None:
    tokens = [1, 2, 3, 9, 1, 2, 3]
    assert Lookup(shortest=4).guess(tokens, 1) == Guess((), 0)
    assert Lookup(shortest=1, longest=2).guess(tokens, 1) == Guess((9,), 2)
    assert Lookup(shortest=1).guess([4, 5, 4], 1) == Guess((5,), 1)
    with pytest.raises(ValueError, match="5 to 4"):
        Lookup(shortest=5, longest=4)


def test_a_prediction_is_followed_from_its_beginning() -> None:
    request = make_request(0, (1, 2, 3))
    request.prediction = (7, 8, 9, 10)
    (seq,) = request.sequences
    drafter = PromptLookup()
    seq.tokens.append(7)
    assert drafter.draft([(seq, 2)])[0].tokens == (8, 9)
    seq.tokens += [8, 9, 10]
    assert drafter.draft([(seq, 5)])[0].tokens == (), "what follows is another text"
    drafter.forget(request)
    request.prediction = ()
    assert drafter.draft([(seq, 5)])[0].tokens == ()


@given(TEXTS, TEXTS, st.integers(1, 7), st.integers(1, 4))
def test_as_a_plain_search_finds_it(
    before: list[int], text: list[int], most: int, shortest: int
) -> None:
    """Token by token, as an engine asks, the guess is that of a search from scratch."""
    lookup = Lookup(before, shortest=shortest, longest=6)
    for end in range(1, len(text) + 1):
        guess = lookup.guess(text[:end], most)
        whole = [*before, -1, *text[:end]]
        assert guess == _searched(whole, most, shortest)


def _searched(text: list[int], most: int, shortest: int) -> Guess:
    places = [
        place
        for place in range(shortest, len(text))
        if text[place - shortest : place] == text[len(text) - shortest :]
    ]
    best = Guess((), 0)
    for place in places[:-9:-1]:
        length = shortest
        while length < min(place, 6) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        if length > best.match_len:
            found = text[place : place + most]
            best = Guess(tuple(found[: found.index(-1)] if -1 in found else found), length)
    return best
