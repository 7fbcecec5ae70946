"""How many drafts pay: as many as make tokens per second of the whole step greatest.

Goodput (Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using
Goodput", 2024): drafts are added in the order of their chance to be right, as long as tokens per
second grow. Both sides are measured: the chance by comparing guesses with the text that came,
whether they were verified or not, and the time of a step by its numbers of sequences and rows.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass

from ridgeline.core.request import Sequence
from ridgeline.core.scheduling.speculate import Guess
from ridgeline.core.step import SeqId

# Steps without drafts, after which likely ones are timed again although they seemed too slow: soon
# at first, since the first step of a size is slow, as it touches memory for the first time.
_FIRST_TRIAL, _LAST_TRIAL, _TRY_CHANCE = 16, 256, 0.5
_LEAST_GAIN = 1.08  # a loss is worse than a gain missed, and chances are seen too high
_SLOPE = 0.15  # of a step's time, for each row more, until it is known
_RATES = (0.4, 0.55, 0.7, 0.8, 0.9, 0.95)  # by length of the match, before anything is known
_RATES_WEIGH = 8  # guesses
_BOUNDS = (2, 4, 8, 16, 64)  # of the lengths; more than the last is forced by a grammar
_PRIOR = 2.0  # right guesses of a sequence that weigh as much as what is known of all
_MOST_CHANCE = 0.98


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
        self._rates, self._num_seen = list(_RATES), [0] * len(_RATES)
        self._records: dict[SeqId, _Record] = {}
        self._times_s: dict[int, dict[int, float]] = {}  # by sequences, then by rows
        self._num_steps, self._patience = 0, _FIRST_TRIAL  # without drafts

    def note_step(self, num_seqs: int, num_rows: int, seconds: float) -> None:
        """Add a step without prompts. A step that was much slower than usual counts for less."""
        times_s = self._times_s.setdefault(num_seqs, {})
        times_s[num_rows] = settled(times_s.get(num_rows, seconds), seconds)
        self._num_steps = self._num_steps + 1 if num_rows == num_seqs else 0

    def note_text(self, seq: Sequence, guess: Guess) -> None:
        """Compare an earlier guess with the tokens that are there by now; remember a new one."""
        record = self._records.setdefault(seq.id, _Record())
        bucket = record.bucket
        while record.guess and record.place < len(seq.tokens):
            is_right = record.guess[0] == seq.tokens[record.place]
            record.num_right += is_right - record.num_right / 32
            record.num_expected += self._rates[bucket] - record.num_expected / 32
            self._num_seen[bucket] += 1
            share = max(1 / (_RATES_WEIGH + self._num_seen[bucket]), 1 / 64)
            self._rates[bucket] += (is_right - self._rates[bucket]) * share
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
        is_trial = self._num_steps >= self._patience
        tokens, rate = float(num_rows), num_rows / times_s[num_rows]
        for rows, (chance, minus_i) in enumerate(reversed(worth), start=num_rows + 1):
            tokens += chance
            depths[-minus_i] += 1
            goodput = tokens / _time_s(times_s, num_rows, rows)
            if goodput > rate * _LEAST_GAIN or (is_trial and chance > _TRY_CHANCE):
                rate, best = goodput, depths.copy()
        if is_trial and any(best):
            self._patience = min(2 * self._patience, _LAST_TRIAL)
        return best

    def _rate(self, seq: Sequence, guess: Guess) -> float:
        """Return the chance that a draft is right if those before it are."""
        record = self._records[seq.id]
        skill = (_PRIOR + record.num_right) / (_PRIOR + record.num_expected)
        return min(self._rates[_bucket(guess.match_len)] * skill, _MOST_CHANCE)


def settled(known_s: float, seconds: float) -> float:
    """Return the time of a kind of step, known so far, after one more that took ``seconds``."""
    share = 1 / 2 if seconds < known_s / 1.5 else 1 / 8  # what is known was no usual step
    return known_s + (min(seconds, 1.5 * known_s) - known_s) * share


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
    return sum(match_len > bound for bound in _BOUNDS)
