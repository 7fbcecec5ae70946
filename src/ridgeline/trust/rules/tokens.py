"""Which tokens of a text may be told of, and which others in the place of each.

Of each one question is asked: may it stand here, behind the text before it? A token that is a part
of a match may not, nor one that would complete a match, or that no answer may say if it stands
alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ridgeline.core.step import TokenLogprobs
from ridgeline.trust.text_rules.answer import TextRules
from ridgeline.trust.text_rules.patterns import Hit
from ridgeline.trust.text_rules.search import NOTHING, Begun, MatchSearch

Entry = TokenLogprobs | int  # a bare token has no log-probability


class TokenText(Protocol):
    """Turns tokens into characters, never half of one (``text.tokenizers.tokenizer``)."""

    def __call__(self, token_id: int, /) -> str:
        """Return the characters that this token completes."""

    @property
    def is_whole(self) -> bool:
        """Whether the last token ended where a character ends."""


@dataclass(slots=True)
class SearchedToken:
    """A token in the text that it stands in.

    Attributes:
        entry: what is told of it, without what may not stand in its place.
        is_known: whether it is certain that it may be told, or may not.
        is_told: whether it may.
    """

    entry: Entry
    start: int
    is_told: bool
    end: int = 0
    is_whole: bool = False
    is_known: bool = False


class SearchedTokens:
    """The tokens of one text, searched as they come."""

    def __init__(
        self,
        rules: TextRules,
        is_shown: Callable[[str], bool],
        token_bytes: Callable[[int], bytes],
        text: TokenText,
        begun: Begun = NOTHING,
    ) -> None:
        """Begin behind a text that has begun.

        Args:
            rules: those for the text.
            is_shown: whether an answer may say a text that stands alone.
            token_bytes: what a token stands for.
            text: decodes these tokens.
            begun: where the search begins.
        """
        self._is_shown, self._token_bytes, self._text = is_shown, token_bytes, text
        self._search = MatchSearch(rules.forbidden, begun) if rules.forbidden else None
        self._tail = b""  # of a character that is not whole yet
        self._tokens = deque[SearchedToken]()  # not known yet
        self._num_fed = 0  # characters
        self._at = -len(begun.pending)  # up to where all is known
        self._has_failed = False

    def feed(self, entry: Entry) -> SearchedToken:
        """Take the next token, and return what will be known of it."""
        token = entry if isinstance(entry, int) else entry.token
        if isinstance(entry, TokenLogprobs):
            top = tuple(one for one in entry.top if self.may_stand(one[0]))
            entry = entry._replace(top=top)
        data = self._token_bytes(token)
        searched = SearchedToken(entry, self._num_fed, self._is_shown(_spelled(data)))
        self._tokens.append(searched)
        text = self._text(token)
        self._num_fed += len(text)
        self._tail = b"" if self._text.is_whole else self._tail + data
        for one in reversed(self._tokens):
            if one.is_whole:
                break
            one.end, one.is_whole = self._num_fed, self._text.is_whole
        self._read(text, is_end=False)
        return searched

    def finish(self) -> None:
        """No token follows: all is known."""
        self._read("", is_end=True)
        for one in self._tokens:
            one.is_known = True
        self._tokens.clear()

    def may_stand(self, token: int) -> bool:
        """Whether a token may be told of that could come next."""
        data = self._token_bytes(token)
        if self._has_failed or not self._is_shown(_spelled(data)):
            return False
        text = (self._tail + data).decode("utf-8", "ignore")
        try:
            return self._search is None or not self._search.completes(text)
        except Exception:  # a rule that fails is counted where the text is read
            return False

    def _read(self, text: str, *, is_end: bool) -> None:
        if self._search is None:
            self._at = self._num_fed
        else:
            try:
                news = self._search.feed(text, is_end=is_end)
            except Exception:
                self._has_failed, news = True, []
            for one in news:
                start, self._at = (
                    self._at,
                    self._at + len(one if isinstance(one, str) else one.text),
                )
                if isinstance(one, Hit):
                    self._drop(start, self._at)
        if self._has_failed:
            self._drop(-1, self._num_fed + 1)
        while self._tokens and self._tokens[0].is_whole and self._tokens[0].end <= self._at:
            self._tokens.popleft().is_known = True

    def _drop(self, start: int, end: int) -> None:
        """Tell of no token whose characters are between two places."""
        for one in self._tokens:
            is_inside = start < one.end and one.start < end
            one.is_told = one.is_told and not is_inside


def _spelled(data: bytes) -> str:
    """Return a token's text as it is told, of parts of characters what OpenAI has for them."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
