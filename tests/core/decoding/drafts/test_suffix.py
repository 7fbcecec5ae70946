"""Earlier answers as drafts: the longest match, of the same owner alone, in bounded memory."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.decoding.drafts.suffix import Past, SuffixLookup
from ridgeline.core.request import Request
from ridgeline.core.scheduling.speculate import Guess
from tests.core.harness import make_request

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=25)
NOTHING = Guess((), 0)


def told(
    drafter: SuffixLookup, prompt: list[int], answer: list[int], owner: str = "", **params: Any
) -> Request:
    """Let a request end with this answer."""
    request = make_request(0, prompt, **params)
    request.owner = owner
    request.sequences[0].tokens += answer
    drafter.forget(request)
    return request


def asked(drafter: SuffixLookup, tokens: list[int], owner: str = "", most: int = 4) -> Guess:
    """Return the guess behind these tokens of a request that has just begun."""
    request = make_request(1, tokens)
    request.owner = owner
    (guess,) = drafter.draft([(request.sequences[0], most)])
    return guess


def test_an_earlier_answer_is_followed() -> None:
    drafter = SuffixLookup()
    assert asked(drafter, [1, 2, 3]) == NOTHING
    told(drafter, [1, 2, 3], [10, 11, 12])
    assert asked(drafter, [1, 2, 3]) == Guess((10, 11, 12), 3), "from its first token"
    assert asked(drafter, [7, 10, 11]) == Guess((12,), 2)
    assert asked(drafter, [7, 8, 11]) == NOTHING
    assert asked(drafter, [11, 12]) == NOTHING, "nothing followed"
    assert asked(drafter, [2]) == NOTHING


def test_the_longer_match_wins_and_the_own_text_of_equal_ones() -> None:
    drafter = SuffixLookup()
    told(drafter, [1, 2, 3], [10, 11])
    assert asked(drafter, [2, 3, 50, 9, 2, 3], most=1) == Guess((50,), 2)
    assert asked(drafter, [2, 3, 50, 1, 2, 3], most=1) == Guess((10,), 3)


def test_nobody_gets_what_others_were_told() -> None:
    drafter = SuffixLookup()
    told(drafter, [1, 2, 3], [10, 11, 12], "alice")
    told(drafter, [4, 5, 6], [20, 21, 22], "bob")
    assert asked(drafter, [1, 2, 3], "alice").tokens == (10, 11, 12)
    assert asked(drafter, [4, 5, 6], "bob").tokens == (20, 21, 22)
    for owner in ("bob", "", "alic", "Alice"):
        assert asked(drafter, [1, 2, 3], owner) == NOTHING
    assert asked(drafter, [4, 5, 6], "alice") == NOTHING


def test_the_oldest_answers_go_first_whoever_got_them() -> None:
    drafter = SuffixLookup(most_tokens=24)
    told(drafter, [1, 2], [10, 11, 12], "alice")  # six tokens, with the prompt and an end
    told(drafter, [3, 4], [20, 21, 22], "bob")
    told(drafter, [5, 6], [30, 31, 32], "alice")
    told(drafter, [7, 8], [40, 41, 42], "bob")
    assert asked(drafter, [1, 2], "alice").tokens == (10, 11, 12)
    told(drafter, [1, 1], [50], "carol")
    assert asked(drafter, [1, 2], "alice") == NOTHING
    assert asked(drafter, [3, 4], "bob").tokens == (20, 21, 22)
    told(drafter, [1, 1], [51] * 9, "carol")
    assert asked(drafter, [3, 4], "bob") == NOTHING
    assert asked(drafter, [5, 6], "alice") == NOTHING
    assert asked(drafter, [7, 8], "bob").tokens == (40, 41, 42)
    assert set(drafter._pasts) == {"bob", "carol"}
    told(drafter, [1, 2], [60] * 30, "dave")  # more than is kept at all
    assert not drafter._pasts
    assert not drafter._owners
    assert drafter._num_tokens == 0
    told(drafter, [1, 2], [10, 11])
    assert asked(drafter, [1, 2]).tokens == (10, 11)


def test_a_request_without_an_answer_leaves_nothing() -> None:
    drafter = SuffixLookup()
    told(drafter, [1, 2, 3, 1, 2], [])
    assert not drafter._pasts


def test_long_prompts_are_not_kept() -> None:
    drafter = SuffixLookup(longest=4)
    told(drafter, [1, 2, 3, 4, 5, 6, 7], [10, 11])
    assert asked(drafter, [1, 2, 3]) == NOTHING
    assert asked(drafter, [5, 6, 7]) == Guess((10, 11), 3)


def test_an_end_never_counts_as_a_token() -> None:
    past = Past(shortest=1, longest=8)
    past.add([1, 2])
    past.add([1, 3])
    assert past.guess([2], 4) == NOTHING
    assert past.guess([1], 4) == Guess((3,), 1)


def test_memory_stays_bounded() -> None:
    """Many answers come and go; what is kept of them does not grow."""
    drafter = SuffixLookup(most_tokens=3000)
    for i in range(400):
        told(drafter, [i, i + 1], list(range(i, i + 50)), "ab"[i % 3 == 0])
    assert drafter._num_tokens <= 3000
    sizes = [len(p._text) + len(p._older) + len(p._newest) for p in drafter._pasts.values()]
    assert sum(sizes) < 8 * 3000
    told(drafter, [1, 2], list(range(2800)), "c")
    for past in drafter._pasts.values():
        assert len(past._text) <= 2 * sum(past._lengths), "others' answers leave room behind"
    assert asked(drafter, [398, 399, 400], "a").tokens == (401, 402, 403, 404)
    assert asked(drafter, [9, 10, 11], "a") == NOTHING


@given(st.lists(TEXTS, max_size=8), st.integers(0, 8), TEXTS, st.integers(1, 7), st.integers(1, 3))
@pytest.mark.parametrize("num_slots", [1, 1 << 10])
def test_as_a_plain_search_finds_it(
    num_slots: int,
    answers: list[list[int]],
    num_dropped: int,
    tokens: list[int],
    most: int,
    shortest: int,
) -> None:
    """Also where all keys have the same hash, as far as places are compared."""
    past = Past(shortest=shortest, longest=6)
    if num_slots == 1:
        past._slot = lambda key: 0  # type: ignore[method-assign]
    for answer in answers:
        past.add(answer)
    num_dropped = min(num_dropped, len(answers))
    for answer in answers[:num_dropped]:
        assert past.drop_oldest() == len(answer) + 1
    assert len(past) == len(answers) - num_dropped
    found = _searched(answers[num_dropped:], tokens, shortest)
    guess = past.guess(tokens, most)
    if guess.tokens:
        assert (guess.match_len, True) in [
            (length, rest[:most] == guess.tokens) for length, rest in found
        ]
    num_places = sum(max(len(answer) - shortest, 0) for answer in answers[num_dropped:])
    if num_places <= 8:  # so many are compared
        best = max((length for length, _ in found), default=0)
        assert guess.match_len == best
        newest = [rest for length, rest in found if length == best][-1:]
        assert guess.tokens == (newest[0][:most] if newest else ())


def _searched(
    answers: list[list[int]], tokens: list[int], shortest: int
) -> list[tuple[int, tuple[int, ...]]]:
    """Return the length of each match, and what followed it."""
    found = []
    for answer in answers:
        for place in range(shortest, len(answer)):
            length = 0
            while length < min(place, 6, len(tokens)) and (
                answer[place - 1 - length] == tokens[-1 - length]
            ):
                length += 1
            if length >= shortest:
                found.append((length, tuple(answer[place:])))
    return found
