from __future__ import annotations

import re
import unicodedata
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ridgeline.trust.text_rules.expressions import ExpressionError
from ridgeline.trust.text_rules.folding import folded, is_seen, kind_of
from ridgeline.trust.text_rules.patterns import Hit, Patterns, Scanner, TextPattern

ALL = [
    TextPattern(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"),
    TextPattern(r"ab(?:cd)?", apart=""),
    TextPattern("bc|x{2,4}y", apart="", most=4),
    TextPattern("foo"),
    TextPattern("b\u00e9"),
    TextPattern("stra\xdfe|\ud55cx?"),
    TextPattern(r"\d(?:[ -]?\d){3,5}", check=lambda text: _digits(text) % 3 == 0),
]
PATTERNS = Patterns(ALL)
PARTS = [
    *"abcdxy@.-_* 12\xb2",
    "\u0430",
    "foo",
    "bob@x.de",
    "\u200b",
    "\ufe0f",
    "\uff11",
    "A",
    "\u00e9",
    "\x01",
]
PARTS += ["e\u0301", "\u0332", "\u0301", "\ud55c", "\u1112\u1161\u11ab", "STRASSE", "\xdf"]


def _digits(text: str) -> int:
    return sum(unicodedata.digit(char) for char in text if char.isdigit())


def _read(text: str) -> str:
    """Fold a whole text at once, as nothing that reads it in pieces can."""
    seen = unicodedata.normalize("NFC", "".join(filter(is_seen, text.replace("*", ""))))
    seen = seen.replace("\u0430", "a")
    plain = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", seen).casefold())
    return plain.replace("\u0332", "").replace("\u0301", "")


def _longest(text: str, start: int) -> tuple[int, int] | None:
    """Try every end and every pattern, by the library's own regular expressions."""
    if not folded(text[start]) or kind_of(text[start]) == "m" or text[start] == "*":
        return None
    for end in range(len(text), start, -1):
        for i, pattern in enumerate(ALL):
            before, last, after = (
                text[start - 1 : start] if start else "",
                text[end - 1],
                text[end:],
            )
            if after and not folded(after[0]):  # which belongs to the match
                continue
            if "".join(filter(is_seen, text[start:end])).endswith("*"):  # which does not
                continue
            if len(list(filter(is_seen, text[start:end]))) > pattern.most:
                continue
            kinds = [kind_of(before) if before else "", kind_of(after[0]) if after else ""]
            kinds[1] = kinds[1] if folded(last) else ""
            if kinds[1] == "m" or any(kind and kind in pattern.apart for kind in kinds):
                continue
            whole = re.compile(
                unicodedata.normalize("NFC", pattern.expression).casefold(), re.DOTALL
            )
            if not whole.fullmatch(_read(text[start:end])):
                continue
            if pattern.check is None or pattern.check(text[start:end]):
                return end, i
    return None


def oracle(text: str) -> list[str | Hit]:
    """Return what a scanner must find in a whole text."""
    found: list[str | Hit] = []
    at, plain = 0, ""
    while at < len(text):
        match = _longest(text, at)
        if match is None:
            plain += text[at]
            at += 1
            continue
        found += [plain] if plain else []
        found.append(Hit(match[1], text[at : match[0]]))
        at, plain = match[0], ""
    return found + ([plain] if plain else [])


def scanned(pieces: list[str], patterns: Patterns = PATTERNS) -> list[str | Hit]:
    scanner = Scanner(patterns)
    news = [one for piece in pieces for one in scanner.feed(piece)]
    news += scanner.feed("", is_end=True)
    assert not scanner.pending
    merged: list[str | Hit] = []
    for one in news:
        if isinstance(one, str) and merged and isinstance(merged[-1], str):
            merged[-1] += one
        else:
            merged.append(one)
    return merged


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=14).map("".join), st.data())
def test_a_scanner_finds_what_trying_every_span_finds_however_the_text_is_cut(
    text: str, data: st.DataObject
) -> None:
    expected = oracle(text)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=6)))
    edges = [0, *cuts, len(text)]
    drawn = [text[a:b] for a, b in pairwise(edges)]
    for pieces in ([text], list(text), drawn):
        assert scanned(pieces) == expected
    assert PATTERNS.may_match(text) or not any(isinstance(one, Hit) for one in expected)


@pytest.mark.parametrize("pieces", [["a", "\u200ba", "x"], ["\u0301\u0301", "a", "\x01-"]])
def test_an_invisible_character_that_begins_a_piece_belongs_to_the_one_before(
    pieces: list[str],
) -> None:
    assert scanned(pieces) == oracle("".join(pieces))
    assert scanned([*pieces, "bcd"]) == oracle("".join([*pieces, "bcd"]))


def test_a_text_that_begins_matches_and_ends_none_is_passed_at_once() -> None:
    patterns = Patterns([TextPattern(r"\d{3}-\d{2}"), TextPattern(r"a.{30}b", apart="")])
    assert not patterns.may_match("12-34, 123-4 and 1\u200b2345, a1b")
    assert patterns.may_match("so 123-45")
    assert patterns.may_match("so 1\u200b23-4\uff15!")
    dice = Random(3)
    for _ in range(200):  # each makes states of its own, until there are enough
        patterns.may_match("".join(dice.choice("ac") for _ in range(100)))
    assert len(patterns.accepts) < 6_000
    assert patterns.may_match("x 123-45")


def test_what_is_held_back_is_no_longer_than_a_match_can_be() -> None:
    scanner = Scanner(Patterns([TextPattern(r"a+b", apart="", most=5)]))
    shown = "".join(str(one) for char in "a" * 50 for one in scanner.feed(char))
    assert shown == "a" * 46  # four more could still be the beginning of a match
    assert len(scanner.pending) == 4


def test_a_long_text_of_one_word_is_read_in_linear_time() -> None:
    """By the states that were made: none for each length."""
    patterns = Patterns([TextPattern(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")])
    scanner = Scanner(patterns)
    for _ in range(3_000):
        scanner.feed("abc.d")
    assert len(patterns.accepts) < 20
    assert len(scanner.pending) <= 256


@pytest.mark.parametrize(
    ("expression", "word"),
    [
        ("", "empty"),
        ("a*", "empty"),
        ("(a|)", "empty"),
        ("(a", r"\("),
        ("a)", r"\)"),
        ("[a", r"\["),
        ("[z-a]", "class"),
        ("a{1,100000}", "repeats"),
        ("a{5,2}", "order"),
        ("a{x}", "count"),
        ("*a", "before"),
        ("a(?=b)", "supported"),
        ("(?<!a)b", "supported"),
        (r"(a)\1", "supported"),
        (r"\bfoo", "supported"),
        ("^a", "anchor"),
        ("a$", "anchor"),
        ("(((a{999}){999}){999})", "large"),
        ("(" * 60 + "a" + ")" * 60, "groups"),
        ("a\\", "supported"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_reason(expression: str, word: str) -> None:
    with pytest.raises(ExpressionError, match=word):
        Patterns([TextPattern(expression)])


def test_bounds_of_matches_are_checked() -> None:
    with pytest.raises(ExpressionError, match="most is 0"):
        Patterns([TextPattern("a", most=0)])
    with pytest.raises(ExpressionError, match="no pattern"):
        Patterns([])


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (r"a{2}", "aa"), (r"(?:ab){2,}c", "abababc"), (r"[^a-c]x", "dx"), (r"a.c", "a\nc"),
        (r"[]a]b", "]b"), (r"\.\*", ".*"), (r"(a|b)+?c", "abac"), (r"a?b", "b"),
        (r"a{2}{2}", "aaaa"),
    ],
)  # fmt: skip
def test_the_language_means_what_re_means(expression: str, text: str) -> None:
    patterns = Patterns([TextPattern(expression, apart="")])
    assert scanned(list(f"-{text}"), patterns) == ["-", Hit(0, text)]
