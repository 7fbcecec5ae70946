"""Servers of a simulated fleet that end without notice, at random times, and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from ridgeline.foresight.simulator.fleet import Ended, Evict


def random_kills(
    num_replicas: int, per_minute: float, until_s: float, back_after_s: float, seed: int
) -> tuple[Evict, ...]:
    """Return when which server ends: a Poisson process over those that are there.

    Args:
        num_replicas: servers.
        per_minute: how many end in a minute, of all together.
        until_s: none ends later.
        back_after_s: how long it takes until one like it takes requests again, with nothing read.
        seed: of the draws.
    """
    rng, now_s, found = Random(f"{seed} kills"), 0.0, list[Evict]()
    back_s = [0.0] * num_replicas
    while per_minute:
        now_s += rng.expovariate(per_minute / 60)
        if now_s >= until_s:
            break
        there = [replica for replica in range(num_replicas) if back_s[replica] <= now_s]
        if there:
            replica = rng.choice(there)
            back_s[replica] = now_s + back_after_s
            found.append(Evict(at_s=now_s, replica=replica, back_s=back_s[replica]))
    return tuple(found)


def cost_of(kills: Sequence[Evict], ended: Sequence[Ended]) -> dict[str, Any]:
    """Return what kills cost: requests and tokens that moved, and what was computed again.

    ``share_again`` is of all tokens that were computed. What the cache of another server had of a
    prompt counts as computed again, so it is at most that.
    """
    work = sum(len(one.asked.prompt) + one.num_new for one in ended)
    again = sum(one.num_again for one in ended)
    return {
        "kills": len(kills),
        "requests_moved": sum(one.num_moves > 0 for one in ended),
        "requests_lost": sum(one.is_lost for one in ended),
        "tokens_again": again,
        "share_again": round(again / (work + again), 4) if work else 0.0,
    }
