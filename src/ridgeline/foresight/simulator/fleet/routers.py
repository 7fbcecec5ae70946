"""Rules that choose a replica: functions of a request and of what can be seen of open replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import NamedTuple

from ridgeline.core.cache.kvcache import hash_block
from ridgeline.foresight.routing.balancer import PrefixBalancer
from ridgeline.foresight.simulator.run import SimRequest


class View(NamedTuple):
    """What a router sees of a replica that takes requests.

    Attributes:
        replica: which one it is.
        num_pending_tokens: prompt and answer tokens that are still to come, as far as is known.
        num_cached_tokens: of this request's prompt, what the replica was sent before.
    """

    replica: int
    num_pending_tokens: int
    num_cached_tokens: int


Router = Callable[[SimRequest, Sequence[View]], int]
PIECE_TOKENS = 128  # of a prompt, for the router's own rule: 512 bytes of text


def round_robin() -> Router:
    """Return a router that takes one replica after the other."""
    turn = count()
    return lambda asked, views: views[next(turn) % len(views)].replica


def least_tokens(asked: SimRequest, views: Sequence[View]) -> int:
    """Return the replica with the fewest tokens to come; of equals the first."""
    return min(views, key=lambda view: (view.num_pending_tokens, view.replica)).replica


def prefix_aware(max_more_tokens: int = 8192) -> Router:
    """Return a router that takes the longest cached prefix, unless that replica is far behind.

    Only replicas count whose tokens to come exceed the fewest by at most ``max_more_tokens``
    (bounded imbalance; Srivatsa et al., "Preble", 2024).
    """

    def choose(asked: SimRequest, views: Sequence[View]) -> int:
        fewest = min(view.num_pending_tokens for view in views)
        near = [view for view in views if view.num_pending_tokens <= fewest + max_more_tokens]
        best = max(near, key=lambda view: (view.num_cached_tokens, -view.num_pending_tokens))
        return best.replica

    return choose


def least_work() -> PrefixBalancer:
    """Return the rule of ``ridgeline serve`` itself; a key stands for about as much text there."""
    return PrefixBalancer(PIECE_TOKENS)


ROUTERS: dict[str, Callable[[], Router | PrefixBalancer]] = {
    "least-work": least_work,
    "round-robin": round_robin,
    "least-tokens": lambda: least_tokens,
    "prefix": prefix_aware,
}


def keys_of(prompt: tuple[int, ...], size: int) -> list[bytes]:
    """Return a key for each ``size`` tokens, which depends on all that is before."""
    keys, key = list[bytes](), b""
    for begin in range(0, len(prompt) - size + 1, size):
        key = hash_block(key, prompt[begin : begin + size])
        keys.append(key)
    return keys
