"""Policies: which sequences should run next, and how many tokens of each.

A policy is a generator of token requests in priority order over read-only sequences. It touches no
block, knows nothing of budgets and cannot break an invariant: the scheduler grants what fits.
Beside the engine's own stand older ones, which read prompts whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from collections.abc import Sequence as Listing
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf
from operator import attrgetter
from typing import NamedTuple, Protocol

from ridgeline.core.request import Sequence, Status

_num_pending, _due_s = attrgetter("num_pending"), attrgetter("is_over_share", "request.due_s")
_owner, _group = attrgetter("request.owner"), attrgetter("is_over_share", "request.owner")
Queue = Listing[Sequence]  # in the order of ``queues.by_order``
TokenRequest = tuple[Sequence, int]  # and tokens wanted; at most its pending ones are granted

_Chunks = Generator[TokenRequest, None, int]  # returns how many tokens are left


class Load(NamedTuple):
    """What a policy may know of the world outside the queues; a step's record has all of it.

    Attributes:
        num_outside: prompts that wait before the engine and cannot be requested yet.
        is_read: whether a client reads an answer while it grows; else only its end counts.
        num_pushed, num_permitted, gives_way, num_since: no policy needs these (``StepRecord``).
    """

    num_outside: int = 0
    is_read: bool = True
    num_pushed: int | None = None
    num_permitted: int | None = None
    gives_way: bool = False
    num_since: tuple[int, ...] = ()


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
    def min_chunk(self) -> int:
        """How many tokens of prompts beside those that decode suit the device."""

    def token_requests(
        self, running: Queue, waiting: Queue, load: Load, budget: int
    ) -> Iterator[TokenRequest]:
        """Yield what to compute, the highest priority first, in a step of ``budget`` tokens."""


def _in_turn(decoding: Queue, min_chunk: int) -> Iterator[Sequence]:
    """Yield who decodes: of each owner as many as of all others together, or ``min_chunk``."""
    for _, (first, *others) in groupby(sorted(decoding, key=_owner), _owner):
        most = max(min_chunk, len(decoding) - 1 - len(others))
        at = sum(seq.num_generated for seq in others) % max(1, len(others))  # moves on
        yield from (first, *(others[at:] + others[:at])[: most - 1])


def _chunks(group: Queue, left: int, *, is_read: bool, is_held_up: bool) -> _Chunks:
    """Yield an owner's first prompt, then others, short ones first; ranked tokens take twice."""
    num_reserved, (first, *others) = 0, group
    if is_read:
        others.sort(key=lambda seq: (*_due_s(seq), seq.num_pending))
        alike = (seq for seq in others if first.request.due_s == inf or seq.request.due_s < inf)
        shorter = (n for n in map(_num_pending, alike) if n < first.num_pending)
        num_reserved = min(sum(shorter), left // 2)
    runs = next((seq for seq in group if seq.status is Status.RUNNING), None)
    for seq in (first, *others):
        cost = 2 if is_held_up and seq.request.params.prompt_logprobs is not None else 1
        wanted, num_reserved = min(seq.num_pending, max(1, (left - num_reserved) // cost)), 0
        if left > 0 or seq is runs:  # those before it may wait for its blocks
            yield seq, wanted
            left -= cost * min(seq.num_pending, wanted)
    return left


@dataclass(frozen=True)
class SplitFuse:
    """One token for each that decodes, then prompts in chunks (Holmes et al., FastGen, 2024).

    While more decode than wait, prompts get as many tokens as decode, at least ``min_chunk``: steps
    are not much longer (Agrawal et al., Sarathi-Serve, OSDI 2024). Due ones go first; while a
    client reads, the first prompt leaves half to shorter ones. Beside others an owner decodes as
    many as all of them, or a sixteenth of ``min_chunk``; it reads as many tokens, or a tenth of it.
    """

    name: str = "splitfuse"
    reserve_full: bool = False
    whole_prompts: bool = False
    min_chunk: int = 64  # of a processor; a GPU's is larger

    def token_requests(
        self, running: Queue, waiting: Queue, load: Load, budget: int
    ) -> Iterator[TokenRequest]:
        """Yield single tokens first, then of each owner the first prompt, then short ones."""
        prompts = sorted([*[seq for seq in running if seq.num_pending > 1], *waiting], key=_due_s)
        now = [seq for seq in running if seq.num_pending == 1]
        few = max(1, self.min_chunk // 10)  # tokens of each owner's prompts (docs/adr/0027)
        rows, waits = Counter(map(_owner, now)), Counter(map(_owner, prompts))
        if is_shared := len(rows | waits) > 1:
            now = [*_in_turn(now, max(1, self.min_chunk // 16))]  # doubles a step with one row
        yield from ((seq, 1) for seq in now)
        decoding, left, is_read = len(now), budget - len(now), load.is_read or is_shared
        groups = [[*group] for _, group in groupby(sorted(prompts, key=_group), _group)]
        groups.sort(key=lambda group: (group[0].is_over_share, sum(map(_num_pending, group))))
        num = sum(not group[0].is_over_share for group in groups)
        if is_held_up := is_shared or (is_read and decoding > 0):
            least, outside = (few * num, 0) if is_shared else (self.min_chunk, load.num_outside)
            paces = [self.min_chunk * (waits[o] + outside) // rows[o] for o in rows]
            pace = min(paces or [self.min_chunk])
            left = min(left, max(decoding, least, pace))
        for i, group in enumerate(groups):  # of equal parts, what is not wanted is for the others
            part = -(-left // max(1, num - i))
            left += (yield from _chunks(group, part, is_read=is_read, is_held_up=is_held_up)) - part


@dataclass(frozen=True)
class Static:
    """Form a batch, run it until its last member is done, then form the next."""

    name: str = "static"
    reserve_full: bool = True
    whole_prompts: bool = True
    min_chunk: int = SplitFuse.min_chunk  # not used: prompts run whole

    def token_requests(
        self, running: Queue, waiting: Queue, load: Load, budget: int
    ) -> Iterator[TokenRequest]:
        """Yield the batch, or a new one when the last is done."""
        for seq in running or waiting:
            yield seq, seq.num_pending


@dataclass(frozen=True)
class Orca:
    """Sequences join and leave at every step, prompts whole (Yu et al., Orca, OSDI 2022)."""

    name: str = "orca"
    reserve_full: bool = True
    whole_prompts: bool = True
    min_chunk: int = SplitFuse.min_chunk  # not used: prompts run whole

    def token_requests(
        self, running: Queue, waiting: Queue, load: Load, budget: int
    ) -> Iterator[TokenRequest]:
        """Yield all sequences, the running ones first."""
        for group in (running, waiting):
            for seq in group:
                yield seq, seq.num_pending


POLICIES: Mapping[str, Static | Orca | SplitFuse] = {
    one.name: one for one in (Static(), Orca(), SplitFuse())
}


def policy_of(name: str, min_chunk: int, reserve_full: bool | None) -> Policy:
    """Return a policy of a name, as an engine's record describes it. Raises LookupError."""
    policy = POLICIES[name]
    is_full = policy.reserve_full if reserve_full is None else reserve_full
    return replace(policy, min_chunk=min_chunk, reserve_full=is_full)
