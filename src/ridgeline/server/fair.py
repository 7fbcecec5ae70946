"""The waiting queue before the engine: first come, first served within a tenant, and the tenant
that was served the fewest tokens first. It knows neither threads nor what it queues.

After Sheng et al., "Fairness in Serving Large Language Models" (2024): each tenant has a counter of
tokens. A tenant of whom nothing waited is lifted to the lowest counter in the queue or, if the
queue is empty, to that of the tenant served last. So nobody saves up by being away, and nobody is
passed over for having been served while nobody else wanted anything. No counter is ever lowered.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Items of tenants, in fair order."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Item]] = {}  # tenants with something in the queue
        self._served: dict[str, int] = {}
        self._last: tuple[str, ...] = ()  # the tenant served last, once there is one
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def push(self, tenant: str, item: Item) -> None:
        """Queue an item."""
        if tenant not in self._waiting:
            others = self._waiting or self._last
            floor = min((self._served[other] for other in others), default=0)
            self._served[tenant] = max(self._served.get(tenant, 0), floor)
            self._waiting[tenant] = deque()
        self._waiting[tenant].append(item)
        self._num_waiting += 1

    def pop(self) -> Item:
        """Take the next item; there must be one."""
        tenant = min(self._waiting, key=self._served.__getitem__)
        item = self._waiting[tenant].popleft()
        self._last = (tenant,)
        self._num_waiting -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        return item

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Count tokens that a tenant was served."""
        self._served[tenant] = self._served.get(tenant, 0) + num_tokens

    def remove(self, unwanted: Callable[[Item], bool]) -> list[Item]:
        """Take out all items that ``unwanted`` names, and return them."""
        found = []
        for tenant, items in list(self._waiting.items()):
            found += [item for item in items if unwanted(item)]
            self._waiting[tenant] = deque(item for item in items if not unwanted(item))
            if not self._waiting[tenant]:
                del self._waiting[tenant]
        self._num_waiting -= len(found)
        return found
