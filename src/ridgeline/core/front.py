"""The front of an engine: whose prompts enter it next, and whether those in the background rest.

Prompts wait here in fair order until the engine could start them, so that its own queue stays
short. Those with a promise enter at once; while there are any, others enter only as they are
permitted, or where they have less than their share of the engine. Those in the background enter
while no other request is there, and give way before the next step.

What is pushed takes its place at the next ``take``. So the order of the queues follows from what
was served and from which pushes each take saw, not from the moment within a step at which a push
came. Both a server and a simulation drive it; threads, clocks and models are unknown here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import inf
from typing import Generic, NamedTuple, TypeVar

from ridgeline.core.scheduling.admission import Admission, Room
from ridgeline.core.scheduling.policies import Load

Item = TypeVar("Item")
QUIET_S = 0.5  # without a request, until the background goes on: a client may ask again


class _Push(NamedTuple, Generic[Item]):
    """A request that has come since the last take."""

    tenant: str
    prompts: Sequence[tuple[Item, int]]  # with the tokens of each
    num_seqs: int
    is_background: bool


class Front(Generic[Item]):
    """The prompts before an engine.

    Attributes:
        num_pushed: prompts that have ever come.
        num_permitted: prompts that may enter beside promises; inf for all.
        load: what the next step is told, as of the last take, which does not know who came since.
            Those that wait and could enter are outside; those that are held back are not.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self._pushed: list[_Push[Item]] = []
        self._promised: list[tuple[str, Item, int]] = []
        self._queue: Admission[Item] = Admission()
        self._background: Admission[Item] = Admission()
        self._waited_s = -inf  # when a request was last there that people wait for
        self.num_pushed = 0
        self.num_permitted: float = inf
        self.load = Load()

    def __len__(self) -> int:
        """How many prompts wait, but for the background's and those with a promise."""
        return len(self._queue) + len([*self._new_prompts()])

    def __iter__(self) -> Iterator[Item]:
        """Yield these prompts in the order in which they came."""
        yield from self._queue
        yield from self._new_prompts()

    def _new_prompts(self) -> Iterator[Item]:
        for push in self._pushed:
            if not push.is_background:
                yield from (item for item, _ in push.prompts)

    @property
    def is_wanted(self) -> bool:
        """Whether a prompt is here that people wait for."""
        return bool(self._promised or self._queue or [*self._new_prompts()])

    @property
    def has_background(self) -> bool:
        """Whether a prompt of the background is here."""
        pushed = any(push.is_background and push.prompts for push in self._pushed)
        return pushed or bool(self._background)

    def push(
        self,
        tenant: str,
        prompts: Sequence[tuple[Item, int]],
        num_seqs: int,
        *,
        is_promised: bool = False,
        is_background: bool = False,
    ) -> None:
        """Queue a request: its prompts, with the tokens of each and sequences for each."""
        self.num_pushed += len(prompts)
        if is_promised:
            self._promised += [(tenant, item, num_tokens) for item, num_tokens in prompts]
        else:
            self._pushed.append(_Push(tenant, prompts, num_seqs, is_background))

    def charge(self, tenant: str, num_tokens: int, *, is_background: bool = False) -> None:
        """Count tokens that a tenant was served."""
        self._queue_of(is_background).charge(tenant, num_tokens)

    def is_waited_for(self, now_s: float, *, is_inside: bool) -> bool:
        """Whether a request is there that people wait for, or was a moment ago.

        ``is_inside`` says whether the engine has one.
        """
        if is_inside or self.is_wanted:
            self._waited_s = now_s
        return now_s < self.quiet_at_s

    @property
    def quiet_at_s(self) -> float:
        """When the background may go on, if nobody asks until then."""
        return self._waited_s + QUIET_S

    def take(
        self,
        room: Callable[[], Room],
        num_inside: Callable[[Item], int],
        *,
        is_busy: bool,
        gives_way: bool,
        num_since: tuple[int, ...] = (),
    ) -> list[Item]:
        """Return the prompts that enter now, in order; they count as served.

        Those with a promise enter, and others as far as there is room. A tenant with less than its
        share of the engine has room beside promises to others.

        Args:
            room: returns what the engine could start; asked only if a prompt may enter.
            num_inside: how many sequences the request of a prompt has in the engine.
            is_busy: whether the engine has work: else nobody is held back.
            gives_way: whether the background rests.
            num_since: what has happened to the engine since its last step, for the step's record.
        """
        num_permitted = None if self.num_permitted == inf else int(self.num_permitted)
        for push in self._pushed:
            queue = self._queue_of(push.is_background)
            queue.push(push.tenant, push.prompts, push.num_seqs)
        promised, self._promised, self._pushed = self._promised, [], []
        for tenant, _, num_tokens in promised:
            self._queue.charge(tenant, num_tokens)
        taken: list[Item] = []
        if self._queue or (self._background and not gives_way):
            free = room()
            if promised:
                free = free._replace(num_seqs=0)
            elif self.num_permitted < inf and is_busy:
                free = free._replace(num_seqs=min(free.num_seqs, int(self.num_permitted)))
            taken = self._queue.take(free, num_inside)
            self.num_permitted = max(0, self.num_permitted - len(taken))
            if self._background and not taken and not gives_way:
                taken = self._background.take(free, num_inside)
        num_outside = int(min(len(self._queue), self.num_permitted))
        num_outside += 0 if gives_way else len(self._background)
        self.load = Load(num_outside, True, self.num_pushed, num_permitted, gives_way, num_since)
        return [item for _, item, _ in promised] + taken

    def remove(self, unwanted: Callable[[Item], bool]) -> list[Item]:
        """Take out, after a ``take``, what ``unwanted`` names, and return it."""
        removed = self._queue.remove(unwanted)
        num_outside = max(0, self.load.num_outside - len(removed))
        self.load = self.load._replace(num_outside=num_outside)
        return removed + self._background.remove(unwanted)

    def clear(self) -> None:
        """Take out all."""
        self._pushed.clear()
        self._promised.clear()
        self.remove(lambda item: True)

    def _queue_of(self, is_background: bool) -> Admission[Item]:
        return self._background if is_background else self._queue
