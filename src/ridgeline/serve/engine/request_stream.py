"""The answers to one HTTP request on their way from the engine's thread to the event loop.

A stream lives on the loop and holds what its reader has not taken yet. It knows nothing of HTTP and
engines: token ids go in, events come out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

from ridgeline.core.params import SamplingParams
from ridgeline.core.records import RequestRecord
from ridgeline.core.request import NO_ADAPTER, Adapter, Constraint, Request, Text
from ridgeline.core.step import NO_RULES, Event, TokenRules


class PromptProgress(NamedTuple):
    """How far a prompt is computed: in tokens, and since when it is."""

    num_tokens: int
    num_cached: int
    num_computed: int
    time_s: float


class Refusal(NamedTuple):
    """One of a prompt's answers is over: a rule has ended it. What it says of that."""

    answer: int
    says: str


# Which prompt, what about it. Progress comes first, if it was asked for; then the engine's request,
# and its record last.
StreamEvent = tuple[int, PromptProgress | Request | Event | Refusal | RequestRecord]
# Holds events back until they may be read, and returns those that may be now.
Hold = Callable[[list[StreamEvent]], Awaitable[list[StreamEvent]]]
_SEED_STRIDE = 0xBF58476D1CE4E5B9  # keeps the seeds of prompts apart
_MAX_BEHIND = 256  # events that a stream may hold before its requests are paused


class StreamError(Exception):
    """The stream ends early, and why.

    ``status``, and ``param``, the field at fault, are for a client that has seen nothing yet.
    """

    def __init__(self, message: str, status: int = 500, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


class ServerEnds(StreamError):
    """Every stream of this server ends early: another server could go on with each."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 503)


class ClientGone(Exception):
    """This stream is not read any more."""


class StreamCaller(NamedTuple):
    """For whom the answers of a stream are.

    Attributes:
        tenant: whose turn it is.
        name: of the request: x-request-id.
        cache_root: separates cached prefixes of others.
        is_background: nobody waits for it: it gives way to those who do.
        on_record: told of each prompt's end, also when it is not read any more.
        arrived_s: when the request was at the gate, if that was before now.
        created_s: what answers say of time: seconds of the epoch.
    """

    tenant: str
    name: str = ""
    cache_root: bytes = b""
    is_background: bool = False
    on_record: Callable[[RequestRecord], None] = lambda record: None
    arrived_s: float | None = None
    created_s: int | None = None


class AnswerBounds(NamedTuple):
    """What the tokens of answers are held to.

    Attributes:
        new_constraint: makes what ensures their form, and ``form_param`` is the field that asks
            for it.
        token_rules: what is said of single tokens.
    """

    new_constraint: Callable[[], Constraint] | None = None
    form_param: str | None = None
    token_rules: TokenRules = NO_RULES


class StreamReader(NamedTuple):
    """How a stream is read.

    Attributes:
        is_growing: as it grows, not when it is complete.
        hears_progress: how far its prompts are is told, too.
        hold: what holds events back.
    """

    is_growing: bool = True
    hears_progress: bool = False
    hold: Hold | None = None


_FREE, _AS_IT_GROWS = AnswerBounds(), StreamReader()


class RequestStream:
    """The answers to one HTTP request, which may have several prompts. Lives on the loop."""

    def __init__(
        self,
        prompts: Sequence[tuple[int, ...]],
        params: SamplingParams,
        new_text: Callable[[tuple[int, ...], SamplingParams], Text],
        caller: StreamCaller,
        reader: StreamReader = _AS_IT_GROWS,
        bounds: AnswerBounds = _FREE,
        *,
        adapter: Adapter = NO_ADAPTER,
        prediction: tuple[int, ...] = (),
    ) -> None:
        self.prompts = prompts
        self.params = params
        self.new_text = new_text
        self.tenant, self.name, self.cache_root = caller.tenant, caller.name, caller.cache_root
        self.is_background, self.on_record = caller.is_background, caller.on_record
        self.is_read, self.tells_progress, self.hold = reader
        self.new_constraint, self.form_param, self.token_rules = bounds
        self.adapter = adapter  # until the end: others may wait for its memory
        self.prediction = prediction
        self.arrival_s = time.monotonic()
        self.arrived_s = self.arrival_s if caller.arrived_s is None else caller.arrived_s
        self.created_s = int(time.time()) if caller.created_s is None else caller.created_s
        self.due_s = inf  # when it is to run at the latest, if that was promised
        self.on_events: Callable[[list[StreamEvent]], None] = lambda events: None
        self.default_seed: int | None = None  # of the first prompt, if the request brings none
        # Of each prompt that was begun elsewhere, the tokens of all its answers.
        self.answers: dict[int, tuple[tuple[int, ...], ...]] = {}
        self.open_prompts = list(range(len(prompts)))  # not answered when it is submitted
        self.first_pushed = 0  # the number of the first of these, among all that are submitted
        self.num_open = len(prompts)
        self.is_over = False  # nothing more will come
        self.resume: Callable[[], None] | None = None  # while its requests are paused
        self._events: list[StreamEvent] = []
        self._end: Exception | None = None
        self._wake = asyncio.Event()
        self._max_behind = max(_MAX_BEHIND, 8 * params.num_answers * len(prompts))

    def close(self, prompt: int) -> None:
        """Ask no engine for a prompt, all of whose answers are over."""
        self.open_prompts.remove(prompt)
        self.num_open -= 1
        self.is_over = not self.num_open

    def params_of(self, prompt: int) -> SamplingParams:
        """Return the sampling of a prompt's answers."""
        if self.default_seed is None or self.params.seed is not None:
            return self.params
        return replace(self.params, seed=(self.default_seed + prompt * _SEED_STRIDE) % (1 << 63))

    async def events(self) -> list[StreamEvent]:
        """Wait for events; return all there are, none when the stream has ended well.

        Calling this means that all earlier events were sent, so paused requests resume.

        Raises:
            StreamError: it failed; what came before was returned before.
            ClientGone: it was given up.
        """
        while events := await self._new_events():
            if shown := await self.hold(events) if self.hold else events:
                return shown
        return []

    async def _new_events(self) -> list[StreamEvent]:
        if self.resume and not self._events:
            self.resume()
            self.resume = None
        while not self._events and not self.is_over:
            self._wake.clear()
            await self._wake.wait()
        events, self._events = self._events, []
        if not events and self._end:
            raise self._end
        return events

    def deliver(self, events: list[StreamEvent]) -> bool:
        """Take the events of a step; return False if the reader is too far behind."""
        records = [payload for _, payload in events if isinstance(payload, RequestRecord)]
        for record in records:
            self.on_record(record)
        if self.is_over:
            return True
        self.on_events(events)
        self._events += events
        self.num_open -= len(records)
        self.is_over = not self.num_open
        if self.is_over:
            self.adapter = NO_ADAPTER
        self._wake.set()
        return len(self._events) <= self._max_behind

    @property
    def is_given_up(self) -> bool:
        """Whether its reader left before its end."""
        return isinstance(self._end, ClientGone)

    def end(self, why: Exception) -> None:
        """Let no more come: the reader gets what there is, then ``why``."""
        if not self.is_over:
            self.is_over, self._end = True, why
            self.adapter = NO_ADAPTER
            if isinstance(why, ClientGone):
                self._events.clear()
            self._wake.set()
