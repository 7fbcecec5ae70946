"""A request passed on to a server of its model, and the answer, byte for byte.

A stream outlives that server. Beside its bytes comes a journal, which says from which tokens they
were made. When the server ends, or is silent, the request and the journal go to another one, which
continues where the journal ends. A frame that is not whole is not shown, so nothing comes twice and
nothing is missing. Answers that are sent whole are asked for again.

When a server is about to leave, another one reads what was shown, while the first still answers. So
the stream goes on there after a step or two.

A request that a server was working on when it crashed, and that had brought nothing, may have been
the cause. It is tried once more, beside no other such request. If that server crashes too, it is
not tried on a third one. A silent server counts as crashed until it answers again.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AbstractAsyncContextManager
from functools import partial

import httpx2
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ridgeline.fleet.pool import Pool
from ridgeline.fleet.servers.replica_set import ReplicaSet
from ridgeline.fleet.servers.worker import Draining, Worker
from ridgeline.foresight.routing.balancer import NOTHING, PromptKeys
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.request_state import client_left
from ridgeline.serve.tunnel.middleware import FINGERPRINT, HEADER, SPENT, header_value
from ridgeline.serve.tunnel.resume_log import Frames, is_diverged, spent_in

_MAX_FAILED = 8  # attempts in a row without any progress, whatever ended them
_REST_S = 0.1  # until a server is asked again, or a suspected request looks for its turn
_REFUSALS = frozenset({429, 503})  # by one server, where another may have room
_OF_CONNECTION = frozenset({b"connection", b"transfer-encoding", b"keep-alive", b"content-length"})
# The edge sets the first two.
_OURS = frozenset({b"date", b"x-request-id", HEADER, FINGERPRINT, SPENT})


class _Refused(Exception):
    """A server takes no more requests, and there are others."""


class _Attempt:
    """A request at a server, as it is counted there."""

    def __init__(
        self, replica_set: ReplicaSet, worker: Worker, prompt: PromptKeys | None, is_trial: bool
    ) -> None:
        """Begin; without a ``prompt`` a request only looks, and is no load.

        With ``is_trial`` it holds the server's trial, and releases it at the first progress.
        """
        self.replica_set, self.worker = replica_set, worker
        self._placed = (
            replica_set.where.place(str(worker.number), prompt) if prompt is not None else None
        )
        self._is_trial, self.has_progress = is_trial, False
        self._begin_s = asyncio.get_running_loop().time()

    def note_progress(self) -> None:
        """Take note that the server has brought something."""
        self.has_progress = True
        if self._placed is not None:
            self._placed.has_read(asyncio.get_running_loop().time() - self._begin_s)
        self._leave_trial()

    def end(self) -> None:
        """Count it out."""
        if self._placed is not None:
            self._placed.end()
        self._leave_trial()

    def _leave_trial(self) -> None:
        if self._is_trial:
            self._is_trial = False
            self.worker.trial.release()


class ProxiedResponse(Response):
    """The answer of a server of a model."""

    def __init__(
        self,
        pool: Pool,
        use: Callable[[], AbstractAsyncContextManager[ReplicaSet]],
        body: bytes = b"",
        *,
        prompt: PromptKeys = NOTHING,
        only: Worker | None = None,
        num_tokens: int = 0,
    ) -> None:
        """Pass a request with this body on to a server of the model that ``use`` keeps loaded.

        Args:
            pool: has the models.
            use: the model, for as long as the answer lasts.
            body: as the client sent it.
            prompt: the part to be read, which decides which server reads it best.
            only: the one server that can answer.
            num_tokens: about how many tokens its key needs; the server says how many there were.
        """
        super().__init__()
        self._pool, self._use, self._body = pool, use, body
        self._prompt, self._only = prompt, only
        self._seed, self._journal = secrets.randbits(63), bytearray()
        self._has_begun = self._is_framed = False
        self._perhaps_ended: Worker | None = None  # by this request
        self._num_failed = 0
        self._avoided = set[Worker]()
        self._reader: Worker | None = None  # which has read what was shown
        self._num_tokens = num_tokens
        self._release: Callable[[], None] = lambda: None

    @property
    def _is_suspect(self) -> bool:
        """Whether it may have crashed a server: one that was in trouble after it, and still is."""
        return self._perhaps_ended is not None and not self._perhaps_ended.is_well

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on. Raises ApiError for what goes wrong before the answer has begun."""
        working = asyncio.ensure_future(self._run(scope, send))
        leaving = asyncio.ensure_future(client_left(receive))
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            working.cancel()  # no effect if it is done
        try:
            await working
        except asyncio.CancelledError:
            if not self._has_begun:  # otherwise nobody would read why
                raise ApiError(499, "the client left") from None
        except ApiError as error:
            if not self._has_begun:
                raise
            ended = {"passed_on": False, "finish": "error", "error": str(error)}
            scope["state"]["note"] |= ended  # nobody else has a line of it
            scope["state"]["cut"]()  # the reader must see that it is not whole

    async def _run(self, scope: Scope, send: Send) -> None:
        """Answer; try again, and go on, when a server or a connection has ended."""
        if self._num_tokens:
            self._release = self._pool.limits.reserve(scope["state"]["tenant"], self._num_tokens)
        try:
            async with self._use() as replica_set:
                while not await self._is_tried(replica_set, scope, send):
                    pass
                replica_set.num_failed = 0
                await send({"type": "http.response.body", "body": b""})
        finally:
            self._release()

    async def _is_tried(self, replica_set: ReplicaSet, scope: Scope, send: Send) -> bool:
        """Let one server answer; return whether it has."""
        worker = self._only or self._read_by(replica_set)
        worker = worker or await self._pool.server(
            replica_set, self._prompt, self._avoided, is_patient=self._has_begun
        )
        is_trial = await self._has_trial(worker)
        if is_trial and replica_set.workers.get(worker.number) is not worker:
            worker.trial.release()
            return False
        attempt = _Attempt(replica_set, worker, None if self._only else self._prompt, is_trial)
        return await self._is_answered(attempt, scope, send)

    def _read_by(self, replica_set: ReplicaSet) -> Worker | None:
        """Return the server that has read what was shown, once, if it takes requests."""
        reader, self._reader = self._reader, None
        is_there = (
            reader and replica_set.workers.get(reader.number) is reader and reader.takes_requests
        )
        return reader if is_there else None

    async def _has_trial(self, worker: Worker) -> bool:
        """Wait for the trial of a server; return False if there is no suspicion, or no more."""
        while self._is_suspect:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REST_S):
                    return await worker.trial.acquire()
        return False

    async def _is_answered(self, attempt: _Attempt, scope: Scope, send: Send) -> bool:
        """Let a server answer, and return True; if it cannot, return False where another may.

        Raises ApiError where none may.
        """
        replica_set, worker = attempt.replica_set, attempt.worker
        try:
            async with worker.having(partial(self._have_read, attempt, scope)):
                await self._answer(attempt, scope, send)
            return True
        except _Refused:
            if self._has_begun:
                await asyncio.sleep(_REST_S)
            self._avoided.add(worker)
            return False
        except httpx2.TransportError as error:
            await self._pool.forget_dead(replica_set, worker)
            self._judge(attempt, worker.has_failed, str(error) or type(error).__name__)
        except Draining as error:
            self._judge(attempt, bool(worker.trouble), str(error))
        finally:
            attempt.end()
        replica_set.moved[worker.number] += 1
        replica_set.counts["again"] += not self._has_begun
        self._avoided = {worker}
        return False

    async def _have_read(self, attempt: _Attempt, scope: Scope) -> None:
        """Have another server read prompt and answer so far, since this one leaves.

        What it has read is in its cache when the request comes to stay.
        """
        replica_set = attempt.replica_set
        reader = replica_set.choose(self._prompt, {attempt.worker}) if self._journal else None
        if reader is None:
            return
        reading = _Attempt(replica_set, reader, self._prompt, False)
        try:
            answer = await reader.client.send(self._request(reader, scope, only_reads=True))
            replica_set.counts["read_first"] += answer.is_success
            self._reader = reader
        except httpx2.HTTPError:  # it has ended, or its link
            pass
        finally:
            reading.end()

    def _judge(self, attempt: _Attempt, may_be_ours: bool, why: str) -> None:
        """Decide whether a request whose server has failed goes on. Raises ApiError if not.

        ``may_be_ours`` says that the server failed in a way that a request can cause.
        """
        name, counts = attempt.replica_set.name, attempt.replica_set.counts
        if self._only or (self._has_begun and not self._is_framed):
            raise ApiError(503, f"{name} ended while it answered: {why}", code="model_ended")
        if attempt.has_progress:
            self._perhaps_ended, self._num_failed = None, 0
        elif may_be_ours and self._is_suspect and self._perhaps_ended is not attempt.worker:
            counts["lost_blame"] += 1
            message = (
                f"this request ended two servers of {name}: it is not tried on a third ({why})"
            )
            raise ApiError(503, message, code="model_ended")
        else:
            self._perhaps_ended = attempt.worker if may_be_ours else self._perhaps_ended
            self._num_failed += 1
        if self._num_failed >= _MAX_FAILED:
            counts["lost_failed"] += 1
            message = f"{_MAX_FAILED} servers of {name} ended while they answered: {why}"
            raise ApiError(503, message, code="model_ended")

    async def _answer(self, attempt: _Attempt, scope: Scope, send: Send) -> None:
        worker = attempt.worker
        answer = await worker.send(self._request(worker, scope))
        try:
            await self._pass_on(attempt, answer, scope, send)
        finally:
            await answer.aclose()

    async def _pass_on(
        self, attempt: _Attempt, answer: httpx2.Response, scope: Scope, send: Send
    ) -> None:
        is_framed, replica_set = HEADER.decode() in answer.headers, attempt.replica_set
        if answer.status_code in _REFUSALS and await self._may_go_elsewhere(attempt):
            raise _Refused
        self._charge(attempt.worker, scope, int(answer.headers.get(SPENT.decode(), 0)))
        if self._has_begun and not is_framed:
            raise httpx2.RemoteProtocolError(f"it answers {answer.status_code}, and does not go on")
        assert isinstance(answer.stream, httpx2.AsyncByteStream)
        pieces = aiter(answer.stream)
        if is_framed:
            pieces = self._unframed(attempt, scope, pieces)
        if self._has_begun:
            replica_set.counts["resumed"] += 1
            replica_set.counts["resumed_tokens"] += max(0, self._journal.count(b"\n") - 1)
        else:
            pairs = [pair for pair in answer.headers.raw if _passes(pair[0], _OURS)]
            if length := answer.headers.get("content-length"):  # whole, or asked for again
                pieces = _one([piece async for piece in pieces])
                pairs.append((b"content-length", length.encode()))
            scope["state"]["note"]["passed_on"] = True
            status = answer.status_code
            await send({"type": "http.response.start", "status": status, "headers": pairs})
            self._has_begun, self._is_framed = True, is_framed
        async for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})

    def _charge(self, worker: Worker, scope: Scope, spent: int) -> None:
        """Count what the server says this key has spent there; nothing stays reserved."""
        tenant = scope["state"]["tenant"]
        self._pool.limits.charge(tenant, worker.newly_spent(tenant, spent))
        self._release()

    async def _may_go_elsewhere(self, attempt: _Attempt) -> bool:
        """Whether another server may answer what this one refuses, now or when it is started."""
        avoided = {*self._avoided, attempt.worker}
        if self._only is not None:
            return False
        is_elsewhere = attempt.replica_set.choose(NOTHING, avoided) is not None
        return self._has_begun or is_elsewhere or await attempt.worker.check_leaving()

    async def _unframed(
        self, attempt: _Attempt, scope: Scope, pieces: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        """Yield the answer's bytes of each whole frame, and then keep the frame's journal.

        A server may be let go while a slow client makes these bytes wait: they were not sent then.
        """
        frames, is_whole = Frames(), False
        try:
            async for piece in pieces:
                attempt.worker.hear()
                try:
                    parts = list(frames.feed(piece))
                except ValueError as error:
                    raise httpx2.RemoteProtocolError(str(error)) from None
                for lines, body in parts:
                    if (spent := spent_in(lines)) is not None:
                        is_whole = True
                        self._charge(attempt.worker, scope, spent)
                        continue
                    if body:
                        yield body
                    self._keep(attempt, lines)
        except httpx2.TransportError:
            if not is_whole:
                raise

    def _keep(self, attempt: _Attempt, lines: bytes) -> None:
        has_events = lines.count(b"\n") > (not self._journal)  # the very first line is no event
        self._journal += lines
        attempt.replica_set.counts["diverged"] += is_diverged(lines)
        if has_events and not attempt.has_progress:
            attempt.note_progress()

    def _request(self, worker: Worker, scope: Scope, *, only_reads: bool = False) -> httpx2.Request:
        path = scope["state"]["path"] + ("?" + scope["query_string"].decode("latin-1")).rstrip("?")
        exclude = frozenset({b"host", b"origin", b"x-request-id", HEADER})
        headers = [pair for pair in scope["headers"] if _passes(pair[0], exclude)]
        state, journal = scope["state"], bytes(self._journal)
        headers.append((b"x-request-id", state["request_id"].encode()))
        batch = (state["tenant"], state["seed"]) if state["is_background"] else None
        said = (worker.key, self._seed, state["created"], journal, batch)
        headers.append((HEADER, header_value(*said, only_reads=only_reads)))
        url, content = f"http://localhost{path}", journal + self._body
        return httpx2.Request(scope["method"], url, headers=headers, content=content)


def _passes(name: bytes, exclude: Iterable[bytes]) -> bool:
    """Whether a header goes through: not those of a connection, nor those to ``exclude``."""
    return (lower := name.lower()) not in _OF_CONNECTION and lower not in exclude


async def _one(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
    yield b"".join(pieces)
