"""A division of a model on a device, as a search for choices looks at it.

How many tokens of prompts its steps should have at least follows from how long they take. Up to
some number of tokens a step takes as long as reading the weights; from there on arithmetic decides,
and the time grows with each token. Below that knee a device computes less than it could, so prompts
wait; far above it those that decode wait for each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ridgeline.core.records import EngineRecord
from ridgeline.core.scheduling.policies import SplitFuse
from ridgeline.foresight.simulator.run import TimeModel
from ridgeline.model.cost.costs import Features
from ridgeline.model.cost.hardware import Price
from ridgeline.model.cost.ownership import Owned
from ridgeline.planner.capacity.latency_model import LatencyModel
from ridgeline.planner.capacity.load import OfferedLoad
from ridgeline.planner.capacity.steady_state import Bounds, knee, queue_s
from ridgeline.planner.memory.placement import Placement

Alive = Callable[[], None]
_MOST_TOKENS = 1 << 40
_MOST = 1 << 13  # tokens; more are in no step
_KNEES = 2  # docs/adr/0054-pieces-that-suit-the-device.md


class _Watched:
    """A model of time that asks at each step whether its answer is still wanted."""

    def __init__(self, times: TimeModel, alive: Alive) -> None:
        self._times, self._alive = times, alive
        self.windows = times.windows
        self.after = times.after

    def seconds(self, features: Features) -> float:
        """Return the seconds of a step, unless the answer is not wanted any more."""
        self._alive()
        return self._times.seconds(features)


@dataclass(frozen=True, eq=False, slots=True)
class Candidate:
    """A division on a device, with its model of time."""

    placement: Placement
    latency_model: LatencyModel
    bounds: Bounds
    price: Price | Owned | None
    load: OfferedLoad
    alive: Alive
    knees: dict[float, float] = field(default_factory=dict)

    def knee(self, factor: float = 1.0) -> float:
        """Return the most requests per second that a replica bears, if all takes so much longer."""
        if factor not in self.knees:
            self.knees[factor] = knee(self.latency_model.at(factor), self.load, self.bounds)
        return self.knees[factor]

    def begin_s(self, replicas: int, factor: float = 1.0) -> float:
        """Return what a first token takes besides its steps that take `factor` longer.

        Clients of a closed loop begin at once.
        """
        latency_model, clients = self.latency_model, self.load.concurrency
        if clients is None or not latency_model.queue_share:
            return latency_model.request_s
        queued_s = queue_s(latency_model.at(factor), self.load, self.bounds, clients / replicas)
        return latency_model.request_s + latency_model.queue_share * queued_s

    def usd_per_hour(self, replicas: int) -> float | None:
        """Return what this number of replicas costs to rent or to own; None without a price."""
        num = replicas * self.placement.num_devices
        return None if self.price is None else self.price.of(num, self.placement.device)

    @property
    def times(self) -> TimeModel:
        """Its model of time, as simulations use it."""
        return _Watched(self.latency_model.times, self.alive)

    @property
    def is_ours(self) -> bool:
        """Whether this engine's own rules hold."""
        return self.placement.setting.engine.name == "ridgeline"

    def settings(self) -> EngineRecord:
        """Return how its engine is set up, with no more blocks than the load can hold."""
        longest = sorted(sum(lengths) for lengths in self.load.lengths)
        held = longest[-self.bounds.max_num_seqs :]
        return engine_record(self.placement, self.latency_model.times, held)


def engine_record(placement: Placement, times: TimeModel, held: Iterable[int]) -> EngineRecord:
    """Return how the engine of a placement is set up by itself, for simulations.

    ``held`` are the tokens of all sequences that can lie in the cache at once. A small model has
    room for thousands of times as many, which would take gigabytes here.
    """
    bounds = bounds_of(placement)
    most_blocks = sum(num_tokens // bounds.block_size + 2 for num_tokens in held)
    # Our own for processors, else what suits the device.
    is_cpu = placement.device.kind == "cpu"
    return EngineRecord(
        policy="splitfuse",
        block_size=bounds.block_size,
        num_blocks=min(bounds.num_blocks, most_blocks),
        max_num_batched_tokens=bounds.max_num_batched_tokens,
        max_num_seqs=bounds.max_num_seqs,
        max_model_len=_MOST_TOKENS,
        enable_prefix_caching=False,
        seed=0,
        eos_ids=(),
        looks_ahead=placement.setting.engine.looks_ahead,
        least_prompt_tokens=SplitFuse.min_chunk if is_cpu else least_prompt_tokens(times.seconds),
    )


def bounds_of(placement: Placement) -> Bounds:
    """Return what a placement has room for."""
    ledger, setting = placement.ledger, placement.setting
    tokens = min(int(ledger.max_concurrency_exact * setting.context), _MOST_TOKENS)
    return Bounds(
        setting.engine.max_num_seqs,
        tokens // setting.block_size,
        setting.block_size,
        setting.max_num_batched_tokens,
    )


def least_prompt_tokens(seconds: Callable[[Features], float]) -> int:
    """Return for how many tokens arithmetic takes twice as long as a step without prompts.

    ``seconds`` is a model of time. At most 8,192.
    """
    step_s, many_s, more_s = (seconds(_step(num)) for num in (1, _MOST, 2 * _MOST))
    token_s = (more_s - many_s) / _MOST
    return max(1, min(_MOST, round(_KNEES * step_s / token_s))) if token_s > 0 else _MOST


def _step(num_tokens: int) -> Features:
    return Features(num_tokens, num_seqs=1, num_rows=1, num_positions=0, num_pairs=0)
