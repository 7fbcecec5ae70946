"""The Open Inference Protocol for several models: a path names its model, and is passed on."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Protocol
from urllib.parse import quote

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.routing import Route

from ridgeline.serve.dialects.triton.response import VERSION
from ridgeline.serve.dialects.triton.routes import (
    ALL_STATS,
    ANSWERS,
    FACTS,
    READY,
    STATS,
    add_probes,
    add_refusals,
    check_version,
    entry,
    paths,
    server_metadata,
)
from ridgeline.serve.http.request_state import check_operator
from ridgeline.serve.observe.statistics import added


class Models(Protocol):
    """The models of a router."""

    @property
    def is_draining(self) -> bool:
        """Whether no requests are taken any more."""

    def resolve_model(self, name: Any) -> tuple[str, str]:
        """Return name and model of what a request names. Raises ApiError."""

    def listing(self, is_operator: bool) -> list[dict[str, Any]]:
        """Return all models, each with its name as its id."""

    @property
    def running(self) -> Iterable[str]:
        """Names of the models that have servers."""

    async def all_say(self, name: str, path: str, request: Request) -> list[Any]:
        """Return what each server of a model answers to a GET of ``path``."""


def add_triton(
    app: FastAPI, models: Models, proxy: Callable[[Request], Coroutine[Any, Any, Response]]
) -> None:
    """Add the routes to an application; ``proxy`` answers those that name a model."""
    add_probes(app, lambda: None, lambda: "the server is stopping" if models.is_draining else None)
    add_refusals(app)

    @app.get("/v2")
    async def server() -> Mapping[str, Any]:
        """Say what this server is."""
        return server_metadata()

    @app.post("/v2/repository/index")
    async def index() -> list[Mapping[str, Any]]:
        """List all models: each is ready, since it is loaded when it is first asked for."""
        return [entry(one["id"]) for one in models.listing(False)]

    async def ready(model: str, version: str = VERSION) -> Response:
        """Say whether there is such a model; it is loaded when it is first asked for."""
        check_version(version)
        models.resolve_model(model)
        return Response(status_code=503 if models.is_draining else 200)

    async def stats(request: Request, model: str, version: str = VERSION) -> dict[str, Any]:
        """Say how many requests all servers of a model have had."""
        check_operator(request.state)
        check_version(version)
        name, _ = models.resolve_model(model)
        answers = await models.all_say(name, f"/v2/models/{quote(model)}{STATS}", request)
        entries = [one for answer in answers for one in answer["model_stats"]]
        return {"model_stats": [added(entries)] if entries else []}

    async def all_stats(request: Request) -> dict[str, Any]:
        """Say it of each model that has servers, and of its adapters."""
        check_operator(request.state)
        entries: dict[str, list[Any]] = {}
        for name in models.running:
            for answer in await models.all_say(name, ALL_STATS, request):
                for one in answer["model_stats"]:
                    entries.setdefault(one["name"], []).append(one)
        return {"model_stats": [added(several) for several in entries.values()]}

    app.router.add_api_route(ALL_STATS, all_stats, methods=["GET"])
    for path in paths(STATS):
        app.router.add_api_route(path, stats, methods=["GET"])
    for path in paths(READY):
        app.router.add_api_route(path, ready, methods=["GET"], response_class=Response)
    for method, endings in (("POST", ANSWERS), ("GET", FACTS)):
        for path in (full for ending in endings for full in paths(ending)):
            app.router.routes.append(Route(path, proxy, methods=[method]))
