"""The text of an answer as it grows: final characters only, cut exactly at a stop string.

It decodes nothing itself: a callable turns each token into the characters that became complete.
It knows nothing about requests, steps or the wire.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

Entry = TypeVar("Entry")


class Decoder(Protocol):
    """Turns tokens into characters, never half of one (``text.tokenizers.tokenizer``)."""

    def __call__(self, token_id: int, /) -> str:
        """Return the characters that this token completes."""

    @property
    def is_whole(self) -> bool:
        """Whether the last token ended where a character ends."""

    def flush(self) -> str:
        """Return what an incomplete character at the very end becomes."""


class TextStream:
    """Text of one sequence, with the shortest possible hold-back for stop strings.

    The result does not depend on how the text is split into tokens: the stop string that is
    complete first, reading character by character, ends it (the longest of those that end there).
    """

    def __init__(
        self, decoder: Decoder, stop: tuple[str, ...] = (), *, shows_stop: bool = False
    ) -> None:
        """Decode with ``decoder`` and stop before any string of ``stop``, or with it."""
        self._decoder = decoder
        self._stop = stop
        self._shows_stop = shows_stop
        self._ready = ""  # final, not yet taken
        self._pending = ""  # may be the beginning of a stop string
        self._ended = False

    def feed(self, token: int, may_stop: bool) -> str | None:
        """Take one more token; return the stop string that it completed.

        With ``may_stop`` false nothing stops, and what could have is text.
        """
        return self._push(self._decoder(token), may_stop)

    def take(self) -> str:
        """Return the text that became final since the last call."""
        text, self._ready = self._ready, ""
        return text

    @property
    def is_whole(self) -> bool:
        """Whether the last token ended where a character ends."""
        return self._decoder.is_whole

    def finish(self) -> None:
        """No token will follow: held-back text is final."""
        if not self._ended:
            self._ended = True
            self._ready += self._pending + self._decoder.flush()
            self._pending = ""

    def _push(self, piece: str, may_stop: bool) -> str | None:
        if not self._stop or not may_stop:
            self._ready += self._pending + piece
            self._pending = ""
            return None
        text = self._pending + piece
        matches = [
            (text.find(stop) + len(stop), -len(stop), stop) for stop in self._stop if stop in text
        ]
        if matches:
            end, negative_length, stop = min(matches)
            self._ready += text[: end if self._shows_stop else end + negative_length]
            self._pending, self._ended = "", True
            return stop
        num_pending = self._longest_beginning(text)
        cut = len(text) - num_pending
        self._ready += text[:cut]
        self._pending = text[cut:]
        return None

    def _longest_beginning(self, text: str) -> int:
        """Return how many of the last characters may be the beginning of a stop string."""
        longest = min(len(text), max(map(len, self._stop)) - 1)
        for length in range(longest, 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0


class HeldEntries(Generic[Entry]):
    """What is told of an answer's tokens, held back until its text shows all their characters.

    Tokens whose text may still become a stop string, a marker or a whole character stay untold.
    """

    def __init__(self, text: TextStream) -> None:
        """Take a text of the same tokens that has no stop strings."""
        self._text = text
        self._num_fed = self._num_shown = 0  # characters
        self._num_known = self._num_told = 0  # of those that are no longer held, and of entries
        self._pending: deque[tuple[int, bool, Entry]] = deque()

    def feed(self, token: int, entry: Entry) -> None:
        """Take what is told of the next token."""
        self._text.feed(token, may_stop=False)
        self._num_fed += len(self._text.take())
        self._pending.append((self._num_fed, self._text.is_whole, entry))

    def take(self, num_chars: int, num_unread: int = 0, *, is_over: bool) -> list[Entry]:
        """Return the entries that may be told now, in order.

        Args:
            num_chars: characters that became final since the last call.
            num_unread: the last of all final ones, which the reader of the message holds back.
            is_over: whether the answer has ended; then nothing is held back.
        """
        self._num_shown += num_chars
        self._num_known = self._num_shown - num_unread
        num_told = 0
        for place, (end, is_whole, _) in enumerate(self._pending, start=1):
            if is_over or (is_whole and end <= self._num_shown - num_unread):
                num_told = place
        if num_told:
            self._num_told = self._pending[num_told - 1][0]
        return [self._pending.popleft()[2] for _ in range(num_told)]

    def drop_begun(self) -> None:
        """Drop the next entry if a part of its text is known."""
        if self._pending and self._num_told < self._num_known:
            self._num_told = self._pending.popleft()[0]
