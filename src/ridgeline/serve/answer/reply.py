"""Responses over ASGI: a stream's events as server-sent events or as one JSON document.

A reply runs its stream, and ends it when the client is gone, reads nothing, or gets an error.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, NamedTuple, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ridgeline.core.records import RequestRecord
from ridgeline.serve.answer.dialect import Dialect
from ridgeline.serve.answer.protocol import ChatRequest
from ridgeline.serve.answer.response_builder import Choice, ResponseBuilder, progress_of
from ridgeline.serve.answer.stages import Earlier, Stage, behind
from ridgeline.serve.deadlines.field import PROMISE
from ridgeline.serve.deadlines.promise import Promise
from ridgeline.serve.engine.interface import EngineClient
from ridgeline.serve.engine.request_stream import (
    ClientGone,
    PromptProgress,
    RequestStream,
    ServerEnds,
    StreamError,
    StreamEvent,
)
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.fair_pool import FairThreadPool
from ridgeline.serve.http.keys import Limits
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.http.request_body import ENDED, RequestModel
from ridgeline.serve.http.request_state import client_left
from ridgeline.serve.tunnel.middleware import HEADER, NOTES
from ridgeline.text.messages.tool_calls import texts_of

SSE = "text/event-stream; charset=utf-8"
# The second is for nginx, which otherwise keeps a stream until its buffer is full.
STREAMED = {"cache-control": "no-cache", "x-accel-buffering": "no"}
PING = b": ping\n\n"  # a comment: clients pass over it
_HEAD_S = 1.0  # then a stream gets its head anyway; before, an error has a status
_PING_S = 3.0  # of silence; proxies and clients give up after five or more
_JSON = {"content-type": "application/json"}
_MANY_PROMPTS, _MANY_ENTRIES = 8, 1 << 10  # an answer with more takes milliseconds to write
_AT_ONCE = 64  # events that are written again before others have their turn
_DEPTH = 5  # of a token in an answer's logprobs, or of a text's vector
_encode = json.JSONEncoder(separators=(",", ":")).encode  # made once: faster
_CONTENT = {"messages", "prompt", "suffix", "input_prefix", "input_suffix", "input_extra"}
_CONTENT |= {"input", "text_input", "query", "documents", "text_1", "text_2"}


class RawBody(NamedTuple):
    """A whole answer that is not JSON."""

    data: bytes
    headers: dict[str, str]


class ResponseWriter(Protocol):
    """How the objects of an answer are written.

    Attributes:
        stream_type: content type of a stream.
        ping: what says that a stream lives while nothing comes.
    """

    stream_type: str
    ping: bytes  # says that a stream lives

    def whole(self) -> Mapping[str, Any] | Sequence[Mapping[str, Any]] | RawBody:
        """Return the whole answer, or a list of those to several prompts."""

    def take(self, event: StreamEvent) -> list[bytes]:
        """Take an event; return the new parts of a streamed answer. Raises StreamError.

        A part may be empty: it only says that the answer has begun.
        """

    def ending(self) -> bytes:
        """Return the server-sent events that end a stream."""

    def failure(self, error: ApiError) -> bytes:
        """Return the server-sent event of a stream that fails."""


class Results(Protocol):
    """What becomes of a stream: answers, or vectors.

    Attributes:
        promise: when the answer was promised to be there, if it was.
        records: of the prompts that have ended.
        stages: what events pass before they are written.
    """

    promise: Promise | None
    records: list[RequestRecord]
    stages: Sequence[Stage]

    @property
    def is_cut(self) -> bool:
        """Whether it is over, though the engine does not know."""

    @property
    def bounds(self) -> str:
        """Which bounds have ended it, each once."""

    @property
    def finish_reasons(self) -> str:
        """How it ended, each way once."""

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""

    @property
    def num_cached(self) -> int:
        """Prompt tokens that the prefix cache had."""

    def timings(self) -> Mapping[str, Any]:
        """Return the engine's times, nothing if nothing came."""


class OpenAiWriter:
    """OpenAI's objects."""

    stream_type, ping = SSE, PING

    def __init__(self, answers: ResponseBuilder, model: str, fingerprint: str) -> None:
        """Write ``answers`` as their request wants; the names stand in each object."""
        self._answers, self._body = answers, (body := answers.body)
        names = {True: ("chatcmpl-", "chat.completion"), False: ("cmpl-", "text_completion")}
        prefix, kind = names[isinstance(body, ChatRequest)]
        if body.stream and isinstance(body, ChatRequest):
            kind += ".chunk"
        self._start: dict[str, Any] = {"id": prefix + answers.stream.name, "object": kind}
        self._start |= {"created": answers.created_s, "model": model}
        self._start["system_fingerprint"] = fingerprint
        self._has_begun = False

    def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        return self._closing(self._answers.whole())

    def take(self, event: StreamEvent) -> list[bytes]:
        """Take an event; return the new parts of a streamed answer as server-sent events."""
        if isinstance(event[1], PromptProgress):
            return [self._progress(event[0], event[1])]
        return self._answers.take_written(event, self._chunk)

    def _progress(self, prompt: int, progress: PromptProgress) -> bytes:
        """Return a chunk with nothing new of the answer: the first one may be only a role."""
        is_chat = isinstance(self._body, ChatRequest)
        news = {"delta": {"role": "assistant", "content": None}} if is_chat else {"text": ""}
        choice = {"index": self._answers.choice_of(prompt), **news, "finish_reason": None}
        chunk = {**self._start, "choices": [choice], "prompt_progress": progress_of(progress)}
        return sse(chunk | {"usage": None} if self._body.wants_usage else chunk)

    def _chunk(self, choice: Choice) -> bytes:
        chunk: dict[str, Any] = {**self._start, "choices": [choice]}
        if isinstance(self._body, ChatRequest) and not self._has_begun:
            self._has_begun = True
            chunk |= self._answers.of_prompt()
        if self._body.wants_continuous_usage:
            chunk["usage"] = self._answers.usage()
        elif self._body.wants_usage:
            chunk["usage"] = None
        if self._body.timings_per_token and "role" not in choice.get("delta", ()):
            chunk["timings"] = self._answers.pace(self._answers.prompt_of(choice))
        return sse(chunk)

    def ending(self) -> bytes:
        """Return the server-sent events that end a stream."""
        last = b"data: [DONE]\n\n"
        body = self._body
        wants_more = body.include_timings or body.timings_per_token or body.verbose
        if body.wants_usage or wants_more or self._answers.stages:
            last = sse(self._closing([])) + last
        return last

    def failure(self, error: ApiError) -> bytes:
        """Return the server-sent event of a stream that fails."""
        return sse(error.body())

    def _closing(self, choices: list[Choice]) -> dict[str, Any]:
        usage = self._answers.usage()
        closing = {**self._start, "choices": choices, "usage": usage}
        if isinstance(self._body, ChatRequest) and not self._body.stream:
            closing |= self._answers.of_prompt()
        if self._body.include_timings:
            closing["metrics"] = self._answers.timings()
        if self._body.timings_per_token:
            closing["timings"] = self._answers.pace()
        closing |= self._answers.ends(self._texts)
        if self._body.verbose:
            closing["__verbose"] = {"prompt": self._answers.prompt_text()}
        return closing

    def _texts(self) -> dict[str, str]:
        """Return all texts that were shown, by their places in the answer."""
        chosen = self._answers.chosen
        if not isinstance(self._body, ChatRequest):
            return {f"choices[{one.index}].text": one.shown_text for one in chosen}
        return {
            f"choices[{one.index}].message.{place}": text
            for one in chosen
            for place, text in texts_of(one.shown_pieces or ()).items()
        }


class ReplyParts(NamedTuple):
    """What all replies of a server share; ``pool`` writes long answers."""

    engine: EngineClient
    limits: Limits
    options: ServeOptions
    pool: FairThreadPool


class Reply(Response):
    """The response to a completion, or to texts that become vectors."""

    def __init__(
        self,
        shared: ReplyParts,
        stream: RequestStream,
        answers: Results,
        body: RequestModel,
        writer: ResponseWriter,
        dialect: Dialect,
        promising: Callable[[], Awaitable[Promise]] | None = None,
        note_lengths: Callable[[str, Sequence[RequestRecord]], None] = lambda tenant, records: None,
    ) -> None:
        """Prepare to submit ``stream`` and to show ``answers`` in their ``writer``.

        A failure is told in the names of the ``dialect``. ``promising`` waits until the answer is
        promised to be in time, and raises ApiError if it cannot be; ``note_lengths`` is told how
        long the answers were.
        """
        super().__init__()
        del self.headers["content-length"]  # of the body that is still to come
        self._engine, self._limits, options, self._pool = shared
        self._stream = stream
        self._answers, self._body, self._writer = answers, body, writer
        self._take = behind(answers.stages, writer.take)
        self._of_stream = {"content-type": writer.stream_type, **STREAMED}
        self._log_content, self._content = options.log_content, b""
        self._stall_timeout_s = options.stall_timeout
        self._promising, self._note_lengths = promising, note_lengths
        self._dialect = dialect
        self._has_begun, self._num_charged = False, 0
        self._earlier: Earlier | None = None
        self._is_sending, self._since_s = False, time.monotonic()  # when it last began to
        self._is_streamed = bool(getattr(body, "stream", False))

    def keep(self, earlier: Earlier, fingerprint: str) -> None:
        """Let a router know how far the answer is, or go on where ``earlier`` ends.

        Answers are equal only where ``fingerprint`` is.
        """
        self._earlier, self._fingerprint = earlier, fingerprint
        self._of_stream[HEADER.decode()] = "frames"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ApiError for a failure before the answer has begun."""
        tenant, self._note = self._stream.tenant, scope["state"]["note"]
        if not (self._earlier and self._earlier.goes_on):  # its prompts were counted elsewhere
            self._limits.take(tenant, sum(map(len, self._stream.prompts)))
        watcher = asyncio.ensure_future(self._watch(receive))
        try:
            if self._earlier is not None:
                await self._go_on(self._earlier, send)
            if self._promising is not None and not (self._earlier and self._earlier.goes_on):
                self._note["promise"] = "refused"
                promise = self._answers.promise = await self._promising()
                self.headers[PROMISE] = "promised" if promise.is_made else "unpromised"
                if self._stream.is_over:
                    raise ClientGone
            if self._stream.open_prompts:
                self._engine.submit(self._stream)
            await (self._send_stream(send) if self._is_streamed else self._send_whole(send))
        except ClientGone:
            self._note["finish"] = "abort"
        except TimeoutError:  # no error event would reach it
            self._note["finish"], self._note["error"] = "error", "the client reads too slowly"
            scope["state"]["cut"]()
            await watcher  # until the connection is gone; otherwise uvicorn would report a bug
        except StreamError as error:
            if self._has_begun and self._earlier is not None and isinstance(error, ServerEnds):
                self._note["finish"], self._note["error"] = "error", str(error)
                scope["state"]["cut"]()  # the router goes on elsewhere
                await watcher
            else:
                await self._fail(send, error)
        finally:
            watcher.cancel()
            self._engine.abandon(self._stream, ClientGone())
            self._charge()
            self._note_lengths(tenant, self._answers.records)
            self._finish_note()

    def _charge(self) -> None:
        """Count the tokens of answers that were not counted yet: before the last byte leaves.

        None of a server that only reads: the one that goes on counts them.
        """
        if self._earlier and self._earlier.only_reads:
            return
        num_new = self._answers.num_tokens - self._num_charged
        self._limits.charge(self._stream.tenant, num_new)
        self._num_charged += num_new

    async def _go_on(self, earlier: Earlier, send: Send) -> None:
        """Continue where another server ended, if one began the answer."""
        if earlier.goes_on:
            await self._send(send, b"", self._of_stream)  # what goes wrong now is an event of it
        for i, one in enumerate(earlier.begin(self._stream, self._fingerprint)):
            self._take(one)  # whose bytes are shown
            if i % _AT_ONCE == 0:
                await asyncio.sleep(0)  # otherwise a long one would keep all others waiting

    def _frames(self, one: StreamEvent) -> list[bytes]:
        if self._earlier is None:
            return self._take(one)
        return self._earlier.frames(one, self._take)

    async def _watch(self, receive: Receive) -> None:
        await client_left(receive)
        self._engine.abandon(self._stream, ClientGone())

    async def _send_stream(self, send: Send) -> None:
        """Send a streamed answer. Raises TimeoutError if nobody reads it, StreamError, ClientGone.

        One task watches the whole stream: a timer for each piece would cost more than the piece.
        """
        async with asyncio.timeout(None) as patience:
            keeper = asyncio.ensure_future(self._keep(send, patience))
            try:
                await self._send_chunks(send)
            finally:
                keeper.cancel()

    async def _keep(self, send: Send, patience: asyncio.Timeout) -> None:
        """Send a stream's head after a second, and pings in silence; end it if nobody reads."""
        longest_s = self._stall_timeout_s
        while True:
            silence_s = _HEAD_S if not self._has_begun else _PING_S if self._writer.ping else inf
            left_s = longest_s if self._is_sending else silence_s
            left_s -= time.monotonic() - self._since_s
            if left_s > 0:
                await asyncio.sleep(min(left_s, longest_s, _PING_S))
            elif self._is_sending or not await self._signs(send):
                patience.reschedule(asyncio.get_running_loop().time())
                return

    async def _signs(self, send: Send) -> bool:
        """Send what says that a stream lives; return whether it could be sent."""
        sign = self._writer.ping if self._has_begun else b""
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await self._send(send, sign, self._of_stream)
        except TimeoutError:
            return False
        return True

    async def _send_whole(self, send: Send) -> None:
        while batch := await self._stream.events():
            for one in batch:
                self._take(one)
            if self._answers.is_cut:
                break
        is_long = len(self._stream.prompts) > _MANY_PROMPTS or self._num_entries() > _MANY_ENTRIES
        whole = partial(self._whole, in_pieces if is_long else _encode)
        data, headers = await self._pool.run(whole) if is_long else whole()
        self._charge()
        if bounds := self._answers.bounds:
            headers = headers | {ENDED: bounds}
        async with asyncio.timeout(self._stall_timeout_s):
            await self._send(send, data, headers, more_body=False)

    def _whole(self, encode: Callable[[Any], str]) -> RawBody:
        whole = self._writer.whole()
        return whole if isinstance(whole, RawBody) else RawBody(encode(whole).encode(), _JSON)

    def _num_entries(self) -> int:
        """Return how much an answer tells at most: tokens, and those ranked in their places."""
        params = self._stream.params
        num_ranked = max(params.logprobs or 0, params.prompt_logprobs or 0)
        num_tokens = sum(map(len, self._stream.prompts)) + self._answers.num_tokens
        return num_tokens * (1 + num_ranked)

    async def _send_chunks(self, send: Send) -> None:
        while not self._has_read and (batch := await self._stream.events()):
            frames: list[bytes] = []
            try:
                for one in batch:
                    frames += self._frames(one)
            finally:
                if frames:
                    await self._send(send, b"".join(frames), self._of_stream, notes=self._notes())
            if self._answers.is_cut:
                break
        self._charge()
        ending = self._writer.ending()
        await self._send(send, ending, self._of_stream, more_body=False, notes=self._notes())

    @property
    def _has_read(self) -> bool:
        """Whether this server should only read what another one has shown, and has."""
        return self._earlier is not None and self._earlier.has_read

    def _notes(self) -> bytes:
        """Return what is noted of the bytes that are to be sent now."""
        return self._earlier.notes() if self._earlier else b""

    async def _fail(self, send: Send, error: StreamError) -> None:
        """Say what went wrong: with a status, or where the answer has begun as its last event.

        No [DONE] follows: a stream that failed must not look complete.
        """
        self._note["finish"], self._note["error"] = "error", str(error)
        headers = {"retry-after": "5"} if error.status == 503 else {}
        code = "invalid_value" if error.status == 400 else "generation_failed"
        shown = self._dialect.renamed(
            ApiError(error.status, str(error), param=error.param, code=code, headers=headers)
        )
        if not self._has_begun:
            raise shown
        async with asyncio.timeout(self._stall_timeout_s):
            failure = self._writer.failure(shown)
            await self._send(send, failure, self._of_stream, more_body=False, notes=self._notes())

    async def _send(
        self,
        send: Send,
        data: bytes,
        headers: dict[str, str],
        *,
        more_body: bool = True,
        notes: bytes = b"",
    ) -> None:
        if self._log_content and data != self._writer.ping:
            self._content += data
        self._is_sending, self._since_s = True, time.monotonic()
        if not self._has_begun:
            self._has_begun = True
            pairs = [(k.encode(), v.encode()) for k, v in headers.items()]
            pairs += self.raw_headers
            if not more_body and self._earlier is None:
                pairs.append((b"content-length", str(len(data)).encode()))
            await send({"type": "http.response.start", "status": 200, "headers": pairs})
        message = {"type": "http.response.body", "body": data, "more_body": more_body}
        await send(message | {NOTES: notes} if notes else message)
        self._is_sending = False

    def _finish_note(self) -> None:
        self._note["prompt_tokens"] = sum(map(len, self._stream.prompts))
        self._note["cached_tokens"] = self._answers.num_cached
        self._note["completion_tokens"] = self._answers.num_tokens
        if self._has_read:
            self._note.setdefault("finish", "read")
        self._note.setdefault("finish", self._answers.finish_reasons)
        timings = self._answers.timings()
        for name in ("queue_time_ms", "time_to_first_token_ms"):
            self._note[name] = round(timings[name], 1) if timings else None
        if self._answers.promise is not None:
            self._note["promise"] = self._answers.promise.outcome or "open"
        for name in ("user", "safety_identifier", "prompt_cache_key", "metadata"):
            self._note[name] = getattr(self._body, name, None)
        if self._log_content:
            content = self._body.model_dump(include=_CONTENT, exclude_none=True)
            self._note |= content | {"response": self._content.decode(errors="replace")}


def sse(value: Mapping[str, Any]) -> bytes:
    """Return an object as a server-sent event."""
    return b"data: " + _encode(value).encode() + b"\n\n"


def in_pieces(value: object, depth: int = _DEPTH) -> str:
    """Return a value as JSON, encoded an object at a time.

    The encoder holds the interpreter until a value is done; a long answer encoded as one value
    would stop the event loop for tenths of a second.
    """
    if depth and isinstance(value, dict):
        fields = (f"{_encode(name)}:{in_pieces(one, depth - 1)}" for name, one in value.items())
        return "{" + ",".join(fields) + "}"
    if depth and isinstance(value, list) and value and isinstance(value[-1], dict):
        return "[" + ",".join(in_pieces(one, depth - 1) for one in value) + "]"
    return _encode(value)
