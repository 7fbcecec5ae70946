"""Promises: whether a request can be done in time without breaking what was promised before.

A forecast says when each request will have its first token and its end. It is stretched by a margin
(``PromiseMargin``). A request that is in time with its margin is promised. One that is in time
only without it is accepted without a promise, if that breaks none; all others are refused. Requests
without a deadline break no promise: as many enter as a forecast allows. It knows nothing of clocks,
threads and HTTP, and forecasts are a parameter.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, exp, inf, log, sqrt
from typing import Literal, NamedTuple

from ridgeline.core.scheduling.admission import fair_share
from ridgeline.foresight.simulator.forecast import PredictedTimes, RequestSnapshot, State, forecast
from ridgeline.foresight.simulator.run import TimeModel
from ridgeline.foresight.step_time.features import of_items

_MAX_FORECASTS = 12  # of one round
_OF_THE_REST = 0.1  # that a new request may take of the time left to a promise that may fail
_PATIENCE = 2.0  # a forecast ends at this multiple of the last deadline
_NUM_LENGTHS = 20  # answers from which the length of the next is predicted
_MOST_LENGTHS = 200  # lengths of answers to a key

Outlook = Literal["promised", "unpromised", "refused"]


class Due(NamedTuple):
    """When first token and end are due, in seconds from now; inf if that was not asked for."""

    first_s: float = inf
    end_s: float = inf


class PromiseRequest(NamedTuple):
    """A request with a deadline, or what is left of it: one snapshot for each of its prompts.

    Attributes:
        is_protected: whether no other may take its margin; not if it was accepted without promise.
    """

    snapshots: tuple[RequestSnapshot, ...]
    due: Due
    is_protected: bool = True

    @property
    def owner(self) -> str:
        """Whose it is."""
        return self.snapshots[0].owner

    @property
    def num_seqs(self) -> int:
        """How many sequences it is, or will be."""
        return sum(answer.num_seeds for one in self.snapshots for answer in one.answers)


class AdmissionVerdict(NamedTuple):
    """The prediction for a request with a deadline.

    Attributes:
        outlook: "promised" if it is in time with the margin, "unpromised" if only without, else
            "refused". A request that would harm a promise is refused as well.
        foreseen: until the last of its prompts has its first token, and until all have ended.
        stretched: the same with a margin; this was compared with what is due.
    """

    outlook: Outlook
    foreseen: PredictedTimes
    stretched: PredictedTimes


class Lengths:
    """How long answers to the requests of each key were."""

    def __init__(self) -> None:
        """Begin without an answer."""
        self._of: dict[str, deque[int]] = {}

    def note(self, label: str, num_tokens: int) -> None:
        """Add an answer that ended by itself or by its length."""
        self._of.setdefault(label, deque(maxlen=_MOST_LENGTHS)).append(num_tokens)

    def expected(self, label: str, most: int) -> int:
        """Return the 90 % quantile, at most ``most``; that, where too few answers are known."""
        lengths = self._of.get(label, ())
        if len(lengths) < _NUM_LENGTHS:
            return most
        return max(1, min(most, ceil(_quantile(lengths, 0.9))))


@dataclass
class AdmissionRound:
    """One round of decisions over a copied state: what is promised, and how many others enter.

    Attributes:
        state: with all requests that run.
        margin: what forecasts are multiplied by, at least 1.
        promised: what was promised before, or accepted without, by a name.
        lag_s: from the state until a request that is promised now is in the engine.
        has_time: whether one more forecast may be made.
        forecaster: how long until what; for tests of this alone.
        under_way_s: for how long the step that the state is before has run by now.
        coming: promised requests that are not in the state yet, and after how many seconds each
            enters.
    """

    state: State
    times: TimeModel
    margin: float
    promised: dict[int, PromiseRequest]
    lag_s: float = 0.0
    has_time: Callable[[], bool] = lambda: True
    forecaster: Callable[..., Mapping[int, PredictedTimes]] = forecast
    under_way_s: float = 0.0
    coming: tuple[tuple[float, RequestSnapshot], ...] = ()

    def __post_init__(self) -> None:
        """Foresee what was promised before."""
        self._num_left = _MAX_FORECASTS
        self._verdicts = self._foresee(self.promised) if self.promised else {}
        self._before = self._verdicts

    def decide(
        self,
        requests: Sequence[PromiseRequest],
        refuse: Callable[[int, AdmissionVerdict], None] = lambda index, verdict: None,
    ) -> list[AdmissionVerdict | None]:
        """Return a verdict for each of these, in order; None where there was no time for one.

        All at once if all can be promised, else by halves: what is promised first, counts.
        ``refuse`` is called with each that is refused, by its index, as soon as that is known.
        """
        names = self._names(requests, 0, refuse)
        return [self._accepted(name) if isinstance(name, int) else name for name in names]

    def _accepted(self, name: int) -> AdmissionVerdict:
        """Return the verdict for one that is let in, with what others delay it since."""
        outlook: Outlook = "promised" if self.promised[name].is_protected else "unpromised"
        return self._verdicts[name]._replace(outlook=outlook)

    def _names(
        self,
        requests: Sequence[PromiseRequest],
        at: int,
        refuse: Callable[[int, AdmissionVerdict], None],
    ) -> list[int | AdmissionVerdict | None]:
        """Return the names of those that are let in now, else as ``decide`` does."""
        if not requests or not self._may_go_on():
            return [None] * len(requests)
        first = max(self.promised, default=0) + 1
        trial = dict(enumerate(requests, start=first))
        verdicts = self._foresee(self.promised | trial, trial)
        is_harmful = self._harms(verdicts, trial)
        if not is_harmful and all(verdicts[name].outlook == "promised" for name in trial):
            self._keep(trial, verdicts)
            return list(trial)
        if len(requests) == 1:
            if not is_harmful and verdicts[first].outlook == "unpromised":
                self._keep({first: requests[0]._replace(is_protected=False)}, verdicts)
                return [first]
            verdict = verdicts[first]._replace(outlook="refused")
            refuse(at, verdict)
            return [verdict]
        half = len(requests) // 2
        before = self._names(requests[:half], at, refuse)
        return [*before, *self._names(requests[half:], at + half, refuse)]

    def num_may_enter(self, queued: Sequence[RequestSnapshot]) -> int:
        """Return how many that have no deadline may come in now, and break no promise."""
        if not any(request.is_protected for request in self.promised.values()):
            return len(queued)
        num = len(queued)
        while num and self._may_go_on():
            verdicts = self._foresee(self.promised, queued=queued[:num])
            if not self._harms(verdicts):
                self._verdicts = verdicts
                return num
            num //= 4
        return 0

    def delays_s(self) -> dict[int, tuple[float, float]]:
        """Return by how much the requests of this round delay those that were promised before.

        By so much the earlier forecasts differ from what will happen; that is no error of theirs.
        """
        delays = {}
        for name, verdict in self._before.items():
            now, then = self._verdicts[name].foreseen, verdict.foreseen
            first_s = _difference(now.first_s, then.first_s)
            delays[name] = first_s, _difference(now.end_s, then.end_s)
        return delays

    def _may_go_on(self) -> bool:
        return self._num_left > 0 and self.has_time()

    def _harms(
        self,
        verdicts: dict[int, AdmissionVerdict],
        trial: Mapping[int, PromiseRequest] | None = None,
    ) -> bool:
        """Whether a kept promise becomes endangered, or one that may fail becomes more so.

        What an owner was promised beyond its share does not hinder another owner on trial.
        """
        beyond = self._beyond(trial or {})
        for name, old in self._verdicts.items():
            one, new = self.promised[name], verdicts[name]
            if one.owner in beyond or not one.is_protected:
                continue
            if old.outlook == "promised":
                if new.outlook != "promised":
                    return True
            elif old.outlook == "unpromised" and _is_pressed(new.foreseen, old.foreseen, one.due):
                return True
        return False

    def _beyond(self, trial: Mapping[int, PromiseRequest]) -> set[str]:
        """Return the owners of more such sequences than their share; none on trial is one."""
        wanted = Counter[str]()
        for request in (*self.promised.values(), *trial.values()):
            wanted[request.owner] += request.num_seqs * request.is_protected
        share = fair_share(wanted.values(), self.state.settings.max_num_seqs)
        asking = {request.owner for request in trial.values()}
        return {owner for owner in wanted.keys() - asking if asking and wanted[owner] > share}

    def _keep(
        self, newly_promised: Mapping[int, PromiseRequest], verdicts: dict[int, AdmissionVerdict]
    ) -> None:
        self.promised |= newly_promised
        self.coming += self._entering(newly_promised)
        self._verdicts = verdicts

    def _foresee(
        self,
        promised: Mapping[int, PromiseRequest],
        trial: Mapping[int, PromiseRequest] | None = None,
        queued: Sequence[RequestSnapshot] = (),
    ) -> dict[int, AdmissionVerdict]:
        """Foresee all that is promised, with those on trial as well."""
        self._num_left -= 1
        numbers = [one.number for request in promised.values() for one in request.snapshots]
        last_s = max((s for one in promised.values() for s in one.due if s < inf), default=0.0)
        within_s = _PATIENCE * last_s
        forecasts = self.forecaster(
            self.state,
            self.times,
            numbers,
            queued=queued,
            coming=self.coming + self._entering(trial or {}),
            under_way_s=self.under_way_s,
            within_s=within_s,
        )
        return {name: self._verdict(request, forecasts) for name, request in promised.items()}

    def _entering(
        self, requests: Mapping[int, PromiseRequest]
    ) -> tuple[tuple[float, RequestSnapshot], ...]:
        return tuple((self.lag_s, one) for each in requests.values() for one in each.snapshots)

    def _verdict(
        self, request: PromiseRequest, forecasts: Mapping[int, PredictedTimes]
    ) -> AdmissionVerdict:
        each = [forecasts[snapshot.number] for snapshot in request.snapshots]
        foreseen = PredictedTimes(max(one.first_s for one in each), max(one.end_s for one in each))
        stretched = PredictedTimes(*(self.margin * seconds for seconds in foreseen))
        outlook: Outlook = "refused"
        if _is_in_time(foreseen, request.due):
            outlook = "promised" if _is_in_time(stretched, request.due) else "unpromised"
        return AdmissionVerdict(outlook, foreseen, stretched)


def _is_in_time(foreseen: PredictedTimes, due: Due) -> bool:
    return foreseen.first_s <= due.first_s and foreseen.end_s <= due.end_s


def _is_pressed(foreseen: PredictedTimes, before: PredictedTimes, due: Due) -> bool:
    times = zip(foreseen, before, due, strict=True)
    return any(now > then + _OF_THE_REST * (last - then) for now, then, last in times if last < inf)


def latest_start_s(times: TimeModel, num_prompt: int, num_new: int, due: Due) -> float:
    """Return until when a request may wait, in seconds from now, if it were alone from then on.

    This is its slack: requests with a deadline are served in this order.
    """
    reading_s = times.seconds(of_items([(0, num_prompt, 1)], times.windows))
    half_way = of_items([(num_prompt + num_new // 2 - 1, 1, 1)], times.windows)
    writing_s = times.seconds(half_way) + times.after(1, 0)
    return min(due.first_s - reading_s, due.end_s - reading_s - (num_new - 1) * writing_s)


def _difference(after_s: float, before_s: float) -> float:
    return after_s - before_s if max(after_s, before_s) < inf else 0.0


def _quantile(values: Iterable[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, ceil(share * len(ordered)) - 1)]


_LEAST, _MOST = 1.0, 4.0  # bounds of what a forecast is multiplied by
_NUM_ERRORS = 25  # relative errors that mean and spread are taken of
_NUM_PRIOR, _PRIOR_SD = 4, 0.1  # errors that are believed beside those seen; of their log
_TARGET = 0.004  # share of promises that may break: then any 500 have five at most, by chance too
_STEP = 0.6  # by which a broken promise widens the margin, in spreads
_WIDTHS = 0.5, 5.0  # bounds of the width
_FIRST_WIDTH = 2.2
_NUM_JUDGED = 500  # outcomes that are looked back at
_MOST_BROKEN, _FEW_BROKEN = 5, 2  # of these: promises end at the one, and begin again at the other


class PromiseMargin:
    """What forecasts are multiplied by, and whether promises are made at all.

    Attributes:
        factor: what a forecast is multiplied by.
        are_promises_made: False where too many were broken of late. What would be promised is
            judged all the same.
    """

    def __init__(self) -> None:
        """Begin without a forecast."""
        self._errors = deque[float](maxlen=_NUM_ERRORS)  # of logarithms
        self._width = _FIRST_WIDTH
        self._broken = deque[bool](maxlen=_NUM_JUDGED)
        self.are_promises_made = True
        self.factor = self._factor()

    def note(self, foreseen_s: float, happened_s: float) -> None:
        """Add what was predicted, without margin, and what it became."""
        if 0 < foreseen_s < inf and 0 < happened_s < inf:
            self._errors.append(log(happened_s / foreseen_s))
            self.factor = self._factor()

    def judge(self, *, is_broken: bool) -> None:
        """Add what became of a promise, or of what would be one if any were made."""
        self._broken.append(is_broken)
        narrowest, widest = _WIDTHS
        self._width = min(widest, max(narrowest, self._width + _STEP * (is_broken - _TARGET)))
        limit = _MOST_BROKEN if self.are_promises_made else _FEW_BROKEN + 1
        self.are_promises_made = sum(self._broken) < limit
        self.factor = self._factor()

    def _factor(self) -> float:
        count = len(self._errors) + _NUM_PRIOR
        mean = sum(self._errors) / count
        squares = sum((error - mean) ** 2 for error in self._errors)
        spread = sqrt((squares + _NUM_PRIOR * _PRIOR_SD**2) / count)
        return min(_MOST, max(_LEAST, exp(max(0.0, mean) + self._width * spread)))
