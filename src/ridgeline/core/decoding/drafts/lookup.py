"""Prompt lookup: what followed the last time is a good guess at what follows now.

Prompt lookup decoding (Saxena, 2023), with a match as long as it is instead of one fixed length, as
in SuffixDecoding (Oliaro et al., 2024). Places of equal n-grams are chained from the newest to the
oldest, as in LZ77 (Ziv and Lempel, 1977), so nothing is searched. It knows tokens alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing

from ridgeline.core.request import Request, Sequence
from ridgeline.core.scheduling.speculate import Guess
from ridgeline.core.step import SeqId, Work

PLACES = 8  # earlier places that are compared
NO_TOKEN = -1  # between two texts


class Lookup:
    """A text that grows, with the places of its n-grams."""

    def __init__(self, before: Listing[int] = (), *, shortest: int = 2, longest: int = 32) -> None:
        """Begin with a text that comes ``before``; matches have ``shortest`` to ``longest`` tokens.

        Raises ValueError unless 1 <= shortest <= longest.
        """
        if not 1 <= shortest <= longest:
            raise ValueError(f"matches of {shortest} to {longest} tokens: there are none")
        self._shortest, self._longest = shortest, longest
        self._text = [*before, NO_TOKEN] if before else []
        self._begin = len(self._text)
        self._key = 0  # the last tokens, 32 bits each
        self._key_bits = (1 << 32 * shortest) - 1
        self._newest: dict[int, int] = {}  # by key: the newest place behind these tokens
        self._older: list[int] = []  # by place: the next older place behind the same tokens

    def guess(self, tokens: Listing[int], most: int) -> Guess:
        """Return at most ``most`` tokens that may follow ``tokens``, which only ever grow."""
        text, shortest = self._text, self._shortest
        text += tokens[len(text) - self._begin :]
        end = len(text)
        key = self._key
        for place in range(len(self._older), end):
            self._older.append(self._newest.get(key, -1))
            self._newest[key] = place
            key = (key << 32 | text[place] & 0xFFFFFFFF) & self._key_bits
        self._key = key
        place = self._newest.get(key, -1)
        match_end, length = -1, 0
        for _ in range(PLACES):
            if place < shortest:
                break
            same = shortest
            while (
                same < min(place, self._longest) and text[place - 1 - same] == text[end - 1 - same]
            ):
                same += 1
            if same > length:
                match_end, length = place, same
            place = self._older[place]
        if match_end < 0:
            return Guess((), 0)
        drafts = text[match_end : match_end + most]
        if NO_TOKEN in drafts:
            drafts = drafts[: drafts.index(NO_TOKEN)]
        return Guess(tuple(drafts), length)


class PromptLookup:
    """The drafter: a ``Lookup`` for each sequence, of its tokens and its request's prediction."""

    def __init__(self, *, shortest: int = 2, longest: int = 32) -> None:
        """Match ``shortest`` to ``longest`` tokens."""
        self._range = shortest, longest
        self._lookups: dict[SeqId, Lookup] = {}

    def draft(self, wanted: Listing[tuple[Sequence, int]]) -> list[Guess]:
        """Return a guess for each sequence, of at most the number of tokens beside it."""
        return [self._of(seq).guess(seq.tokens, most) for seq, most in wanted]

    def note_draws(self, work: Work, draws: tuple[int, ...]) -> None:
        """Take nothing: the text has all that counts."""

    def _of(self, seq: Sequence) -> Lookup:
        lookup = self._lookups.get(seq.id)
        if lookup is None:
            shortest, longest = self._range
            lookup = self._lookups[seq.id] = Lookup(
                _predicted(seq.request, longest), shortest=shortest, longest=longest
            )
        return lookup

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that has ended."""
        for seq in request.sequences:
            self._lookups.pop(seq.id, None)


def _predicted(request: Request, longest: int) -> tuple[int, ...]:
    """Return a request's prediction behind the end of its prompt, where it is expected."""
    return request.prompt[-longest:] + request.prediction if request.prediction else ()
