"""An overloaded server that promises, under a virtual clock: all of it but HTTP and threads.

Steps take what ``TRUTH`` says, times noise that is drawn from a seed: of each step by itself, of a
speed that wanders within seconds, and of a host that takes the processor away now and then. The
server does not know the noise. It follows the speed by its steps, as a real one does.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from ridgeline.core.params import SamplingParams
from ridgeline.core.records import EngineRecord, Record, RequestRecord
from ridgeline.foresight.deadline import (
    AdmissionRound,
    Due,
    PromiseMargin,
    PromiseRequest,
    latest_start_s,
)
from ridgeline.foresight.simulator import run
from ridgeline.foresight.simulator.forecast import (
    PredictedTimes,
    RequestSnapshot,
    State,
    forecast,
    new_snapshot,
    state_of,
)
from ridgeline.foresight.simulator.run import Clock, new_replica
from ridgeline.foresight.step_time.calibration import Calibration
from ridgeline.foresight.step_time.features import StepTime
from ridgeline.foresight.step_time.fit import PredictionMonitor
from ridgeline.model.cost.costs import Features

# Of a model of 135M weights on two cores: 450 tokens/s alone, 2,700 of prompts.
TRUTH = StepTime(
    (1, 4, 16, 64, 256, 2048),
    (2.2e-3, 4e-3, 9e-3, 28e-3, 95e-3, 720e-3),
    *(3.5e-4, 3e-5, 1e-5, 2e-7, 1e-8),
    *(3e-4, 1e-5, 5e-5),
)
SETTINGS = EngineRecord(
    policy="splitfuse",
    block_size=16,
    num_blocks=2000,
    max_num_batched_tokens=2048,
    max_num_seqs=64,
    max_model_len=2048,
    enable_prefix_caching=False,
    seed=0,
    eos_ids=(),
)
KNOWN = Calibration(
    **dict.fromkeys(("model", "arch", "dtype", "kv_cache_dtype", "processor"), "any"),
    backend="cpu",
    threads=2,
    source="measured",
    measured_at=0.0,
    version="0",
    times=TRUTH,
    step_error=None,
    total_error=None,
    factors=(1.0,),
    samples=(),
    after=(),
)
PROMPTS, ANSWERS = (20, 60, 150, 400), (16, 32, 64)
ALONE_S, RATE_PER_S = 0.13, 12.0  # in the median; what can be served
TIGHT, LOOSE = 5.0, 15.0  # deadlines, in times of what a request takes alone
PERIOD_S, LAG_S = 0.05, 0.03  # from one round to the next, and until its verdicts are there


@dataclass(frozen=True)
class Noise:
    """How a machine differs from its model of time."""

    step: float = 0.05  # standard deviation of the logarithm
    speed: float = 0.05  # the same, of the wandering speed
    speed_s: float = 3.0  # in which it forgets
    held_up: float = 0.005  # share of steps
    held_up_s: float = 0.01


NONE = Noise(0.0, 0.0, 3.0, 0.0)
QUIET = Noise()
MEASURED = Noise(0.17, 0.04, 3.0, 0.03, 0.01)  # two cores of a virtual machine that does no more
CROWDED = Noise(0.15, 0.12, 3.0, 0.01, 0.02)
UNSTEADY = Noise(0.5, 0.4, 2.0, 0.05, 0.03)  # the same two cores, shared with six programs


class Speed:
    """How much longer than ``TRUTH`` all takes, from moment to moment; it wanders."""

    _GRID_S = 0.02

    def __init__(self, noise: Noise, seed: int) -> None:
        self._dice, self._noise = random.Random(f"speed {seed}"), noise
        self._logs = [self._dice.gauss(0.0, noise.speed)]

    def __call__(self, now_s: float) -> float:
        kept = math.exp(-self._GRID_S / self._noise.speed_s)
        spread = self._noise.speed * math.sqrt(1 - kept * kept)
        while len(self._logs) <= now_s / self._GRID_S:
            self._logs.append(kept * self._logs[-1] + self._dice.gauss(0.0, spread))
        return math.exp(self._logs[int(now_s / self._GRID_S)])


class Hits:
    """What hits a step that begins at a moment: a factor, and seconds of being held up."""

    _GRID_S = 1e-3

    def __init__(self, noise: Noise, seed: int) -> None:
        self._dice, self._noise = random.Random(f"hits {seed}"), noise
        self._all: list[tuple[float, float]] = []

    def __call__(self, now_s: float) -> tuple[float, float]:
        dice, noise = self._dice, self._noise
        while len(self._all) <= now_s / self._GRID_S:
            held_up_s = dice.expovariate(1 / noise.held_up_s)
            is_held_up = dice.random() < noise.held_up
            factor = math.exp(dice.gauss(0.0, noise.step))
            self._all.append((factor, held_up_s if is_held_up else 0.0))
        return self._all[int(now_s / self._GRID_S)]


class Noisy:
    """What steps take on a machine: a function of when they begin, so that it can be asked again.

    ``from_s`` is the machine's time where ``clock`` begins.
    """

    windows = TRUTH.windows

    def __init__(self, clock: Clock, speed: Speed, hits: Hits, from_s: float = 0.0) -> None:
        self._clock, self._speed, self._hits, self._from_s = clock, speed, hits, from_s

    def seconds(self, features: Features) -> float:
        now_s = self._from_s + self._clock.now_s
        factor, held_up_s = self._hits(now_s)
        return TRUTH.seconds(features) * self._speed(now_s) * factor + held_up_s

    def after(self, num_rows: int, num_ended: int) -> float:
        return TRUTH.after(num_rows, num_ended)


@dataclass(eq=False)
class Wish:
    """A request of the load, and what becomes of it."""

    prompt: tuple[int, ...]
    num_new: int
    arrived_s: float
    total_s: float
    owner: str = ""
    outcome: str = "open"
    is_protected: bool = False
    is_made: bool = False
    verdict_s: float = inf  # seconds after it came
    entered_s: float = inf
    due_s: float = inf
    made_s: float = inf
    expected: PredictedTimes = field(default_factory=PredictedTimes)
    end_s: float = inf

    @property
    def last_s(self) -> float:
        return self.arrived_s + self.total_s

    def snapshot(self, number: int) -> RequestSnapshot:
        lengths = len(self.prompt), self.num_new
        return new_snapshot(number, *lengths, due_s=self.due_s, owner=self.owner)

    def asked(self) -> run.SimRequest:
        params = SamplingParams(temperature=0.0, max_tokens=self.num_new, ignore_eos=True)
        lengths = {"prompt": self.prompt, "num_new": (self.num_new,)}
        return run.SimRequest(**lengths, arrival_s=self.entered_s, params=params, due_s=self.due_s)


def overload(seconds: float, seed: int, load: float = 1.5) -> list[Wish]:
    """Return requests that come at random, ``load`` times as many as can be served."""
    dice, wishes, at_s = random.Random(seed), list[Wish](), 0.0
    while (at_s := at_s + dice.expovariate(load * RATE_PER_S)) < seconds:
        first = 1000 * len(wishes)
        prompt = tuple(range(first, first + dice.choice(PROMPTS)))
        total_s = dice.choice((TIGHT, LOOSE)) * ALONE_S
        wishes.append(Wish(prompt, dice.choice(ANSWERS), at_s, total_s))
    return wishes


def spread_deadlines(seconds: float, seed: int, load: float = 0.7) -> list[Wish]:
    """Return requests that can all be served, but not all as soon as they wish.

    Deadlines are spread evenly, in logarithms, from what a request takes alone to seven times that:
    so what a margin costs is seen, and not what the load costs.
    """
    dice, wishes, at_s = random.Random(seed), list[Wish](), 0.0
    while (at_s := at_s + dice.expovariate(load * RATE_PER_S)) < seconds:
        first = 1000 * len(wishes)
        prompt = tuple(range(first, first + dice.choice(PROMPTS)))
        num_new = dice.choice(ANSWERS)
        alone_s = -latest_start_s(TRUTH, len(prompt), num_new, Due(end_s=0.0))
        total_s = PERIOD_S + LAG_S + alone_s * math.exp(dice.uniform(0.0, 2.0))
        wishes.append(Wish(prompt, num_new, at_s, total_s))
    return wishes


class Copy(NamedTuple):
    """What a round begins with: the state before the step under way, and what was known then."""

    now_s: float
    state: State
    times: StepTime
    open: dict[int, Wish]


class Promising:
    """The server. ``run`` serves a load to its end.

    As in the server, a round begins at the copy that was made before the step under way. It is
    decided when that step's time is known, and counts from when it would have begun.
    """

    def __init__(self, noise: Noise, seed: int = 0) -> None:
        self.clock, self.records = Clock(), list[Record]()
        self.speed, self.hits = Speed(noise, seed), Hits(noise, seed)
        self.times = Noisy(self.clock, self.speed, self.hits)
        replica, self.runner = new_replica(SETTINGS, self.clock, self.times, self.records.append)
        self.engine = replica.engine
        self.monitor, self.margin = PredictionMonitor(KNOWN), PromiseMargin()
        self.margins = list[float]()  # of each round
        self.engine.listeners.append(self.monitor.on_record)
        self.open: dict[int, Wish] = {}  # by the engine's numbers
        self.to_come: deque[Wish] = deque()
        self.asking: list[Wish] = []
        self.on_the_way: list[Wish] = []  # promised something, but not in the engine
        self.round_s = -inf

    def run(self, wishes: list[Wish]) -> None:
        self.to_come = deque(wishes)
        while self.to_come or self.asking or self.on_the_way or self.engine.has_work():
            self.let_in()
            copy = self.copy()
            if self.engine.has_work():
                self.step()
            else:
                moments = [self.round_s + LAG_S] if self.on_the_way else []
                moments += [self.next_round_s()]
                self.clock.wait_until(min(moments))
            while (round_s := self.next_round_s()) <= self.clock.now_s:
                self.decide(copy, max(round_s, copy.now_s))

    def next_round_s(self) -> float:
        """Return when the next round begins: somebody asks, and the last one is long enough ago."""
        first_s = min((one.arrived_s for one in (*self.asking, *self.to_come)), default=inf)
        return max(first_s, self.round_s + PERIOD_S)

    def step(self) -> None:
        num_before = len(self.records)
        self.engine.step()
        ended = [one for one in self.records[num_before:] if isinstance(one, RequestRecord)]
        for record in ended:
            wish = self.open.pop(record.request_id)
            wish.end_s = record.finish_s
            is_in_time = wish.end_s <= wish.last_s
            if wish.is_protected:
                self.margin.judge(is_broken=not is_in_time)
            kept, broken = ("kept", "broken") if wish.is_made else ("in_time", "late")
            wish.outcome = kept if is_in_time else broken
            assert record.first_token_s is not None
            happened = PredictedTimes(record.first_token_s, record.finish_s)
            for foreseen_s, at_s in zip(wish.expected, happened, strict=True):
                self.margin.note(foreseen_s - wish.made_s, at_s - wish.made_s)
        self.clock.now_s += self.times.after(self.runner.num_rows, len(ended))

    def copy(self) -> Copy:
        times = self.monitor.calibration.times.scaled(self.monitor.factor)
        state = state_of(SETTINGS, self.engine.scheduler)
        return Copy(self.clock.now_s, state, times, dict(self.open))

    def decide(self, copy: Copy, round_s: float) -> None:
        while self.to_come and self.to_come[0].arrived_s <= round_s:
            self.asking.append(self.to_come.popleft())
        now_s, asking, self.asking = copy.now_s, self.asking, []
        self.round_s = round_s
        snapshot = {one.number: one for one in copy.state.requests}
        known = [*copy.open.values(), *self.on_the_way]
        snapshots = [snapshot[number] for number in copy.open]
        coming = [wish.snapshot((1 << 39) + i) for i, wish in enumerate(self.on_the_way)]
        promised = {
            i: PromiseRequest((one,), Due(end_s=wish.last_s - now_s), wish.is_protected)
            for i, (wish, one) in enumerate(zip(known, [*snapshots, *coming], strict=True))
        }
        asked = []
        for number, wish in enumerate(asking, start=1 << 40):
            lengths = len(wish.prompt), wish.num_new
            slack_s = latest_start_s(copy.times, *lengths, Due(end_s=wish.total_s))
            wish.due_s = wish.arrived_s + slack_s
            asked.append(PromiseRequest((wish.snapshot(number),), Due(end_s=wish.last_s - now_s)))
        under_way_s = round_s - now_s
        admission_round = AdmissionRound(
            copy.state,
            copy.times,
            self.margin.factor,
            promised,
            under_way_s + LAG_S,
            under_way_s=under_way_s,
            coming=tuple((1e-9, one) for one in coming),
            forecaster=self.forecaster(now_s),
        )
        self.margins.append(self.margin.factor)
        for wish, verdict in zip(asking, admission_round.decide(asked), strict=True):
            wish.entered_s = round_s + LAG_S  # or could have
            wish.verdict_s = wish.entered_s - wish.arrived_s
            if verdict is None or verdict.outlook == "refused":
                wish.outcome = "refused"
                continue
            wish.is_protected = verdict.outlook == "promised"
            wish.is_made = wish.is_protected and self.margin.are_promises_made
            wish.made_s = now_s
            wish.expected = PredictedTimes(*(now_s + seconds for seconds in verdict.foreseen))
            self.on_the_way.append(wish)
        for i, (first_s, end_s) in admission_round.delays_s().items():
            first, end = known[i].expected
            known[i].expected = PredictedTimes(first + first_s, end + end_s)

    def forecaster(self, now_s: float) -> Callable[..., Mapping[int, PredictedTimes]]:
        """Return what makes the forecasts of a round whose copy is of this moment."""
        return forecast

    def let_in(self) -> None:
        """Let those enter whose verdict is there by now."""
        here = [wish for wish in self.on_the_way if wish.entered_s <= self.clock.now_s]
        for wish in here:
            self.on_the_way.remove(wish)
            wish.entered_s = self.clock.now_s
            asked = wish.asked()
            number = self.engine.add(
                asked.prompt,
                asked.sampling(),
                arrival_s=wish.entered_s,
                due_s=wish.due_s,
                owner=wish.owner,
            )
            self.runner.note(number, asked)
            self.open[number] = wish
