"""The Open Inference Protocol for several models: a path names its model, and is passed on."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.routing import Route

from ridgeline.server.dialects.triton.response import VERSION
from ridgeline.server.dialects.triton.routes import (
    ANSWERS,
    FACTS,
    READY,
    add_probes,
    add_refusals,
    check_version,
    entry,
    paths,
    server_metadata,
)


class Models(Protocol):
    """What is known of the models."""

    @property
    def is_draining(self) -> bool:
        """Whether no requests are taken any more."""

    def chosen(self, name: Any) -> tuple[str, str]:
        """Return name and model of what a request names. Raises ApiError."""

    def listing(self, is_operator: bool) -> list[dict[str, Any]]:
        """Return all models, each with its name as its id."""


def add_triton(
    app: FastAPI, models: Models, pass_on: Callable[[Request], Coroutine[Any, Any, Response]]
) -> None:
    """Add the routes to an application; ``pass_on`` answers those that name a model."""
    add_probes(app, lambda: None, lambda: "the server is stopping" if models.is_draining else None)
    add_refusals(app)

    @app.get("/v2")
    async def server() -> dict[str, Any]:
        """Say what this server is."""
        return server_metadata()

    @app.post("/v2/repository/index")
    async def index() -> list[dict[str, str]]:
        """List all models: each is ready, since it is loaded when it is first asked for."""
        return [entry(one["id"]) for one in models.listing(False)]

    async def ready(model: str, version: str = VERSION) -> Response:
        """Say whether there is such a model; it is loaded when it is first asked for."""
        check_version(version)
        models.chosen(model)
        return Response(status_code=503 if models.is_draining else 200)

    for path in paths(READY):
        app.router.add_api_route(path, ready, methods=["GET"], response_class=Response)
    for method, endings in (("POST", ANSWERS), ("GET", FACTS)):
        for path in (full for ending in endings for full in paths(ending)):
            app.router.routes.append(Route(path, pass_on, methods=[method]))
