"""Ollama's routes that manage models: pull, create, copy, delete, push and blobs.

What changes something is an operator's, except where nothing would: a model that is here is pulled
at once. Files come from the hub alone, never from a client and never from a path.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from ridgeline.serve.aliases import NAME, Alias, Aliases
from ridgeline.serve.answer.reply import STREAMED
from ridgeline.serve.answer.schemas import TEXT_ERRORS, documented
from ridgeline.serve.dialects.ollama.protocol import (
    CopyRequest,
    CreateRequest,
    NameRequest,
    PullRequest,
)
from ridgeline.serve.dialects.ollama.request import openai_messages
from ridgeline.serve.dialects.ollama.response import OllamaWriter
from ridgeline.serve.dialects.ollama.schemas import LINES, Progress
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.fair_pool import in_thread
from ridgeline.serve.http.request_body import bad_value
from ridgeline.serve.http.request_state import check_operator

_SUCCESS: Progress = {"status": "success"}
_SAID = TEXT_ERRORS | documented(Progress, LINES, OllamaWriter.stream_type)
_LOOK_S = 0.5  # between two lines about a model that is fetched
# Ollama's templates are Go's: actions are in double braces, where Jinja has expressions.
_OF_GO = re.compile(r"\{\{-?\s*(?:[.$]|(?:if|else|end|range|with|template|block|define)\b)")

Report = Callable[[int, int], None]  # bytes so far, and in all


class Shelf(Protocol):
    """The models that a server, or a router, has."""

    aliases: Aliases

    def model_of(self, name: str) -> str | None:
        """Return the model or the adapter that has a name itself, None if there is none."""

    def fetch(self, name: str, report: Report) -> None:
        """Fetch a model and serve it from then on; any thread may call.

        Raises ValueError or OSError if it cannot be had.
        """


def add_management(app: FastAPI, models: Shelf) -> None:
    """Add the routes to an application."""
    _add_pull(app, models)
    _add_aliases(app, models)
    _add_refusals(app)


def _add_pull(app: FastAPI, models: Shelf) -> None:
    fetching = asyncio.Lock()

    @app.post("/api/pull", responses=_SAID)
    async def pull(body: PullRequest, request: Request) -> Response:
        """Fetch a model, unless it is here; then nothing is to be done."""
        name = body.named
        if models.model_of(name) or models.aliases.find(name):
            return _done(body.stream)
        check_operator(request.state)
        if fetching.locked():
            headers = {"retry-after": "60"}
            raise ApiError(503, "another model is being fetched", code="busy", headers=headers)
        if body.stream is not False:
            lines = _lines(models, name, fetching)
            return StreamingResponse(lines, 200, STREAMED, OllamaWriter.stream_type)
        async with fetching:
            await _fetched(models, name, lambda done, total: None)
        return _done(False)


async def _fetched(models: Shelf, name: str, report: Report) -> None:
    """Fetch a model. Raises ApiError if it cannot be had."""
    try:
        await in_thread(models.fetch, name, report)
    except (ValueError, OSError) as error:
        raise ApiError(400, f"{name[:80]}: {error}", param="model", code="not_pulled") from None


async def _lines(models: Shelf, name: str, fetching: asyncio.Lock) -> AsyncIterator[bytes]:
    """Yield lines of JSON about a model that is fetched; the last one says how it went."""
    far: dict[str, int] = {}

    def report(done: int, total: int) -> None:
        far.update(total=total, completed=done)

    async with fetching:
        task = asyncio.ensure_future(_fetched(models, name, report))
        while not task.done():
            yield _line({"status": f"pulling {name}", **far})
            await asyncio.wait([task], timeout=_LOOK_S)
        try:
            await task
            yield _line(_SUCCESS)
        except ApiError as error:
            yield _line({"error": str(error)})


def _add_aliases(app: FastAPI, models: Shelf) -> None:
    def keep(alias: Alias) -> None:
        """Keep an alias under a name that no model has. Raises ApiError."""
        if not NAME.fullmatch(alias.name):
            why = "write 1 to 128 letters, digits and ._:/-"
            raise bad_value("model", f"{alias.name[:80]!r} is no name: {why}")
        if models.model_of(alias.name):
            raise bad_value("model", f"{alias.name[:80]!r} is a model itself: take another name")
        try:
            models.aliases.keep(replace(alias, created_s=int(time.time())))
        except (OSError, ValueError) as error:
            raise ApiError(503, str(error), code="no_files") from None

    def resolve_alias(name: str, param: str) -> Alias:
        """Return what a name means, with what it adds. Raises ApiError 404."""
        if model := models.model_of(name):
            return Alias(name, model)
        if alias := models.aliases.find(name):
            return alias
        message = f"there is no model {name[:80]!r} here"
        raise ApiError(404, message, param=param, code="model_not_found")

    @app.post("/api/create", responses=_SAID)
    async def create(body: CreateRequest, request: Request) -> Response:
        """Give a model a further name, with a system prompt, a template, options, messages."""
        check_operator(request.state)
        if _OF_GO.search(body.template or ""):
            why = "it is Go's: write Jinja, or leave it out, and the model's own is used"
            raise bad_value("template", why)
        base = resolve_alias(body.from_model, "from")
        said = body.parameters.model_dump(exclude_none=True) if body.parameters else {}
        changes: dict[str, Any] = {
            "system": body.system,
            "template": body.template,
            "parameters": {**base.parameters, **said},
            "messages": list(openai_messages(body.messages)) if body.messages else None,
        }
        changes = {name: value for name, value in changes.items() if value is not None}
        keep(replace(base, name=body.named, **changes))
        return _done(body.stream)

    @app.post("/api/copy", responses=TEXT_ERRORS, response_class=Response)
    async def copy(body: CopyRequest, request: Request) -> Response:
        """Give a model a further name."""
        check_operator(request.state)
        keep(replace(resolve_alias(body.source, "source"), name=body.destination))
        return Response()

    @app.delete("/api/delete", responses=TEXT_ERRORS, response_class=Response)
    async def delete(body: NameRequest, request: Request) -> Response:
        """Take a further name from a model."""
        check_operator(request.state)
        if models.model_of(body.named):
            message = f"{body.named[:80]!r} is served here: ridgeline rm removes files of models"
            raise ApiError(400, message, param="model", code="model_in_use")
        models.aliases.forget(resolve_alias(body.named, "model"))
        return Response()


def _add_refusals(app: FastAPI) -> None:
    @app.post("/api/push", include_in_schema=False)
    async def push() -> Response:
        """Refuse to publish a model."""
        message = "nothing is pushed from here: upload files to the hub with its own client"
        raise ApiError(501, message, code="unsupported_endpoint")

    @app.get("/api/blobs/{digest}", include_in_schema=False)
    async def blob(digest: str) -> Response:
        """Say that there is no such blob."""
        message = f"there is no blob {digest[:80]!r}: files are not kept by digest here"
        raise ApiError(404, message, code="not_found")

    @app.post("/api/blobs/{digest}", include_in_schema=False)
    async def send_blob(digest: str) -> Response:
        """Refuse a file."""
        message = "no files of models are taken over HTTP: ridgeline pull, or copy them there"
        raise ApiError(501, message, code="unsupported_endpoint")


def _done(stream: bool | None) -> Response:
    if stream is False:
        return JSONResponse(_SUCCESS)
    return Response(_line(_SUCCESS), media_type=OllamaWriter.stream_type)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"
