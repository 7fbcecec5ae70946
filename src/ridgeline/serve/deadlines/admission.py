"""Deadlines: a request is promised to be in time, accepted without a promise, or refused at once.

Verdicts are made in rounds: forecasts begin at a copy of the engine's state, and are made in a
thread of their own, which takes an eighth of a processor, or more if rounds would be more than 50
ms apart (half a second while several owners have requests in the engine). A refusal is told as soon
as it is found. While there are promises a copy is made before each step, so that no round waits for
the step under way. Requests that come meanwhile share the next round. A client whose request is
refused learns it at once. A promised request enters the engine exactly when its forecast assumed,
or the forecast would not hold.
Nothing runs while no request has a deadline. All but the forecasts lives on the event loop; what is
decided there stands in ``foresight.deadline``. Where promises are off, everything goes on
as if they were made, but no client is told of one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from math import inf
from typing import NamedTuple

from ridgeline.core.params import SamplingParams
from ridgeline.core.records import RequestRecord
from ridgeline.core.step import Event
from ridgeline.engine.text_processor import TextProcessor
from ridgeline.foresight.deadline import (
    AdmissionRound,
    AdmissionVerdict,
    Due,
    Lengths,
    PromiseMargin,
    PromiseRequest,
)
from ridgeline.foresight.simulator.forecast import PredictedTimes, RequestSnapshot
from ridgeline.foresight.step_time.features import StepTime
from ridgeline.foresight.step_time.fit import FIRST_STEPS, PredictionMonitor
from ridgeline.serve.deadlines.field import Deadline, refusal, too_early
from ridgeline.serve.deadlines.prediction_sampling import snapshot_of, with_cached
from ridgeline.serve.deadlines.promise import Promise, due_from, ranked, refuse_now
from ridgeline.serve.engine.interface import EngineClient, EngineSnapshot
from ridgeline.serve.engine.request_stream import (
    ClientGone,
    RequestStream,
    StreamCaller,
    StreamError,
    StreamEvent,
)
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.fair_pool import carried

_log = logging.getLogger("ridgeline.serve")
_LEAST_PERIOD_S, _PERIOD_S = 0.02, 0.05  # from one round to the next; a request waits that long
_SHARED_PERIOD_S, _SHARED_S = 0.5, 1.0  # the longest while others are there, and until they are not
_SHARE = 1 / 8  # of a processor, for forecasts
_ROUND_S = 0.05  # after which a round begins no other forecast
_SOON_S = 1e-9
_FIRST_LAG_S, _NUM_LAGS = 0.03, 20
_PROMPTS = (5, 130, 20, 300, 60, 600, 10, 200)  # tokens, of requests that only measure
_WORDS = "How long does a step take, and how much longer if there is more in it?"
_MOST_WAVES = 100
_FITTING_S = 0.2  # from one to the next, while what they showed is fitted
_OUTSIDE = 1 << 40  # numbers of requests that are not in the engine yet
_NOT_MADE = (
    "the speed of this machine changes too much for promises: too many were broken; requests with "
    "a deadline are accepted without a promise until predictions are reliable again"
)
_MADE_AGAIN = "promises are made again: recent predictions were reliable"
# There was no time for a forecast.
_UNKNOWN = AdmissionVerdict("refused", PredictedTimes(), PredictedTimes())


class _RoundState(NamedTuple):
    """What a round decides about; seconds count from the copy."""

    copy: EngineSnapshot
    lag_s: float  # until a request that is promised now is in the engine
    requests: list[tuple[RequestSnapshot, ...]]
    promised: list[tuple[Promise, tuple[RequestSnapshot, ...]]]
    coming: list[RequestSnapshot]  # promised, and about to enter
    queued: list[RequestSnapshot]


class DeadlineAdmission:
    """The promises that were made, and whether they were kept."""

    def __init__(
        self,
        engine: EngineClient,
        monitor: PredictionMonitor,
        text: TextProcessor,
        count: Callable[[str], None],
        margin: PromiseMargin,
    ) -> None:
        """Promise what ``engine`` will do, by what ``monitor`` knows; ``count`` takes outcomes.

        Forecasts must be sooner than deadlines by ``margin``, which learns from outcomes.
        ``text`` is asked for what own requests need, those that only measure.
        """
        self._engine, self._monitor, self._text, self._count = engine, monitor, text, count
        self._margin, self._lengths = margin, Lengths()
        self._asking: list[tuple[Promise, asyncio.Future[AdmissionVerdict]]] = []
        self._open: list[Promise] = []
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._measuring: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "forecast")
        self._cost_s = 0.0  # of the processor, in the last round
        self._shared_s = -inf  # when several owners had requests in the engine
        self._copy: EngineSnapshot | None = None
        # From the begin of each of the last rounds until its verdicts were there.
        self._lags_s = deque((_FIRST_LAG_S,), maxlen=_NUM_LAGS)

    def close(self) -> None:
        """Make no more promises."""
        for task in (self._task, self._measuring):
            if task is not None:
                task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def request(self, stream: RequestStream, deadline: Deadline) -> Promise:
        """Wait until a stream is promised to be in time, or accepted. Raises ApiError if not."""
        due = Due(
            *(
                inf if ms is None else stream.arrived_s + ms / 1e3
                for ms in (deadline.ttft_ms, deadline.total_ms)
            )
        )
        promise, future = Promise(stream, deadline, due), asyncio.Future[AdmissionVerdict]()
        self._asking.append((promise, future))
        self._news.set()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._rounds())
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(loop.time() + min(due) - time.monotonic()):
                verdict = await future
        except TimeoutError:
            verdict = _UNKNOWN
        except ApiError:
            self._end(promise, "refused")
            raise
        if verdict.outlook == "refused":
            self._end(promise, "refused")
            raise refusal(deadline, verdict.stretched)
        self._watch(promise)
        return promise

    # --- what becomes of it --------------------------------------------------------------------

    def _watch(self, promise: Promise) -> None:
        """Follow an open promise; it is broken as soon as its time has passed."""
        stream, loop = promise.stream, asyncio.get_running_loop()

        def break_if_late() -> None:
            if min(promise.left()) <= time.monotonic() and not stream.is_given_up:
                self._finish(promise, is_in_time=False)

        for at_s in promise.due:
            if at_s < inf:  # the clock of the loop is the engine's
                loop.call_later(max(0.0, at_s - time.monotonic()) + 1e-3, break_if_late)

        def take(events: list[StreamEvent]) -> None:
            for index, payload in events:
                if isinstance(payload, Event) and payload.token is not None:
                    promise.begun.add(index)
                elif isinstance(payload, RequestRecord):
                    promise.records.append(payload)
            if len(promise.records) == len(stream.prompts):
                self._judge(promise)
            elif min(promise.left()) == inf:
                self._finish(promise, is_in_time=True)

        stream.on_events = take

    def _judge(self, promise: Promise) -> None:
        """Say what became of a promise whose request has ended; learn from it."""
        records = promise.records
        firsts = [record.first_token_s or inf for record in records]
        first_s, end_s = max(firsts), max(record.finish_s for record in records)
        reasons = {reason for record in records for reason in record.finish_reasons}
        if "abort" in reasons:
            self._end(promise, None)
            return
        is_in_time = first_s <= promise.due.first_s and end_s <= promise.due.end_s
        self._finish(promise, is_in_time=is_in_time and "error" not in reasons)
        made_s, expected = promise.made_s, promise.expected
        if first_s < inf:
            self._margin.note(expected.first_s - made_s, first_s - made_s)
        lengths = [num for record in records for num in record.num_generated]
        if max(lengths) == promise.num_new:  # else it was shorter, and says nothing
            self._margin.note(expected.end_s - made_s, end_s - made_s)

    def note_lengths(self, label: str, records: Sequence[RequestRecord]) -> None:
        """Learn how long answers to a key's requests are."""
        for record in records:
            if not {"abort", "error"} & {*record.finish_reasons}:
                self._lengths.note(label, max(record.num_generated))

    def _finish(self, promise: Promise, *, is_in_time: bool) -> None:
        """Say whether an accepted request was in time, once; learn from it if it was protected."""
        if promise.outcome is None and promise.is_protected:
            were_made = self._margin.are_promises_made
            self._margin.judge(is_broken=not is_in_time)
            if self._margin.are_promises_made != were_made:
                _log.warning(_NOT_MADE if were_made else _MADE_AGAIN)
        good, bad = ("kept", "broken") if promise.is_made else ("in_time", "late")
        self._end(promise, good if is_in_time else bad)

    def _end(self, promise: Promise, outcome: str | None) -> None:
        if promise in self._open:
            self._open.remove(promise)
        if promise.outcome is None and outcome is not None:
            promise.outcome = outcome
            self._count(outcome)

    # --- before anything is known ---------------------------------------------------------------

    async def _measure(self) -> None:
        """Run own requests until enough steps were seen: some of all sizes, one to eight at once.

        Else a server whose clients all have deadlines would never learn how fast it is.
        """
        num_wave, longest = 0, self._engine.settings.max_model_len // 2
        words = self._text.tokenizer.encode(_WORDS)
        while not self._monitor.is_calibrated and num_wave < _MOST_WAVES:
            sizes = _PROMPTS[num_wave % len(_PROMPTS) :][: 1 << num_wave % 4]
            prompts = [  # with nothing in common, or the cache would spare the work
                tuple(words[i * stride % len(words)] for i in range(1, 1 + min(size, longest)))
                for stride, size in enumerate(sizes, start=1 + len(_PROMPTS) * num_wave)
            ]
            params = SamplingParams(temperature=0.0, max_tokens=min(24, longest), ignore_eos=True)
            caller = StreamCaller("", name="measuring", cache_root=b"measuring")
            stream = RequestStream(prompts, params, self._text.new_text, caller)
            try:
                self._engine.submit(stream)
                while await stream.events():
                    pass
            except StreamError:  # the server is stopping
                return
            finally:
                self._engine.abandon(stream, ClientGone())
            num_wave += 1
            if self._monitor.num_steps >= FIRST_STEPS:  # a fit is under way; a step must follow it
                await asyncio.sleep(_FITTING_S)

    # --- rounds --------------------------------------------------------------------------------

    async def _rounds(self) -> None:
        loop = asyncio.get_running_loop()
        self._engine.before_step, self._copy = self._take_copy, None
        while self._asking or self._open:
            began_s = loop.time()
            if self._asking or self._engine.num_queued:
                await self._round()
                is_shared = began_s < self._shared_s + _SHARED_S
                longest_s = _SHARED_PERIOD_S if is_shared else _PERIOD_S
                period_s = min(longest_s, max(_LEAST_PERIOD_S, self._cost_s / _SHARE))
                await asyncio.sleep(max(0.0, began_s + period_s - loop.time()))
            else:
                self._news.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_PERIOD_S):
                        await self._news.wait()
            self._open = [one for one in self._open if not one.stream.is_over]
        self._engine.before_step = self._copy = None
        self._engine.permit(inf)

    async def _round(self) -> None:
        """Decide about all who ask, and how many others may enter."""
        asking, self._asking = self._asking, []
        loop = asyncio.get_running_loop()
        try:
            copy = await self._newest_copy()
            if len({one.owner for one in copy.state.requests}) > 1:
                self._shared_s = loop.time()
            if not self._monitor.is_calibrated:
                self._measuring = self._measuring or asyncio.create_task(self._measure())
                raise too_early(self._monitor.num_steps)
            began_s, lag_s = time.monotonic(), max(self._lags_s)
            promises = [promise for promise, _ in asking]
            round_state = self._facts(copy, promises, began_s - copy.now_s + lag_s)
            times = self._monitor.calibration.times.scaled(self._monitor.factor)

            # In the thread for forecasts.
            def refuse(index: int, verdict: AdmissionVerdict) -> None:
                loop.call_soon_threadsafe(refuse_now, *asking[index], verdict, copy.now_s)

            verdicts, num_may_enter, delays_s = await loop.run_in_executor(
                self._thread, carried(self._decide), round_state, promises, times, began_s, refuse
            )
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            for _, future in asking:
                if not future.done():
                    future.set_exception(error)
            if not isinstance(error, ApiError):
                raise
            return
        for i, (first_s, end_s) in delays_s.items():
            promise, _ = round_state.promised[i]
            expected = promise.expected
            promise.expected = PredictedTimes(expected.first_s + first_s, expected.end_s + end_s)
        accepted = []
        for one, verdict, snapshots in zip(asking, verdicts, round_state.requests, strict=True):
            promise, future = one
            if future.done():  # it was refused, or had no time to wait
                continue
            if verdict is None and not promise.is_put_off:
                promise.is_put_off = True
                self._asking.append(one)
            elif verdict is None or verdict.outlook == "refused":
                refuse_now(promise, future, verdict or _UNKNOWN, copy.now_s)
            else:
                accepted.append((promise, future, verdict))
                if not promise.stream.is_over:
                    self._accept(promise, verdict, snapshots, copy.now_s)
        if self._open:
            self._engine.permit(num_may_enter)
        if asking:
            self._lags_s.append(time.monotonic() - began_s)
        if accepted:
            await asyncio.sleep(max(0.0, began_s + lag_s - time.monotonic()))
        for promise, future, verdict in accepted:
            if future.done():  # its client has left
                self._end(promise, None)
            else:
                future.set_result(verdict)

    def _accept(
        self,
        promise: Promise,
        verdict: AdmissionVerdict,
        snapshots: tuple[RequestSnapshot, ...],
        now_s: float,
    ) -> None:
        promise.made_s, promise.snapshots = now_s, snapshots
        promise.is_protected = verdict.outlook == "promised"
        promise.is_made = promise.is_protected and self._margin.are_promises_made
        promise.foreseen = PredictedTimes(*(now_s + seconds for seconds in verdict.foreseen))
        promise.expected = promise.foreseen
        promise.num_new = max(snapshot.num_new for snapshot in snapshots)
        promise.stream.due_s = min(snapshot.due_s for snapshot in snapshots)
        self._open.append(promise)

    def _decide(
        self,
        round_state: _RoundState,
        asking: list[Promise],
        times: StepTime,
        began_s: float,
        refuse: Callable[[int, AdmissionVerdict], None],
    ) -> tuple[list[AdmissionVerdict | None], int, dict[int, tuple[float, float]]]:
        """Decide by forecasts, in the thread for them.

        Returns verdicts, how many others may enter, and how much both delay each promise.
        """
        thread_s, now_s = time.thread_time(), round_state.copy.now_s
        requests = [
            PromiseRequest(
                tuple(ranked(one, promise, times) for one in snapshots), due_from(promise, now_s)
            )
            for promise, snapshots in zip(asking, round_state.requests, strict=True)
        ]
        for i, one in enumerate(requests):
            round_state.requests[i] = one.snapshots
        promised = {
            i: PromiseRequest(
                snapshots,
                Due(*(at_s - now_s for at_s in promise.left())),
                promise.is_protected,
            )
            for i, (promise, snapshots) in enumerate(round_state.promised)
        }
        admission_round = AdmissionRound(
            round_state.copy.state,
            times,
            self._margin.factor,
            promised,
            round_state.lag_s,
            has_time=lambda: time.monotonic() < began_s + _ROUND_S,
            under_way_s=began_s - now_s,
            # Not in time for the step that the copy was made before.
            coming=tuple((_SOON_S, one) for one in round_state.coming),
        )
        verdicts = admission_round.decide(requests, refuse)
        num_may_enter = admission_round.num_may_enter(round_state.queued)
        self._cost_s = time.thread_time() - thread_s
        return verdicts, num_may_enter, admission_round.delays_s()

    async def _newest_copy(self) -> EngineSnapshot:
        """Return the copy made before the step under way, or one that is made now."""
        if self._copy is not None and self._engine.step_began_s is not None:
            return self._copy
        looked, copies = asyncio.Event(), list[EngineSnapshot]()

        def take_copy() -> None:
            try:
                copies.append(self._take_copy())
            finally:
                self._engine.call(looked.set)

        self._engine.between_steps(take_copy)
        await looked.wait()
        if not copies:
            raise ApiError(500, "no deadline can be promised now; the server's log says why")
        return copies[0]

    def _take_copy(self) -> EngineSnapshot:
        """Copy what a forecast needs; in the engine's thread."""
        copy = self._engine.snapshot()
        max_num_seqs = copy.state.settings.max_num_seqs
        self._copy = copy._replace(waiting=copy.waiting[:max_num_seqs])
        return self._copy

    def _facts(self, copy: EngineSnapshot, asking: list[Promise], lag_s: float) -> _RoundState:
        """Return what a round decides about."""
        here = {snapshot.number: snapshot for snapshot in copy.state.requests}
        open_promises, coming = [], list[RequestSnapshot]()
        for promise in self._open:
            snapshots = [here[n] for n in copy.numbers.get(promise.stream, ()) if n in here]
            if not snapshots and not promise.begun and promise.stream not in copy.numbers:
                snapshots = list(promise.snapshots)
                coming += snapshots
            if snapshots:
                open_promises.append((promise, tuple(snapshots)))
        taken = len(coming) + max((one.number for one in coming), default=_OUTSIDE)
        new = [self._snapshots(one, taken + (1 << 20) * i) for i, one in enumerate(asking, start=1)]
        queued = [
            snapshot_of(self._engine, stream, index, taken + (1 << 32) + i)
            for i, (stream, index) in enumerate(copy.waiting)
        ]
        return _RoundState(copy, lag_s, new, open_promises, coming, queued)

    def _snapshots(self, promise: Promise, number: int) -> tuple[RequestSnapshot, ...]:
        """Return the lengths of a request that asks, and what the cache has of it."""
        stream, engine = promise.stream, self._engine
        snapshots = []
        for i in range(len(stream.prompts)):
            one = snapshot_of(engine, stream, i, number + i)
            if promise.deadline.length == "expected":
                num_new = self._lengths.expected(stream.tenant, one.num_new)
                one = one._replace(num_new=num_new)
            snapshots.append(with_cached(engine, stream, i, one))
        return tuple(snapshots)
