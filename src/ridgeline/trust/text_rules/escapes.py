"""A text and what is written in it with the escapes of JSON and HTML, searched at once.

``\\u0062ob`` in a string of JSON is ``bob`` to its reader, and so is ``&#98;ob`` in Markdown. So a
text is searched as it stands and with its escapes resolved: once, and once more for JSON in a
string of JSON. What is found has its place in the text as it stands.
"""

from __future__ import annotations

import html
import re
from collections import deque
from typing import NamedTuple

from ridgeline.trust.text_rules.folding import kind_of
from ridgeline.trust.text_rules.patterns import Hit, Patterns, Scanner

_DEEPEST = 2  # escapes in escapes
_HIGH, _LOW = "u[dD][89abAB][0-9a-fA-F]{2}", "u[dD][c-fC-F][0-9a-fA-F]{2}"  # of a pair
_ESCAPE = re.compile(
    rf"\\(?:{_HIGH}\\{_LOW}|[\"\\/bfnrt]|u[0-9a-fA-F]{{4}})"
    r"|&(?:#[xX][0-9a-fA-F]{1,9}|#[0-9]{1,9}|[A-Za-z][A-Za-z0-9]{1,30});"
)
_BEGINS_ESCAPE = re.compile(
    rf"\\(?:{_HIGH}(?:\\(?:u[0-9a-fA-F]{{0,3}})?)?|u[0-9a-fA-F]{{0,3}})?"
    r"|&(?:#(?:[xX][0-9a-fA-F]{0,9}|[0-9]{0,9})|[A-Za-z][A-Za-z0-9]{0,30})?"
)
_MAY_ESCAPE = re.compile(r"\\|&(?:[#A-Za-z]|\Z)")
_SHORT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def may_escape(text: str) -> bool:
    """Whether a text may have an escape, or the beginning of one at its end; False is certain."""
    return _MAY_ESCAPE.search(text) is not None


class FoundMatch(NamedTuple):
    """A match: of which pattern, from where to where in the text as it stands."""

    start: int
    end: int
    pattern: int


class EscapedText:
    """A text that grows, and may have escapes.

    Attributes:
        pending: its end, of which nothing is known yet.
        before: the character before that, if any.
        first: what became known at once of the text that it began with.
    """

    def __init__(self, patterns: Patterns, pending: str, before: str) -> None:
        """Go on behind ``before`` with a text that is pending, as a scanner does."""
        self._views = [_Reading(patterns, depth, before) for depth in range(_DEEPEST + 1)]
        self._matches: list[FoundMatch] = []  # in what is pending
        self._at = 0  # where that begins
        self.pending = ""
        self.before = before
        self.first = self.feed(pending)

    def feed(self, text: str, *, is_end: bool = False) -> list[str | Hit]:
        """Take more text; return what became known, as ``Scanner.feed`` does."""
        characters, sizes = list(text), [1] * len(text)
        self.pending += text
        for view in self._views:
            characters, sizes = view.feed(characters, sizes, self._matches, is_end=is_end)
        place = self._at + len(self.pending) if is_end else min(view.at for view in self._views)
        for one in sorted(self._matches, reverse=True):
            if one.start < place < one.end:  # another view does not know yet what stands there
                place = one.start
        return self._release(place)

    def _release(self, place: int) -> list[str | Hit]:
        """Return what is pending up to a place; matches that overlap are one."""
        news: list[str | Hit] = []
        for one in sorted(match for match in self._matches if match.end <= place):
            if one.end <= self._at:
                continue
            if one.start > self._at:
                news.append(self._cut(one.start))
            news.append(Hit(one.pattern, self._cut(one.end)))
        if place > self._at:
            news.append(self._cut(place))
        self._matches = [one for one in self._matches if one.end > self._at]
        return news

    def _cut(self, place: int) -> str:
        size = place - self._at
        text, self.pending, self._at = self.pending[:size], self.pending[size:], place
        self.before = text[-1:]
        return text

    def plain(self, patterns: Patterns) -> Scanner | None:
        """Return a scanner to go on with if no view sees more than the text as it stands."""
        if all(view.sees(self.pending, self.before) for view in self._views) and not self._matches:
            return Scanner(patterns, self.pending, self.before)
        return None


class _Reading:
    """The text as it reads with its escapes resolved a number of times.

    Attributes:
        at: up to where in the text as it stands all is known.
    """

    def __init__(self, patterns: Patterns, depth: int, before: str) -> None:
        self._resolves = depth > 0
        self._scanner = Scanner(patterns, before=before)
        self._sizes: deque[int] = deque()  # of what the scanner holds: characters of the text
        self._unread = ""  # may be the beginning of an escape
        self._unread_sizes: list[int] = []
        self.at = 0

    def feed(
        self, characters: list[str], sizes: list[int], matches: list[FoundMatch], *, is_end: bool
    ) -> tuple[list[str], list[int]]:
        """Take characters, and as how many each stands in the text; add to ``matches``.

        Returns the same of this view, for one that resolves once more.
        """
        if self._resolves:
            characters, sizes = self._resolved(characters, sizes, is_end=is_end)
        self._sizes += sizes
        for one in self._scanner.feed("".join(characters), is_end=is_end):
            num_characters = len(one.text if isinstance(one, Hit) else one)
            start = self.at
            self.at += sum(self._sizes.popleft() for _ in range(num_characters))
            if isinstance(one, Hit):
                matches.append(FoundMatch(start, self.at, one.pattern))
        return characters, sizes

    def _resolved(
        self, characters: list[str], sizes: list[int], *, is_end: bool
    ) -> tuple[list[str], list[int]]:
        text = self._unread + "".join(characters)
        sizes = self._unread_sizes + sizes
        shown, shown_sizes, at = list[str](), list[int](), 0
        while at < len(text):
            size = 1
            if text[at] in "\\&":
                if not is_end and _BEGINS_ESCAPE.fullmatch(text, at):
                    break
                escape = _ESCAPE.match(text, at)
                size = len(escape[0]) if escape and _character(escape[0]) else 1
            shown.append(_character(text[at : at + size]))
            shown_sizes.append(sum(sizes[at : at + size]))
            at += size
        self._unread, self._unread_sizes = text[at:], sizes[at:]
        return shown, shown_sizes

    def sees(self, pending: str, before: str) -> bool:
        """Whether it holds the text as it stands, behind the same character."""
        scanner = self._scanner
        is_same = scanner.pending == pending and not self._unread and set(self._sizes) <= {1}
        return is_same and _kind(scanner.before) == _kind(before)


def _kind(before: str) -> str:
    return kind_of(before) if before else ""


def _character(text: str) -> str:
    """Return the character of an escape, or one that stands for itself; nothing if none is."""
    if len(text) == 1:
        return text
    if text[0] == "&":
        char = html.unescape(text)
        return char if len(char) == 1 else ""  # no name, or one of two characters of mathematics
    if text[1] == "u":
        units = [int(unit, 16) for unit in text.split("\\u")[1:]]
        data = b"".join(unit.to_bytes(2, "big") for unit in units)
        return data.decode("utf-16-be", errors="replace")
    return _SHORT.get(text[1], text[1])
