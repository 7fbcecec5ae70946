"""An overloaded server that promises, under a virtual clock: all of it but HTTP and threads.

Steps take what ``TRUTH`` says, times noise that is drawn from a seed: of each step by itself, of a
speed that wanders within seconds, and of a host that takes the processor away now and then. The
server does not know the noise. It follows the speed by its steps, as a real one does.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from ridgeline.core.params import SamplingParams
from ridgeline.core.records import EngineRecord, Record, RequestRecord
from ridgeline.planner.calibration import Calibration
from ridgeline.planner.promise import Asked, Book, Due, Safety, Verdict, latest_start_s
from ridgeline.planner.score import Score
from ridgeline.simulator import run
from ridgeline.simulator.forecast import Foreseen, new_standing, state_of
from ridgeline.simulator.run import Clock, new_replica, simulate
from ridgeline.simulator.steptime import Features, StepTime

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
CROWDED = Noise(0.15, 0.12, 3.0, 0.01, 0.02)


class Noisy:
    """A model of time that errs; windows and what follows a step are as in the truth."""

    windows = TRUTH.windows

    def __init__(self, noise: Noise, clock: Clock, seed: int) -> None:
        self.true_s = self.spent_s = 0.0
        self._noise, self._clock, self._dice = noise, clock, random.Random(seed)
        self._log_speed = self._dice.gauss(0.0, noise.speed)
        self._at_s = 0.0

    def seconds(self, features: Features) -> float:
        noise, dice, now_s = self._noise, self._dice, self._clock.now_s
        kept = math.exp((self._at_s - now_s) / noise.speed_s)
        spread = noise.speed * math.sqrt(1 - kept * kept)
        self._log_speed = kept * self._log_speed + dice.gauss(0.0, spread)
        self._at_s = now_s
        true_s = TRUTH.seconds(features)
        took_s = true_s * math.exp(self._log_speed + dice.gauss(0.0, noise.step))
        if dice.random() < noise.held_up:
            took_s += dice.expovariate(1 / noise.held_up_s)
        self.true_s += true_s
        self.spent_s += took_s
        return took_s

    def after(self, num_rows: int, num_ended: int) -> float:
        return TRUTH.after(num_rows, num_ended)


@dataclass(eq=False)
class Wish:
    """A request of the load, and what becomes of it."""

    prompt: tuple[int, ...]
    num_new: int
    arrived_s: float
    total_s: float
    outcome: str = "open"
    verdict_s: float = inf  # seconds after it came
    entered_s: float = inf
    due_s: float = inf
    made_s: float = inf
    expected: Foreseen = field(default_factory=Foreseen)
    end_s: float = inf

    @property
    def last_s(self) -> float:
        return self.arrived_s + self.total_s

    def asked(self) -> run.Asked:
        params = SamplingParams(temperature=0.0, max_tokens=self.num_new, ignore_eos=True)
        lengths = {"prompt": self.prompt, "num_new": (self.num_new,)}
        return run.Asked(**lengths, arrival_s=self.entered_s, params=params, due_s=self.due_s)


def overload(seconds: float, seed: int, load: float = 1.5) -> list[Wish]:
    """Return requests that come at random, ``load`` times as many as can be served."""
    dice, wishes, at_s = random.Random(seed), list[Wish](), 0.0
    while (at_s := at_s + dice.expovariate(load * RATE_PER_S)) < seconds:
        first = 1000 * len(wishes)
        prompt = tuple(range(first, first + dice.choice(PROMPTS)))
        total_s = dice.choice((TIGHT, LOOSE)) * ALONE_S
        wishes.append(Wish(prompt, dice.choice(ANSWERS), at_s, total_s))
    return wishes


class Promising:
    """The server. ``run`` serves a load to its end."""

    def __init__(self, noise: Noise, seed: int = 0) -> None:
        self.clock, self.records = Clock(), list[Record]()
        self.times = Noisy(noise, self.clock, seed)
        replica, self.runner = new_replica(SETTINGS, self.clock, self.times, self.records.append)
        self.engine = replica.engine
        self.score, self.safety = Score(KNOWN, start=lambda work: work()), Safety()
        self.engine.listeners.append(self.score.on_record)
        self.open: dict[int, Wish] = {}  # by the engine's numbers
        self.asking: list[Wish] = []
        self.verdicts: list[tuple[Wish, Verdict | None]] = []
        self.looked_s = -inf

    def run(self, wishes: list[Wish]) -> None:
        to_come, clock = deque(wishes), self.clock
        while to_come or self.asking or self.verdicts or self.engine.has_work():
            while to_come and to_come[0].arrived_s <= clock.now_s:
                self.asking.append(to_come.popleft())
            if self.verdicts and clock.now_s >= self.looked_s + LAG_S:
                self.let_in()
            if self.asking and not self.verdicts and clock.now_s >= self.looked_s + PERIOD_S:
                self.look()
            if self.engine.has_work():
                self.step()
                continue
            moments = [to_come[0].arrived_s] if to_come else []
            if self.verdicts or self.asking:
                moments.append(self.looked_s + (LAG_S if self.verdicts else PERIOD_S))
            clock.wait_until(min(moments, default=0.0))

    def step(self) -> None:
        num_before = len(self.records)
        self.engine.step()
        ended = [one for one in self.records[num_before:] if isinstance(one, RequestRecord)]
        for record in ended:
            wish = self.open.pop(record.request_id)
            wish.end_s = record.finish_s
            wish.outcome = "kept" if wish.end_s <= wish.last_s else "broken"
            assert record.first_token_s is not None
            happened = Foreseen(record.first_token_s, record.finish_s)
            for foreseen_s, at_s in zip(wish.expected, happened, strict=True):
                self.safety.note(foreseen_s - wish.made_s, at_s - wish.made_s)
        self.clock.now_s += self.times.after(self.runner.num_rows, len(ended))

    def look(self) -> None:
        now_s, asking, self.asking = self.clock.now_s, self.asking, []
        state = state_of(SETTINGS, self.engine.scheduler)
        standing = {one.number: one for one in state.requests}
        promised = {
            i: Asked((standing[number],), Due(end_s=wish.last_s - now_s))
            for i, (number, wish) in enumerate(self.open.items())
        }
        known = list(self.open.values())
        times = self.score.calibration.times.scaled(self.score.factor)
        asked = []
        for number, wish in enumerate(asking, start=1 << 40):
            lengths = len(wish.prompt), wish.num_new
            wish.due_s = wish.arrived_s + latest_start_s(times, *lengths, Due(end_s=wish.total_s))
            new = new_standing(number, *lengths, due_s=wish.due_s)
            asked.append(Asked((new,), Due(end_s=wish.last_s - now_s)))
        book = Book(state, times, self.safety, promised, LAG_S)
        self.looked_s, self.verdicts = now_s, list(zip(asking, book.decide(asked), strict=True))
        for i, (first_s, end_s) in book.delays_s().items():
            first, end = known[i].expected
            known[i].expected = Foreseen(first + first_s, end + end_s)

    def let_in(self) -> None:
        verdicts, self.verdicts = self.verdicts, []
        for wish, verdict in verdicts:
            wish.entered_s = self.clock.now_s  # or could have
            wish.verdict_s = self.looked_s + LAG_S - wish.arrived_s
            if verdict is None or not verdict.is_kept:
                wish.outcome = "refused"
                continue
            wish.made_s = self.looked_s
            wish.expected = Foreseen(*(self.looked_s + seconds for seconds in verdict.foreseen))
            asked = wish.asked()
            number = self.engine.add(
                asked.prompt, asked.sampling(), arrival_s=wish.entered_s, due_s=wish.due_s
            )
            self.runner.note(number, asked)
            self.open[number] = wish


def num_in_vain(wishes: Iterable[Wish], times: StepTime, num_chosen: int) -> int:
    """Return how many of some refused requests break no promise if they alone are let in."""
    accepted = [wish for wish in wishes if wish.outcome in ("kept", "broken")]
    refused = [wish for wish in wishes if wish.outcome == "refused"]

    def kept(load: list[Wish]) -> set[Wish]:
        by_prompt = {wish.prompt: wish for wish in load}
        load = sorted(load, key=lambda wish: wish.entered_s)
        records = simulate([wish.asked() for wish in load], SETTINGS, times)
        ended = [one for one in records if isinstance(one, RequestRecord)]
        found = ((by_prompt[one.prompt_token_ids], one.finish_s) for one in ended)
        return {wish for wish, end_s in found if end_s <= wish.last_s}

    before = kept(accepted)
    chosen = random.Random(0).sample(refused, num_chosen)
    return sum(kept([*accepted, wish]) >= before | {wish} for wish in chosen)
