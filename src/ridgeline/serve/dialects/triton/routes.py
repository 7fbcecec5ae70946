"""The routes of the Open Inference Protocol, and Triton's generate, over the one path.

A request of tensors becomes one of named fields: each input is a field of the same name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.responses import Response

from ridgeline.engine.outputs import shaped
from ridgeline.serve.answer.dialect import Dialect
from ridgeline.serve.answer.reply import RawBody
from ridgeline.serve.answer.schemas import TEXT_ERRORS, documented
from ridgeline.serve.dialects.openai.embeddings import Vectors, vectors_of
from ridgeline.serve.dialects.triton import schemas
from ridgeline.serve.dialects.triton.protocol import InferRequest, InputTensor, TritonRequest
from ridgeline.serve.dialects.triton.response import (
    OUTPUTS,
    VERSION,
    Output,
    TritonWriter,
    generated,
    inferred,
    packed,
)
from ridgeline.serve.dialects.triton.tensors import check_shape, checked, unpack
from ridgeline.serve.http.errors import ApiError, validation_error
from ridgeline.serve.http.request_body import (
    MAX_PARTS,
    MAX_VALUES,
    STRICT,
    BodyRoute,
    bad_value,
    note_ignored,
)
from ridgeline.serve.http.request_state import check_operator
from ridgeline.serve.model_server import ModelServer
from ridgeline.version import __version__

EXTENSIONS = [
    *("binary_tensor_data", "generate", "model_configuration", "model_repository", "parameters"),
    "statistics",
]
LENGTH = "inference-header-content-length"
STREAM = "text/event-stream"  # clients that accept it get a stream from infer
MANAGE = "/v2/repository/models/{model:path}/{action}"
STATS, ALL_STATS = "/stats", "/v2/models/stats"  # of one model, and of all
ANSWERS, FACTS, READY = ("/generate", "/generate_stream", "/infer"), ("/config", ""), "/ready"
TRITON = Dialect(names={"prompt": "text_input"})
_TEXT_VALUES = MAX_VALUES // MAX_PARTS  # as many numbers as a text counts for
_BINARY = "binary_data_output"  # of a request's parameters: how all outputs are sent
_EMBEDDING = "embedding"
_KINDS = {"BYTES": "TYPE_STRING", "BOOL": "TYPE_BOOL", "UINT32": "TYPE_UINT32", "FP32": "TYPE_FP32"}
_FLAGS = ("finish_reason", "num_input_tokens", "num_output_tokens")


class TensorRoute(BodyRoute):
    """A route whose body may have tensors behind its JSON."""

    async def json_of(self, request: Request) -> bytes:
        """Return the JSON, and leave the bytes behind it to the request."""
        data, request.state.behind = parted(await request.body(), request.headers.get(LENGTH))
        return data


def paths(path: str) -> list[str]:
    """Return a path below a model's, with a version and without; names may have slashes."""
    return [f"/v2/models/{{model:path}}{version}{path}" for version in ("/versions/{version}", "")]


def add_triton(app: FastAPI, server: ModelServer) -> None:
    """Add the routes to an application."""
    _add_server(app, server)
    add_refusals(app)
    _add_answers(app, server)
    _add_model(app, server)


def server_metadata() -> schemas.ServerMetadata:
    """Return what is said of a server."""
    return {"name": "ridgeline", "version": __version__, "extensions": EXTENSIONS}


def entry(name: str, state: str = "READY") -> schemas.IndexEntry:
    """Return a model as the repository's index has it."""
    return {"name": name, "version": VERSION, "state": state, "reason": ""}


def check_version(version: str) -> None:
    """Raise ApiError unless this is the version that each model has."""
    if version != VERSION:
        message = f"there is no version {version[:20]!r} here: each model has version {VERSION}"
        raise ApiError(404, message, param="version", code="model_not_found")


def add_probes(
    app: FastAPI, live: Callable[[], str | None], ready: Callable[[], str | None]
) -> None:
    """Add the probes of a server; each question returns why not."""

    def probe(question: Callable[[], str | None]) -> Callable[[], Any]:
        async def answer() -> Response:
            return Response(status_code=200 if question() is None else 503)

        return answer

    said = {"response_class": Response, "responses": {503: {"description": "No"}}}
    app.get("/v2/health/live", summary="Does the server live?", **said)(probe(live))  # type: ignore[arg-type]
    app.get("/v2/health/ready", summary="Are requests taken?", **said)(probe(ready))  # type: ignore[arg-type]


def _add_server(app: FastAPI, model_server: ModelServer) -> None:
    add_probes(app, model_server.trouble, model_server.unready)

    @app.get("/v2", responses=TEXT_ERRORS)
    async def server() -> schemas.ServerMetadata:
        """Say what this server is, as Triton does."""
        return server_metadata()

    @app.post("/v2/repository/index", responses=TEXT_ERRORS)
    async def index() -> list[schemas.IndexEntry]:
        """List the one model and its adapters, as Triton does."""
        return [entry(name) for name in (*model_server.names, *model_server.loras.names)]


def _add_answers(app: FastAPI, server: ModelServer) -> None:
    async def generate(
        body: TritonRequest, request: Request, model: str, version: str = VERSION
    ) -> Response:
        """Continue a text, as Triton's generate does."""
        _check(server, model, version)
        if body.stream:
            raise bad_value("stream", "generate answers once: ask generate_stream")
        return await _reply(server, request, body, model, _wanted(body), generated)

    async def generate_stream(
        body: TritonRequest, request: Request, model: str, version: str = VERSION
    ) -> Response:
        """Continue a text, as server-sent events."""
        _check(server, model, version)
        body = body.streamed()
        return await _reply(server, request, body, model, _wanted(body), generated)

    async def infer(
        body: InferRequest, request: Request, model: str, version: str = VERSION
    ) -> Response:
        """Continue texts, or return their vectors, with tensors for input and output."""
        _check(server, model, version)
        target = request_of(body, request.state.behind, is_strict=server.options.strict)
        if target.stream and request.headers.get("accept") != STREAM:
            raise bad_value("stream", "infer answers once: ask generate_stream, or over gRPC")
        target = target.streamed() if target.stream else target
        names = [one.name for one in body.outputs or ()] or _wanted(target)
        if not server.text.has_head and not body.outputs:
            names = [_EMBEDDING]
        _check_outputs(server, names)
        write = partial(inferred, request_id=body.id)
        pack = partial(packed, wants_bytes=partial(wants_bytes, body))
        if _EMBEDDING in names:
            reply = await _embed(server, request, target, lambda one: pack(write(model, [one])))
        else:
            reply = await _reply(server, request, target, model, names, write, pack)
        note_ignored(reply, target.ignored())
        return reply

    events = documented(schemas.Generated, schemas.EVENTS)
    routes: dict[str, tuple[Callable[..., Any], Any, type[BodyRoute]]] = {
        "/generate": (generate, {200: {"model": schemas.Generated}}, BodyRoute),
        "/generate_stream": (generate_stream, events, BodyRoute),
        "/infer": (infer, {200: {"model": schemas.Inferred}}, TensorRoute),
    }
    for path, (route, answered, kind) in routes.items():
        for full in paths(path):
            app.router.add_api_route(
                full,
                route,
                methods=["POST"],
                responses=TEXT_ERRORS | answered,
                route_class_override=kind,
                include_in_schema="{version}" not in full,
            )


def _check(server: ModelServer, model: str, version: str) -> None:
    """Raise ApiError unless requests for this version of a model are taken."""
    check_version(version)
    server.check_open(model)


def _wanted(body: TritonRequest) -> list[str]:
    """Return the names of the outputs that a request's flags ask for."""
    flags = [name for name in _FLAGS if getattr(body, f"return_{name}")]
    return ["text_output", *flags]


def _check_outputs(server: ModelServer, names: Sequence[str]) -> None:
    """Raise ApiError for an output that the model does not have."""
    has = [one["name"] for one in _outputs(server)]
    if unknown := [name for name in names if name not in has]:
        message = f"there is no output {unknown[0][:80]!r}: this model has {', '.join(has)}"
        raise bad_value("outputs", message)
    if _EMBEDDING in names and len(names) > 1:
        raise bad_value("outputs", f"{_EMBEDDING} comes alone")


async def _reply(
    server: ModelServer,
    request: Request,
    body: TritonRequest,
    model: str,
    names: Sequence[str],
    write: Callable[[str, list[Output]], schemas.Generated | schemas.Inferred],
    pack: Callable[[Any], schemas.Generated | schemas.Inferred | RawBody] = lambda answer: answer,
) -> Response:
    """Return the reply to texts, which has the outputs of these names. Raises ApiError."""
    body.model = model
    new_writer = partial(TritonWriter, names=names, write=write, pack=pack)
    with TRITON.errors():
        return await server.complete(body, request, new_writer=new_writer, dialect=TRITON)


async def _embed(
    server: ModelServer,
    request: Request,
    body: TritonRequest,
    write: Callable[[Output], schemas.Inferred | RawBody],
) -> Response:
    """Return the reply with the texts' vectors. Raises ApiError."""
    make = partial(shaped, normalises=server.text.normalises)

    def answer(vectors: Vectors) -> schemas.Inferred | RawBody:
        rows = [make(vector) for vector in vectors.values]
        values = [value for row in rows for value in row]
        return write(Output(_EMBEDDING, "FP32", [len(rows), len(rows[0])], values))

    return await vectors_of(server, request, body, body.prompts, "text_input", answer)


def _inputs(server: ModelServer) -> list[schemas.TensorMetadata]:
    """Return the inputs that a model's metadata names; each other field may be one as well."""
    texts = _tensor("text_input", "BYTES", -1)
    if not server.text.has_head:
        return [texts]
    options = {"sampling_parameters": "BYTES"}
    options |= dict.fromkeys(("stream", "exclude_input_in_output"), "BOOL")
    options |= {f"return_{name}": "BOOL" for name in _FLAGS}
    return [texts, *(_tensor(name, kind, 1) for name, kind in options.items())]


def _outputs(server: ModelServer) -> list[schemas.TensorMetadata]:
    vector = _tensor(_EMBEDDING, "FP32", -1, server.text.vector_size)
    texts = (_tensor(name, kind, -1) for name, kind in OUTPUTS.items())
    return [*texts, vector] if server.text.has_head else [vector]


def _tensor(name: str, kind: str, *shape: int) -> schemas.TensorMetadata:
    return {"name": name, "datatype": kind, "shape": list(shape)}


def _configured(tensor: schemas.TensorMetadata) -> schemas.ConfiguredTensor:
    kind = _KINDS[tensor["datatype"]]
    return {"name": tensor["name"], "data_type": kind, "dims": tensor["shape"]}


def _add_model(app: FastAPI, server: ModelServer) -> None:
    async def ready(model: str, version: str = VERSION) -> Response:
        """Say whether a model takes requests."""
        _check(server, model, version)
        return Response(status_code=200 if server.unready() is None else 503)

    async def config(model: str, version: str = VERSION) -> schemas.ModelConfig:
        """Return a model's configuration, as Triton writes it."""
        _check(server, model, version)
        inputs = list(map(_configured, _inputs(server)))
        for tensor in inputs[1:]:
            tensor["optional"] = True
        return {
            "name": model,
            "platform": "",
            "backend": "ridgeline",
            "max_batch_size": 0,
            "input": inputs,
            "output": list(map(_configured, _outputs(server))),
            "model_transaction_policy": {"decoupled": server.text.has_head},
        }

    async def metadata(model: str, version: str = VERSION) -> schemas.ModelMetadata:
        """Say which inputs and outputs a model has."""
        _check(server, model, version)
        return {
            "name": model,
            "versions": [VERSION],
            "platform": "ridgeline",
            "inputs": _inputs(server),
            "outputs": _outputs(server),
        }

    async def stats(
        request: Request, model: str, version: str = VERSION
    ) -> schemas.ModelStatistics:
        """Say how many requests a model has had, and how long they took. For operators."""
        check_operator(request.state)
        _check(server, model, version)
        return {"model_stats": [server.statistics_of(model, VERSION)]}

    async def all_stats(request: Request) -> schemas.ModelStatistics:
        """Say it of the model and of each adapter. For operators."""
        check_operator(request.state)
        names = (*server.names[:1], *server.loras.names)
        return {"model_stats": [server.statistics_of(name, VERSION) for name in names]}

    app.router.add_api_route(ALL_STATS, all_stats, methods=["GET"], responses=TEXT_ERRORS)
    routes: dict[str, Callable[..., Any]]
    routes = {READY: ready, STATS: stats, "/config": config, "": metadata}
    for path, route in routes.items():
        for full in paths(path):
            app.router.add_api_route(
                full,
                route,
                methods=["GET"],
                responses=TEXT_ERRORS,
                response_class=Response if path == READY else JSONResponse,
                include_in_schema="{version}" not in full,
            )


def add_refusals(app: FastAPI) -> None:
    """Add the routes that load and unload models: they refuse."""

    @app.post(MANAGE, include_in_schema=False)
    async def manage(model: str, action: str) -> Response:
        """Refuse to load or unload a model."""
        why = "models are not loaded or unloaded by request: --keep-alive says how long one stays"
        raise ApiError(400, why, param="model", code="unsupported_endpoint")


# --- a request of tensors as one of named fields: each input is a field of the same name ---------


def request_of(body: InferRequest, behind: bytes, *, is_strict: bool) -> TritonRequest:
    """Return the request that tensors and parameters describe.

    ``behind`` are the bytes behind the JSON, of the tensors that stand there in this order. They
    may have as many elements as a body in JSON may have values. Raises ApiError.
    """
    room = MAX_VALUES
    given = {name: value for name, value in (body.parameters or {}).items() if name != _BINARY}
    for tensor in body.inputs:
        weight = _TEXT_VALUES if tensor.datatype == "BYTES" else 1
        values, behind = _values(tensor, behind, room // weight)
        room -= weight * len(values)
        values = _row_of(tensor, values) if tensor.name != "text_input" else values
        names = TritonRequest.model_fields.keys() - set(TritonRequest.absent)
        if tensor.name not in names | fields_of_others():
            raise bad_value("inputs", f"there is no input {tensor.name[:80]!r} here")
        given[tensor.name] = values[0] if len(values) == 1 else values
    if behind:
        raise bad_value("inputs", f"{len(behind)} bytes behind the JSON belong to no tensor")
    given["id"] = body.id
    try:
        return TritonRequest.model_validate(given, context=STRICT if is_strict else None)
    except ValidationError as error:
        raise validation_error(error.errors(include_url=False)) from None


def _row_of(tensor: InputTensor, values: list[Any]) -> list[Any]:
    """Return a setting that has a row for each text, as TensorRT-LLM's clients send it.

    One request has one setting. Raises ApiError unless the rows are equal.
    """
    if len(tensor.shape) < 2 or tensor.shape[0] < 2 or not values:
        return values
    width = len(values) // tensor.shape[0]
    first = values[:width]
    if values != first * tensor.shape[0]:
        why = f"the rows of {tensor.name[:80]!r} differ: send a request for each text"
        raise bad_value("inputs", why)
    return first


def fields_of_others() -> frozenset[str]:
    """Return the names in the table that says what becomes of each."""
    return frozenset(TritonRequest.extras or ())


def wants_bytes(body: InferRequest, name: str) -> bool:
    """Whether an output is to be sent as bytes. ``name`` is the output's."""
    by_default = (body.parameters or {}).get(_BINARY) is True
    for one in body.outputs or ():
        if one.name == name and one.parameters and one.parameters.binary_data is not None:
            return one.parameters.binary_data
    return by_default


def _values(tensor: InputTensor, behind: bytes, most: int) -> tuple[list[Any], bytes]:
    """Return a tensor's elements, of bytes at most ``most``, and what is left. Raises ApiError."""
    size = tensor.parameters.binary_data_size if tensor.parameters else None
    where = f"the input {tensor.name[:80]!r}"
    try:
        if size is not None and tensor.data is not None:
            raise ValueError("it has both data and binary_data_size")
        if size is not None and size > len(behind):
            raise ValueError(f"binary_data_size is {size}, but {len(behind)} bytes are left")
        if size is not None:
            values, behind = unpack(tensor.datatype, behind[:size], most), behind[size:]
        else:
            values = checked(tensor.datatype, tensor.data or [])
        check_shape(tensor.shape, len(values))
    except UnicodeDecodeError:
        raise bad_value("inputs", f"{where} is not UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise bad_value("inputs", f"{where}: {error}") from None
    if any(isinstance(value, float) and not math.isfinite(value) for value in values):
        raise bad_value("inputs", f"{where} has a number that is not finite")
    return values, behind


def parted(data: bytes, length: str | None) -> tuple[bytes, bytes]:
    """Return the JSON of a body and the tensors behind it; ``length`` is the header's value.

    Raises ApiError.
    """
    if length is None:
        return data, b""
    if not (length.isascii() and length.isdigit() and len(length) < 20) or int(length) > len(data):
        name = "Inference-Header-Content-Length"
        raise ApiError(400, f"{name} is {length[:20]!r}, but the body has {len(data)} bytes")
    return data[: int(length)], data[int(length) :]
