"""All errors of an application, in the form of the API that the path belongs to."""

from __future__ import annotations

import difflib

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute

from ridgeline.serve.http.errors import ApiError, body_at

_STATUS = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed"}


def _takes(route: BaseRoute, request: Request) -> bool:
    """Whether a route is shown, and takes requests of this kind."""
    methods = getattr(route, "methods", None) or ()
    return getattr(route, "include_in_schema", True) and request.method in methods


def add_errors(app: FastAPI) -> None:
    """Let an application answer all errors in the form of the API that the path belongs to."""

    async def api(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        request.scope["state"]["note"].setdefault("error", str(error))
        request.scope["state"]["code"] = error.code
        shown = body_at(request.state.path, error, request.state.request_id)
        return JSONResponse(shown, error.status, error.headers)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path[:80]
        text = f"{request.method} {path!r}: {error.detail}"
        headers = dict(error.headers or {})
        if error.status_code == 404:
            known = [getattr(one, "path", "") for one in app.routes if _takes(one, request)]
            # A client whose base URL lacks /v1 asks for the rest of the path.
            near = [f"/v1{path}"] if f"/v1{path}" in known else []
            near += difflib.get_close_matches(path, known, n=1, cutoff=0.75)
            text += f"; did you mean {near[0]}?" if near else ""
        if "GET" in headers.get("Allow", ""):
            headers["Allow"] = "GET, HEAD"  # the gate makes one the other
        code = _STATUS.get(error.status_code)
        return await api(request, ApiError(error.status_code, text, code=code, headers=headers))

    async def child(request: Request, error: Exception) -> Response:
        """Answer what a helper process was needed for: another server may have one."""
        headers = {"retry-after": "5"}
        return await api(request, ApiError(503, str(error), code="no_process", headers=headers))

    async def bug(request: Request, error: Exception) -> Response:
        return await api(request, ApiError(500, "something went wrong; the server's log says what"))

    app.exception_handler(Exception)(bug)  # the gate logs it
    app.exception_handler(ApiError)(api)
    app.exception_handler(ChildProcessError)(child)
    app.exception_handler(HTTPException)(http)
