"""Spellings that a reader takes for the same, and those that are others."""

from __future__ import annotations

import unicodedata

import pytest

from ridgeline.trust.text_rules.answer import TextRule, TextRules, screened
from ridgeline.trust.text_rules.folding import folded, is_seen, kind_of, spellings
from ridgeline.trust.text_rules.look_alikes import LATIN
from ridgeline.trust.text_rules.patterns import Patterns, Scanner, TextPattern


def shown(pattern: str, text: str, *, is_word: bool = True) -> str:
    found = TextPattern(pattern) if is_word else TextPattern(pattern, apart="")
    return screened(text, TextRules([TextRule("x", found, "redact", "[X]")]), lambda rule: None)[0]


def invisible() -> list[str]:
    """Default_Ignorable_Code_Point, as far as Python knows what it is derived from; controls."""
    ranges = [(0x180B, 0x180F), (0xFE00, 0xFE0F), (0xE0100, 0xE01EF)]  # variation selectors
    others = "\u034f\u115f\u1160\u17b4\u17b5\u2065\u3164\uffa0\ufff0\ufff8\U000e0000\U000e0fff"
    found = [chr(code) for first, last in ranges for code in range(first, last + 1)]
    formats = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) == "Cf"]
    controls = [chr(code) for code in range(0xA0) if chr(code) not in "\t\n\v\f\r\x85"]
    return found + formats + [*others] + [c for c in controls if unicodedata.category(c) == "Cc"]


def test_invisible_characters_are_passed_over_and_do_not_count() -> None:
    chars = invisible()
    assert len(chars) > 400
    for char in chars:
        assert shown("project heron", f"say project he{char}ron now") == "say [X] now", hex(
            ord(char)
        )
    for char in "\u200b\xad\u2060\ufeff\ufe0f\x00":
        text = f"say project he{char * 3000}ron{char} now"
        assert shown("project heron", text) == "say [X] now"


def test_what_is_seen_is_not_passed_over() -> None:
    seen = "\t\n\v\f\r\x85 .-_\u2800\u3000\u0301\ufffd\u093c\u0e31"
    for char in seen:
        assert is_seen(char)
    for char in "\n.-\u2800\ufffd":
        assert shown("heron", f"he{char}ron") == f"he{char}ron"


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("caf\xe9", "cafe\u0301"),
        ("cafe\u0301", "caf\xe9"),
        ("caf\xe9", "CAFE\u0301"),
        ("\xfcber", "u\u0308ber"),
        ("\ud55c\uad6d", "\u1112\u1161\u11ab\u1100\u116e\u11a8"),
        ("\u1112\u1161\u11ab", "\ud55c"),
        ("\ud55c", "\ud558\u11ab"),
        ("stra\xdfe", "STRASSE"),
        ("strasse", "stra\xdfe"),
        ("stra\xdfe", "stra\u1e9ee"),
        ("\u03bf\u03b4\u03bf\u03c2", "\u039f\u0394\u039f\u03a3"),
        ("istanbul", "\u0130STANBUL"),
        ("\u0130stanbul", "istanbul"),
        ("fish", "\ufb01sh"),
        ("first", "fir\ufb06"),
        ("\xe5ngstr\xf6m", "\u212bngstro\u0308m"),
        ("\u30ac", "\uff76\uff9e"),
        ("\u01c6", "\u01c5"),
        ("\u0915\u093c", "\u0958"),
        ("\u1ec7", "e\u0323\u0302"),
        ("\u1ec7", "e\u0302\u0323"),
        ("\u1ec7", "\u1eb9\u0302"),
        ("\u1ec7", "\xea\u0323"),
        ("[\xe9\xe8]", "e\u0301"),
        ("[\xe0-\xf6]x", "e\u0300x"),
        (r"\w+@x", "jose\u0301@x"),
        ("c.fe", "ca\u0301fe"),
        ("[\xdf]x", "SSx"),
        ("project heron", "project\nheron"),
        ("project heron", "project \u00a0\t heron"),
        ("project heron", "project\u1680heron"),
        ("project heron", "p\u0332r\u0332oject h\u0336e\u0336r\u0336on"),
        ("heron", "\U0001f177\U0001f174\U0001f181\U0001f17e\U0001f17d"),
        ("heron", "\U0001f1ed\U0001f1ea\U0001f1f7\U0001f1f4\U0001f1f3"),
        ("heron", "h\u20dde\u20ddron"),
        (r"\d{3}", "1\ufe0f\u20e32\ufe0f\u20e33\ufe0f\u20e3"),
        ("heron", "h\u0435r\u043en"),
        ("heron", "\u041dER\u041eN"),
        ("heron", "\u0397\u0395R\u039f\u039d"),
        ("heron", "\u13bb\u13ac\u13a1\ua4f3\ua4e0"),
        ("heron", "\u029c\u1d07\u0280\u1d0f\u0274"),
        ("[a-z]{5}", "h\u0435r\u043en"),
        ("h[e]ron", "h\u0435ron"),
        ("\u043d\u043e\u0441", "\u043doc"),
        ("\u043d\u043e\u0441", "\u041d\u041e\u0421"),
        ("[\u0430-\u044f]{3}", "\u043doc"),
        ("project heron", "project **heron"),
        ("project heron", "project** `heron"),
        ("project heron", "pro**je**ct ***he***ron"),
        ("project heron", "pro~~ject~~ h`eron"),
        (r"\d+-\d", "4*1*-`2"),
        (r"4\*[*]1", "4**1"),
    ],
)
def test_equivalent_spellings_are_one(pattern: str, text: str) -> None:
    for cut in range(len(text) + 1):
        patterns = Patterns([TextPattern(pattern)])
        scanner = Scanner(patterns)
        news = [scanner.feed("say " + text[:cut]), scanner.feed(text[cut:] + " now")]
        news.append(scanner.feed("", is_end=True))
        found = ["[X]" if not isinstance(one, str) else one for new in news for one in new]
        assert "".join(found) == "say [X] now"


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("cafe", "cafe\u0301"),
        ("cafe", "caf\xe9"),
        ("caf\xe9", "cafe"),
        ("b\xe1n", "b\u1ea1n"),
        ("b\xe1n", "ba\u0323n"),
        ("heron", "xheron"),
        ("heron", "heron2"),
        ("heron", "her0n"),
        ("heron", "\u043d\u0435\u0440\u043e\u043d"),
        ("\u043d\u043e\u0441", "hoc"),
        ("[^a]x", "ax"),
        ("heron", "her_on"),
        ("heron", "he<b>ron</b>"),
        ("heron", "heron\u0301"),
        ("heron", "e\u0301heron"),
        ("\ud558", "\u1112\u1161\u11ab"),
        ("\u0915", "\u0915\u093f"),
        ("[a-z]1", "\xe91"),
        ("\xea", "e\u0302\u0323"),
    ],
)
def test_other_letters_and_parts_of_words_are_not(pattern: str, text: str) -> None:
    assert shown(pattern, text) == text
    if pattern in ("cafe", "\ud558", "\u0915", "\xea"):
        assert shown(pattern, text, is_word=False) == text


def test_a_raised_number_and_an_invisible_letter_end_a_word() -> None:
    assert shown("heron", "heron\xb2") == "[X]\xb2"
    assert shown("heron", "\u3164heron\u3164") == "\u3164[X]"
    assert shown("heron", "heron\u200ds") == "[X]s"


def test_emphasis_ends_a_word_and_stays_around_it() -> None:
    for mark in ("*", "**", "~~", "`", "_", "__"):
        assert shown("heron", f"a {mark}heron{mark} flies") == f"a {mark}[X]{mark} flies"
    assert shown("heron", "my_heron_nest") == "my_[X]_nest"
    assert shown("heron", "**h**eron*s*") == "**[X]*s*"


def test_each_letter_that_looks_like_a_latin_one_is_read_as_it_and_as_itself() -> None:
    alphabets = {unicodedata.name(chr(code)).split()[0] for code in LATIN}
    assert alphabets == {"LATIN", "GREEK", "CYRILLIC", "ARMENIAN", "CHEROKEE", "LISU"}
    for code, latin in LATIN.items():
        other = chr(code)
        assert folded(other) == other  # or no text would have it
        assert shown(f"x{latin}x", f"say x{other}x now") == "say [X] now", hex(code)
        assert shown(f"x{other}x", f"say x{latin}x now") == "say [X] now", hex(code)
        assert shown(f"x[{latin}]x", f"say x{other}x now") == "say [X] now", hex(code)
        assert shown("q[^x]q", f"q{other}q") == "[X]"


def test_each_letter_that_is_composed_has_the_spelling_that_is_not() -> None:
    """All of Unicode's: so none is composed of what no spelling has."""
    for code in range(0x110000):
        char = chr(code)
        if char.casefold() != char or unicodedata.normalize("NFKC", char) != char:
            continue
        apart = unicodedata.normalize("NFD", char)
        if apart != char:
            assert apart in spellings(char), hex(code)
            assert all(kind_of(mark) == "m" for mark in apart[1:]), hex(code)


def test_a_long_text_is_read_in_a_number_of_steps_that_grows_with_it() -> None:
    """Also where every character may begin a match: what is read alike is read once."""

    class Counting(Patterns):
        num = 0

        def step(self, state: int, char: str) -> int:
            self.num += 1
            return super().step(state, char)

    def steps(text: str, size: int) -> int:
        patterns = Counting([TextPattern(r"[\w.]+@\w+", apart="", most=400), TextPattern("a+b")])
        scanner = Scanner(patterns)
        for i in range(0, len(text), size):
            scanner.feed(text[i : i + size])
        return patterns.num

    for text, size in (("a" * 8000, 5), ("a" * 8000, 8000), ("a\u200b" * 4000, 7)):
        assert steps(text, size) < 12 * len(text)
    dots = "a" + "\u200b" * 100_000  # does not count, and is read once
    assert steps(dots, 1000) < 1000
