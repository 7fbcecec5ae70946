"""Drafts from what was said before: prompt lookup that also knows the latest answers.

SuffixDecoding (Oliaro et al., 2024) keeps answers in a suffix tree. Here places of equal n-grams
are chained by hash, as in ``drafts.lookup``, in flat arrays. Answers to one owner are never
compared with another owner's tokens: how soon an answer comes would tell what others were told. It
knows tokens alone.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence as Listing

from ridgeline.core.decoding.drafts.lookup import NO_TOKEN, PLACES, PromptLookup
from ridgeline.core.request import Request, Sequence
from ridgeline.core.scheduling.speculate import Guess
from ridgeline.core.step import Work

MOST_TOKENS = 1 << 20  # of all answers that are kept; each takes 12 to 16 bytes
_LEAST_SLOTS = 1 << 10
_SPREAD, _SHIFT = 0x9E3779B97F4A7C15, 40  # 2^64 / golden ratio: spreads keys over the slots


class Past:
    """Answers to one owner, the oldest first, with the places of their n-grams."""

    def __init__(self, *, shortest: int, longest: int) -> None:
        """Begin with none; matches have ``shortest`` to ``longest`` tokens."""
        self._shortest, self._longest = shortest, longest
        self._key_bits = (1 << 32 * shortest) - 1
        self._lengths: deque[int] = deque()  # of the answers, each with NO_TOKEN after it
        self._text = array("i")
        self._begin = 0  # tokens before are of answers that were dropped
        self._newest = array("i", [-1]) * _LEAST_SLOTS  # by hash: the newest place behind a key
        self._older = array("i")  # by place: the next older place of the same hash

    def __len__(self) -> int:
        """Return the number of answers."""
        return len(self._lengths)

    def add(self, answer: Listing[int]) -> int:
        """Add an answer, and return how many tokens it takes."""
        start = len(self._text)
        self._text.extend(answer)
        self._text.append(NO_TOKEN)
        self._lengths.append(len(self._text) - start)
        if len(self._text) > len(self._newest):
            self._rebuild()
        else:
            self._index(start, len(self._text))
        return self._lengths[-1]

    def drop_oldest(self) -> int:
        """Drop the oldest answer, and return how many tokens that frees."""
        length = self._lengths.popleft()
        self._begin += length
        if 2 * self._begin > len(self._text):
            self._rebuild()
        return length

    def guess(self, tokens: Listing[int], most: int) -> Guess:
        """Return at most ``most`` tokens that followed the end of ``tokens`` in an answer."""
        text, shortest = self._text, self._shortest
        if len(tokens) < shortest:
            return Guess((), 0)
        key = 0
        for token in tokens[len(tokens) - shortest :]:
            key = key << 32 | token
        place = self._newest[self._slot(key)]
        match_end, length = -1, 0
        for _ in range(PLACES):
            if place < self._begin:
                break
            same, limit = 0, min(self._longest, place, len(tokens))
            while same < limit and text[place - 1 - same] == tokens[-1 - same]:
                same += 1
            if same > length:
                match_end, length = place, same
            place = self._older[place]
        if length < shortest:  # another key with the same hash
            return Guess((), 0)
        drafts = text[match_end : match_end + most]
        if NO_TOKEN in drafts:
            drafts = drafts[: drafts.index(NO_TOKEN)]
        return Guess(tuple(drafts), length)

    def _index(self, start: int, end: int) -> None:
        """Enter an answer's places, but not its first ones and its end: nothing is there."""
        key, is_key_from = 0, start + self._shortest
        for place in range(start, end):
            older = -1
            if is_key_from <= place < end - 1:
                slot = self._slot(key)
                older, self._newest[slot] = self._newest[slot], place
            self._older.append(older)
            key = (key << 32 | self._text[place]) & self._key_bits

    def _rebuild(self) -> None:
        """Free what was dropped, and enter the rest into as many slots as it needs."""
        del self._text[: self._begin]
        self._begin = 0
        num_slots = max(_LEAST_SLOTS, 1 << len(self._text).bit_length())
        self._newest, self._older = array("i", [-1]) * num_slots, array("i")
        start = 0
        for length in self._lengths:
            self._index(start, start + length)
            start += length

    def _slot(self, key: int) -> int:
        return (key * _SPREAD >> _SHIFT) & (len(self._newest) - 1)


class SuffixLookup:
    """The drafter: what a sequence's own text says, or an earlier answer to the same owner."""

    def __init__(
        self, *, shortest: int = 2, longest: int = 32, most_tokens: int = MOST_TOKENS
    ) -> None:
        """Match ``shortest`` to ``longest`` tokens; keep answers of ``most_tokens`` in all."""
        self._own = PromptLookup(shortest=shortest, longest=longest)
        self._shortest, self._longest = shortest, longest
        self._most_tokens = most_tokens
        self._num_tokens = 0
        self._pasts: dict[str, Past] = {}  # by owner
        self._owners: deque[str] = deque()  # of all answers, the oldest first

    def draft(self, wanted: Listing[tuple[Sequence, int]]) -> list[Guess]:
        """Return a guess for each sequence, by the longer match, of at most ``most`` tokens."""
        guesses = self._own.draft(wanted)
        for i, (seq, most) in enumerate(wanted):
            past = self._pasts.get(seq.request.owner)
            from_past = past.guess(seq.tokens, most) if past else Guess((), 0)
            if from_past.match_len > guesses[i].match_len:
                guesses[i] = from_past
        return guesses

    def note_draws(self, work: Work, draws: tuple[int, ...]) -> None:
        """Take nothing: the texts have all that counts."""

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that has ended, and keep its answers."""
        self._own.forget(request)
        prompt = request.prompt
        for seq in request.sequences:
            if len(seq.tokens) > len(prompt):  # with the prompt's end, where an answer begins
                self._keep(request.owner, seq.tokens[max(0, len(prompt) - self._longest) :])

    def _keep(self, owner: str, answer: Listing[int]) -> None:
        past = self._pasts.get(owner)
        if past is None:
            past = self._pasts[owner] = Past(shortest=self._shortest, longest=self._longest)
        self._num_tokens += past.add(answer)
        self._owners.append(owner)
        while self._num_tokens > self._most_tokens:
            oldest = self._owners.popleft()
            self._num_tokens -= self._pasts[oldest].drop_oldest()
            if not self._pasts[oldest]:
                del self._pasts[oldest]
