"""Policies: which sequences should run next, and how many tokens of each.

A policy is a generator of wishes in priority order over read-only sequences. It touches no block,
knows no budget and cannot break an invariant: the scheduler grants what fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import Protocol

from ridgeline.core.request import Sequence

_EVERYTHING = 1 << 40  # tokens
NOBODY_READS = _EVERYTHING  # a backlog: answers are looked at when all are complete
Queue = Listing[Sequence]  # in order of arrival
Wish = tuple[Sequence, int]  # sequence, tokens wanted; what is pending is not exceeded


class Policy(Protocol):
    """What the scheduler asks of a policy."""

    @property
    def reserve_full(self) -> bool:
        """Whether blocks for the longest possible answer are taken at admission."""

    @property
    def whole_prompts(self) -> bool:
        """Whether all pending tokens of a sequence must run in one step."""

    def wishes(self, running: Queue, waiting: Queue, backlog: int = 0) -> Iterator[Wish]:
        """Yield wishes, the dearest first.

        ``backlog`` is how many prompts more wait elsewhere, which cannot be wished for yet, or
        ``NOBODY_READS``: then no answer has to grow steadily.
        """


@dataclass(frozen=True)
class Static:
    """Form a batch, run it until its last member is done, then form the next."""

    reserve_full: bool = True
    whole_prompts: bool = True

    def wishes(self, running: Queue, waiting: Queue, backlog: int = 0) -> Iterator[Wish]:
        """Yield the batch, or a new one when the last is done."""
        for seq in running or waiting:
            yield seq, seq.num_pending


@dataclass(frozen=True)
class Orca:
    """Sequences join and leave at every step, prompts whole (Yu et al., Orca, OSDI 2022)."""

    reserve_full: bool = True
    whole_prompts: bool = True

    def wishes(self, running: Queue, waiting: Queue, backlog: int = 0) -> Iterator[Wish]:
        """Yield everything, the running first."""
        for group in (running, waiting):
            for seq in group:
                yield seq, seq.num_pending


@dataclass(frozen=True)
class SplitFuse:
    """One token for everyone who decodes, then prompts in pieces until the budget is full.

    DeepSpeed-FastGen (Holmes et al., 2024), Sarathi-Serve (Agrawal et al., OSDI 2024). While more
    decode than wait, prompts get as many tokens, but ``least``: steps are at most twice as long.
    """

    reserve_full: bool = False
    whole_prompts: bool = False
    least: int = 64

    def wishes(self, running: Queue, waiting: Queue, backlog: int = 0) -> Iterator[Wish]:
        """Yield single tokens first, then what is longer, then who waits."""
        prompts = [*[seq for seq in running if seq.num_pending > 1], *waiting]
        for seq in running:
            if seq.num_pending == 1:
                yield seq, 1
        left, decoding = _EVERYTHING, len(running) + len(waiting) - len(prompts)
        if decoding:
            left = max(decoding, self.least, self.least * (len(prompts) + backlog) // decoding)
        for seq in prompts:
            if left:
                yield seq, min(seq.num_pending, left)
                left -= min(seq.num_pending, left)
