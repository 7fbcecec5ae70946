"""How many tokens a draft model guesses before a step: as many as give most tokens per second.

Goodput as in ``drafts.depth``, for guesses that cost time. Nothing is known of them unless they
are made. So where they do not pay, guessing rests, and is tried again for a few steps: after 64
steps, then after four times as many each time.

Before its first guess the draft model has to compute the prompt. How long an answer will be is not
known. A good estimate is that as much is to come as has come, and 64 tokens at least; so a model
catches up when what it will save on that many tokens is more than what catching up takes.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from dataclasses import dataclass, field

from ridgeline.core.decoding.drafts.depth import settled
from ridgeline.core.request import Sequence
from ridgeline.core.scheduling.speculate import Guess
from ridgeline.core.step import SeqId

_FIRST_STEPS = 8  # without drafts, to know what they take
_TRIAL_STEPS, _TRIAL_DEPTH = 3, 2
_FIRST_REST, _LAST_REST = 64, 4096  # steps
_LOOK_EVERY = 64  # of the steps with drafts, one has none: what that takes may have changed
_LEAST_GAIN = 1.08
_CHANCE, _CHANCE_WEIGHS = 0.7, 8  # that a guess is right if those before it are, until it is known
_CHANCE_MEMORY = 64  # guesses: texts differ
_USUAL_BEHIND = 4  # tokens: that a step with few right drafts leaves to be computed
_LEARN_BEHIND = 32  # with fewer, what they take is lost in the noise of a step's time
_CATCH_UP = 0.03  # of a step, for each token to catch up with, until it is known
_EXPECTED = 64  # tokens of an answer that are still to come, at least
_SAVED = 0.2  # of a step, on each token, while that is tried


@dataclass(slots=True)
class _StepStats:
    """What is known of steps with one number of sequences."""

    times_s: dict[int, float] = field(default_factory=dict)  # by depth
    rest: int = _FIRST_STEPS  # steps without drafts in this phase, and then there are some with
    patience: int = _FIRST_REST
    num_steps: int = 0  # of this phase
    depth: int = 0  # of the step under way
    is_trial: bool = False  # that step
    num_lost: int = 0  # trials so far, after which it rested


class Pace:
    """How many tokens to guess, by what was measured."""

    def __init__(self, most: int) -> None:
        """Guess at most ``most`` tokens."""
        self._most = most
        self._loads: dict[int, _StepStats] = {}
        self._now: _StepStats | None = None
        self._num_behind = 0  # tokens that are caught up with before the step under way
        self._catch_up_s: float | None = None  # for each of them
        self._chance, self._num_seen = _CHANCE, 0

    def begin(self, num_seqs: int) -> int:
        """Return how many tokens to guess for each of ``num_seqs`` sequences, before a step."""
        load = self._now = self._loads.setdefault(num_seqs, _StepStats())
        self._num_behind = 0
        load.depth = self._decide(load)
        return load.depth

    def _decide(self, load: _StepStats) -> int:
        load.num_steps += 1
        place = load.num_steps - load.rest
        trial = min(_TRIAL_DEPTH, self._most)
        if place <= 0 or 0 not in load.times_s or place % _LOOK_EVERY == 0:
            return 0
        load.is_trial = place <= _TRIAL_STEPS or trial not in load.times_s
        if load.is_trial:
            return trial
        if best := self._best(load.times_s, trial):
            load.patience, load.num_lost = _FIRST_REST, 0
            return best
        load.num_steps, load.rest = 0, load.patience
        load.num_lost += 1
        load.patience = min(4 * load.patience, _LAST_REST)
        return 0

    def _best(self, times_s: dict[int, float], trial: int) -> int:
        """Return the depth with most tokens per second; 0 if none is clearly better."""
        best, goodput = 0, _LEAST_GAIN / times_s[0]
        tokens = chance = 1.0
        for depth in range(1, self._most + 1):
            chance *= self._chance
            tokens += chance
            rate = tokens / self._time_s(times_s, depth, trial)
            if rate > goodput:
                best, goodput = depth, rate
        return best

    def _time_s(self, times_s: dict[int, float], depth: int, trial: int) -> float:
        """Return the time of a step with ``depth`` guesses: measured, or in proportion."""
        slope_s = (times_s[trial] - times_s[0]) / trial
        return times_s.get(depth, times_s[0] + depth * slope_s)

    def may_catch_up(self, num_behind: int, num_generated: int, num_left: int) -> bool:
        """Return whether a model that is this many tokens behind should compute them.

        ``num_generated`` tokens of the answer have come, and at most ``num_left`` will.
        """
        load = self._now
        if num_behind <= _USUAL_BEHIND or load is None or 0 not in load.times_s:
            return True
        step_s = load.times_s[0]
        trial = min(_TRIAL_DEPTH, self._most)
        is_known = trial in load.times_s and not load.is_trial
        hoped_s = _SAVED * step_s / (1 + load.num_lost)
        saved_s = self._saved_s(load.times_s, trial) if is_known else hoped_s
        catch_up_s = self._catch_up_s or _CATCH_UP * step_s
        num_expected = min(max(num_generated, _EXPECTED), num_left)
        return catch_up_s * num_behind <= saved_s * num_expected

    def _saved_s(self, times_s: dict[int, float], trial: int) -> float:
        """Return the seconds that guessing saves on each token."""
        depth = self._best(times_s, trial)
        if not depth:
            return 0.0
        tokens = sum(self._chance**i for i in range(depth + 1))
        return times_s[0] - self._time_s(times_s, depth, trial) / tokens

    def note_none(self) -> None:
        """Nothing is guessed before this step after all."""
        if self._now is not None:
            self._now.depth = 0

    def note_catch_up(self, num_tokens: int) -> None:
        """Take how many tokens more than one a sequence the draft model computes."""
        self._num_behind += num_tokens

    def note_drafts(self, num_right: int, num_drafts: int) -> None:
        """Take how many of a sequence's drafts were right, before the first that was wrong."""
        for is_right in [1] * num_right + [0] * (num_right < num_drafts):
            self._num_seen += 1
            share = max(1 / (_CHANCE_WEIGHS + self._num_seen), 1 / _CHANCE_MEMORY)
            self._chance += (is_right - self._chance) * share

    def note_step(self, num_seqs: int, num_rows: int, seconds: float) -> None:
        """Take what a step without prompts took, its drafting included."""
        if self._now is not None:
            times_s, depth = self._now.times_s, self._now.depth
            if self._num_behind <= _USUAL_BEHIND * num_seqs:
                known_s = times_s.get(depth, seconds)
                # The first steps with drafts are slow, as they touch memory for the first time.
                is_first = self._now.is_trial and depth > 0
                times_s[depth] = min(known_s, seconds) if is_first else settled(known_s, seconds)
            elif self._num_behind >= _LEARN_BEHIND and 0 in times_s:
                found_s = max(seconds - times_s.get(depth, times_s[0]), 0.0) / self._num_behind
                self._catch_up_s = settled(self._catch_up_s or found_s, found_s)
        self._now = None

    def choose(self, num_rows: int, guesses: Listing[tuple[Sequence, Guess]]) -> list[int]:
        """Return the lengths of the guesses: what was made is verified."""
        return [len(guess.tokens) for _, guess in guesses]

    def note_text(self, seq: Sequence, guess: Guess) -> None:
        """Take nothing: what a guess is worth shows when it is verified."""

    def forget(self, seq_id: SeqId) -> None:
        """Drop nothing: nothing is known of single sequences."""
