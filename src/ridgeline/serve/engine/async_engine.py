"""Between asyncio and the engine: one thread runs the engine, streams carry its events to the loop.

All streams' events of one step wake the loop once; an idle engine sleeps on a condition. Requests
wait here, in the order of ``core.front``, until the engine could start them.
Those in the background, as of a batch, give way to others and go on from their tokens.
The requests of a stream whose reader lags are paused: they have neither a slot nor memory in the
engine until the reader has caught up.
A step that fails is executed again by halves, until the request that breaks it is found.
Whatever fails here ends requests with an error, never the thread; should that end or hang all the
same, ``trouble`` says so at once, and nobody waits for it.
This module knows nothing of HTTP and text: token ids go in, events come out.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import inf
from typing import Any, TypeVar

from typing_extensions import override

from ridgeline.core.cache.kvcache import held_blocks
from ridgeline.core.engine import Engine
from ridgeline.core.front import QUIET_S, Front
from ridgeline.core.records import Record, RequestRecord
from ridgeline.core.request import Request, Sequence, Status
from ridgeline.core.scheduling.queues import Queues
from ridgeline.core.step import Event, Runner, Step, StepOutput
from ridgeline.foresight.simulator.forecast import state_of
from ridgeline.serve.engine.interface import EngineClient, EngineSnapshot
from ridgeline.serve.engine.request_stream import (
    PromptProgress,
    RequestStream,
    ServerEnds,
    StreamError,
    StreamEvent,
)
from ridgeline.system.machine import DeviceLost

_log = logging.getLogger("ridgeline.serve")
_WATCH_S = 0.5  # between two looks whether the thread is well
_MAX_SHOWN = 128  # sequences that a view has; the counts include the others
_MESSAGE = "the model failed on this request; the server's log says more"

Value = TypeVar("Value")


class AsyncEngine(EngineClient):
    """Runs an engine in a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        """Take over ``engine``: after ``start`` only this thread may touch it."""
        self._engine = engine
        self.settings = engine.describe()
        self.listeners = engine.listeners  # called in the engine's thread
        self.error: str | None = None  # why the engine stopped for good
        self.step_began_s: float | None = None  # while a step is under way
        self.step_timeout_s = inf  # after which a step hangs
        self._turn_began_s: float | None = None  # a turn is a step and all around it
        self.before_step: Callable[[], object] | None = None  # called in the engine's thread
        self.on_submit: Callable[[RequestStream], None] = lambda stream: None  # on the loop
        self.on_lost: Callable[[str], None] = lambda why: None  # too: there is no device any more
        self.lost: Callable[[], str] = lambda: ""  # asked between steps: why there is none
        engine.runner = BisectingRunner(engine.runner, self._note_failure)
        self.listeners.append(self._note_end)
        self._wake = threading.Condition()
        self._front: Front[tuple[RequestStream, int]] = Front()
        self._lagging: set[RequestStream] = set()  # whose readers are behind
        self._gone: list[RequestStream] = []
        self._pauses: dict[RequestStream, bool] = {}  # whether it is to be paused from now on
        self._callbacks: list[Callable[[], None]] = []
        self._stopping = False
        self._owners: dict[int, tuple[RequestStream, int]] = {}  # by the engine's request id
        self._num_seqs: Counter[RequestStream] = Counter()  # in the engine
        self._unseen: dict[int, Request] = {}  # of which no event was sent yet
        self._reports = PromptReports()
        self._closed: list[RequestRecord] = []
        self._streams: set[RequestStream] = set()  # on the loop's side
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # --- the loop's side -----------------------------------------------------------------------

    def start(self) -> None:
        """Begin; to be called on the loop that streams live on."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._watch()

    @override
    def trouble(self) -> str | None:
        if self.error:
            return self.error
        if self._thread.ident and not self._thread.is_alive() and not self._stopping:
            return "the engine has stopped: its thread has ended"
        began_s = self._turn_began_s
        if began_s and time.monotonic() - began_s > self.step_timeout_s:
            return f"a step has taken more than {self.step_timeout_s:g} s"
        return None

    def _watch(self) -> None:
        """End all waiting for an engine that has stopped, or hangs."""
        if self._streams and (why := self.trouble()):
            self.abandon_all(ServerEnds(why))
        if self.lost():  # while no step runs that would find out
            with self._wake:
                self._wake.notify()
        if not self._stopping:
            self._loop.call_later(_WATCH_S, self._watch)

    @property
    @override
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    @override
    def num_queued(self) -> int:
        with self._wake:
            return len(self._front)

    @override
    def submit(self, stream: RequestStream) -> None:
        if why := "the server is stopping" if self._stopping else self.trouble():
            raise StreamError(why, 503)
        self._streams.add(stream)
        with self._wake:
            stream.first_pushed = self._front.num_pushed
            self._front.push(
                stream.tenant,
                [((stream, i), len(stream.prompts[i])) for i in stream.open_prompts],
                stream.params.num_seqs,
                is_promised=stream.due_s < inf,
                is_background=stream.is_background,
            )
            self._wake.notify()
        if not stream.is_background:
            self.on_submit(stream)

    @override
    def abandon(self, stream: RequestStream, why: Exception) -> None:
        if not stream.is_over:
            stream.end(why)
            with self._wake:
                self._gone.append(stream)
                self._wake.notify()
        self._streams.discard(stream)

    @override
    def between_steps(self, callback: Callable[[], None]) -> None:
        with self._wake:
            self._callbacks.append(callback)
            self._wake.notify()

    @override
    def permit(self, num_prompts: float) -> None:
        with self._wake:
            self._front.num_permitted = num_prompts
            self._wake.notify()

    def abandon_all(self, why: StreamError) -> None:
        """End every stream."""
        for stream in list(self._streams):
            self.abandon(stream, why)

    def stop(self, timeout_s: float) -> bool:
        """Stop the thread after the step under way; return whether it has ended."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _deliver(self, batch: list[tuple[RequestStream, list[StreamEvent]]]) -> None:
        for stream, events in batch:
            try:
                is_behind = not stream.deliver(events)
            # What is told of its end failed: the others' events are still to come.
            except Exception:
                _log.exception("a stream failed")
                self.abandon(stream, StreamError("the answer failed; the server's log says more"))
                continue
            if is_behind:
                stream.resume = functools.partial(self._pause, stream, False)
                self._pause(stream, True)

    def _pause(self, stream: RequestStream, is_paused: bool) -> None:
        """Pause a stream's requests before the next step, or let them go on."""
        with self._wake:
            self._pauses[stream] = is_paused
            self._wake.notify()

    # --- what others may read of it ------------------------------------------------------------

    @override
    def snapshot(self) -> EngineSnapshot:
        numbers: dict[RequestStream, list[int]] = {}
        is_read = False
        for number, (stream, _) in self._owners.items():
            numbers.setdefault(stream, []).append(number)
            is_read = is_read or stream.is_read
        state = state_of(self.settings, self._engine.scheduler, is_read)
        return EngineSnapshot(time.monotonic(), state, numbers, self._waiting())

    @override
    def view(self, owner: str | None = None) -> dict[str, Any]:
        shown = view(self._engine, owner)
        shown["num_waiting"] += sum(owner in (None, one.tenant) for one, _ in self._waiting())
        return shown

    @override
    def num_cached(self, stream: RequestStream, index: int) -> int:
        request = Request(
            0,
            stream.prompts[index],
            stream.params,
            max_model_len=self._engine.max_model_len,
            cache_root=stream.cache_root,
            adapter=stream.adapter,
        )
        # Meanwhile the engine may change what is cached: it is only asked for single blocks.
        return self._engine.scheduler.queues.kv.num_cached(request.sequences[0])

    def gauges(self) -> dict[str, float]:
        """Return how full the engine is now, by the names of metrics. Any thread may call."""
        values = self._engine.gauges()
        values["num_requests_waiting"] += self.num_queued
        return values

    def _waiting(self) -> list[tuple[RequestStream, int]]:
        with self._wake:
            return list(self._front)

    # --- the engine's side ---------------------------------------------------------------------

    def _run(self) -> None:
        goes_on = True
        while goes_on:
            try:
                goes_on = self._turn()
            except DeviceLost as lost:
                goes_on, self.error = False, str(lost)
                self.call(self.abandon_all, ServerEnds(self.error))
                self.call(self.on_lost, self.error)
            except BaseException:  # panics of compiled libraries are no Exceptions
                _log.exception("the engine failed; all its requests end")
                goes_on = self._clear()
            self._turn_began_s = None

    def _turn(self) -> bool:
        """Wait until something is to be done, and do it; return False at the end."""
        with self._wake:
            rests = self._front.has_background or self._front.load.gives_way
            if not self._wake.wait_for(self._is_wanted, QUIET_S if rests else None):
                return True
            if self._stopping:
                return False
            if why := self.lost():
                raise DeviceLost(why)
            self._turn_began_s = time.monotonic()
            gave_way, gives_way = self._front.load.gives_way, self._is_waited_for()
            arrivals = self._front.take(
                self._engine.scheduler.room,
                num_inside=lambda item: self._num_seqs[item[0]],
                is_busy=self._engine.has_work(),
                gives_way=gives_way,
                num_since=self._engine.num_since,
            )
            gone, self._gone = self._gone, []
            pauses, self._pauses = self._pauses, {}
            callbacks, self._callbacks = self._callbacks, []
            if gone:
                arrivals += self._front.remove(lambda item: item[0].is_over)
        try:
            self._enter(arrivals, some_left=bool(gone))
            self._rest(pauses, is_changed=gives_way != gave_way)
        finally:  # each is waited for
            for callback in callbacks:
                self._call_back(callback)
        self._step()
        return True

    @staticmethod
    def _call_back(callback: Callable[[], None]) -> None:
        try:
            callback()
        except BaseException:
            _log.exception("a look at the engine failed")

    def _is_wanted(self) -> bool:
        has_orders = self._stopping or self._gone or self._callbacks or self._pauses
        if has_orders or self.lost() or self._front.is_wanted or self._engine.has_work():
            return True
        rests = self._front.has_background or self._front.load.gives_way
        return rests and not self._is_waited_for()

    def _is_waited_for(self) -> bool:
        """Whether a request is there that people wait for, or was a moment ago."""
        is_inside = any(not stream.is_background for stream, _ in self._owners.values())
        return self._front.is_waited_for(time.monotonic(), is_inside=is_inside)

    def _enter(self, arrivals: list[tuple[RequestStream, int]], *, some_left: bool) -> None:
        """Add requests that enter, and drop those of streams that are over."""
        for stream, index in arrivals:
            self._add(stream, index)
        if some_left:
            for request_id, (stream, _) in list(self._owners.items()):
                if stream.is_over:
                    self._engine.abort(request_id)

    def _rest(self, pauses: dict[RequestStream, bool], *, is_changed: bool) -> None:
        """Pause whose reader has fallen behind and, while it gives way, the background."""
        for stream, is_behind in pauses.items():
            (self._lagging.add if is_behind else self._lagging.discard)(stream)
        gives_way = self._front.load.gives_way
        is_changed &= any(stream.is_background for stream, _ in self._owners.values())
        for request_id, (stream, _) in self._owners.items() if pauses or is_changed else ():
            if stream in pauses or (is_changed and stream.is_background):
                rests = stream in self._lagging or (gives_way and stream.is_background)
                (self._engine.pause if rests else self._engine.resume)(request_id)

    def _step(self) -> None:
        """Run a step, if there is work for one, and hand out its events."""
        events: list[Event] = []
        if self._engine.has_work():
            is_read = any(stream.is_read for stream, _ in self._owners.values())
            if (before_step := self.before_step) is not None:
                before_step()
            self.step_began_s = time.monotonic()
            try:
                events = self._engine.step(self._front.load._replace(is_read=is_read))
            except StepLost as lost:  # the engine has taken it back, and goes on from there
                self._note_failure(lost.__cause__ or lost)
            self.step_began_s = None
        self._send(events)
        if not self._engine.has_work():
            self._check()

    def _check(self) -> None:
        try:
            self._engine.check()
        except AssertionError:  # a leak must be known, but is no reason to refuse requests
            _log.exception("the engine's own check fails")

    def _add(self, stream: RequestStream, index: int) -> None:
        prompt, params = stream.prompts[index], stream.params_of(index)
        first = stream.first_pushed
        try:
            request_id = self._engine.add(
                prompt,
                params,
                new_text=lambda: stream.new_text(prompt, params),
                arrival_s=stream.arrival_s,
                name=stream.name,
                cache_root=stream.cache_root,
                adapter=stream.adapter,
                prediction=stream.prediction,
                owner=stream.tenant,
                new_constraint=stream.new_constraint,
                token_rules=stream.token_rules,
                due_s=stream.due_s,
                answers=stream.answers.get(index, ()),
                is_background=stream.is_background,
                pushed=(first, first + stream.open_prompts.index(index)),
            )
        except ValueError as error:  # it can never run
            name = str(error).split(" ")[0]
            param = name if hasattr(params, name) else None
            self.call(self.abandon, stream, StreamError(str(error), 400, param))
            return
        except BaseException:  # such as no memory for its text: the engine knows nothing of it
            _log.exception("a request cannot enter the engine")
            why = StreamError("the request failed; the server's log says more")
            self.call(self.abandon, stream, why)
            return
        self._num_seqs[stream] += params.num_seqs
        self._owners[request_id] = stream, index
        self._unseen[request_id] = request = self._engine.requests[request_id]
        if stream.tells_progress:
            self._reports.add(stream, index, request)

    def _send(self, events: list[Event]) -> None:
        """Hand a step's events to the loop, all at once."""
        batch: dict[RequestStream, list[StreamEvent]] = {}
        for stream, report in self._reports.take(time.monotonic()):
            batch.setdefault(stream, []).append(report)
        for event in events:
            request_id = event.seq_id[0]
            stream, index = self._owners[request_id]
            of_stream = batch.setdefault(stream, [])
            if request_id in self._unseen:
                of_stream.append((index, self._unseen.pop(request_id)))
            of_stream.append((index, event))
            if event.token is not None:
                self._charge(stream, 1)
        closed, self._closed = self._closed, []
        for record in closed:
            stream, index = self._owners.pop(record.request_id)
            if stream.params.searches:  # beams that were not chosen send no events
                num_all = stream.params.num_seqs * max(record.num_generated)
                self._charge(stream, num_all - sum(record.num_generated))
            self._num_seqs[stream] -= stream.params.num_seqs
            if not self._num_seqs[stream]:
                del self._num_seqs[stream]
                self._lagging.discard(stream)
            self._unseen.pop(record.request_id, None)
            self._reports.drop(record.request_id)
            batch.setdefault(stream, []).append((index, record))
        if batch:
            self.call(self._deliver, list(batch.items()))

    def _charge(self, stream: RequestStream, num_tokens: int) -> None:
        self._front.charge(stream.tenant, num_tokens, is_background=stream.is_background)

    @override
    def call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: there are no listeners left
            _log.debug("an event after the end")

    def _clear(self) -> bool:
        """After a fault in the engine itself: end everything; return whether it may go on."""
        self.step_began_s = None
        try:
            with self._wake:
                self._front.clear()
            for request_id in list(self._engine.requests):
                self._engine.abort(request_id)
            self._engine.check()
        except BaseException as error:
            _log.exception("the engine cannot go on")
            self.error = f"the engine has stopped: {type(error).__name__}"
        self._owners.clear()
        self._num_seqs.clear()
        self._lagging.clear()
        self._unseen.clear()
        self._reports.clear()
        self._closed.clear()
        self.call(self.abandon_all, StreamError("the engine failed; the server's log says more"))
        return self.error is None

    @override
    def tenant_of(self, request_id: int) -> str:
        owner = self._owners.get(request_id)
        return owner[0].tenant if owner else ""

    def _note_end(self, record: Record) -> None:
        if isinstance(record, RequestRecord):
            self._closed.append(record)

    def _note_failure(self, error: BaseException) -> None:
        _log.error("the backend failed", exc_info=error)


class StepLost(Exception):
    """The step failed and cannot be repeated; the cause is not known yet."""


class BisectingRunner:
    """Executes steps; if that raises, by halves, until each item runs or is the one that raises.

    It relies on two promises of runners: a step may be executed again, and the result for a
    sequence does not depend on the batch it is in. Copies are the exception: the failed attempt may
    have overwritten their sources. Such a step is given up, and all its sequences start again; then
    they have blocks and states of their own, so the next failure can be traced.
    """

    def __init__(self, runner: Runner, on_error: Callable[[BaseException], None]) -> None:
        """Run on ``runner``; ``on_error`` is told of each item that fails."""
        self._runner = runner
        self._on_error = on_error

    def execute(self, step: Step) -> StepOutput:
        """Execute a step; an exception becomes the error of the item that causes it.

        Raises StepLost if that cannot be found out, and DeviceLost if no step can run any more.
        """
        try:
            return self._runner.execute(step)
        except DeviceLost:
            raise
        except BaseException as error:  # panics of compiled libraries are no Exceptions
            if step.copies or step.state_copies:
                raise StepLost from error
            if len(step.work) == 1:
                self._on_error(error)
                return StepOutput(((),), errors={0: _MESSAGE})
        middle = len(step.work) // 2
        first = self.execute(step._replace(work=step.work[:middle]))
        second = self.execute(step._replace(work=step.work[middle:]))
        return StepOutput(
            first.tokens + second.tokens,
            {**first.logprobs, **_moved(second.logprobs, middle)},
            {**first.prompt_logprobs, **_moved(second.prompt_logprobs, middle)},
            {**first.errors, **_moved(second.errors, middle)},
            {**first.top, **_moved(second.top, middle)},
            {**first.similarity, **_moved(second.similarity, middle)},
            {**first.vectors, **_moved(second.vectors, middle)},
        )


def _moved(by_index: Mapping[int, Value], by: int) -> dict[int, Value]:
    return {index + by: value for index, value in by_index.items()}


class PromptReports:
    """Prompts whose streams ask how far they are: each is told of until it is computed."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[RequestStream, int, Request]] = {}  # by the request's id
        self._num_reported: dict[int, int] = {}  # how far each was at its last report

    def add(self, stream: RequestStream, index: int, request: Request) -> None:
        """Tell of a prompt of a stream from now on."""
        self._open[request.id] = stream, index, request

    def drop(self, request_id: int) -> None:
        """Tell no more of a request that is over."""
        self._open.pop(request_id, None)
        self._num_reported.pop(request_id, None)

    def clear(self) -> None:
        """Tell no more of any."""
        self._open.clear()
        self._num_reported.clear()

    def take(self, now_s: float) -> Iterator[tuple[RequestStream, StreamEvent]]:
        """Yield what is new since the last call; first of each prompt, how much was cached."""
        for request_id, (stream, index, request) in tuple(self._open.items()):
            if request.scheduled_s is None:
                continue
            length, num_cached = len(request.prompt), request.num_cached_tokens
            is_done = request.first_token_s is not None
            num_computed = length if is_done else min(request.sequences[0].num_computed, length)
            if request_id not in self._num_reported:
                self._num_reported[request_id] = num_cached
                yield stream, (index, PromptProgress(length, num_cached, num_cached, 0.0))
            if num_computed > self._num_reported[request_id]:
                self._num_reported[request_id] = num_computed
                time_s = now_s - request.scheduled_s
                yield stream, (index, PromptProgress(length, num_cached, num_computed, time_s))
            if num_computed == length:
                self.drop(request_id)


def view(engine: Engine, owner: str | None = None) -> dict[str, Any]:
    """Return the queues, the sequences with their progress, and a map of the KV cache.

    Ids and numbers, never the text of a prompt; to be called between two steps. It is of one
    owner's requests alone, if one is given; then what others hold looks free.
    """
    queues = engine.scheduler.queues
    everyone = [
        seq
        for seq in (*queues.running, *queues.waiting, *queues.paused)
        if owner in (None, seq.request.owner)
    ]
    running = [seq for seq in everyone if seq.status is Status.RUNNING]
    return {
        "num_running": len(running),
        "num_waiting": len(everyone) - len(running),
        "block_size": queues.kv.block_size,
        "blocks": _map(queues, running, shows_cached=owner is None),
        "sequences": [_shown(seq) for seq in everyone[:_MAX_SHOWN]],
    }


def _map(queues: Queues, running: Iterable[Sequence], *, shows_cached: bool) -> str:
    """Return runs of blocks, such as ``s2u1f9``: free, cached and free, used by one, shared."""
    pool = queues.kv.pool
    blocks = bytearray(b"f") * len(pool.refs)
    for index in pool.index if shows_cached else ():
        for block in index.values():
            blocks[block] = ord("c")
    for seq in running:
        for block in held_blocks(seq):
            blocks[block] = ord("s" if pool.refs[block] > 1 else "u")
    return re.sub(r"(.)\1*", lambda run: f"{run[1]}{len(run[0])}", blocks.decode())


def _shown(seq: Sequence) -> dict[str, Any]:
    prompt_len = len(seq.request.prompt)
    return {
        "id": seq.id,
        "status": seq.status.name.lower(),
        "prompt_tokens": prompt_len,
        "computed_tokens": min(seq.num_computed, prompt_len),
        "cached_tokens": seq.request.num_cached_tokens,
        "generated_tokens": seq.num_generated,
        "max_tokens": seq.request.max_len - prompt_len,
        "num_blocks": len(held_blocks(seq)),
    }
