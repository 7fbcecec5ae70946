"""A replica under a steady load, by formula: what a simulation is not needed for.

Sequences that answer, pieces of prompts and the time of a step depend on each other; the smallest
solution is where they settle (Little's law, 1961). Where there is none, the load is more than a
replica bears. It is used to find what is worth a simulation, and how times move with their error.
"""

from __future__ import annotations

from dataclasses import dataclass

from ridgeline.foresight.simulator.run import TimeModel
from ridgeline.foresight.step_time.features import in_the_mean, of_items
from ridgeline.model.cost.costs import Features
from ridgeline.planner.capacity.load import OfferedLoad

_ROUNDS = 200
_CLOSE = 1e-4


@dataclass(frozen=True, slots=True)
class Steady:
    """Where a replica settles.

    Attributes:
        rate_per_s: requests that it answers per second.
        ttft_s, tpot_s: means.
        num_seqs: sequences that it holds, in the mean.
        step: what a step computes, in the mean.
    """

    rate_per_s: float
    ttft_s: float
    tpot_s: float
    num_seqs: float
    step: Features


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a replica has room for: sequences, by the scheduler and by the cache, and tokens."""

    max_num_seqs: int
    num_blocks: int
    block_size: int
    max_num_batched_tokens: int

    def most_seqs(self, load: OfferedLoad) -> float:
        """Return how many sequences of a load fit at once, half answered in the mean."""
        held = load.mean_prompt + load.mean_new / 2 + self.block_size / 2
        return min(self.max_num_seqs, self.num_blocks * self.block_size / held)


def steady(times: TimeModel, load: OfferedLoad, bounds: Bounds, rate_per_s: float) -> Steady | None:
    """Return where a replica settles that gets this many requests per second; None if nowhere."""
    prompt, new, most = load.mean_prompt, load.mean_new, bounds.most_seqs(load)
    reading = _reading(load, times)
    answering = of_items([(max(0, round(prompt + new / 2) - 1), 1, 1)], times.windows)

    def step_of(seqs: float, arriving: float) -> Features:
        return in_the_mean([(seqs, answering), (arriving, reading)])

    def seconds(step: Features) -> float:
        return times.seconds(step) + times.after(step.num_rows, 0)

    step_s = seconds(step_of(0.0, 0.0))
    for _ in range(_ROUNDS):
        arriving, seqs = rate_per_s * step_s, rate_per_s * new * step_s
        room = bounds.max_num_batched_tokens - seqs
        if seqs > most or arriving * prompt > room:
            return None
        # A step either has a prompt, or as much of one as there is room for, or it has none.
        piece = min(1.0, room / prompt)
        share = min(1.0, arriving / piece)
        with_one = step_of(seqs, max(piece, arriving))
        longer_s = (1 - share) * seconds(step_of(seqs, 0.0)) + share * seconds(with_one)
        if longer_s - step_s < _CLOSE * step_s:
            more_s = (seconds(with_one) - seconds(step_of(seqs, 0.0))) / max(piece, arriving)
            first_s = longer_s * min(1.0, seqs) / 2 + seconds(with_one) / piece
            # Prompts queue as in an M/G/1 (Pollaczek, 1930; Khinchine, 1932).
            busy = min(0.99, rate_per_s * more_s)
            spread = 1 + load.prompt_variation**2
            wait_s = busy * more_s * spread / (2 * (1 - busy))
            step = step_of(seqs, arriving)
            return Steady(rate_per_s, first_s + wait_s, longer_s, seqs, step)
        step_s = longer_s
    return None


def knee(times: TimeModel, load: OfferedLoad, bounds: Bounds) -> float:
    """Return the most requests per second that a replica bears."""
    if bounds.most_seqs(load) < 1:
        return 0.0
    low, high = 0.0, 1e-3
    while steady(times, load, bounds, high) is not None and high < 1e6:
        low, high = high, 2 * high
    while high - low > 0.01 * high and high > 1e-9:
        middle = (low + high) / 2
        low, high = (low, middle) if steady(times, load, bounds, middle) is None else (middle, high)
    return low


def steady_closed(
    times: TimeModel, load: OfferedLoad, bounds: Bounds, num_clients: float
) -> Steady | None:
    """Return where a replica settles with this many clients; None if fewer than one fits."""
    low, high = 0.0, knee(times, load, bounds)
    settled = steady(times, load, bounds, high) if high else None
    if settled is None or _held(settled, load) <= num_clients:
        return settled
    while high - low > 0.002 * high:
        middle = (low + high) / 2
        tried = steady(times, load, bounds, middle)
        if tried is not None and _held(tried, load) <= num_clients:
            low = middle
        else:
            high = middle
        settled = tried or settled
    return settled


def queue_s(times: TimeModel, load: OfferedLoad, bounds: Bounds, num_clients: float) -> float:
    """Return the seconds that a prompt waits, in the mean, if all clients begin at once."""
    together = min(num_clients, max(1.0, bounds.max_num_batched_tokens / load.mean_prompt))
    step_s = times.seconds(in_the_mean([(together, _reading(load, times))]))
    return max(0.0, num_clients - 1) / 2 * step_s / together


def _reading(load: OfferedLoad, times: TimeModel) -> Features:
    """Return what it takes to read a prompt of the mean length."""
    return of_items([(0, max(1, round(load.mean_prompt)), 1)], times.windows)


def _held(settled: Steady, load: OfferedLoad) -> float:
    """Return the clients that wait for an answer, in the mean."""
    return settled.rate_per_s * (settled.ttft_s + load.mean_new * settled.tpot_s)
