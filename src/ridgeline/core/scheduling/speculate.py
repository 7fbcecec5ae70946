"""Speculation: which drafts a step verifies.

A draft is a guess at a token that is not drawn yet. Behind each draft the backend draws as it would
without drafts, and a draft counts only if it equals the draw, so drafts change no answer: they
only let one step draw several tokens.
"""

from __future__ import annotations

from collections.abc import Sequence as Listing
from typing import NamedTuple, Protocol

from ridgeline.core.cache.kvcache import KVCache
from ridgeline.core.request import Request, Sequence
from ridgeline.core.step import SeqId, Step, StepOutput, Work

MOST_DRAFTS = 15  # of one sequence: sixteen rows of it in a step
FORCED = 1 << 10  # the ``match_len`` of what a constraint forces
_BUSY_SEQS = 32  # with more of them in a step, a draft costs more than it brings


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
        """Return a guess for each sequence, of at most the number of tokens beside it."""

    def note_draws(self, work: Work, draws: tuple[int, ...]) -> None:
        """Take what was drawn behind a sequence's drafts, perhaps also behind wrong ones."""

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that has ended."""


class Depth(Protocol):
    """Decides how many drafts pay (``drafts.depth``). There is no clock in it: it is told."""

    def choose(self, num_rows: int, guesses: Listing[tuple[Sequence, Guess]]) -> list[int]:
        """Return how many tokens of each guess pay, in a step of ``num_rows`` sequences."""

    def note_step(self, num_seqs: int, num_rows: int, seconds: float) -> None:
        """Take what a step without prompts took."""

    def note_text(self, seq: Sequence, guess: Guess) -> None:
        """Take a new guess, and the tokens that have come since the one before."""

    def forget(self, seq_id: SeqId) -> None:
        """Drop what is known of a sequence."""


def _allowed(seq: Sequence, most: int, guess: Guess) -> Guess:
    """Return what a sequence's constraint forces, else what it allows of a guess."""
    constraint = seq.constraint
    if constraint is None:
        return guess
    if forced := constraint.forced(most):
        return Guess(forced, FORCED)
    return Guess(guess.tokens[: constraint.num_valid(guess.tokens)], guess.match_len)


def _reads(item: Work) -> bool:
    """Whether an item computes a prompt, or more again than drafts may have left."""
    is_again = item.seeds and item.start >= item.sampling.prompt_len
    most = MOST_DRAFTS + 1 if is_again else 1
    return bool(item.targets) or len(item.tokens) - item.drafts > most


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

        ``left`` is how many rows more the step may have. No sequence gives way for a draft: one for
        which no block is free is not verified. A step that computes prompts has no drafts.
        """
        is_busy = self._depth is not None and len(work) > _BUSY_SEQS
        if is_busy or any(map(_reads, work)):
            return
        places: dict[int, tuple[Sequence, int]] = {}
        for i, (seq, item) in enumerate(zip(granted, work, strict=True)):
            left_to_say = seq.request.max_len - len(seq.tokens)
            most = min(self.most, left_to_say - 1)  # the last needs no row
            if len(item.seeds) == 1 and most > 0:
                places[i] = seq, most
        wanted = [*places.values()]
        guesses = self.drafter.draft(wanted) if wanted else []
        guesses = [_allowed(*pair, guess) for pair, guess in zip(wanted, guesses, strict=True)]
        for i, guess in zip(places, self._chosen(work, wanted, guesses), strict=False):
            seq, item, drafts = granted[i], work[i], guess[:left]
            tokens = item.tokens + drafts
            if drafts and kv.reserve_drafts(seq, item.start + len(tokens)):
                work[i] = item._replace(
                    tokens=tokens, table=seq.table, others=seq.others, drafts=len(drafts)
                )
                left -= len(drafts)

    def _chosen(
        self, work: list[Work], wanted: Listing[tuple[Sequence, int]], guesses: Listing[Guess]
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

    def note_step(self, step: Step, output: StepOutput, seconds: float) -> None:
        """Learn what a step took, and what was drawn behind drafts."""
        for item, draws in zip(step.work, output.tokens, strict=True):
            if item.drafts:
                self.drafter.note_draws(item, draws)
        if self._depth is not None and not any(map(_reads, step.work)):
            num_rows = sum(len(item.tokens) for item in step.work)
            self._depth.note_step(len(step.work), num_rows, seconds)

    def forget(self, request: Request) -> None:
        """Drop what is kept of a request that has ended."""
        self.drafter.forget(request)
        if self._depth is not None:
            for seq in request.sequences:
                self._depth.forget(seq.id)
