"""What promises cost, against one who knows: how the machine's speed will be, at every moment."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from ridgeline.core.records import Record, RequestRecord
from ridgeline.foresight.simulator.forecast import PredictedTimes, forecast
from ridgeline.foresight.simulator.run import Clock, ClockHooks, new_replica, serve
from ridgeline.model.cost.costs import Features
from tests.foresight.overload import SETTINGS, TRUTH, Noise, Noisy, Promising, Speed, Wish

NUM_LOOKED_AT = 500  # promises, of which so few may break


class Known:
    """The margin of who knows: none, or some to spare for those that come later."""

    are_promises_made = True

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def note(self, foreseen_s: float, happened_s: float) -> None:
        pass

    def judge(self, *, is_broken: bool) -> None:
        pass


class Oracle(Promising):
    """A server whose forecasts take each step for as long as it will take."""

    def __init__(self, noise: Noise, seed: int, factor: float = 1.0) -> None:
        super().__init__(noise, seed)
        self.margin = Known(factor)  # type: ignore[assignment]

    def forecaster(self, now_s: float) -> Callable[..., Mapping[int, PredictedTimes]]:
        clock = Clock()

        def foresee(state, times, wanted, **more):  # type: ignore[no-untyped-def]
            clock.now_s = 0.0
            known = Noisy(clock, self.speed, self.hits, now_s)
            return forecast(state, known, wanted, clock=clock, **more)

        return foresee


class Steady:
    """The truth at the speed that the machine had at each moment, without what hit single steps."""

    windows = TRUTH.windows

    def __init__(self, noise: Noise, clock: Clock, speed: Speed) -> None:
        self._clock, self._speed = clock, speed
        self._held_up_s = noise.held_up * noise.held_up_s  # a step in the mean

    def seconds(self, features: Features) -> float:
        return TRUTH.seconds(features) * self._speed(self._clock.now_s) + self._held_up_s

    def after(self, num_rows: int, num_ended: int) -> float:
        return TRUTH.after(num_rows, num_ended)


def most_broken(wishes: Sequence[Wish]) -> int:
    """Return how many were broken of any so many promises in turn, at most."""
    promised = sorted((one for one in wishes if one.is_made), key=lambda one: one.made_s)
    broken = [one.outcome == "broken" for one in promised]
    begins = range(max(1, len(broken) - NUM_LOOKED_AT + 1))
    return max(sum(broken[i : i + NUM_LOOKED_AT]) for i in begins)


def slacks_in_vain(
    server: Promising, noise: Noise, wishes: Sequence[Wish], num_chosen: int
) -> tuple[list[float], int]:
    """Return the slack of those of some refused requests that break no promise if let in alone.

    And of how many. Slack is the time that a request had, over what it takes. All is simulated
    again at the speed that the machine had.
    """
    accepted = [wish for wish in wishes if wish.outcome != "refused"]
    refused = [wish for wish in wishes if wish.outcome == "refused"]

    def ends_s(load: list[Wish]) -> dict[int, float]:
        """Return when each ends, by the first token of its prompt."""
        clock, ended = Clock(), list[Record]()
        times = Steady(noise, clock, server.speed)
        replica, runner = new_replica(SETTINGS, clock, times, ended.append)

        def pass_after_step() -> None:
            clock.now_s += times.after(runner.num_rows, len(replica.ended))

        load = sorted(load, key=lambda wish: wish.entered_s)
        hooks = ClockHooks(clock, clock.wait_until, pass_after_step)
        serve(replica, [wish.asked() for wish in load], hooks)
        found = (one for one in ended if isinstance(one, RequestRecord))
        return {one.prompt_token_ids[0]: one.finish_s for one in found}

    def is_in_time(ended_s: dict[int, float], wish: Wish) -> bool:
        return ended_s[wish.prompt[0]] <= wish.last_s

    before = [one for one in accepted if one.is_made]
    before = [*filter(partial(is_in_time, ends_s(accepted)), before)]
    chosen = random.Random(0).sample(refused, min(num_chosen, len(refused)))
    slacks = []
    for wish in chosen:
        after = ends_s([*accepted, wish])
        if all(is_in_time(after, one) for one in (*before, wish)):
            slacks.append(wish.total_s / (after[wish.prompt[0]] - wish.arrived_s))
    return slacks, len(chosen)
