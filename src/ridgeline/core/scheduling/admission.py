"""Admission: which of the prompts that wait before the engine enters it next.

Between tenants it is the one that was served the fewest tokens (Sheng et al., "Fairness in Serving
Large Language Models", OSDI 2024). A tenant without waiting prompts is lifted to the lowest counter
in the queue or, if the queue is empty, to that of the tenant served last. So a tenant cannot save
up by being away, and is not passed over for tokens served while no other tenant waited. No counter
is ever lowered.

Between the requests of one tenant it is fair queueing (Demers, Keshav and Shenker, SIGCOMM 1989):
each prompt has the virtual time at which it would be read if all requests were read side by side,
and the earliest comes first. So a short request passes long ones, the prompts of one request share
its turn, and every prompt is served in the end.

A tenant that has fewer sequences in the engine than its share of the slots enters even if none is
free: the scheduler takes one from a tenant that has more. Shares are max-min fair: a tenant that
wants less than an equal share leaves the rest to others (Bertsekas and Gallager, Data Networks).

One request may hold seven times as many sequences as there are free slots, a dynamic threshold
(Choudhury and Hahne, IEEE/ACM Transactions on Networking 1998): one such request leaves an eighth
of the slots, two leave a fifteenth. Its first prompt always enters.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Generic, NamedTuple, TypeVar

Item = TypeVar("Item")
_MOST_NEW = 16  # at once beside other tenants: to begin and end hundreds takes longer than a step
_SEQS_PER_FREE_SLOT = 7  # that one request may hold


class Room(NamedTuple):
    """What the engine could start in its next step.

    Attributes:
        num_seqs: sequences.
        num_tokens: tokens of prompts; below 1 the next step is full.
        short_len: a prompt of at most this many tokens is short: it may enter although the step is
            full, since the engine reads it beside the long ones.
        num_short_tokens: tokens of short prompts that may enter then.
        max_num_seqs: slots, also those that are taken.
        inside: sequences in the engine, by tenant; all slots if its prompts fill a step.
    """

    num_seqs: int
    num_tokens: int
    short_len: int
    num_short_tokens: int
    max_num_seqs: int = 0
    inside: Mapping[str, int] = {}


def fair_share(wanted: Collection[int], num_slots: int) -> int:
    """Return the most slots that each may have, if who wants fewer leaves the rest to others."""
    given = lambda share: sum(min(num, share) for num in wanted)  # noqa: E731
    return bisect_right(range(num_slots + 1), num_slots, key=given) - 1


@dataclass(frozen=True, slots=True)
class _Prompt(Generic[Item]):
    item: Item
    tenant: str
    num_tokens: int
    num_seqs: int
    request: int
    finish: tuple[float, int]  # its virtual time, then its number


@dataclass(slots=True)
class _Tenant(Generic[Item]):
    """The waiting prompts of one tenant, in order, and the virtual time of its requests."""

    prompts: list[_Prompt[Item]] = field(default_factory=list)
    left: dict[int, int] = field(default_factory=dict)  # prompts that wait, by request
    now: float = 0.0

    def drop(self, index: int) -> _Prompt[Item]:
        prompt = self.prompts.pop(index)
        self.left[prompt.request] -= 1
        if not self.left[prompt.request]:
            del self.left[prompt.request]
        return prompt


class Admission(Generic[Item]):
    """Prompts of tenants, in fair order. It knows neither threads nor what it queues."""

    def __init__(self) -> None:
        """Begin empty."""
        self._tenants: dict[str, _Tenant[Item]] = {}
        self._served: dict[str, int] = {}
        self._last: tuple[str, ...] = ()  # the tenant served last, once there is one
        self._num_waiting = self._num_requests = self._num_prompts = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Item]:
        """Yield what waits, in the order in which it came."""
        prompts = [prompt for tenant in self._tenants.values() for prompt in tenant.prompts]
        return (prompt.item for prompt in sorted(prompts, key=lambda one: one.finish[1]))

    def push(self, tenant: str, prompts: Sequence[tuple[Item, int]], num_seqs: int = 1) -> None:
        """Queue a request: its prompts, with the tokens of each and sequences for each."""
        queue = self._tenants.setdefault(tenant, _Tenant())
        if not queue.prompts:
            others = [name for name, other in self._tenants.items() if other.prompts] or self._last
            floor = min((self._served[other] for other in others), default=0)
            self._served[tenant] = max(self._served.get(tenant, 0), floor)
        self._num_requests += 1
        queue.left[self._num_requests] = len(prompts)
        finish = queue.now
        for item, num_tokens in prompts:
            finish += num_tokens
            self._num_prompts += 1
            key = finish, self._num_prompts
            prompt = _Prompt(item, tenant, num_tokens, num_seqs, self._num_requests, key)
            insort(queue.prompts, prompt, key=lambda one: one.finish)
        self._num_waiting += len(prompts)

    def take(self, room: Room, num_inside: Callable[[Item], int]) -> list[Item]:
        """Return the items that enter now, in order; their prompts count as served.

        Args:
            room: what the engine could start.
            num_inside: how many sequences the request of an item has in the engine.
        """
        taken: list[Item] = []
        seqs, tokens, short_len, short_tokens, most, _ = room
        has: dict[int, int] = {}  # sequences by request, with those that enter now
        inside = Counter(room.inside)

        def is_short(name: str) -> bool:  # of its share
            others = [num for other, num in inside.items() if other != name]
            return bool(others) and inside[name] < fair_share([*others, most], most)

        def fits(prompt: _Prompt[Item]) -> bool:  # beside what its request has in the engine
            num_held = has.setdefault(prompt.request, num_inside(prompt.item))
            num_free = seqs - prompt.num_seqs
            return not num_held or num_held + prompt.num_seqs <= _SEQS_PER_FREE_SLOT * num_free

        def index_of(name: str) -> int | None:  # of a tenant's next prompt that may enter
            longest = inf if tokens > 0 else min(short_len, short_tokens)
            listed = enumerate(self._tenants[name].prompts if seqs > 0 else ())
            may_enter = (i for i, one in listed if one.num_tokens <= longest and fits(one))
            return 0 if is_short(name) else next(may_enter, None)

        most_new = _MOST_NEW if len(self._tenants) > 1 else self._num_waiting
        while len(taken) < most_new and (prompt := self._pop(index_of)):
            taken.append(prompt.item)
            has[prompt.request] = has.get(prompt.request, num_inside(prompt.item)) + prompt.num_seqs
            inside[prompt.tenant] += prompt.num_seqs
            seqs, tokens = seqs - prompt.num_seqs, tokens - prompt.num_tokens
            if prompt.num_tokens <= short_len:
                short_tokens -= prompt.num_tokens
        return taken

    def _pop(self, index_of: Callable[[str], int | None]) -> _Prompt[Item] | None:
        """Take the next prompt that may enter; None if there is none."""
        waiting = [name for name, one in self._tenants.items() if one.prompts]
        for name in sorted(waiting, key=self._turn):
            if (index := index_of(name)) is not None:
                tenant = self._tenants[name]
                prompt = tenant.prompts[index]
                tenant.now += prompt.num_tokens / len(tenant.left)
                tenant.drop(index)
                self._last = (name,)
                self._num_waiting -= 1
                self.charge(name, prompt.num_tokens)
                return prompt
        return None

    def _turn(self, name: str) -> tuple[int, int]:
        """Return what tenants are sorted by; of equal ones, the older next prompt is first."""
        return self._served[name], self._tenants[name].prompts[0].finish[1]

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Count tokens that a tenant was served."""
        self._served[tenant] = self._served.get(tenant, 0) + num_tokens

    def remove(self, unwanted: Callable[[Item], bool]) -> list[Item]:
        """Take out all items that ``unwanted`` names, and return them."""
        removed = []
        for tenant in self._tenants.values():
            named = [i for i, prompt in enumerate(tenant.prompts) if unwanted(prompt.item)]
            removed += [tenant.drop(index).item for index in reversed(named)]
        self._num_waiting -= len(removed)
        return removed
