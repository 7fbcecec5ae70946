"""How a reader sees characters: which are invisible, which look alike, which belong together.

A text is read as symbols: each character by itself in its compatibility form (NFKC), with full case
folding where one becomes several. What is canonically equivalent may still be written with other
symbols, such as ``é`` with a mark of its own: ``spellings`` names them all, for patterns, whose
classes match any case. So a text that grows is read once.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache, lru_cache
from itertools import pairwise, permutations, product

# Default_Ignorable_Code_Point of Unicode, 4174 code points: DerivedCoreProperties.txt of Unicode
# 14.0, as Perl's prop_invlist("Default_Ignorable_Code_Point") gives it. The ranges are the same
# since Unicode 5.0, and hold what may yet be assigned there.
_IGNORABLE = (
    *((0xAD, 0xAD), (0x34F, 0x34F), (0x61C, 0x61C), (0x115F, 0x1160), (0x17B4, 0x17B5)),
    *((0x180B, 0x180F), (0x200B, 0x200F), (0x202A, 0x202E), (0x2060, 0x206F), (0x3164, 0x3164)),
    *((0xFE00, 0xFE0F), (0xFEFF, 0xFEFF), (0xFFA0, 0xFFA0), (0xFFF0, 0xFFF8)),
    *((0x1BCA0, 0x1BCA3), (0x1D173, 0x1D17A), (0xE0000, 0xE0FFF)),
)
_LINE_ENDS = "\t\n\v\f\r\x85"  # control characters that a reader sees as a gap
_HIDDEN = re.compile("[\x00-\x08\x0e-\x1f\x7f]")  # the others of ASCII
# First of 26 letters that Unicode gives no compatibility form: in black circles, in black squares,
# and the regional indicators, which many screens show as letters.
_ALPHABETS = (0x1F150, 0x1F170, 0x1F1E6)
_SMALL_CAPITAL = re.compile(r"LATIN LETTER SMALL CAPITAL ([A-Z])")
# Marks that a letter of any alphabet may have: over, under, around and through it.
_MARKS = "\u0300-\u036f\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f"
_JAMO = ((0x1161, 0x11FF), (0xD7B0, 0xD7FF))  # vowels and ends, which go on with a syllable
_MOST_MARKS = 4  # of a letter whose marks may come in any order


@lru_cache(maxsize=1 << 16)
def is_seen(char: str) -> bool:
    """Whether a reader sees a character, if only as a gap."""
    code, category = ord(char), unicodedata.category(char)
    if category == "Cc":
        return char in _LINE_ENDS
    return category != "Cf" and not any(first <= code <= last for first, last in _IGNORABLE)


@lru_cache(maxsize=1 << 16)
def folded(char: str) -> str:
    """Return the symbols as which a character is read, none if nobody sees it."""
    if not is_seen(char):
        return ""
    for first in _ALPHABETS:
        if first <= ord(char) < first + 26:
            return chr(ord("a") + ord(char) - first)
    if small := _SMALL_CAPITAL.fullmatch(unicodedata.name(char, "")):
        return small[1]
    plain = unicodedata.normalize("NFKC", char)
    symbols = unicodedata.normalize("NFKC", plain.casefold())
    # A capital stays: what it looks like may be another letter than what its small form does.
    return plain if plain.lower() == symbols and len(plain) == 1 else symbols


def units(text: str) -> list[str]:
    """Return the characters that are seen, each with the invisible ones behind it.

    The first may have none that is seen.
    """
    if text.isascii() and not _HIDDEN.search(text):
        return list(text)
    starts = [i for i, char in enumerate(text) if not i or is_seen(char)]
    return [text[a:b] for a, b in pairwise([*starts, len(text)])]


@lru_cache(maxsize=1 << 16)
def kind_of(char: str) -> str:
    """Return what a character is to its neighbours.

    That is ``a`` (a letter), ``1`` (a digit), ``m`` (a part of the character before it, such as an
    accent), or nothing: an underscore is between words, as where it makes them italic.
    """
    symbol = folded(char)[:1]
    if not symbol:
        return ""
    category = unicodedata.category(symbol)
    if category[0] == "M" or any(first <= ord(symbol) <= last for first, last in _JAMO):
        return "m"
    # A raised 2 is a note's number, as a rule, and no part of the word before it.
    return {"L": "a", "N": "1"}.get(category[0], "") if char.isalpha() or char.isdecimal() else ""


def spellings(char: str) -> list[str]:
    """Return all ways to write a character in symbols, the shortest first; marks stand alone."""
    parts = [_equivalent(symbol) for symbol in _undecorated(folded(char).casefold())]
    return sorted(map("".join, product(*parts)), key=len) if parts else [""]


def joined(letter: str, symbol: str) -> str:
    """Return the letter that a symbol makes of the one before it, or the symbol if none."""
    both = _composed(letter + symbol)
    return both if len(both) == 1 else symbol


@cache
def marks_around(symbol: str) -> str:
    """Return a class, as ``re`` writes it, of the marks that leave a symbol the one that it is.

    Such as a line under it: there is no character for the two together.
    """
    parts = "".join(mark for mark in _single_marks() if len(_composed(symbol + mark)) == 1)
    return f"(?![{parts}])[{_MARKS}]" if parts else f"[{_MARKS}]"


@cache
def all_marks() -> str:
    """Return a class of all parts of characters, for behind what may be any letter."""
    chars = (chr(code) for code in range(0x300, 0x20000))
    return f"[{''.join(char for char in chars if unicodedata.category(char)[0] == 'M')}]"


@cache
def accented() -> tuple[str, ...]:
    """Return the symbols that are a letter and one mark, if they are written in two characters."""
    symbols = filter(lambda char: folded(char).lower() == char, map(chr, range(0xC0, 0x3100)))
    return tuple(char for char in symbols if len(_decomposed(char)) > 1)


def base_of(symbol: str) -> str:
    """Return a symbol without its marks."""
    return _decomposed(symbol)[0]


def _composed(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _decomposed(text: str) -> str:
    return unicodedata.normalize("NFD", text)


@cache
def _single_marks() -> list[str]:
    return re.findall(f"[{_MARKS}]", "".join(map(chr, range(0x300, 0xFE30))))


def _undecorated(symbols: str) -> str:
    """Return symbols without the marks that a text may have or not have."""
    return re.sub(f"[{_MARKS}]", "", symbols)


def _equivalent(symbol: str) -> list[str]:
    """Return the spellings that are canonically equivalent to a symbol."""
    base, *marks = list(_decomposed(symbol))
    orders = permutations(marks) if len(marks) <= _MOST_MARKS else [tuple(marks)]
    spellings = {symbol: None}
    for order in orders:
        if _decomposed(base + "".join(order)) != _decomposed(symbol):
            continue
        for num in range(len(order) + 1):  # of the marks, how many are in the first character
            first = _composed(base + "".join(order[:num]))
            if len(first) == 1:
                spellings[first + "".join(order[num:])] = None
    return list(spellings)
