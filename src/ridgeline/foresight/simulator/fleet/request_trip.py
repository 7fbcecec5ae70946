"""A request on its way through replicas, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ridgeline.foresight.routing.balancer import ServerLease
from ridgeline.foresight.simulator.fleet.routers import PIECE_TOKENS, keys_of
from ridgeline.foresight.simulator.run import SimRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutcome:
    """How a request ended.

    Attributes:
        asked: the request, as it was given.
        replica: where it ended; None if it never got to one.
        arrival_s: when it came.
        first_token_s: when its first token was there; None if there was none.
        finish_s: when it ended.
        num_new: tokens of its answers that were made, each counted once.
        is_lost: it got no whole answer.
        num_moves: how often it was resumed elsewhere.
        num_again: tokens that were computed again because of that; what a cache had of them was
            not.
        num_computed: all tokens that were computed for it, those among them.
        token_s: when each of its tokens was there.
        num_cached_tokens: of its prompt, what the cache had where it began last.
    """

    asked: SimRequest
    replica: int | None
    arrival_s: float
    first_token_s: float | None
    finish_s: float
    num_new: int
    is_lost: bool
    num_moves: int
    num_again: int
    num_computed: int
    token_s: tuple[float, ...]
    num_cached_tokens: int


class SimulatedRequest:
    """A request on its way: where it is, and what it has got."""

    def __init__(self, asked: SimRequest, arrival_s: float) -> None:
        self.asked, self.arrival_s = asked, arrival_s
        self.now = replace(asked, arrival_s=arrival_s)  # what a replica is asked
        self.num_moves = self.num_again = self.num_computed = 0
        self.token_s: list[float] = []  # when each token was there
        self.num_cached = 0
        self.placed: ServerLease | None = None  # by the router's own rule
        self._begin_s = arrival_s  # where it is now
        self._keys: tuple[bytes, ...] | None = None
        self.num_to_read = len(asked.prompt)  # and of answers that go on, where it is now
        self._num_known = 0  # tokens that were computed, wherever that was
        self._num_said = [0] * asked.num_seqs  # tokens of each answer, wherever they were made

    @property
    def num_pending(self) -> int:
        """Tokens of its prompt and answers that are to come where it is."""
        num_here = len(self.token_s) - sum(self.now.num_before)
        return len(self.now.prompt) + sum(self.now.num_new) - num_here

    def note_token(self, index: int, now_s: float) -> None:
        """Take a token of an answer."""
        self._num_said[index] += 1
        self.token_s.append(now_s)
        if self.placed is not None:
            self.placed.has_read(now_s - self._begin_s)

    def note_work(self, num_done: int, num_cached: int) -> None:
        """Take note of what the replica where it is has done of it.

        Args:
            num_done: tokens of prompt and answers whose keys and values it had at the end.
            num_cached: of them, what its cache had at the beginning.
        """
        self.num_cached = num_cached
        self.num_computed += max(0, num_done - num_cached)
        self.num_again += max(0, min(self._num_known, num_done) - num_cached)
        self._num_known = max(self._num_known, num_done)

    def move(self, now_s: float) -> None:
        """Be what is left, for another replica, which reads prompt and answers so far."""
        self.num_moves += 1
        self._begin_s = now_s
        if self.placed is not None:
            self.placed.end()
        going_on = [
            said
            for said, whole in zip(self._num_said, self.asked.num_new, strict=True)
            if said < whole
        ]
        self.num_to_read = len(self.asked.prompt) + sum(going_on)
        self.now = replace(self.asked, arrival_s=now_s, num_before=tuple(self._num_said))

    def keys(self) -> tuple[bytes, ...]:
        """Return what the router's own rule knows of the prompt, made once."""
        if self._keys is None:
            self._keys = tuple(keys_of(self.asked.prompt, PIECE_TOKENS))
        return self._keys

    def end(self, replica: int | None, now_s: float, *, is_lost: bool) -> RequestOutcome:
        """Return how it has ended."""
        if self.placed is not None:
            self.placed.end()
        return RequestOutcome(
            asked=self.asked,
            replica=replica,
            arrival_s=self.arrival_s,
            first_token_s=self.token_s[0] if self.token_s else None,
            finish_s=now_s,
            num_new=len(self.token_s),
            is_lost=is_lost,
            num_moves=self.num_moves,
            num_again=self.num_again,
            num_computed=self.num_computed,
            token_s=tuple(self.token_s),
            num_cached_tokens=self.num_cached,
        )
