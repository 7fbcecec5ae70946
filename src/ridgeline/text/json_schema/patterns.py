"""Regular expressions of schemas: read, and written for strings of an answer.

As ECMA 262 has them, without what a finite automaton cannot do, and without what engines read
differently. A pattern may match anywhere in a string unless it is anchored. Look-ahead is known at
its very beginning only, where it says something of the whole string.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ridgeline.text.json_schema import charsets
from ridgeline.text.json_schema.charsets import Ranges

_MOST_NESTED = 100
_LETTERS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    chars: Ranges


@dataclass(frozen=True, slots=True)
class Anchor:
    """The beginning of the string, or its end."""

    is_end: bool


@dataclass(frozen=True, slots=True)
class Seq:
    """One after the other."""

    parts: tuple[Regex, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of several; none of none."""

    options: tuple[Regex, ...]


@dataclass(frozen=True, slots=True)
class Rep:
    """The same many times, ``most`` None for any number."""

    part: Regex
    least: int
    most: int | None


Regex = Chars | Anchor | Seq | Alt | Rep
EMPTY = Seq(())
ANY = Rep(Chars(charsets.WRITTEN), 0, None)


class Pattern(NamedTuple):
    """What a string must match, whole, and what it must not."""

    must: tuple[Regex, ...]
    must_not: tuple[Regex, ...] = ()


class PatternError(ValueError):
    """A pattern that cannot be held to, and why."""


@lru_cache(maxsize=64)
def pattern(source: str) -> Pattern:
    """Return what a pattern asks of a string. Raises PatternError."""
    reader = _PatternReader(source)
    body, ahead = reader.whole()
    must = [_anchored(body)]
    must += [_anchored(one, at_start=True) for one, is_negative in ahead if not is_negative]
    must_not = [
        _anchored(one, at_start=True, is_wide=True) for one, is_negative in ahead if is_negative
    ]
    return Pattern(tuple(must), tuple(must_not))


@lru_cache(maxsize=64)
def negated(source: str) -> Pattern:
    """Return what a string must be that a pattern does not match. Raises PatternError."""
    body, ahead = _PatternReader(source, is_wide=True).whole()
    if ahead:
        raise PatternError("look-ahead cannot be negated")
    return Pattern((), (_anchored(body, is_wide=True),))


def literals(texts: Iterable[str]) -> Regex:
    """Return what matches any of some texts."""
    return _alt(Seq(tuple(Chars(charsets.of(char)) for char in text)) for text in texts)


def written(regex: Regex) -> str:
    """Return a whole match as an answer's string has it, between quotation marks."""
    return f'"{_written(regex)}"'


def _written(regex: Regex) -> str:
    if isinstance(regex, Chars):
        return charsets.regex(regex.chars)
    if isinstance(regex, Seq):
        return "".join(map(_written, regex.parts))
    if isinstance(regex, Alt):
        return f"(?:{'|'.join(map(_written, regex.options))})"
    assert isinstance(regex, Rep)
    least, most = regex.least, regex.most
    short = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    times = short.get((least, most), f"{{{least},{'' if most is None else most}}}")
    return f"(?:{_written(regex.part)}){times}"


# --- reading -----------------------------------------------------------------------------------


class _PatternReader:
    """Reads a pattern. ``is_wide`` takes characters that any reading of it has, not only all."""

    def __init__(self, source: str, *, is_wide: bool = False) -> None:
        self._source, self._at, self._is_wide, self._depth = source, 0, is_wide, 0

    def whole(self) -> tuple[Regex, list[tuple[Regex, bool]]]:
        """Return the pattern, and what it looks ahead for, with whether that must not be there."""
        ahead = []
        begin = self._at
        self._take("^")
        while self._source.startswith(("(?=", "(?!"), self._at):
            is_negative = self._source[self._at + 2] == "!"
            self._at += 3
            was_wide, self._is_wide = self._is_wide, is_negative
            ahead.append((self._options(), is_negative))
            self._is_wide = was_wide
            self._need(")")
        if ahead and not self._source.startswith("^"):
            raise PatternError("look-ahead is only known behind a ^ at the beginning")
        if not ahead:
            self._at = begin
        body = self._options()
        if self._at < len(self._source):
            raise PatternError("it has a ) without its (")
        if ahead:
            if isinstance(body, Alt) and "|" in self._source:
                self._check_one_branch(begin)
            body = _seq((Anchor(False), body))
        return body, ahead

    def _check_one_branch(self, begin: int) -> None:
        """Raise PatternError if what looks ahead is in one of several branches."""
        depth, is_escaped, is_class = 0, False, False
        for char in self._source[begin:]:
            if is_escaped or char == "\\":
                is_escaped = not is_escaped and char == "\\"
            elif is_class or char == "[":
                is_class = char != "]"
            else:
                depth += (char == "(") - (char == ")")
                if char == "|" and not depth:
                    raise PatternError("look-ahead in one of several branches is not known")

    def _options(self) -> Regex:
        self._depth += 1
        if self._depth > _MOST_NESTED:
            raise PatternError("it is nested too deeply")
        options = [self._sequence()]
        while self._take("|"):
            options.append(self._sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else _alt(options)

    def _sequence(self) -> Regex:
        parts = []
        while self._at < len(self._source) and self._source[self._at] not in "|)":
            part = self._atom()
            parts.append(self._repeated(part))
        return _seq(parts)

    def _repeated(self, part: Regex) -> Regex:
        match = re.compile(r"[*+?]|\{(\d+)(,(\d*))?\}").match(self._source, self._at)
        if match is None:
            return part
        if isinstance(part, Anchor):
            raise PatternError("it repeats an anchor")
        self._at = match.end()
        self._take("?")  # which of several matches comes first does not matter
        if self._at < len(self._source) and self._source[self._at] in "*+":
            raise PatternError("it repeats a repetition")
        if match[1] is None:
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[match[0]]
            return _rep(part, least, most)
        if max(len(match[1]), len(match[3] or "")) > 6:
            raise PatternError("it repeats too often")
        most = int(match[1]) if match[2] is None else int(match[3]) if match[3] else None
        if most is not None and most < int(match[1]):
            raise PatternError("a repetition ends before it begins")
        return _rep(part, int(match[1]), most)

    def _atom(self) -> Regex:
        char = self._source[self._at]
        self._at += 1
        if char in "^$":
            return Anchor(char == "$")
        if char == "(":
            return self._group()
        if char == "[":
            return Chars(self._class())
        if char == ".":
            return Chars(charsets.CLASSES["."][self._is_wide])
        if char == "\\":
            return Chars(self._escape(self._is_wide))
        if char in "*+?":
            raise PatternError("it repeats nothing")
        return Chars(charsets.of(char))

    def _group(self) -> Regex:
        if self._take("?") and not self._take(":"):
            match = re.compile(r"P?<[A-Za-z_]\w*>").match(self._source, self._at)
            if match is None:
                raise PatternError("look-around and flags inside of it are not known")
            self._at = match.end()
        inner = self._options()
        self._need(")")
        return inner

    def _class(self) -> Ranges:
        is_negative = self._take("^")
        is_wide = self._is_wide != is_negative
        if self._source.startswith("]", self._at):
            raise PatternError("engines read an empty class differently")
        pairs = list[tuple[int, int]]()
        while not self._take("]"):
            low = self._member(is_wide)
            is_range = self._source.startswith("-", self._at)
            if not is_range or self._source.startswith("-]", self._at):
                pairs += low
                continue
            self._at += 1
            high = self._member(is_wide)
            if len(low) > 1 or len(high) > 1 or low[0][0] != low[0][1] or high[0][0] != high[0][1]:
                raise PatternError("a range in it begins or ends with a class")
            if low[0][0] > high[0][0]:
                raise PatternError("a range in it ends before it begins")
            pairs.append((low[0][0], high[0][0]))
        chars = charsets.ranges(pairs)
        return charsets.complement(chars) if is_negative else chars

    def _member(self, is_wide: bool) -> Ranges:
        if self._at >= len(self._source):
            raise PatternError("it has a [ without its ]")
        char = self._source[self._at]
        self._at += 1
        if char == "\\" and self._take("b"):
            return charsets.of("\b")
        if char == "[" or self._source.startswith(("--", "&&", "~~", "||"), self._at - 1):
            raise PatternError("engines read such a class differently")
        return self._escape(is_wide) if char == "\\" else charsets.of(char)

    def _escape(self, is_wide: bool) -> Ranges:
        if self._at >= len(self._source):
            raise PatternError("it ends with a backslash")
        char = self._source[self._at]
        self._at += 1
        if char in charsets.CLASSES and char != ".":
            return charsets.CLASSES[char][is_wide]
        if char in _LETTERS:
            return charsets.of(_LETTERS[char])
        if char in "xu":
            digits = r"[0-9a-fA-F]{2}" if char == "x" else r"[0-9a-fA-F]{4}"
            match = re.compile(digits).match(self._source, self._at)
            if match is not None:
                self._at = match.end()
                return charsets.ranges([(int(match[0], 16), int(match[0], 16))])
        if char.isascii() and not char.isalnum():
            return charsets.of(char)
        if char in "bB":
            raise PatternError(f"\\{char} is not known")
        if char.isdigit() or char == "k":
            raise PatternError("back references are not known")
        raise PatternError(f"\\{char} is not known")

    def _take(self, text: str) -> bool:
        is_there = self._source.startswith(text, self._at)
        self._at += len(text) * is_there
        return is_there

    def _need(self, text: str) -> None:
        if not self._take(text):
            raise PatternError(f"it has no {text} where there should be one")


def _seq(parts: Iterable[Regex]) -> Regex:
    flat = list[Regex]()
    for part in parts:
        flat += part.parts if isinstance(part, Seq) else [part]
    if any(part == Alt(()) for part in flat):
        return Alt(())
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def _alt(options: Iterable[Regex]) -> Regex:
    possible = [option for option in options if not _is_nothing(option)]
    return possible[0] if len(possible) == 1 else Alt(tuple(possible))


def _is_nothing(regex: Regex) -> bool:
    if isinstance(regex, Chars):
        return not charsets.without(regex.chars, charsets.complement(charsets.WRITTEN))
    return regex == Alt(())


def _rep(part: Regex, least: int, most: int | None) -> Regex:
    if _has_anchor(part):
        if (least, most) == (0, 1):
            return _alt((part, EMPTY))
        raise PatternError("it repeats an anchor")
    if _is_nothing(part):
        return Alt(()) if least else EMPTY
    return part if (least, most) == (1, 1) else Rep(part, least, most)


def _has_anchor(regex: Regex) -> bool:
    if isinstance(regex, Seq | Alt):
        inner = regex.parts if isinstance(regex, Seq) else regex.options
        return any(map(_has_anchor, inner))
    return isinstance(regex, Anchor)


def _anchored(regex: Regex, *, at_start: bool = False, is_wide: bool = False) -> Regex:
    """Return what matches a whole string where ``regex`` matches somewhere, or at its start.

    By a wide reading, that of Python, the end may also be before a newline that ends the string.
    """
    end = Rep(Chars(charsets.of("\n")), 0, 1) if is_wide else EMPTY
    options = list[Regex]()
    for parts in _branches(regex):
        body = list(parts)
        before: Regex = EMPTY if at_start else ANY
        while body and body[0] == Anchor(False):
            before = EMPTY
            del body[0]
        behind: Regex = ANY
        while body and body[-1] == Anchor(True):
            behind = end
            del body[-1]
        if any(isinstance(part, Anchor) for part in body):
            raise PatternError("an anchor in the middle of it is not known")
        options.append(_seq((before, *map(_checked, body), behind)))
    return _alt(options)


def _checked(part: Regex) -> Regex:
    return Alt(()) if _is_nothing(part) else part


def _branches(regex: Regex) -> Iterator[tuple[Regex, ...]]:
    """Yield sequences without anchors inside of their parts; together they are the regex."""
    parts = regex.parts if isinstance(regex, Seq) else (regex,)
    branches: list[tuple[Regex, ...]] = [()]
    for part in parts:
        if isinstance(part, Alt) and _has_anchor(part):
            inner = [branch for option in part.options for branch in _branches(option)]
            branches = [before + branch for before in branches for branch in inner]
        else:
            branches = [(*before, part) for before in branches]
        if len(branches) > 64:
            raise PatternError("it has too many branches with anchors")
    yield from branches
