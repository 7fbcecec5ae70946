"""The route that says why a request was slow: in JSON, as Markdown or as a picture."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from ridgeline.planner.explain_svg import explain_svg
from ridgeline.planner.helpful import would_help
from ridgeline.planner.sentences import as_dict, markdown
from ridgeline.server.errors import ApiError
from ridgeline.server.history import Forgotten
from ridgeline.server.schemas import ERRORS

if TYPE_CHECKING:
    from ridgeline.server.app import Service

_ALSO: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/markdown": {}, "image/svg+xml": {}}}
}
_FORMATS = ("json", "markdown", "svg")


def add_explain(app: FastAPI, service: Service) -> None:
    """Add the route to an application."""

    @app.get("/v1/requests/{name}/explain", responses=ERRORS | _ALSO)
    async def explain_request(name: str, request: Request, format: str = "json") -> Response:
        """Say where the time of a request of this key went, by its id or its x-request-id."""
        if format not in _FORMATS:
            message = f"format is {format[:80]!r}: one of {', '.join(_FORMATS)}"
            raise ApiError(400, message, param="format", code="invalid_value")
        try:
            found = await asyncio.to_thread(service.history.explain, name, request.state.tenant)
        except Forgotten as error:
            raise ApiError(404, str(error), code="request_not_found") from None
        if format == "markdown":
            return Response(
                markdown(found, would_help(found)), media_type="text/markdown; charset=utf-8"
            )
        if format == "svg":
            return Response(explain_svg(found), media_type="image/svg+xml")
        return JSONResponse(as_dict(found, would_help(found)))
