"""Policies: which sequences should run next, and how many tokens of each.

A policy is a generator of wishes in priority order over read-only sequences. It touches no block,
knows no budget and cannot break an invariant: the scheduler grants what fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ridgeline.core.request import Sequence

_UNBOUNDED = 1 << 40  # tokens
Queue = Listing[Sequence]  # in order of arrival
Wish = tuple[Sequence, int]  # sequence, tokens wanted; what is pending is not exceeded


class Load(NamedTuple):
    """What a policy may know of the world outside the queues.

    Attributes:
        num_outside: prompts that wait before the engine and cannot be wished for yet.
        is_read: whether somebody reads an answer while it grows; else only its end counts.
    """

    num_outside: int = 0
    is_read: bool = True


class Policy(Protocol):
    """What the scheduler asks of a policy."""

    @property
    def reserve_full(self) -> bool:
        """Whether blocks for the longest possible answer are taken at admission."""

    @property
    def whole_prompts(self) -> bool:
        """Whether all pending tokens of a sequence must run in one step."""

    def wishes(self, running: Queue, waiting: Queue, load: Load) -> Iterator[Wish]:
        """Yield wishes, those of highest priority first."""


@dataclass(frozen=True)
class Static:
    """Form a batch, run it until its last member is done, then form the next."""

    reserve_full: bool = True
    whole_prompts: bool = True

    def wishes(self, running: Queue, waiting: Queue, load: Load) -> Iterator[Wish]:
        """Yield the batch, or a new one when the last is done."""
        for seq in running or waiting:
            yield seq, seq.num_pending


@dataclass(frozen=True)
class Orca:
    """Sequences join and leave at every step, prompts whole (Yu et al., Orca, OSDI 2022)."""

    reserve_full: bool = True
    whole_prompts: bool = True

    def wishes(self, running: Queue, waiting: Queue, load: Load) -> Iterator[Wish]:
        """Yield everything, the running first."""
        for group in (running, waiting):
            for seq in group:
                yield seq, seq.num_pending


@dataclass(frozen=True)
class SplitFuse:
    """One token for all that decode, then prompts in pieces (Holmes et al., FastGen, 2024).

    While more decode than wait, prompts get as many tokens as decode, at least ``least``, so that
    steps are at most twice as long (Agrawal et al., Sarathi-Serve, OSDI 2024).
    """

    reserve_full: bool = False
    whole_prompts: bool = False
    least: int = 64

    def wishes(self, running: Queue, waiting: Queue, load: Load) -> Iterator[Wish]:
        """Yield single tokens first, then what is longer, then who waits."""
        prompts = [*[seq for seq in running if seq.num_pending > 1], *waiting]
        for seq in running:
            if seq.num_pending == 1:
                yield seq, 1
        left, decoding = _UNBOUNDED, len(running) + len(waiting) - len(prompts)
        if decoding and load.is_read:
            share = self.least * (len(prompts) + load.num_outside)
            left = max(decoding, self.least, share // decoding)
        for seq in prompts:
            if left:
                yield seq, min(seq.num_pending, left)
                left -= min(seq.num_pending, left)
