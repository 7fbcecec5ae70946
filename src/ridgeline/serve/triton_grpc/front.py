"""The gRPC server in front of the application: one more way in, and no other path."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from starlette.types import ASGIApp

from ridgeline.serve.dialects.triton.routes import ALL_STATS, STATS, STREAM
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.fair_pool import FairThreadPool
from ridgeline.serve.http.listening import bind
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.http.request_body import IGNORED, MOST_NAMED
from ridgeline.serve.http.web_server import Edge, WebServer
from ridgeline.serve.triton_grpc.local_http import Cut, LocalAnswer, ask
from ridgeline.serve.triton_grpc.messages import CLASSES, SERVICE, check_parts
from ridgeline.serve.triton_grpc.relay import Caller, Relay
from ridgeline.serve.triton_grpc.translate import (
    EMPTY_LAST,
    infer_request,
    infer_response,
    last_response,
    model_config,
    path_of,
)
from ridgeline.system.machine import give_back

_MAX_STREAMS = 128  # calls on one connection at a time, and messages that a call has answered
_IDLE_S = 65.0  # of a connection without a call, as over HTTP
_GRACE_S = 2.0
_DATA = b"data: "
_SHORT_BYTES = 1 << 12  # of a message that is counted at once
_NAMES = ("name", "version", "model_name", "model_version")  # which become a path
_MOST_CHARS = dict.fromkeys(_NAMES, 4096) | {"id": 1 << 16}  # an id comes back with each answer
_OPEN = ("ServerLive", "ServerReady")  # calls that need no key
_PASSED = ("authorization", "x-api-key", "x-request-id", "traceparent")
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}


class _Failed(Exception):
    """A request was refused, or its answer failed."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Unread(Exception):
    """Nobody reads an answer."""


class _Left(Exception):
    """The client has left a call; others of its connection go on."""


class _CallRoom:
    """Which messages of a call may be answered at once: together as long as one body may be.

    Attributes:
        is_free: set while the next one may be read.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._least_bytes = most_bytes, most_bytes // _MAX_STREAMS
        self._num_bytes, self.is_free = 0, asyncio.Event()
        self.is_free.set()

    def enter(self, num_bytes: int) -> None:
        self._add(max(num_bytes, self._least_bytes))

    def leave(self, num_bytes: int) -> None:
        self._add(-max(num_bytes, self._least_bytes))

    def _add(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._num_bytes <= self._most_bytes // 2:  # the next may be as long as one may be
            self.is_free.set()
        else:
            self.is_free.clear()


class Translator:
    """The calls of Triton's service, each a request of the application's."""

    def __init__(
        self, app: ASGIApp, edge: Edge, pool: FairThreadPool, relay: Relay, options: ServeOptions
    ) -> None:
        """Ask ``app``, which stands behind ``edge``; long messages are counted in ``pool``.

        All connections come through ``relay``.
        """
        self._app, self._edge, self._pool, self._relay = app, edge, pool, relay
        self._receive_timeout_s = options.receive_timeout
        self._stall_timeout_s = options.stall_timeout
        self._max_body_bytes = options.max_body_bytes

    def handlers(self) -> dict[str, Any]:
        """Return the service's calls by name."""
        named = (
            ("ModelMetadata", "", lambda answer: CLASSES["ModelMetadataResponse"](**answer)),
            ("ModelConfig", "/config", model_config),
        )
        unary: dict[str, Callable[[Any, Any], Awaitable[Any]]] = {
            "ServerLive": self._probe("/v2/health/live", "live"),
            "ServerReady": self._probe("/v2/health/ready", "ready"),
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelInfer": self._infer,
            "ModelStatistics": self._statistics,
            "RepositoryIndex": self._index,
            "RepositoryModelLoad": self._manage("load"),
            "RepositoryModelUnload": self._manage("unload"),
        }
        unary |= {name: self._about(ending, make) for name, ending, make in named}
        # A call that is taken as a stream is told before its message is read.
        handlers: dict[str, Any] = {
            name: grpc.stream_unary_rpc_method_handler(
                self._aborting(partial(self._answered, call, name)), response_serializer=_serialized
            )
            for name, call in unary.items()
        }
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._aborting(self._stream_infer), response_serializer=_serialized
        )
        return handlers

    def _probe(self, path: str, name: str) -> Callable[[Any, Any], Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            async with self._ask("GET", path, context) as answer:
                response = CLASSES[f"Server{name.title()}Response"]
                return response(**{name: answer.status == 200})

        return call

    async def _model_ready(self, request: Any, context: Any) -> Any:
        path = path_of(request.name, request.version, "/ready")
        async with self._ask("GET", path, context) as answer:
            return CLASSES["ModelReadyResponse"](ready=answer.status == 200)

    async def _server_metadata(self, request: Any, context: Any) -> Any:
        return CLASSES["ServerMetadataResponse"](**await _json(self._ask("GET", "/v2", context)))

    async def _index(self, request: Any, context: Any) -> Any:
        models = await _json(self._ask("POST", "/v2/repository/index", context))
        return CLASSES["RepositoryIndexResponse"](models=models)

    async def _statistics(self, request: Any, context: Any) -> Any:
        named = path_of(request.name, request.version, STATS) if request.name else ALL_STATS
        answer = await _json(self._ask("GET", named, context))
        return CLASSES["ModelStatisticsResponse"](**answer)

    def _about(
        self, ending: str, make: Callable[[Any], Any]
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            path = path_of(request.name, request.version, ending)
            return make(await _json(self._ask("GET", path, context)))

        return call

    def _manage(self, action: str) -> Callable[[Any, Any], Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            path = f"/v2/repository/models/{request.model_name}/{action}"
            return await _json(self._ask("POST", path, context))

        return call

    async def _infer(self, request: Any, context: Any) -> Any:
        headers, body = _translated(request)
        path = path_of(request.model_name, request.model_version, "/infer")
        return infer_response(await _json(self._ask("POST", path, context, headers, body)))

    async def _stream_infer(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Answer all requests of a stream side by side, as many as one body may be.

        The next message is read when there is room: until then its sender waits. Who does not read
        the answers is cut. Raises _Failed.
        """
        caller, writing = self._caller(context), asyncio.Lock()
        room = _CallRoom(self._max_body_bytes)

        async def answer(data: bytes) -> None:
            try:
                with caller.answered():
                    await self._answer_streamed(data, context, writing)
            finally:
                room.leave(len(data))

        try:
            async with asyncio.TaskGroup() as group:
                async for data in requests:
                    caller.read(len(data))
                    room.enter(len(data))
                    group.create_task(answer(data))
                    await room.is_free.wait()
        except* _Left:
            pass
        except* _Unread:
            caller.cut()
            await asyncio.Event().wait()  # gRPC sees the end, and cancels this
        finally:
            self._pool.soon(give_back)

    async def _answer_streamed(self, data: bytes, context: Any, writing: asyncio.Lock) -> None:
        """Write the answers to one message. Raises _Unread if nobody reads them, and _Left."""
        response_type, request = CLASSES["ModelStreamInferResponse"], CLASSES["ModelInferRequest"]()

        async def write(**fields: Any) -> None:
            async with writing:
                try:
                    async with asyncio.timeout(self._stall_timeout_s):
                        await context.write(response_type(**fields))
                except TimeoutError:
                    raise _Unread from None
                except grpc.aio.InternalError:
                    raise _Left from None

        try:
            request = await self._parsed("ModelInferRequest", data, context)
            async with contextlib.aclosing(self._answers(request, context)) as answers:
                async for response in answers:
                    await write(infer_response=response)
        except (_Failed, Cut) as error:
            failed = CLASSES["ModelInferResponse"](id=request.id)
            await write(error_message=str(error), infer_response=failed)

    async def _answers(self, request: Any, context: Any) -> AsyncGenerator[Any]:
        """Yield the answer to a request, in pieces if it wants a stream. Raises _Failed, Cut."""
        headers, body = _translated(request)
        headers["accept"] = STREAM
        path = path_of(request.model_name, request.model_version, "/infer")
        async with self._ask("POST", path, context, headers, body) as answer:
            if answer.status != 200:
                raise await _failure(answer)
            if not answer.headers["content-type"].startswith(STREAM):
                yield infer_response(json.loads(await answer.read()))
            else:
                async for event in _events(answer):
                    if "error" in event:
                        raise _Failed(grpc.StatusCode.INTERNAL, event["error"])
                    yield infer_response(event)
        if EMPTY_LAST in request.parameters and request.parameters[EMPTY_LAST].bool_param:
            yield last_response(request)

    @contextlib.asynccontextmanager
    async def _ask(
        self,
        method: str,
        path: str,
        context: Any,
        headers: Mapping[str, str] = {},
        body: bytes = b"",
    ) -> AsyncIterator[LocalAnswer]:
        async with ask(self._app, method, path, {**_said(context), **headers}, body) as answer:
            _note_dropped(answer, context)
            yield answer

    def _aborting(self, call: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Any]:
        """Return a call that has a status if ``call`` fails."""

        async def answer(requests: AsyncIterator[bytes], context: Any) -> Any:
            try:
                return await call(requests, context)
            except _Failed as error:
                await context.abort(error.code, str(error))
            except Cut as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

        return answer

    async def _answered(
        self,
        call: Callable[[Any, Any], Awaitable[Any]],
        name: str,
        requests: AsyncIterator[bytes],
        context: Any,
    ) -> Any:
        """Return the answer to the one message of a call. Raises _Failed, Cut."""
        if name in _OPEN:  # whose messages say nothing
            return await call(None, context)
        caller = self._caller(context)
        try:
            async with asyncio.timeout(self._receive_timeout_s):
                data = await anext(aiter(requests))
        except TimeoutError:
            why = f"the message took more than {self._receive_timeout_s:g} s to arrive"
            raise _Failed(grpc.StatusCode.DEADLINE_EXCEEDED, why) from None
        except StopAsyncIteration:
            raise _Failed(grpc.StatusCode.INVALID_ARGUMENT, "the call has no message") from None
        caller.read(len(data))
        with caller.answered():
            return await call(await self._parsed(f"{name}Request", data, context), context)

    def _caller(self, context: Any) -> Caller:
        """Return who makes a call, before a message of it is read. Raises _Failed without a key."""
        caller = self._relay.caller(context.peer())
        if caller is None:
            raise _Failed(grpc.StatusCode.PERMISSION_DENIED, "ask at the port")
        try:
            if self._edge.is_proved(_headers(context)):
                caller.proved()
        except ApiError as error:
            raise _Failed(_CODES[error.status], str(error)) from None
        return caller

    async def _parsed(self, kind: str, data: bytes, context: Any) -> Any:
        """Return a message that is bounded. Raises _Failed."""
        try:
            return await self._bounded(kind, data, context)
        except ApiError as error:
            code = _CODES.get(error.status, grpc.StatusCode.INTERNAL)
            raise _Failed(code, str(error)) from None

    async def _bounded(self, kind: str, data: bytes, context: Any) -> Any:
        """Return a message; who sends long ones, or wrong ones, waits.

        Raises ApiError if a key is missing or too much waits, and _Failed for a wrong message.
        """
        headers, is_long = _headers(context), len(data) > _SHORT_BYTES
        try:
            if is_long:
                await self._edge.admit(headers, len(data))
                await self._pool.run(partial(check_parts, kind, data))
            else:
                check_parts(kind, data)
            return _with_short_names(CLASSES[kind].FromString(data))
        except (DecodeError, ValueError) as error:
            if not is_long:
                await self._edge.admit(headers, len(data))
            is_none = isinstance(error, DecodeError)
            why = f"the message is not a {kind}" if is_none else str(error)
            raise _Failed(grpc.StatusCode.INVALID_ARGUMENT, why) from None


async def _json(asking: contextlib.AbstractAsyncContextManager[LocalAnswer]) -> Any:
    """Return the JSON of an answer. Raises _Failed."""
    async with asking as answer:
        if answer.status != 200:
            raise await _failure(answer)
        return json.loads(await answer.read())


def _said(context: Any) -> dict[str, str]:
    """Return the headers of a call that a request has, too."""
    return {name: value for name, value in context.invocation_metadata() if name in _PASSED}


def _note_dropped(answer: LocalAnswer, context: Any) -> None:
    """Name at the end of a call what its answers are not held to, as the header does over HTTP."""
    if IGNORED in answer.headers:
        before = dict(context.trailing_metadata() or ()).get(IGNORED)
        names = ", ".join(filter(None, [before, answer.headers[IGNORED]])).split(", ")
        shown = list(dict.fromkeys(names))[: MOST_NAMED + 1]  # a header's, and its dots
        context.set_trailing_metadata(((IGNORED, ", ".join(shown)),))


def _headers(context: Any) -> dict[bytes, bytes]:
    return {name.encode(): value.encode() for name, value in _said(context).items()}


def _with_short_names(message: Any) -> Any:
    """Return a message. Raises ValueError if a name or an id in it is too long."""
    for name, most in _MOST_CHARS.items():
        if len(getattr(message, name, "")) > most:
            raise ValueError(f"{name} may have at most {most} characters")
    return message


def _serialized(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _translated(request: Any) -> tuple[dict[str, str], bytes]:
    try:
        return infer_request(request)
    except ValueError as error:
        raise _Failed(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None


async def _failure(answer: LocalAnswer) -> _Failed:
    code = _CODES.get(answer.status, grpc.StatusCode.INTERNAL)
    return _Failed(code, json.loads(await answer.read())["error"])


async def _events(answer: LocalAnswer) -> AsyncIterator[dict[str, Any]]:
    """Yield the events of a stream; comments are passed over."""
    unread = b""
    async for piece in answer.pieces():
        *lines, unread = (unread + piece).split(b"\n")
        for line in lines:
            if line.startswith(_DATA):
                yield json.loads(line.removeprefix(_DATA))


@contextlib.asynccontextmanager
async def serving_grpc(web: WebServer, options: ServeOptions) -> AsyncIterator[int]:
    """Serve gRPC for as long as the block lasts; yield the port. Raises OSError if it is taken.

    It asks the application of ``web``, and what those without a key may hold is the same for both.
    """
    listener = bind(options.host, options.grpc_port or 0, flag="--grpc-port")
    port = listener.getsockname()[1]
    is_tls = options.ssl_certfile is not None
    relay = Relay(web.strangers, options.receive_timeout, is_tls=is_tls)
    server = grpc.aio.server(
        options=[
            ("grpc.max_concurrent_streams", _MAX_STREAMS),
            ("grpc.max_receive_message_length", options.max_body_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_connection_idle_ms", round(1e3 * _IDLE_S)),
            ("grpc.server_handshake_timeout_ms", round(1e3 * options.receive_timeout)),
            ("grpc.http2.bdp_probe", 0),  # or unread calls would keep more and more
        ]
    )
    pool = FairThreadPool(2, "messages", options.max_queued_requests, web.edge.pace)
    handlers = Translator(web.app, web.edge, pool, relay, options).handlers()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    if options.ssl_certfile is None:
        server.add_insecure_port(relay.address)
    else:
        certificate = options.ssl_certfile.read_bytes()
        key = (options.ssl_keyfile or options.ssl_certfile).read_bytes()
        pair = grpc.ssl_server_credentials([(key, certificate)])
        server.add_secure_port(relay.address, pair)
    await server.start()
    async with relay.listening(listener):
        try:
            yield port
        finally:
            await server.stop(_GRACE_S)
            pool.close()
