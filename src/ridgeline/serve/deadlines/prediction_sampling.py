"""How good predictions at arrival are: one in fifty requests is predicted, and then compared.

The score of steps does not say which requests wait for which. So for a sample of requests a whole
forecast is made of the state that they found: requests that run and wait, each as long as it may
become. Requests that come later are not in it, nor can they be.

A server does not feel it: the state is copied once, between two steps, and the forecast is made in
a thread of low priority that rests after each simulated step, so that the engine never waits for
Python's lock for longer than that. Forecasts take at most a two-hundredth of a processor. There are
none while nothing was measured, or while promises hold other requests back.
"""

from __future__ import annotations

import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf

from ridgeline.core.records import RequestRecord
from ridgeline.foresight.simulator.forecast import (
    PredictedTimes,
    RequestSnapshot,
    State,
    forecast,
    new_snapshot,
)
from ridgeline.foresight.step_time.features import StepTime
from ridgeline.foresight.step_time.fit import PredictionMonitor
from ridgeline.serve.engine.interface import EngineClient, EngineSnapshot
from ridgeline.serve.engine.request_stream import RequestStream, StreamEvent
from ridgeline.system.machine import lower_priority

_log = logging.getLogger("ridgeline.serve")
EVERY = 50
_SHARE = 1 / 200  # of a processor
_REST_S = 0.002  # after each simulated step
_MOST_STEPS = 2000  # of a forecast: what takes more of them is not foreseen
_WAITING = 1 << 40  # numbers of requests that are not in the engine yet


class _TooLong(Exception):
    """A forecast took too many steps, or nobody wants it any more."""


@dataclass(eq=False)
class _Sample:
    """A request with a prediction; times are those of the engine's clock.

    Attributes:
        num_new: tokens of each answer that were reckoned with.
        first_s: when its first token was predicted; 0 as long as it is not.
        end_s: when its end was predicted.
        record: what it got, when it has ended.
    """

    stream: RequestStream
    num_new: int = 0
    first_s: float = 0.0
    end_s: float = 0.0
    record: RequestRecord | None = None


class Arrivals:
    """Foresees one of ``every`` requests when it comes, and tells the score how far that was off.

    All but the forecasts and the copies lives on the event loop.
    """

    def __init__(
        self, engine: EngineClient, monitor: PredictionMonitor, every: int = EVERY
    ) -> None:
        """Watch the requests that are submitted to ``engine``."""
        self.every = every
        self._engine, self._monitor = engine, monitor
        self._thread = ThreadPoolExecutor(1, "arrivals", lower_priority)
        self._num_since = 0  # requests since the last that was predicted
        self._next_s = 0.0  # before which no other forecast is made
        self._is_busy = self._is_closed = False
        engine.on_submit = self._note

    def close(self) -> None:
        """Make no more forecasts."""
        self._is_closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _note(self, stream: RequestStream) -> None:
        """Take a request that came."""
        self._num_since += 1
        if self._num_since < self.every or self._is_busy or not self._can_foresee(stream):
            return
        self._num_since, self._is_busy = 0, True
        sample = _Sample(stream)

        def take(events: list[StreamEvent]) -> None:
            for _, payload in events:
                if isinstance(payload, RequestRecord):
                    sample.record = payload
                    self._compare(sample)

        stream.on_events = take

        def copy() -> None:
            self._engine.call(self._begin, sample, self._engine.snapshot())

        self._engine.between_steps(copy)

    def _can_foresee(self, stream: RequestStream) -> bool:
        params = stream.params
        is_plain = len(stream.prompts) == 1 and not (params.searches or params.pool)
        is_free = stream.due_s == inf and self._engine.before_step is None
        is_time = not self._is_closed and time.monotonic() >= self._next_s
        return is_plain and is_free and is_time and self._monitor.is_calibrated

    def _begin(self, sample: _Sample, copy: EngineSnapshot) -> None:
        """Let a forecast begin at a copy of the engine's state."""
        engine, stream = self._engine, sample.stream
        queued = [
            snapshot_of(engine, one, index, _WAITING + i)
            for i, (one, index) in enumerate(copy.waiting)
        ]
        place = next((i for i, (one, _) in enumerate(copy.waiting) if one is stream), None)
        here = {snapshot.number: snapshot for snapshot in copy.state.requests}
        if place is not None:
            snapshot = queued[place] = with_cached(engine, stream, 0, queued[place])
        elif snapshots := [here[n] for n in copy.numbers.get(stream, ()) if n in here]:
            snapshot = snapshots[0]
        else:  # it was refused, or its client has left
            self._is_busy = False
            return
        sample.num_new = snapshot.num_new
        times = self._monitor.calibration.times.scaled(self._monitor.factor)

        def work() -> None:
            began_s = time.thread_time()
            foreseen = None
            try:
                foreseen = self._foresee(copy.state, times, snapshot.number, queued)
            except BaseException:  # nobody reads what becomes of this call
                _log.exception("a forecast failed")
            cost_s = time.thread_time() - began_s
            self._engine.call(self._end, sample, copy.now_s, foreseen, cost_s)

        if not self._is_closed:
            self._thread.submit(work)

    def _foresee(
        self, state: State, times: StepTime, number: int, queued: list[RequestSnapshot]
    ) -> PredictedTimes | None:
        """Return a forecast, in the thread for them; None if it takes too many steps."""
        steps = iter(range(_MOST_STEPS))

        def check() -> None:
            if self._is_closed or next(steps, None) is None:
                raise _TooLong
            time.sleep(_REST_S)

        try:
            return forecast(state, times, [number], queued=queued, check_cancel=check)[number]
        except _TooLong:
            return None

    def _end(
        self, sample: _Sample, now_s: float, foreseen: PredictedTimes | None, cost_s: float
    ) -> None:
        """Take what a forecast said."""
        self._is_busy = False
        self._next_s = time.monotonic() + cost_s / _SHARE
        if foreseen is not None and foreseen.end_s < inf:
            sample.first_s, sample.end_s = (now_s + seconds for seconds in foreseen)
            self._compare(sample)

    def _compare(self, sample: _Sample) -> None:
        """Tell how far a forecast was off, once it is known, and what happened."""
        record = sample.record
        if record is None or not sample.first_s or record.first_token_s is None:
            return
        if set(record.finish_reasons) - {"stop", "length"}:
            return
        arrival_s, ratios = record.arrival_s, {}
        first_s, end_s = record.first_token_s - arrival_s, record.finish_s - arrival_s
        ratios["ttft_at_arrival"] = (sample.first_s - arrival_s) / first_s
        if max(record.num_generated) == sample.num_new:  # else it was shorter, and says nothing
            ratios["e2e_at_arrival"] = (sample.end_s - arrival_s) / end_s
        self._monitor.note_request({of: abs(ratio - 1) for of, ratio in ratios.items()})


def snapshot_of(
    engine: EngineClient, stream: RequestStream, index: int, number: int
) -> RequestSnapshot:
    """Return a prompt that is not in the engine, whose answer is as long as it may become."""
    num_prompt, max_tokens = len(stream.prompts[index]), stream.params.max_tokens
    longest = max(1, engine.settings.max_model_len - num_prompt)
    num_new = longest if max_tokens is None else min(max_tokens, longest)
    num_seqs = stream.params.num_seqs
    return new_snapshot(number, num_prompt, num_new, num_answers=num_seqs, owner=stream.tenant)


def with_cached(
    engine: EngineClient, stream: RequestStream, index: int, snapshot: RequestSnapshot
) -> RequestSnapshot:
    """Return a prompt that is not in the engine, with what the prefix cache has of it."""
    num_cached = engine.num_cached(stream, index)
    answers = tuple(answer._replace(num_cached=num_cached) for answer in snapshot.answers)
    return snapshot._replace(answers=answers)
