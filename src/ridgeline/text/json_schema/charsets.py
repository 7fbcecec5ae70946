"""Sets of characters, as sorted ranges of code points, and what they are in JSON's strings.

Every character has one spelling in the strings of an answer: itself, or an escape of two
characters where it cannot stand for itself. Others, as ``\\u0061``, are never written: a name
spelled so would be another name to a grammar. Control characters without such an escape are not
written at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Ranges = tuple[tuple[int, int], ...]

_LAST = 0x10FFFF
ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}


def ranges(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Return the union of ranges, sorted and apart."""
    joined: list[tuple[int, int]] = []
    for low, high in sorted(pairs):
        if joined and low <= joined[-1][1] + 1:
            joined[-1] = joined[-1][0], max(joined[-1][1], high)
        else:
            joined.append((low, high))
    return tuple(joined)


def complement(chars: Ranges) -> Ranges:
    """Return all other code points."""
    gaps, begin = list[tuple[int, int]](), 0
    for low, high in chars:
        if begin < low:
            gaps.append((begin, low - 1))
        begin = high + 1
    return (*gaps, (begin, _LAST)) if begin <= _LAST else tuple(gaps)


def without(chars: Ranges, others: Ranges) -> Ranges:
    """Return what is in the first and not in the second."""
    return complement(ranges((*complement(chars), *others)))


def of(text: str) -> Ranges:
    """Return the set of the characters of a text."""
    return ranges((ord(char), ord(char)) for char in text)


_ESCAPED = of("".join(ESCAPES))
_UNWRITTEN = without(((0, 0x1F), (0x7F, 0x7F), (0xD800, 0xDFFF)), _ESCAPED)
WRITTEN = complement(_UNWRITTEN)  # characters that an answer's strings may have
_PLAIN = without(WRITTEN, _ESCAPED)  # those that stand for themselves

# The classes of regular expressions, by two readings: that of ECMA 262, by which \d and \w are
# ASCII, and that of Python and Rust, which know more letters. Of each there is what is in it by
# both, and what is in it by any.
_SPACES = ranges(
    ((9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029),
     (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000))
)  # fmt: skip
_ALL_SPACES = ranges((*_SPACES, (0x1C, 0x1F), (0x85, 0x85), (0x180E, 0x180E), (0xFEFF, 0xFEFF)))
_DIGITS = of("0123456789")
_ALL_DIGITS = ranges(
    (*_DIGITS, (0x660, 0x1FFF), (0xA620, 0xABFF), (0xFF10, 0xFF19), (0x10000, 0x1FFFF))
)
_WORD = ranges(((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)))
_SIGNS = ranges(
    ((0xA0, 0xA9), (0xAB, 0xB1), (0xBB, 0xBB), (0xBF, 0xBF), (0x2010, 0x205E), (0x20A0, 0x20BF),
     (0x2190, 0x23FF), (0x2500, 0x2767), (0x3000, 0x3004), (0x3008, 0x3020), (0x1F300, 0x1F64F))
)  # fmt: skip
_ALL_WORD = without(complement(_SIGNS), without(((0, 0x7F),), _WORD))
_ENDS, _ALL_ENDS = of("\n"), of("\n\r\u2028\u2029")
CLASSES: dict[str, tuple[Ranges, Ranges]] = {
    "d": (_DIGITS, _ALL_DIGITS),
    "D": (complement(_ALL_DIGITS), complement(_DIGITS)),
    "w": (_WORD, _ALL_WORD),
    "W": (complement(_ALL_WORD), complement(_WORD)),
    "s": (_SPACES, _ALL_SPACES),
    "S": (complement(_ALL_SPACES), complement(_SPACES)),
    ".": (complement(_ALL_ENDS), complement(_ENDS)),
}


def is_written(text: str) -> bool:
    """Return whether an answer's strings may have all characters of a text."""
    return all(any(low <= ord(char) <= high for low, high in WRITTEN) for char in text)


def quoted(text: str) -> str:
    """Return a text as it stands in an answer, with its quotation marks."""
    return '"' + "".join("\\" + ESCAPES[c] if c in ESCAPES else c for c in text) + '"'


def regex(chars: Ranges) -> str:
    """Return the regular expression of the spellings of one character of the set."""
    plain = without(chars, complement(_PLAIN))
    options = [f"[{''.join(_range(low, high) for low, high in plain)}]"] if plain else []
    escapes = "".join(ESCAPES[char] for char in ESCAPES if has(chars, ord(char)))
    if escapes:
        options.append(rf"\\[{''.join(_point(ord(char)) for char in escapes)}]")
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"


def has(chars: Ranges, point: int) -> bool:
    """Return whether a code point is in a set."""
    return any(low <= point <= high for low, high in chars)


def literal(text: str) -> str:
    """Return the regular expression of a text that is not in a string."""
    return "".join(_point(ord(char)) for char in text)


def samples(sets: Iterable[Ranges]) -> Iterator[int]:
    """Yield one written code point of each part into which the sets cut all of them."""
    cuts = {0}
    for chars in (*sets, WRITTEN):
        for low, high in chars:
            cuts |= {low, high + 1}
    return (point for point in sorted(cuts) if point <= _LAST and has(WRITTEN, point))


def _range(low: int, high: int) -> str:
    return _point(low) if low == high else f"{_point(low)}-{_point(high)}"


def _point(point: int) -> str:
    char = chr(point)
    return char if char.isascii() and char.isalnum() else rf"\x{{{point:X}}}"
