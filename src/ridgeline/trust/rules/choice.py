"""One choice of an answer under rules: its pieces, and the tokens that may be told of."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ridgeline.core.decoding.text import HeldEntries
from ridgeline.core.step import Event, TokenLogprobs
from ridgeline.text.messages.tool_calls import MessageDelta
from ridgeline.trust.rules.tokens import Entry, SearchedToken, SearchedTokens
from ridgeline.trust.text_rules.answer import AnswerGuard


class FilteredChoice:
    """What the rules let out of one choice.

    Attributes:
        echoed: of tokens that the answer begins with; as ``entries``.
        entries: of tokens whose text the last event has settled, none of what was replaced.
        stop_reason: what has ended it, if that may be told.
    """

    def __init__(
        self,
        guard: AnswerGuard,
        tokens: SearchedTokens | None,
        held: HeldEntries[SearchedToken] | None,
    ) -> None:
        """Let pieces out through ``guard``; ``tokens`` and ``held`` are there if any are told."""
        self._guard, self._tokens, self._held = guard, tokens, held
        self._ready = deque[SearchedToken]()  # whose text is shown
        self._num_echoed = 0  # the first of these
        self.echoed: list[Entry] = []
        self.entries: list[TokenLogprobs] = []
        self.stop_reason: str | int | None = None

    @property
    def is_blocked(self) -> bool:
        """Whether a rule has ended the answer."""
        return self._guard.blocked is not None

    def echo(self, pieces: Sequence[MessageDelta], entries: Sequence[Entry]) -> list[MessageDelta]:
        """Return what is shown of a text that the answer begins with, and take its tokens."""
        shown = self._guard.take(pieces, is_over=False)
        if self._tokens is not None and not self._guard.blocked:
            self._ready += map(self._tokens.feed, entries)
            self._num_echoed = len(self._ready)
        return shown

    def take(
        self, pieces: Sequence[MessageDelta], event: Event, num_unread: int, stopped_by: str
    ) -> list[MessageDelta]:
        """Take an event and the pieces read of it; return those that are shown.

        ``num_unread`` is how many characters the reader of the message holds back. ``stopped_by``
        is the text that has ended the answer and is not shown, if any has.
        """
        guard, is_over = self._guard, event.finish_reason is not None
        num_hits = guard.num_hits
        shown = guard.take(pieces, is_over=False)
        if is_over:
            # A match that the end would cut short is one.
            rest = guard.completing(stopped_by) if stopped_by else None
            shown += guard.take([rest] if rest else [], is_over=True)
        has_hit = guard.blocked is not None or guard.num_hits > num_hits
        self.stop_reason = None if has_hit else event.stop_reason
        if self._held is not None and self._tokens is not None:
            self._take_token(self._held, self._tokens, event, num_unread, has_hit=has_hit)
        return shown

    def _take_token(
        self,
        held: HeldEntries[SearchedToken],
        tokens: SearchedTokens,
        event: Event,
        num_unread: int,
        *,
        has_hit: bool,
    ) -> None:
        is_over = event.finish_reason is not None
        if event.token is not None:
            entry = event.logprobs or TokenLogprobs(event.token, 0.0, 0, ())
            held.feed(event.token, tokens.feed(entry))
        if is_over:
            tokens.finish()
        news = held.take(len(event.text), num_unread + self._guard.num_held, is_over=is_over)
        if has_hit:
            news = []
            held.drop_begun()
        self._ready += news
        if self._guard.blocked:
            self._ready.clear()
        self.echoed, self.entries = [], []
        while self._ready and self._ready[0].is_known:
            self._tell(self._ready.popleft())

    def _tell(self, token: SearchedToken) -> None:
        is_echoed = self._num_echoed > 0
        self._num_echoed -= is_echoed
        if not token.is_told:
            return
        if is_echoed:
            self.echoed.append(token.entry)
        elif isinstance(token.entry, TokenLogprobs):
            self.entries.append(token.entry)
