"""TextStream: the same text however it is split, cut exactly, held back no longer than needed."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import example, given
from hypothesis import strategies as st

from ridgeline.core.decoding.text import HeldEntries, TextStream
from tests.core.decoding.letters import HALF, Letters

# Two letters, so that stop strings overlap, contain each other and begin alike all the time.
TEXTS = st.text("ab", max_size=24)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4).map(tuple)


class Pieces:
    """A decoder whose tokens are given pieces of text."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    is_whole = True

    def __call__(self, token_id: int, /) -> str:
        return self._pieces[token_id]

    def flush(self) -> str:
        return ""


def pieces_of(text: str, cuts: Iterable[int]) -> list[str]:
    """Split a text at these places, modulo its length; equal places give empty pieces."""
    places = sorted(cut % (len(text) + 1) for cut in cuts)
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def cut(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Return text and stop string, plainly: cut where a stop string is completed first."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


def held_back(text: str, stops: tuple[str, ...]) -> str:
    """Return the longest end of the text that a stop string begins with, but is not all of it."""
    ends = (text[start:] for start in range(len(text)))
    return next((end for end in ends if any(s.startswith(end) and s != end for s in stops)), "")


def stream(pieces: list[str], stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Feed the pieces, taking what is final after each; check the hold-back on the way."""
    text = TextStream(Pieces(pieces), stops)
    fed = taken = ""
    for token in range(len(pieces)):
        stop = text.feed(token, may_stop=True)
        fed += pieces[token]
        taken += text.take()
        if stop is not None:
            text.finish()
            assert text.take() == "", "nothing comes after a stop"
            return taken, stop
        assert taken + held_back(fed, stops) == fed
    text.finish()
    return taken + text.take(), None


@given(TEXTS, STOPS, st.lists(st.integers(0, 24), max_size=8))
@example("aab", ("ab", "b"), [])  # both end with the same character: the longer one
@example("abab", ("bab", "aba"), [])  # overlapping: the one that ends first
@example("abb", ("a", "abb"), [])  # one begins with the other: it is complete first
@example("aaab", ("aab",), [1, 2, 3])  # a beginning that fails holds another beginning
def test_the_cut_depends_on_the_text_alone(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    plain = cut(text, stops)
    assert stream(list(text), stops) == plain
    assert stream(pieces_of(text, cuts), stops) == plain
    assert stream([text], stops) == plain


@given(TEXTS, STOPS, st.lists(st.integers(0, 24), max_size=8))
def test_nothing_stops_when_it_may_not(text: str, stops: tuple[str, ...], cuts: list[int]) -> None:
    pieces = pieces_of(text, cuts)
    out = TextStream(Pieces(pieces), stops)
    assert all(out.feed(token, may_stop=False) is None for token in range(len(pieces)))
    assert out.take() == text, "nor is anything held back"


@given(TEXTS, TEXTS, STOPS)
def test_text_before_stops_may_count_is_not_part_of_one(
    before: str, after: str, stops: tuple[str, ...]
) -> None:
    out = TextStream(Pieces([before, after]), stops)
    assert out.feed(0, may_stop=False) is None
    rest, stop = cut(after, stops)
    assert out.feed(1, may_stop=True) == stop
    out.finish()
    assert out.take() == before + rest


def test_taking_late_gives_the_same() -> None:
    out = TextStream(Pieces(["ab", "c", "de"]), ("d",))
    assert [out.feed(token, may_stop=True) for token in range(3)] == [None, None, "d"]
    assert out.take() == "abc"
    assert out.take() == ""


def test_an_incomplete_character_shows_only_at_the_end() -> None:
    out = TextStream(Letters(), ("x",))
    for token in (ord("a"), HALF):
        assert out.feed(token, may_stop=True) is None
    assert out.take() == "a"
    out.finish()
    assert out.take() == "\ufffd"
    out.finish()
    assert out.take() == "", "the end comes once"


def test_an_incomplete_character_does_not_follow_a_stop() -> None:
    class Halved(Letters):
        def __call__(self, token_id: int, /) -> str:
            super().__call__(HALF)
            return chr(token_id)

    out = TextStream(Halved(), ("a",))
    assert out.feed(ord("a"), may_stop=True) == "a"
    out.finish()
    assert out.take() == ""


@given(TEXTS, STOPS, st.lists(st.integers(0, 24), max_size=8))
@example("ab", ("abb",), [1])  # held back to the very end, then shown
@example("aab", ("ab",), [2])  # a token of which only the first half is shown
def test_what_is_told_of_tokens_never_runs_ahead_of_the_text(
    text: str, stops: tuple[str, ...], cuts: list[int]
) -> None:
    pieces = pieces_of(text, cuts)
    out, held = TextStream(Pieces(pieces), stops), HeldEntries[int](TextStream(Pieces(pieces)))
    told: list[int] = []
    shown, num_fed, stop = "", 0, None
    while num_fed < len(pieces) and stop is None:
        held.feed(num_fed, num_fed)
        stop = out.feed(num_fed, may_stop=True)
        num_fed += 1
        new = out.take()
        shown += new
        if stop is None:
            told += held.take(len(new), is_over=False)
            assert shown.startswith("".join(pieces[token] for token in told))
            if shown == "".join(pieces[:num_fed]):
                assert told == list(range(num_fed)), "nothing waits that the text has shown"
    told += held.take(0, is_over=True)
    assert told == list(range(num_fed))


def test_half_a_character_is_told_with_the_other_half() -> None:
    held = HeldEntries[str](TextStream(Letters()))
    held.feed(HALF, "first")
    assert held.take(0, is_over=False) == []
    held.feed(1, "second")
    assert held.take(1, 1, is_over=False) == [], "the reader of the message holds it back"
    assert held.take(0, is_over=False) == ["first", "second"]


def test_what_is_told_of_a_token_is_dropped_where_a_part_of_its_text_is_known() -> None:
    held = HeldEntries[str](TextStream(Pieces(["abc", "d"])))
    held.feed(0, "first")
    held.feed(1, "second")
    held.drop_begun()
    assert held.take(1, is_over=False) == [], "its text is not known yet"
    held.drop_begun()
    held.drop_begun()  # of the second nothing is known
    assert held.take(3, is_over=False) == ["second"]
