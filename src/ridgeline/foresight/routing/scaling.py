"""How many servers a model should have: as many as its requests need, within bounds."""

from __future__ import annotations

from collections import deque

CALM_S = 300.0  # for which fewer are enough before one goes; Kubernetes' autoscaler waits as long


class Scaling:
    """The number of servers that are wanted, which follows the number of requests.

    More are wanted at once. Fewer are wanted when fewer were enough for the last five minutes: a
    machine takes minutes to come, and what it has read goes with it.
    """

    def __init__(self, least: int, most: int, requests_each: int) -> None:
        """Want ``least`` to ``most`` servers, one for each ``requests_each`` at a time."""
        self._least, self._most, self._requests_each = least, most, requests_each
        # Of the last minutes, (time, servers): each number is above all that came after it.
        self._needed = deque[tuple[float, int]]()

    def wanted(self, num_requests: int, now_s: float) -> int:
        """Return how many servers are wanted for what runs and waits at this time, in seconds."""
        needed = -(-num_requests // self._requests_each)
        while self._needed and self._needed[-1][1] <= needed:
            self._needed.pop()
        self._needed.append((now_s, needed))
        while self._needed[0][0] < now_s - CALM_S:
            self._needed.popleft()
        return min(self._most, max(self._least, self._needed[0][1]))
