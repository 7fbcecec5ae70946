"""Speculation: which drafts a step verifies, and what they were worth.

A draft is a guess at a token that is not drawn yet. Behind each draft the backend draws as it would
without drafts, and a draft counts only if it equals the draw, so drafts change no answer: they
only let one step draw several tokens.

How many drafts pay is decided by goodput (Liu et al., "Optimizing Speculative Decoding for Serving
Large Language Models Using Goodput", 2024): drafts are added in the order of their chance to be
right, as long as tokens per second of the whole step grow. Both sides are measured: the chance by
comparing guesses with the text that came, whether they were computed or not, and the time of a step
by its numbers of sequences and rows. There is no clock here: ``note_step`` is told.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ridgeline.core.kvcache import KVCache
from ridgeline.core.request import Request, Sequence
from ridgeline.core.step import SeqId, Step, Work

MOST_DRAFTS = 15  # of one sequence: sixteen rows of it in a step
_BUSY_SEQS = 32  # with more of them in a step, a draft costs more than it brings
_TRY_EVERY, _TRY_CHANCE = 256, 0.5  # steps: likely drafts are timed again, although too slow
_LEAST_GAIN = 1.02  # a loss is worse than a gain missed
_SLOPE = 0.15  # of a step's time, for each row more, until it is known
_RATES = (0.5, 0.65, 0.75, 0.85, 0.9)  # by length of the match, before anything is known
_PRIOR = 2.0  # right guesses of a sequence that weigh as much as what is known of all
_MOST_CHANCE = 0.98


def max_draws(max_num_seqs: int) -> int:
    """Return how many tokens may be drawn in a step at most."""
    return max(max_num_seqs, 1 + MOST_DRAFTS)


class Guess(NamedTuple):
    """Tokens that may follow, and how many tokens before them were matched to find them."""

    tokens: tuple[int, ...]
    match_len: int


class Drafter(Protocol):
    """Proposes tokens; it may be wrong, and may know nothing."""

    def draft(self, wanted: Listing[tuple[Sequence, int]]) -> list[Guess]:
        """Return a guess for each sequence, of at most so many tokens."""

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that has ended."""


@dataclass(slots=True)
class _Record:
    """What is known of a sequence's guesses: one that waits for its text, and how others did.

    Of the latest, ``num_right`` were right, where ``num_expected`` were to be by the rates of all.
    """

    place: int = 0
    guess: tuple[int, ...] = ()
    bucket: int = 0
    num_right: float = 0.0
    num_expected: float = 0.0


class Depth:
    """How many drafts pay, by what was measured."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._rates = list(_RATES)
        self._records: dict[SeqId, _Record] = {}
        self._times_s: dict[int, dict[int, float]] = {}  # by sequences, then by rows
        self._num_steps = 0

    def note_step(self, num_seqs: int, num_rows: int, seconds: float) -> None:
        """Add a step without prompts. A step that was much slower than usual counts for less."""
        times_s = self._times_s.setdefault(num_seqs, {})
        known_s = times_s.setdefault(num_rows, seconds)
        times_s[num_rows] += (min(seconds, 1.5 * known_s) - known_s) / 8
        self._num_steps += 1

    def note_text(self, seq: Sequence, guess: Guess) -> None:
        """Compare an earlier guess with the tokens that are there by now; remember a new one."""
        record = self._records.setdefault(seq.id, _Record())
        bucket = record.bucket
        while record.guess and record.place < len(seq.tokens):
            is_right = record.guess[0] == seq.tokens[record.place]
            record.num_right += is_right - record.num_right / 32
            record.num_expected += self._rates[bucket] - record.num_expected / 32
            self._rates[bucket] += (is_right - self._rates[bucket]) / 64
            record.guess = record.guess[1:] if is_right else ()
            record.place += 1
        if not record.guess:
            record.place, record.guess = len(seq.tokens), guess.tokens
            record.bucket = _bucket(guess.match_len)

    def forget(self, seq_id: SeqId) -> None:
        """Drop what is known of a sequence."""
        self._records.pop(seq_id, None)

    def choose(self, num_rows: int, guesses: Listing[tuple[Sequence, Guess]]) -> list[int]:
        """Return how many tokens of each guess pay, in a step of ``num_rows`` sequences."""
        none = [0] * len(guesses)
        times_s = self._times_s.get(num_rows, {})
        if num_rows not in times_s:  # to be measured first
            return none
        worth = sorted(
            (self._rate(seq, guess) ** j, -i)
            for i, (seq, guess) in enumerate(guesses)
            for j in range(1, len(guess.tokens) + 1)
        )
        depths, best = none.copy(), none
        is_trial = self._num_steps % _TRY_EVERY == _TRY_EVERY - 1
        tokens, rate = float(num_rows), num_rows / times_s[num_rows]
        for rows, (chance, minus_i) in enumerate(reversed(worth), start=num_rows + 1):
            tokens += chance
            depths[-minus_i] += 1
            goodput = tokens / _time_s(times_s, num_rows, rows)
            if goodput > rate * _LEAST_GAIN or (is_trial and chance > _TRY_CHANCE):
                rate, best = goodput, depths.copy()
        return best

    def _rate(self, seq: Sequence, guess: Guess) -> float:
        """Return the chance that a draft is right if those before it are."""
        record = self._records[seq.id]
        skill = (_PRIOR + record.num_right) / (_PRIOR + record.num_expected)
        return min(self._rates[_bucket(guess.match_len)] * skill, _MOST_CHANCE)


def _time_s(times_s: dict[int, float], least: int, num_rows: int) -> float:
    """Return the time of a step: measured, between two that were, or by the slope beyond them."""
    if num_rows in times_s:
        return times_s[num_rows]
    below = max(rows for rows in times_s if rows < num_rows)  # ``least`` is among them
    above = min((rows for rows in times_s if rows > num_rows), default=None)
    if above is None:
        return times_s[below] + _SLOPE * times_s[least] * (num_rows - below) / least
    share = (num_rows - below) / (above - below)
    return times_s[below] * (1 - share) + times_s[above] * share


def _bucket(match_len: int) -> int:
    return sum(match_len > bound for bound in (2, 4, 8, 16))


class Speculation:
    """A drafter, and how far to follow it."""

    def __init__(
        self, drafter: Drafter, *, most: int = MOST_DRAFTS, depth: Depth | None = None
    ) -> None:
        """Verify at most ``most`` drafts of a sequence in a step; all, if there is no ``depth``."""
        self.drafter = drafter
        self.most = most
        self._depth = depth

    def extend(self, kv: KVCache, granted: list[Sequence], work: list[Work], left: int) -> None:
        """Add drafts to a step's work, after all grants.

        ``left`` is how many rows more the step may have. Nobody gives way for a draft: one for
        which no block is free is not verified. A step that computes prompts has no drafts.
        """
        is_busy = self._depth is not None and len(work) > _BUSY_SEQS
        if is_busy or any(len(item.tokens) > 1 or item.targets for item in work):
            return
        wanted: list[tuple[Sequence, int]] = []
        places: list[int] = []
        for i, (seq, item) in enumerate(zip(granted, work, strict=True)):
            most = min(
                self.most, seq.request.max_len - len(seq.tokens) - 1
            )  # the last needs no row
            if len(item.seeds) == 1 and most > 0:
                wanted.append((seq, most))
                places.append(i)
        guesses = self.drafter.draft(wanted) if wanted else []
        for i, guess in zip(places, self._chosen(work, wanted, guesses), strict=False):
            drafts = guess[:left]
            if drafts and kv.reserve_drafts(granted[i], work[i].start + 1 + len(drafts)):
                tokens, table = work[i].tokens + drafts, granted[i].table
                work[i] = work[i]._replace(tokens=tokens, table=table, drafts=len(drafts))
                left -= len(drafts)

    def _chosen(
        self,
        work: list[Work],
        wanted: Listing[tuple[Sequence, int]],
        guesses: Listing[Guess],
    ) -> list[tuple[int, ...]]:
        """Return what of each guess is worth a row."""
        if self._depth is None:
            return [guess.tokens for guess in guesses]
        pairs = [(seq, guess) for (seq, _), guess in zip(wanted, guesses, strict=True)]
        for seq, guess in pairs:
            self._depth.note_text(seq, guess)
        if not any(guess.tokens for guess in guesses):
            return []
        depths = self._depth.choose(len(work), pairs)
        return [guess.tokens[:size] for guess, size in zip(guesses, depths, strict=True)]

    def note_step(self, step: Step, seconds: float) -> None:
        """Learn what a step took."""
        rows = [(len(item.tokens), item.drafts) for item in step.work]
        if self._depth is not None and all(count == drafts + 1 for count, drafts in rows):
            self._depth.note_step(len(rows), sum(count for count, _ in rows), seconds)

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that has ended."""
        self.drafter.forget(request)
        if self._depth is not None:
            for seq in request.sequences:
                self._depth.forget(seq.id)
