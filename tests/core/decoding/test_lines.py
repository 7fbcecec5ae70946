"""Answers that end by their lines, whatever the split into tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.core.decoding.lines import ENDED, LineRules, LineText
from ridgeline.core.decoding.text import TextStream


class Pieces:
    """A decoder whose tokens are the places of pieces of a text."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def __call__(self, token: int) -> str:
        return self._pieces[token]

    def flush(self) -> str:
        return ""


def read(
    pieces: list[str],
    rules: LineRules,
    *,
    stop: tuple[str, ...] = (),
    seconds_each: float = 0.0,
    num_free: int = 0,
) -> tuple[str, str | None]:
    """Return the text of an answer, and what ended it; it may not end in the first ``num_free``."""
    now_s = 0.0
    text = LineText(TextStream(Pieces(pieces), stop), rules, lambda: now_s)
    found, ended = "", None
    for token in range(len(pieces)):
        ended = text.feed(token, token >= num_free)
        found += text.take()
        if ended is not None:
            break
        now_s += seconds_each
    text.finish()
    return found + text.take(), ended


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1", "x = 1"),
        ("x\n    y\n    z", "x\n    y\n    z"),
        ("x\n    y\n  z\n    w", "x\n    y\n  "),
        ("x\n\t\t\t\ty\nz", "x\n\t\t\t\ty\n"),
        ("x\n\n    y", "x\n"),
        ("x\n      y\n", "x\n      y\n"),
        ("\nx", "\n"),
    ],
)
def test_a_line_with_less_indent_ends_the_answer(text: str, expected: str) -> None:
    ended = None if text == expected else ENDED
    assert read(list(text), LineRules(4)) == (expected, ended)
    assert read([text], LineRules(4)) == (expected, ended)
    assert read(list(text), LineRules()) == (text, None)


@given(st.text(alphabet="ab \t\n", max_size=30), st.lists(st.integers(0, 30)), st.integers(0, 4))
def test_the_split_into_tokens_means_nothing(text: str, cuts: list[int], indent: int) -> None:
    bounds = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[low:high] for low, high in pairwise(bounds)]
    rules = LineRules(indent)
    assert read(pieces, rules) == read(list(text), rules)


def test_the_first_line_that_ends_late_is_the_last() -> None:
    tokens = ["a\n", "b", "\nc", "d\n", "e"]
    assert read(tokens, LineRules(0, 2.5), seconds_each=1.0) == ("a\nb\ncd\n", ENDED)
    assert read(tokens, LineRules(0, 1.5), seconds_each=1.0) == ("a\nb\n", ENDED)
    assert read(tokens, LineRules(0, 9.0), seconds_each=1.0) == ("a\nb\ncd\ne", None)
    assert read(["a", "b", "c"], LineRules(0, 0.1), seconds_each=1.0) == ("abc", None)


def test_stop_strings_and_least_lengths_hold() -> None:
    assert read(list("x\n  yz"), LineRules(2), stop=("z",)) == ("x\n  y", "z")
    assert read(list("x\nyz"), LineRules(2), stop=("yz",)) == ("x\n", "yz")
    assert read(list("x\ny\n z"), LineRules(2), num_free=4) == ("x\ny\n ", ENDED)
