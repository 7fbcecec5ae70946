"""Policies: which sequences should run next, and how many tokens of each.

A policy is a generator of wishes in priority order over read-only sequences. It touches no block,
knows nothing of budgets and cannot break an invariant: the scheduler grants what fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Listing
from dataclasses import dataclass
from math import inf
from operator import attrgetter
from typing import NamedTuple, Protocol

from ridgeline.core.request import Sequence

_num_pending, _due_s = attrgetter("num_pending"), attrgetter("is_surplus", "request.due_s")
Queue = Listing[Sequence]  # in the order of ``queues.by_rank``
Wish = tuple[Sequence, int]  # sequence, and tokens wanted; at most its pending tokens are granted


class Load(NamedTuple):
    """What a policy may know of the world outside the queues.

    Attributes:
        num_outside: prompts that wait before the engine and cannot be wished for yet.
        is_read: whether a client reads an answer while it grows; else only its end counts.
    """

    num_outside: int = 0
    is_read: bool = True


class Policy(Protocol):
    """What the scheduler asks of a policy."""

    @property
    def name(self) -> str:
        """What options and records call it."""

    @property
    def reserve_full(self) -> bool:
        """Whether blocks for the longest possible answer are taken at admission."""

    @property
    def whole_prompts(self) -> bool:
        """Whether all pending tokens of a sequence must run in one step."""

    @property
    def least(self) -> int:
        """How many tokens of prompts beside those that decode suit the device."""

    def wishes(self, running: Queue, waiting: Queue, load: Load, budget: int) -> Iterator[Wish]:
        """Yield wishes, those of highest priority first, for a step of ``budget`` tokens."""


def _in_turn(running: Queue, prompts: Queue, least: int) -> tuple[list[Sequence], bool]:
    """Return who decodes now, and whether prompts take turns by owner (not behind a due one)."""
    decoding = [seq for seq in running if seq.num_pending == 1]
    is_shared = len({seq.request.owner for seq in (*decoding, *prompts)}) > 1
    is_divided = is_shared and not (prompts and prompts[0].request.due_s < inf)
    if len(decoding) <= least or not is_shared:
        return decoding, is_divided
    of_owner, chosen = dict[str, list[Sequence]](), list[Sequence]()
    for seq in decoding:
        of_owner.setdefault(seq.request.owner, []).append(seq)
    for first, *others in of_owner.values():
        most = max(least, len(decoding) - 1 - len(others))
        at = sum(seq.num_generated for seq in others) % max(1, len(others))  # moves on
        chosen += (first, *(others[at:] + others[:at])[: most - 1])
    return chosen, is_divided


@dataclass(frozen=True)
class SplitFuse:
    """One token for each that decodes, then prompts in pieces (Holmes et al., FastGen, 2024).

    While more decode than wait, prompts get as many tokens as decode, at least ``least``, so that
    steps are not much longer (Agrawal et al., Sarathi-Serve, OSDI 2024). While a client reads, the
    first prompt leaves up to half of that to shorter ones. Due ones go first. Beside others an
    owner decodes as many as all of them, or ``least``, and its prompts count as one.
    """

    name: str = "splitfuse"
    reserve_full: bool = False
    whole_prompts: bool = False
    least: int = 64  # of a processor; a GPU's is larger

    def wishes(self, running: Queue, waiting: Queue, load: Load, budget: int) -> Iterator[Wish]:
        """Yield single tokens first, then the first prompt, then the others, short ones first."""
        prompts = sorted([*[seq for seq in running if seq.num_pending > 1], *waiting], key=_due_s)
        now, is_divided = _in_turn(running, prompts, self.least)
        yield from ((seq, 1) for seq in now)
        decoding, is_read = len(now), load.is_read or is_divided  # others must not wait
        left, kept, is_held_up = budget - decoding, 0, is_read and decoding > 0
        if is_read and prompts:
            if is_held_up:
                owners = {seq.request.owner for seq in prompts}
                num = len(owners) if is_divided else len(prompts) + load.num_outside
                left = min(left, max(decoding, self.least, self.least * num // decoding))
            first, own, others = prompts[0], prompts[0].request.owner, prompts[1:]
            others.sort(key=lambda s: (*_due_s(s), s.request.owner == own, s.num_pending))
            prompts = [first, *others]
            alike = (seq for seq in others if first.request.due_s == inf or seq.request.due_s < inf)
            shorter = (n for n in map(_num_pending, alike) if n < first.num_pending)
            kept = min(sum(shorter), left // 2)
        for seq in prompts:
            ranks = seq.request.params.prompt_logprobs is not None
            cost = 2 if ranks and is_held_up else 1  # ranking a token takes as long as reading it
            wanted, kept = min(seq.num_pending, max(1, (left - kept) // cost)), 0
            if left > 0:
                yield seq, wanted
                left -= cost * min(seq.num_pending, wanted)
