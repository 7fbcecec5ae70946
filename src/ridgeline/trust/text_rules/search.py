"""The matches in a text that grows, as it stands and with its escapes resolved."""

from __future__ import annotations

from typing import NamedTuple

from ridgeline.trust.text_rules.escapes import EscapedText, may_escape
from ridgeline.trust.text_rules.patterns import Hit, Patterns, Scanner


class Begun(NamedTuple):
    """Where a search goes on: behind a character, with what may be the beginning of a match."""

    pending: str = ""
    before: str = ""


NOTHING = Begun()


class MatchSearch:
    """Finds the matches in one text; without escapes it reads the text once."""

    def __init__(self, patterns: Patterns, begun: Begun = NOTHING) -> None:
        """Go on with a text that has begun."""
        self._patterns = patterns
        self._scanner = Scanner(patterns, begun.pending, begun.before)
        self._escaped: EscapedText | None = None
        self._first: list[str | Hit] = []  # of what was pending, known at once
        if may_escape(begun.pending):
            self._escape()

    def _escape(self) -> None:
        self._escaped = EscapedText(self._patterns, self._scanner.pending, self._scanner.before)
        self._first = self._escaped.first

    @property
    def pending(self) -> str:
        """The end of the text, of which nothing is known yet."""
        return self._escaped.pending if self._escaped else self._scanner.pending

    @property
    def begun(self) -> Begun:
        """Where another search would go on with the same text."""
        before = self._escaped.before if self._escaped else self._scanner.before
        return Begun(self.pending, before)

    def feed(self, text: str, *, is_end: bool = False) -> list[str | Hit]:
        """Take more text; return what became known, in order: text without matches, and matches.

        With ``is_end`` no text follows, so nothing is held back.
        """
        if self._escaped is None and not may_escape(text):
            return self._scanner.feed(text, is_end=is_end)
        if self._escaped is None:
            self._escape()
        assert self._escaped is not None
        news = self._first + self._escaped.feed(text, is_end=is_end)
        self._first = []
        if plain := self._escaped.plain(self._patterns):
            self._scanner, self._escaped = plain, None
        return news

    def completes(self, text: str) -> int:
        """Return how much of a text, if it came now and were all, completes the first match in it.

        In characters, 0 if there is no match that it is a part of.
        """
        is_plain = self._escaped is None and not may_escape(text)
        if is_plain and not self._scanner.may_complete(text):
            return 0
        at = -len(self.pending)
        for one in MatchSearch(self._patterns, self.begun).feed(text, is_end=True):
            at += len(one.text if isinstance(one, Hit) else one)
            if isinstance(one, Hit) and at > 0:
                return at
        return 0
