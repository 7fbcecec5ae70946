"""One choice of an answer under rules: its pieces, and the tokens that may be told of."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ridgeline.core.step import Event, TokenLogprobs
from ridgeline.decoding.guard.answer import AnswerGuard
from ridgeline.decoding.messages.calls import Piece
from ridgeline.decoding.text import HeldEntries
from ridgeline.server.rules.book import RequestRules


class RuledChoice:
    """What the rules let out of one choice.

    Attributes:
        entries: of tokens whose text the last event has settled, none of what was replaced.
    """

    def __init__(
        self,
        guard: AnswerGuard,
        rules: RequestRules,
        spell: Callable[[int], str],
        held: HeldEntries[TokenLogprobs] | None,
    ) -> None:
        """Let pieces out through ``guard``; ``held`` gets the entries of tokens, if any are told.

        ``spell`` returns the text of a token that stands alone.
        """
        self._guard, self._rules, self._spell, self._held = guard, rules, spell, held
        self.entries: list[TokenLogprobs] = []

    @property
    def is_blocked(self) -> bool:
        """Whether a rule has ended the answer."""
        return self._guard.blocked is not None

    def echo(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Return what is shown of a text that the answer begins with."""
        return self._guard.take(pieces, is_over=False)

    def take(self, pieces: Sequence[Piece], event: Event, num_unread: int) -> list[Piece]:
        """Take an event and the pieces read of it; return those that are shown.

        ``num_unread`` is how many characters the reader of the message holds back.
        """
        guard, is_over = self._guard, event.finish_reason is not None
        num_hits = guard.num_hits
        shown = guard.take(pieces, is_over=is_over)
        if self._held is not None:
            if event.token is not None:
                entry = event.logprobs or TokenLogprobs(event.token, 0.0, 0, ())
                self._held.feed(event.token, entry)
            num_held = num_unread + guard.num_held
            entries = self._held.take(len(event.text), num_held, is_over=is_over)
            if guard.blocked or guard.num_hits > num_hits:
                entries = []
                self._held.drop_begun()
            self.entries = allowed(entries, self._rules, self._spell)
        return shown


def allowed(
    entries: Iterable[TokenLogprobs], rules: RequestRules, spell: Callable[[int], str]
) -> list[TokenLogprobs]:
    """Return entries without the tokens whose text alone no answer may say."""
    return [
        one._replace(top=tuple(top for top in one.top if rules.is_shown(spell(top[0]))))
        for one in entries
        if rules.is_shown(spell(one.token))
    ]
