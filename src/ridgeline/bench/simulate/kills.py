"""Servers of a simulated fleet that end without notice, at random times, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Any

from ridgeline.foresight.simulator.fleet.request_trip import RequestOutcome
from ridgeline.foresight.simulator.fleet.serving import Evict


def kills_a_minute(text: str, num_replicas: int) -> float:
    """Read ``12``, or ``10%`` of the servers: how many end in a minute. Raises ValueError."""
    try:
        per_minute = float(text.removesuffix("%"))
        if not 0 <= per_minute < math.inf:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--kills-per-minute is {text}: write a number of at least 0, or a part of the servers "
            "such as 10%"
        ) from None
    return per_minute * num_replicas / 100 if text.endswith("%") else per_minute


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


def cost_of(kills: Sequence[Evict], ended: Sequence[RequestOutcome]) -> dict[str, Any]:
    """Return what became of a fleet's work: what its caches had, and what kills cost.

    ``share_cached`` is of all prompt tokens, and ``share_again`` of all tokens that were computed.
    """
    num_prompt = sum(len(one.asked.prompt) for one in ended)
    num_cached = sum(one.num_cached_tokens for one in ended)
    num_computed = sum(one.num_computed for one in ended)
    num_again = sum(one.num_again for one in ended)
    return {
        "kills": len(kills),
        "requests_moved": sum(one.num_moves > 0 for one in ended),
        "requests_lost": sum(one.is_lost for one in ended),
        "tokens_again": num_again,
        "share_again": round(num_again / num_computed, 6) if num_computed else 0.0,
        "share_cached": round(num_cached / num_prompt, 4) if num_prompt else 0.0,
    }
