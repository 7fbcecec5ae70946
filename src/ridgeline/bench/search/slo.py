"""Service levels, and whether a trial meets them. Pure.

``ttft:p95:500`` means that 95 % of requests have their first token within 500 ms; a failed request
does not. So each request meets it or not, and how often it is met is a binomial number: a trial is
over as soon as that number is certain enough. ``ttft:mean:500`` is about the mean, which is certain
when the limit is further from it than its standard error lets it be.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.bench.load.stats import LIMIT_NAMES, Outcome
from ridgeline.foresight.explain import METRICS

ERROR = 0.005  # chance that a trial which ends early says what a long one would not
_MIN_REQUESTS = 20  # fewer say nothing, however clear they are: the server may only be warming up
_DEVIATIONS = 2.58  # of a normal mean: it is further away with a chance of ``ERROR`` on each side


@dataclass(frozen=True, slots=True)
class RequestSlo:
    """``percent`` of requests have a latency ``metric`` of at most ``limit_ms``; None: the mean."""

    metric: str
    percent: float | None
    limit_ms: float

    def __str__(self) -> str:
        return f"{self.metric}:{self._of}:{self.limit_ms:g}"

    @property
    def label(self) -> str:
        """What a column of its values is called."""
        return f"{self.metric} {self._of}"

    @property
    def _of(self) -> str:
        return "mean" if self.percent is None else f"p{self.percent:g}"

    def value_s(self, outcome: Outcome) -> float:
        """Return the latency of an ended request: infinite if it failed, 0 without a tpot."""
        if outcome.error is not None:
            return math.inf
        name = LIMIT_NAMES[self.metric]
        return outcome.latencies_s().get(name, 0.0 if self.metric == "tpot" else math.inf)

    def is_met(self, outcome: Outcome) -> bool:
        """Return whether an ended request is within the limit."""
        return 1e3 * self.value_s(outcome) <= self.limit_ms

    def is_met_so_far(self, outcome: Outcome, now_s: float) -> bool | None:
        """Return whether a request under way meets it; None if that is open."""
        if self.metric == "ttft" and outcome.chunk_s:
            return 1e3 * (outcome.chunk_s[0] - outcome.sent_s) <= self.limit_ms
        if self.percent is None:  # by how much it will be late counts
            return None
        is_late = self.metric != "tpot" and 1e3 * (now_s - outcome.sent_s) > self.limit_ms
        return False if is_late else None


def parse_slo(text: str) -> RequestSlo:
    """Read ``METRIC:PERCENTILE:MS``, such as ``ttft:p95:500`` or ``ttft:mean:300``.

    Raises ValueError that says what there is.
    """
    match = re.fullmatch(r"(\w+):(?:mean|p?(\d+(?:\.\d+)?)):(\d+(?:\.\d+)?)", text.strip())
    if match and match[1] in METRICS and float(match[3]) > 0:
        percent = None if match[2] is None else float(match[2])
        if percent is None or 0 < percent < 100:
            return RequestSlo(match[1], percent, float(match[3]))
    raise ValueError(
        f"--slo {text} is not METRIC:PERCENTILE:MS, such as ttft:p95:500; METRIC is one of "
        f"{', '.join(METRICS)}, the percentile between 0 and 100, or mean"
    )


@dataclass(frozen=True, slots=True)
class Tally:
    """How many of the requests met a service level; of a mean also what it is, and how sure."""

    slo: RequestSlo
    num_met: int
    num: int
    mean_ms: float = 0.0
    error_ms: float = 0.0  # standard error of the mean

    @property
    def holds(self) -> bool:
        """Whether the share that was seen is enough, or the mean is within the limit."""
        if self.slo.percent is None:
            return self.num > 0 and self.mean_ms <= self.slo.limit_ms
        return self.num > 0 and 100 * self.num_met >= self.slo.percent * self.num

    @property
    def certain(self) -> bool | None:
        """Whether more requests would be enough too; None if that is open."""
        if self.num < _MIN_REQUESTS:
            return None
        if self.slo.percent is None:
            is_clear = abs(self.mean_ms - self.slo.limit_ms) > _DEVIATIONS * self.error_ms
            return self.holds if is_clear else None
        share = self.slo.percent / 100
        if at_least(self.num_met, self.num, share) < ERROR:
            return True
        if at_least(self.num - self.num_met, self.num, 1 - share) < ERROR:
            return False
        return None


def pooled(tallies: Sequence[Tally]) -> Tally:
    """Return what several trials at one load say of a service level together."""
    num = sum(one.num for one in tallies)
    mean_ms = sum(one.num * one.mean_ms for one in tallies) / max(num, 1)
    return Tally(tallies[0].slo, sum(one.num_met for one in tallies), num, mean_ms)


def at_least(k: int, n: int, p: float) -> float:
    """Return the probability of ``k`` or more successes in ``n``, each of probability ``p``."""
    if k <= 0:
        return 1.0
    logs = (math.log(p), math.log1p(-p))
    return min(
        1.0,
        sum(
            math.exp(
                math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1)
                + i * logs[0] + (n - i) * logs[1]
            )
            for i in range(k, n + 1)
        ),
    )  # fmt: skip


def tally(
    slos: Sequence[RequestSlo], ended: Sequence[Outcome], under_way: Sequence[Outcome], now_s: float
) -> list[Tally]:
    """Count the measured requests that met each service level, from the first to the last known.

    It stops before the first request whose fate is open: those behind it that have ended are the
    quick ones, and would flatter the server.
    """
    tallies = []
    for slo in slos:
        fates = {o.index: slo.is_met_so_far(o, now_s) for o in under_way}
        fates |= {o.index: slo.is_met(o) for o in ended}
        verdicts = [fates[index] for index in sorted(fates) if index >= 0]
        if None in verdicts:
            verdicts = verdicts[: verdicts.index(None)]
        num_met = sum(bool(fate) for fate in verdicts)
        if slo.percent is not None:
            tallies.append(Tally(slo, num_met, len(verdicts)))
            continue
        latencies = {o.index: 1e3 * slo.value_s(o) for o in ended}
        latencies |= {o.index: 1e3 * (o.chunk_s[0] - o.sent_s) for o in under_way if o.chunk_s}
        measured = [index for index in sorted(fates) if index >= 0]
        values = [latencies[index] for index in measured[: len(verdicts)]]
        mean_ms = sum(values) / max(len(values), 1)
        spread = sum((value - mean_ms) ** 2 for value in values) if mean_ms < math.inf else 0.0
        error_ms = math.sqrt(spread / max(len(values) - 1, 1) / max(len(values), 1))
        tallies.append(Tally(slo, num_met, len(verdicts), mean_ms, error_ms))
    return tallies


def verdict(tallies: Sequence[Tally]) -> bool | None:
    """Return what is certain: False if one service level is missed, True if all are met."""
    sure = [one.certain for one in tallies]
    if False in sure:
        return False
    return None if None in sure else True


def queue_grows(
    sent_s: Sequence[float], ended_s: Sequence[float], start_s: float, now_s: float
) -> bool:
    """Return whether requests come faster than they are answered, beyond chance.

    The time is cut into three windows: the number under way must grow from each to the next, and
    from the first to the last by more than three deviations of a random walk. A server that cannot
    keep up fails, however generous its limits: they only hide it for a while.

    Args:
        sent_s: when each request was sent, those of the warm-up too.
        ended_s: when those that have ended did.
        start_s: when the windows begin: at the end of the warm-up.
        now_s: the time.
    """
    cuts_s = [start_s + (now_s - start_s) * i / 3 for i in range(1, 4)]
    under_way = [sum(s <= t for s in sent_s) - sum(e <= t for e in ended_s) for t in cuts_s]
    num_since = sum(s > cuts_s[0] for s in sent_s)
    grows = num_since >= _MIN_REQUESTS and under_way[0] < under_way[1] < under_way[2]
    return grows and under_way[2] - under_way[0] > 3 * math.sqrt(num_since)
