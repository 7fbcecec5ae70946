"""The steps of an engine, run in the threads that wait for answers, and nothing of text.

Whichever thread has nothing to read runs the next step, for the requests of all threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Mapping
from threading import RLock
from typing import TypeVar

from ridgeline.core.engine import Engine
from ridgeline.core.request import Request
from ridgeline.core.scheduling.policies import Load
from ridgeline.core.step import Event
from ridgeline.engine.running.interrupts import Interrupts

Events = Generator[tuple[int, Event], None, None]  # which of the requests, and what of it

R = TypeVar("R")
_BEGUN = (-1, Event((-1, -1), None, "", None, None, None, None))


class Loop:
    """An engine that several threads may ask at the same time: their requests share steps."""

    def __init__(self, engine: Engine) -> None:
        """Run ``engine``, which nothing else may step."""
        self.engine = engine
        self._interrupts = Interrupts()
        self._inboxes: dict[int, deque[Event]] = {}  # events by request, until they are taken
        # Around the engine and the inboxes. A forgotten stream may end in the thread that has it.
        self._lock = RLock()

    def submit(
        self,
        adds: Mapping[int, Callable[[], int]],
        refuse: Callable[[int, ValueError], None],
    ) -> dict[int, Request]:
        """Queue requests, each by what adds it to the engine; return those that are queued.

        ``refuse`` is told of one that can never run. If it raises, no request is queued.
        """
        requests: dict[int, Request] = {}
        with self._lock:
            try:
                for i, add in adds.items():
                    try:
                        requests[i] = self.engine.requests[add()]
                    except ValueError as error:
                        refuse(i, error)
            except BaseException:
                for request in requests.values():
                    self.engine.abort(request.id)
                raise
            self._inboxes |= {request.id: deque() for request in requests.values()}
        return requests

    def alone(self, work: Callable[[], R]) -> R:
        """Return what ``work`` returns, between two steps."""
        with self._lock:
            return work()

    def events(self, requests: Mapping[int, Request], load: Load) -> Events:
        """Run the engine until these requests have ended; others keep their events."""
        events = self._run(requests, load)
        next(events)  # begun, it ends its requests when closed or forgotten; else it would not
        return events

    def _run(self, requests: Mapping[int, Request], load: Load) -> Events:
        try:
            with self._interrupts:
                yield _BEGUN
                while self._await_events(requests, load):
                    for i, request in requests.items():
                        inbox = self._inboxes[request.id]
                        while inbox:
                            yield i, inbox.popleft()
        finally:
            with self._lock:
                for request in requests.values():
                    self.engine.abort(request.id)
                    del self._inboxes[request.id]

    def _await_events(self, requests: Mapping[int, Request], load: Load) -> bool:
        """Have events in an inbox of these requests; return False when all have ended."""
        with self._lock:
            if any(self._inboxes[request.id] for request in requests.values()):
                return True
            if all(request.is_finished for request in requests.values()):
                return False
            self._interrupts.hold()
            try:
                for event in self.engine.step(load):
                    self._inboxes[event.seq_id[0]].append(event)
            finally:
                self._interrupts.release()
            return True
