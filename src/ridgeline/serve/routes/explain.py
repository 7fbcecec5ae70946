"""The route that says why a request was slow: in JSON, as Markdown, a picture or a timeline."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.responses import Response

from ridgeline.foresight.explain_report import as_dict, as_file, explain_svg, markdown
from ridgeline.foresight.suggestions import would_help
from ridgeline.serve.answer.schemas import ERRORS
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.model_server import ModelServer
from ridgeline.serve.observe.trace_buffer import Forgotten, TraceBuffer

_ALSO: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/markdown": {}, "image/svg+xml": {}}}
}
_FORMATS = ("json", "markdown", "svg", "timeline")


def add_explain(app: FastAPI, server: ModelServer) -> None:
    """Add the route to an application."""

    @app.get("/v1/requests/{name}/explain", responses=ERRORS | _ALSO)
    async def explain_request(name: str, request: Request, format: str = "json") -> Response:
        """Say where the time of a request of this key went, by its id or its x-request-id.

        The timeline is a file for ui.perfetto.dev.
        """
        if format not in _FORMATS:
            message = f"format is {format[:80]!r}: one of {', '.join(_FORMATS)}"
            raise ApiError(400, message, param="format", code="invalid_value")
        try:
            return await server.work.reports.run(
                partial(_answer, server.trace_buffer, name, request.state.tenant, format)
            )
        except Forgotten as error:
            raise ApiError(404, str(error), code="request_not_found") from None


def _answer(trace_buffer: TraceBuffer, name: str, tenant: str, form: str) -> Response:
    if form == "timeline":
        return Response(
            as_file(trace_buffer.timeline(name, tenant)),
            media_type="application/json",
            headers={"content-disposition": 'attachment; filename="timeline.json"'},
        )
    explanation, beside = trace_buffer.explain(name, tenant)
    if form == "svg":
        return Response(explain_svg(explanation), media_type="image/svg+xml")
    shown = explanation, *would_help(explanation, beside)
    if form == "markdown":
        return Response(markdown(*shown), media_type="text/markdown; charset=utf-8")
    return JSONResponse(as_dict(*shown))
