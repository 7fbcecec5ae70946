"""How many tokens a draft model guesses before a step: as many as give most tokens per second.

Goodput as in ``decoding.depth``, for guesses that cost time. Nothing is known of them unless they
are made. So where they do not pay, guessing rests, and is tried again for a few steps: after 64
steps, then after four times as many each time.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass, field

from ridgeline.core.request import Sequence
from ridgeline.core.speculate import Guess
from ridgeline.core.step import SeqId
from ridgeline.decoding.depth import settled

_FIRST_STEPS = 8  # without drafts, to know what they take
_TRIAL_STEPS, _TRIAL_DEPTH = 3, 2
_FIRST_REST, _LAST_REST = 64, 4096  # steps
_LOOK_EVERY = 64  # of the steps with drafts, one has none: what that takes may have changed
_LEAST_GAIN = 1.04
_CHANCE, _CHANCE_WEIGHS = 0.7, 8  # that a guess is right if those before it are, until it is known


@dataclass(slots=True)
class _Load:
    """What is known of steps with one number of sequences."""

    times_s: dict[int, float] = field(default_factory=dict)  # by depth
    rest: int = _FIRST_STEPS  # steps without drafts in this phase, and then there are some with
    patience: int = _FIRST_REST
    num_steps: int = 0  # of this phase
    depth: int = 0  # of the step under way


class Pace:
    """How many tokens to guess, by what was measured."""

    def __init__(self, most: int) -> None:
        """Guess at most ``most`` tokens."""
        self._most = most
        self._loads: dict[int, _Load] = {}
        self._now: _Load | None = None
        self._is_usual = True
        self._chance, self._num_seen = _CHANCE, 0

    def begin(self, num_seqs: int) -> int:
        """Return how many tokens to guess for each of ``num_seqs`` sequences, before a step."""
        load = self._now = self._loads.setdefault(num_seqs, _Load())
        self._is_usual = True
        load.depth = self._decide(load)
        return load.depth

    def _decide(self, load: _Load) -> int:
        load.num_steps += 1
        place = load.num_steps - load.rest
        trial = min(_TRIAL_DEPTH, self._most)
        if place <= 0 or 0 not in load.times_s or place % _LOOK_EVERY == 0:
            return 0
        if place <= _TRIAL_STEPS or trial not in load.times_s:
            return trial
        if best := self._best(load.times_s, trial):
            load.patience = _FIRST_REST
            return best
        load.num_steps, load.rest = 0, load.patience
        load.patience = min(4 * load.patience, _LAST_REST)
        return 0

    def _best(self, times_s: dict[int, float], trial: int) -> int:
        """Return the depth with most tokens per second; 0 if none is clearly better."""
        best, goodput = 0, _LEAST_GAIN / times_s[0]
        slope_s = (times_s[trial] - times_s[0]) / trial
        tokens = chance = 1.0
        for depth in range(1, self._most + 1):
            chance *= self._chance
            tokens += chance
            found = tokens / times_s.get(depth, times_s[0] + depth * slope_s)
            if found > goodput:
                best, goodput = depth, found
        return best

    def note_catch_up(self) -> None:
        """The draft model computes more than guesses before this step: its time is not usual."""
        self._is_usual = False

    def note_drafts(self, num_right: int, num_drafts: int) -> None:
        """Take how many of a sequence's drafts were right, before the first that was wrong."""
        for is_right in [1] * num_right + [0] * (num_right < num_drafts):
            self._num_seen += 1
            share = max(1 / (_CHANCE_WEIGHS + self._num_seen), 1 / 256)
            self._chance += (is_right - self._chance) * share

    def note_step(self, num_seqs: int, num_rows: int, seconds: float) -> None:
        """Take what a step without prompts took, its drafting included."""
        if self._now is not None and self._is_usual:
            times_s, depth = self._now.times_s, self._now.depth
            times_s[depth] = settled(times_s.get(depth, seconds), seconds)
        self._now = None

    def choose(self, num_rows: int, guesses: Listing[tuple[Sequence, Guess]]) -> list[int]:
        """Return the lengths of the guesses: what was made is verified."""
        return [len(guess.tokens) for _, guess in guesses]

    def note_text(self, seq: Sequence, guess: Guess) -> None:
        """Take nothing: what a guess is worth shows when it is verified."""

    def forget(self, seq_id: SeqId) -> None:
        """Drop nothing: nothing is known of single sequences."""
