"""DRY and bad words: what the tokens before ask of a draw, against plain statements of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.backends.sampler.penalties import forbidden, has, repeats
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import NO_RULES, TokenRules

Ids = tuple[int, ...]


def rules(breakers: Ids = (), runs: tuple[Ids, ...] = ()) -> TokenRules:
    bits = sum(1 << token for token in set(breakers))
    by_last: dict[int, tuple[Ids, ...]] = {}
    for run in runs:
        by_last[run[-1]] = (*by_last.get(run[-1], ()), run)
    return TokenRules(breakers=bits.to_bytes(2, "little"), break_runs=by_last)


def dry(history: Ids, words: TokenRules = NO_RULES, **params: Any) -> dict[int, float]:
    wishes = {"dry_multiplier": 0.5, "dry_base": 2.0} | params
    return dict(repeats(history, SamplingParams(**wishes), words))


def plain_dry(
    history: Ids, breakers: Ids, runs: tuple[Ids, ...], params: SamplingParams
) -> dict[int, float]:
    """Every place, every length, in the words of the rule."""
    last_n = params.dry_penalty_last_n
    window = history if last_n == -1 else history[-last_n:] if last_n else ()
    unbroken = 0
    while unbroken < len(window):
        end = len(window) - unbroken
        if window[end - 1] in breakers or any(window[:end][-len(run) :] == run for run in runs):
            break
        unbroken += 1
    lengths: dict[int, int] = {}
    for place in range(1, len(window)):  # of the token that followed
        for n in range(1, place + 1):
            if n <= unbroken and window[place - n : place] == window[-n:]:
                lengths[window[place]] = max(n, lengths.get(window[place], 0))
    allowed = params.dry_allowed_length
    return {
        token: params.dry_multiplier * params.dry_base ** (n - allowed)
        for token, n in lengths.items()
        if n >= allowed
    }


@given(
    history=st.lists(st.integers(0, 3), max_size=40).map(tuple),
    breakers=st.lists(st.integers(0, 9), max_size=2).map(tuple),
    runs=st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=3).map(tuple), max_size=2).map(
        tuple
    ),
    allowed=st.integers(1, 5),
    last_n=st.integers(-1, 45),
    base=st.sampled_from([1.0, 1.5, 2.0]),
)
@settings(max_examples=800, deadline=None)
def test_repeats_are_those_of_every_place_and_length(
    history: Ids, breakers: Ids, runs: tuple[Ids, ...], allowed: int, last_n: int, base: float
) -> None:
    params = SamplingParams(
        dry_multiplier=0.75, dry_base=base, dry_allowed_length=allowed, dry_penalty_last_n=last_n
    )
    found = dict(repeats(history, params, rules(breakers, runs))) if params.uses_dry else {}
    assert found == pytest.approx(plain_dry(history, breakers, runs, params))


def test_the_penalty_grows_with_the_repeat() -> None:
    assert dry((1, 2, 3, 1, 2)) == {3: 0.5}
    assert dry((9, 1, 2, 3, 9, 1, 2)) == {3: 1.0}
    assert dry((1, 2, 3, 1, 2), dry_allowed_length=3) == {}
    assert dry((1, 2, 3, 1, 2), dry_penalty_last_n=4) == {}
    assert dry((1, 2, 3, 1, 2, 4, 1, 2)) == {3: 0.5, 4: 0.5}
    assert dry((7,) * 5) == {7: 0.5 * 2.0**2}  # four of them stood before


def test_a_breaker_ends_a_repeat() -> None:
    history = (1, 2, 3, 4, 1, 2, 3)
    assert dry(history) == {4: 1.0}
    assert dry(history, rules((1,))) == {4: 0.5}
    assert dry(history, rules((2,))) == {}
    assert dry(history, rules((3,))) == {}
    assert dry(history, rules((), ((1, 2),)), dry_allowed_length=1) == {4: 0.5}
    assert dry(history, rules((), ((5, 2),))) == {4: 1.0}


def test_a_very_long_repeat_stays_a_number_and_ends_to_grow() -> None:
    half = tuple(range(2000))
    once = dry((*half, *half), dry_base=1.001)
    assert once == {0: pytest.approx(0.5 * 1.001**1022)}
    assert dry((*half, *half), dry_base=100.0) == {0: float("inf")}


def test_the_last_1024_places_count() -> None:
    for nearer, wanted in ((1023, 0.5), (1024, None)):
        history = (1, 2, 9, *(3, 2) * nearer, 1, 2)
        assert dry(history).get(9) == wanted


class Counted(int):
    """A token that counts how often it was compared."""

    count = 0

    def __eq__(self, other: object) -> bool:
        Counted.count += 1
        return int(self) == other

    def __hash__(self) -> int:
        return int(self)


@pytest.mark.parametrize("period", [1, 2, 7, 1000])
def test_the_time_is_linear(period: int) -> None:
    history = tuple(Counted(i % period) for i in range(6000))
    Counted.count = 0
    assert dry(history, dry_base=1.0) == {6000 % period: 0.5}
    assert Counted.count < 12 * len(history)


def test_a_set_of_ids_has_no_more_than_its_bits() -> None:
    assert [token for token in range(40) if has(b"\x81\x02", token)] == [0, 7, 9]
    assert not has(b"", 0)


def test_bad_words_end_before_their_last_token() -> None:
    words = TokenRules(banned=(7,), bad={2: ((1, 2, 3), (2, 4)), 5: ((5, 7),)})
    assert forbidden((), 0, words) == (7,)
    assert forbidden((1, 2), 0, words) == (7, 3, 4)
    assert forbidden((2,), 0, words) == (7, 4)
    assert forbidden((1, 2, 9), 0, words) == (7,)
    assert forbidden((5,), 0, words) == (7,)
    assert forbidden((1, 2), 1, words) == (7, 4)  # a word begins in the answer
    assert forbidden((1, 2), 2, words) == (7,)
