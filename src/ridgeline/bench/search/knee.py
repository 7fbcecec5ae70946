"""Which load to try next, to find the highest that holds. Pure.

It grows the load until a trial fails, then narrows the interval between the highest load that held
and the lowest that failed to 5 %, and tries both ends again. Trials at one load count as one. Then
all trials together say where the limit most likely is. It knows nothing of servers and of what a
load is.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ridgeline.bench.search.slo import Tally, pooled

WIDTH = 1.05  # of the interval that answers: its upper end by its lower one
_STEP = 1.045  # from one end of the interval: a little less, so that it ends the search there
_LEAST = 1e-3  # tightness: what is less is as good as nothing
_LEAST_CUT = 0.1  # of the interval, as a part of its logarithm: a wrong guess still narrows it
_FAR, _NEAR = 4.0, 1.3  # times the load, to find the other end of the interval
_SPREAD = 0.03  # of the limit, as a part: where verdicts are chance; found on simulated queues
_NUM_LIMITS = 1000  # that are weighed
_LEAST_LOG = -40.0
_NUM_GUESSES = 3  # narrowing by interpolation; then all trials say where, which always ends


@dataclass(frozen=True, slots=True)
class Trial:
    """What one trial says.

    Attributes:
        load: requests per second, or requests at a time.
        tallies: of each service level.
        is_overloaded: whether the queue grew without end.
        tightness: the worst of measured percentile / limit; 1 is just met.
        completed_per_s: requests that ended per second.
    """

    load: float
    tallies: tuple[Tally, ...]
    is_overloaded: bool
    tightness: float
    completed_per_s: float

    @property
    def holds(self) -> bool:
        """Whether all service levels were met."""
        return all(one.holds for one in self.tallies) and not self.is_overloaded


@dataclass(frozen=True, slots=True)
class Point:
    """All trials at one load."""

    load: float
    num_trials: int
    holds: bool
    tightness: float
    is_overloaded: bool
    completed_per_s: float


@dataclass(frozen=True, slots=True)
class LoadInterval:
    """The highest load that held, and the lowest that failed; None where there is none."""

    low: Point | None
    high: Point | None


def points(trials: Sequence[Trial]) -> list[Point]:
    """Return what the trials say of each load, in order of load."""
    merged = []
    for load in sorted({trial.load for trial in trials}):
        same = [trial for trial in trials if trial.load == load]
        columns = zip(*(trial.tallies for trial in same), strict=True)
        together = [pooled(column) for column in columns]
        # One overload of two may be chance; the pooled requests decide.
        is_overloaded = sum(trial.is_overloaded for trial in same) * 2 > len(same)
        merged.append(
            Point(
                load,
                len(same),
                all(one.holds for one in together) and not is_overloaded,
                sum(trial.tightness for trial in same) / len(same),
                is_overloaded,
                sum(trial.completed_per_s for trial in same) / len(same),
            )
        )
    return merged


def interval(trials: Sequence[Trial]) -> LoadInterval:
    """Return between which loads the answer lies. What held above one that failed was luck."""
    ordered = points(trials)
    high = next((point for point in ordered if not point.holds), None)
    below = [point for point in ordered if high is None or point.load < high.load]
    return LoadInterval(below[-1] if below else None, high)


def likely_limit(trials: Sequence[Trial]) -> float | None:
    """Return the limit that trials speak for; None unless some held and some failed.

    Close to the limit verdicts are chance, as a queue remembers hundreds of requests: a trial holds
    with a probability that falls as a logistic of the load's logarithm, and is one half at the
    limit. Before the trials all logarithms between the loads are as likely; this is the median
    behind them, which a lucky trial moves less than the ends of the interval (as in a probabilistic
    bisection: Waeber, Frazier and Henderson, 2013).
    """
    verdicts = [(math.log(trial.load), 1 if trial.holds else -1) for trial in trials]
    if len({sign for _, sign in verdicts}) < 2:
        return None
    first, last = min(verdicts)[0], max(verdicts)[0]
    limits = [first + (last - first) * i / _NUM_LIMITS for i in range(_NUM_LIMITS + 1)]
    logs = [
        sum(_log_logistic(sign * (limit - load) / _SPREAD) for load, sign in verdicts)
        for limit in limits
    ]
    most = max(logs)
    sums = list(accumulate(math.exp(log - most) for log in logs))
    return math.exp(limits[bisect_left(sums, sums[-1] / 2)])


def _log_logistic(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > _LEAST_LOG else x  # equal there, and exp is too large


class LoadSearch:
    """The next load to try, given those that were.

    Args:
        start: the first load.
        least: the smallest load that makes sense; if it fails, none holds.
        is_whole: loads are whole numbers: requests at a time. Else requests per second.
        is_near: the first load was predicted to be near the limit: the steps from it begin small.
    """

    def __init__(
        self, start: float, least: float, *, is_whole: bool, is_near: bool = False
    ) -> None:
        self.trials: list[Trial] = []
        self._start, self._least, self._is_whole = start, least, is_whole
        self._reach = _NEAR if is_near else _FAR
        self._num_guesses = 0

    def next_load(self) -> float | None:
        """Return the load of the next trial, or None: the answer is ``interval(trials)``."""
        bounds = interval(self.trials)
        low, high = bounds.low, bounds.high
        if not self.trials:
            return self._start
        if high is None:
            return self._higher()
        if low is None:
            return self._lower(high)
        if self._is_closed(low.load, high.load):
            return next((end.load for end in (low, high) if end.num_trials < 2), None)
        return self._between(low, high)

    def _higher(self) -> float:
        """Return twice to four times the load, as far as the last two see the limit.

        Less, from a load that was predicted.
        """
        *others, last = points(self.trials)
        far = self._stride()
        near = math.sqrt(far)
        load = last.load * (far if last.tightness < 0.5 else near)
        if others:
            guess = self._guess(others[-1], last)
            # Behind the last load, or there is none: then it is far.
            load = guess * _STEP if guess > last.load else last.load * far
        load = min(max(load, last.load * near), last.load * far)
        return float(round(load)) if self._is_whole else load

    def _guess(self, low: Point, high: Point) -> float:
        return (_concurrency_at_limit if self._is_whole else _rate_at_limit)(low, high)

    def _lower(self, high: Point) -> float | None:
        if high.load > self._least:
            load = max(self._least, high.load / self._stride())
            return float(round(load)) if self._is_whole else load
        return high.load if high.num_trials < 2 else None

    def _stride(self) -> float:
        """Return how far to go to find the other end; each time further, as far as from nothing."""
        reach, self._reach = self._reach, min(_FAR, self._reach**2)
        return reach

    def _is_closed(self, low: float, high: float) -> bool:
        return high <= WIDTH * low or (self._is_whole and high - low <= 1)

    def _between(self, low: Point, high: Point) -> float:
        """Return a load between two, where interpolation or all trials together see the limit.

        If an end did not stand, the next one may be far away; the limit is not.
        """
        load = math.sqrt(low.load * high.load)
        self._num_guesses += 1
        if high.load > _STEP**2 * low.load:
            edge = max(_STEP, (high.load / low.load) ** _LEAST_CUT)
            is_guess = self._num_guesses <= _NUM_GUESSES
            load = self._guess(low, high) if is_guess else likely_limit(self.trials) or load
            load = min(max(load, low.load * edge), high.load / edge)
        if self._is_whole:
            load = float(min(max(round(load), low.load + 1), high.load - 1))
        return load


def _rate_at_limit(low: Point, high: Point) -> float:
    """Return the rate at which the latency is its limit, seen from two rates.

    Near saturation the reciprocal of a latency falls as a straight line to 0 at the highest rate
    that the server can take, as in an M/M/1 queue. An overloaded trial says what that rate is; its
    latencies say only how long it ran.
    """
    x, y = high.load, 1 / max(high.tightness, _LEAST)
    if high.is_overloaded or math.isinf(high.tightness):
        if high.completed_per_s <= low.load:  # it ended too early to say what the server can take
            return math.sqrt(low.load * high.load)
        x, y = min(x, high.completed_per_s), 0.0
    return _crossing((low.load, 1 / max(low.tightness, _LEAST)), (x, y))


def _concurrency_at_limit(low: Point, high: Point) -> float:
    """Return the number of requests at a time at which the latency is its limit, seen from two.

    The latency is a straight line: once the server is busy, all requests share what it does.
    """
    if math.isinf(high.tightness):
        return math.sqrt(low.load * high.load)
    return _crossing((low.load, low.tightness), (high.load, high.tightness))


def _crossing(first: tuple[float, float], second: tuple[float, float]) -> float:
    """Return where the line through two points is 1; the middle if it is level."""
    (x1, y1), (x2, y2) = first, second
    return (x1 + x2) / 2 if y1 == y2 else x1 + (1 - y1) * (x2 - x1) / (y2 - y1)
