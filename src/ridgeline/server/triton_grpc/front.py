"""The gRPC server in front of the application: one more way in, and no other path."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from starlette.types import ASGIApp

from ridgeline.server.dialects.triton.routes import ALL_STATS, STATS, STREAM
from ridgeline.server.http.errors import ApiError
from ridgeline.server.http.gate import Gate
from ridgeline.server.http.options import ServeOptions
from ridgeline.server.http.turns import Turns
from ridgeline.server.triton_grpc.bounds import check_parts
from ridgeline.server.triton_grpc.local_http import Cut, LocalAnswer, asked
from ridgeline.server.triton_grpc.messages import CLASSES, SERVICE
from ridgeline.server.triton_grpc.translate import (
    EMPTY_LAST,
    infer_request,
    infer_response,
    last_response,
    model_config,
    path_of,
)

_MAX_STREAMS = 128  # calls on one connection at a time
_GRACE_S = 2.0
_DATA = b"data: "
_SHORT_BYTES = 1 << 12  # of a message that is counted at once
_NAMES = ("name", "version", "model_name", "model_version")  # which become a path
_MOST_NAME_CHARS = 4096
_PASSED = ("authorization", "x-api-key", "x-request-id", "traceparent")
_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
}


class _Failed(Exception):
    """A request was refused, or its answer failed."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class Translator:
    """The calls of Triton's service, each a request of the application's."""

    def __init__(self, app: ASGIApp, gate: Gate, turns: Turns) -> None:
        """Ask ``app``, which stands behind ``gate``; long messages are counted in ``turns``."""
        self._app, self._gate, self._turns = app, gate, turns

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
        found: dict[str, Any] = {
            name: grpc.unary_unary_rpc_method_handler(
                self._aborting(call, f"{name}Request"), response_serializer=_serialized
            )
            for name, call in unary.items()
        }
        found["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
            self._stream_infer, response_serializer=_serialized
        )
        return found

    def _probe(self, path: str, name: str) -> Callable[[Any, Any], Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            async with self._asked("GET", path, context) as answer:
                response = CLASSES[f"Server{name.title()}Response"]
                return response(**{name: answer.status == 200})

        return call

    async def _model_ready(self, request: Any, context: Any) -> Any:
        path = path_of(request.name, request.version, "/ready")
        async with self._asked("GET", path, context) as answer:
            return CLASSES["ModelReadyResponse"](ready=answer.status == 200)

    async def _server_metadata(self, request: Any, context: Any) -> Any:
        return CLASSES["ServerMetadataResponse"](**await _json(self._asked("GET", "/v2", context)))

    async def _index(self, request: Any, context: Any) -> Any:
        models = await _json(self._asked("POST", "/v2/repository/index", context))
        return CLASSES["RepositoryIndexResponse"](models=models)

    async def _statistics(self, request: Any, context: Any) -> Any:
        named = path_of(request.name, request.version, STATS) if request.name else ALL_STATS
        answer = await _json(self._asked("GET", named, context))
        return CLASSES["ModelStatisticsResponse"](**answer)

    def _about(
        self, ending: str, make: Callable[[Any], Any]
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            path = path_of(request.name, request.version, ending)
            return make(await _json(self._asked("GET", path, context)))

        return call

    def _manage(self, action: str) -> Callable[[Any, Any], Awaitable[Any]]:
        async def call(request: Any, context: Any) -> Any:
            path = f"/v2/repository/models/{request.model_name}/{action}"
            return await _json(self._asked("POST", path, context))

        return call

    async def _infer(self, request: Any, context: Any) -> Any:
        headers, body = _translated(request)
        path = path_of(request.model_name, request.model_version, "/infer")
        return infer_response(await _json(self._asked("POST", path, context, headers, body)))

    async def _stream_infer(self, requests: AsyncIterator[bytes], context: Any) -> Any:
        """Yield the answers to all requests of a stream, side by side."""
        responses: asyncio.Queue[Any] = asyncio.Queue(1)
        made = CLASSES["ModelStreamInferResponse"]

        async def answer(data: bytes) -> None:
            request = CLASSES["ModelInferRequest"]()
            try:
                request = await self._parsed("ModelInferRequest", data, context)
                async for response in self._answers(request, context):
                    await responses.put(made(infer_response=response))
            except (_Failed, Cut) as error:
                failed = CLASSES["ModelInferResponse"](id=request.id)
                await responses.put(made(error_message=str(error), infer_response=failed))

        async def read() -> None:
            async with asyncio.TaskGroup() as group:
                async for request in requests:
                    group.create_task(answer(request))
            await responses.put(None)

        reading = asyncio.ensure_future(read())
        try:
            while (response := await responses.get()) is not None:
                yield response
        finally:
            reading.cancel()

    async def _answers(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Yield the answer to a request, in pieces if it wants a stream. Raises _Failed, Cut."""
        headers, body = _translated(request)
        headers["accept"] = STREAM
        path = path_of(request.model_name, request.model_version, "/infer")
        async with self._asked("POST", path, context, headers, body) as answer:
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

    def _asked(
        self,
        method: str,
        path: str,
        context: Any,
        headers: Mapping[str, str] = {},
        body: bytes = b"",
    ) -> contextlib.AbstractAsyncContextManager[LocalAnswer]:
        return asked(self._app, method, path, {**_said(context), **headers}, body)

    def _aborting(
        self, call: Callable[[Any, Any], Awaitable[Any]], kind: str
    ) -> Callable[[bytes, Any], Awaitable[Any]]:
        """Return a call that takes a message of this kind, and has a status if ``call`` fails."""

        async def answer(data: bytes, context: Any) -> Any:
            try:
                return await call(await self._parsed(kind, data, context), context)
            except _Failed as error:
                await context.abort(error.code, str(error))
            except Cut as error:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

        return answer

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
        headers = {name.encode(): value.encode() for name, value in _said(context).items()}
        is_long = len(data) > _SHORT_BYTES
        try:
            if is_long:
                await self._gate.admit(headers, len(data))
                await self._turns.run(partial(check_parts, kind, data))
            else:
                check_parts(kind, data)
            return _with_short_names(CLASSES[kind].FromString(data))
        except (DecodeError, ValueError) as error:
            if not is_long:
                await self._gate.admit(headers, len(data))
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


def _with_short_names(message: Any) -> Any:
    """Return a message. Raises ValueError if a name in it is too long to be a path."""
    for name in _NAMES:
        if len(getattr(message, name, "")) > _MOST_NAME_CHARS:
            raise ValueError(f"{name} may have at most {_MOST_NAME_CHARS} characters")
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
async def serving_grpc(app: ASGIApp, gate: Gate, options: ServeOptions) -> AsyncIterator[int]:
    """Serve gRPC for as long as the block lasts; yield the port. Raises OSError if it is taken.

    It asks ``app``, which stands behind ``gate``.
    """
    server = grpc.aio.server(
        options=[
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", _MAX_STREAMS),
            ("grpc.max_receive_message_length", options.max_body_bytes),
            ("grpc.max_send_message_length", -1),
        ]
    )
    turns = Turns(2, "messages", options.max_queued_requests, gate.pace)
    handlers = Translator(app, gate, turns).handlers()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    host = f"[{options.host}]" if ":" in options.host else options.host
    address = f"{host}:{options.grpc_port}"
    try:
        if options.ssl_certfile is None:
            port = server.add_insecure_port(address)
        else:
            certificate = options.ssl_certfile.read_bytes()
            key = (options.ssl_keyfile or options.ssl_certfile).read_bytes()
            pair = grpc.ssl_server_credentials([(key, certificate)])
            port = server.add_secure_port(address, pair)
    except RuntimeError:
        raise OSError(f"cannot listen on {address}: try another --grpc-port") from None
    await server.start()
    try:
        yield port
    finally:
        await server.stop(_GRACE_S)
        turns.close()
