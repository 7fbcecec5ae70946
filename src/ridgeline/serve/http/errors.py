"""Errors as OpenAI's, Anthropic's, Ollama's and Triton's clients expect them, and as they are sent.

It knows nothing of engines.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute
from starlette.types import Send

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
    501: "not_supported_error",  # llama.cpp's
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
# llama.cpp has these without /v1 as well.
SHORT = ("/chat/completions", "/chat/completions/input_tokens", "/models", "/responses")
LLAMACPP_PATHS = (*SHORT, "/completion", "/completions", "/infill", "/apply-template")
_CODES = {  # where the raising code gives none
    400: "invalid_request",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    431: "head_too_large",
    500: "internal_error",
}
_STATUS = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed"}  # no route takes it
# ``answer.protocol``'s own.
_NAMED = ("unknown_parameter", "unsupported_parameter", "invalid_value")

_SUBJECT = re.compile("^(Input|String|List|Dictionary) should")
_OF_NAMES = ("literal_error", "string_pattern_mismatch")  # problems of what is no free text
_MOST_SHOWN = 64  # characters
_LONG_VALUES = re.compile(
    r"""(?<!\w)(?:'([^']{80})[^']+'|"([^"]{80})[^"]+")(?!\w)|(?<!\S)(\S{80})\S{120,}"""
)
_MOST_LETTERS = 1000  # of a message


def shortened(message: str) -> str:
    """Return a message without the rest of values that are longer than about 80 letters.

    Such values come from requests, and each would stand in the answer and in the log.
    """
    message = _LONG_VALUES.sub(_begin, _ends(message, 100 * _MOST_LETTERS))
    return _ends(message, _MOST_LETTERS)


def _begin(value: re.Match[str]) -> str:
    quote = "" if value[3] else value[0][0]
    return f"{quote}{value[1] or value[2] or value[3]}...{quote}"


def _ends(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 2 :]}"


STOPPING = "the server is stopping"  # why /ready says no, and all requests end
LEAVING = "leaving"  # the field of /health that is there from then on


class ApiError(Exception):
    """Ends a request with a status and an error object; its words go to the client, shortened."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        """``counts`` are numbers of the message, in the names that llama.cpp's clients read."""
        super().__init__(shortened(message))
        self.status = status
        self.param = param and shortened(param)
        self.code = code or _CODES.get(status)
        self.headers = dict(headers or {})
        self.counts = dict(counts or {})

    def body(self) -> dict[str, Any]:
        """Return the error object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, kind)
        fields = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def encode(self) -> bytes:
        """Return the error object as JSON."""
        return json.dumps(self.body()).encode()


def anthropic_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Return an error as Anthropic writes it."""
    kind = "api_error" if error.status >= 500 else "invalid_request_error"
    fields = {"type": _ANTHROPIC_TYPES.get(error.status, kind), "message": str(error)}
    return {"type": "error", "error": fields, "request_id": request_id}


def is_triton(path: str) -> bool:
    """Whether a path belongs to the Open Inference Protocol; Cohere has one beside it."""
    return path == "/v2" or (path.startswith("/v2/") and path != "/v2/rerank")


def body_at(path: str, error: ApiError, request_id: str) -> dict[str, Any]:
    """Return an error in the form of the API that ``path`` belongs to, as the client wrote it."""
    if path.startswith("/v1/messages"):
        return anthropic_body(error, request_id)
    if path.startswith("/api/") or is_triton(path):
        return {"error": str(error)}
    shown = error.body()
    if path in LLAMACPP_PATHS and error.code == "context_length_exceeded":
        shown["error"] |= {"type": "exceed_context_size_error", **error.counts}
    return shown


def validation_error(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """Turn pydantic's list of problems into one error about the deepest of them.

    A value of the wrong type counts less: a list that is too long is no text either.
    """
    problem = max(problems, key=lambda one: (len(_path(one)), not one["type"].endswith("_type")))
    path = _path(problem)
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step:.80}" for step in path)[1:]
    if problem["type"] == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="missing_parameter")
    if problem["type"] in _NAMED:
        code, text = problem["type"], f"{param} {problem['msg']}"
        return ApiError(400, text, param=param, code=code)
    text = problem["msg"].removeprefix("Value error, ").replace(" after validation", "")
    text = _SUBJECT.sub("it must", text)
    value = _shown(problem) or "wrong"
    return ApiError(400, f"{param} is {value}: {text}", param=param, code="invalid_value")


def _shown(problem: Mapping[str, Any]) -> str:
    """Return the value at fault if it can be no part of a prompt, which logs must not have."""
    value = problem.get("input")
    is_name = isinstance(value, str) and problem["type"] in _OF_NAMES and len(value) <= _MOST_SHOWN
    is_number = isinstance(value, bool | int | float) and abs(value) < 1e18  # else long to read
    return json.dumps(value) if is_name or is_number else ""


def _path(problem: Mapping[str, Any]) -> list[str | int]:
    """Return where in the body something is, without the names of a union's members.

    A problem that ``answer.protocol`` raised names in its context the field that it is about.
    """
    types = {"str", "int", "bool", "float"}
    steps = [s for s in problem["loc"] if s not in types and not {"[", "-"} & set(str(s))]
    if field := problem.get("ctx", {}).get("field"):
        steps.append(field)
    return steps if steps and isinstance(steps[0], str) else ["body"]


async def refuse(send: Send, error: ApiError, state: Mapping[str, Any]) -> None:
    """Send an error as a whole response, to the request that has this state."""
    body = json.dumps(body_at(state["path"], error, state["request_id"])).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body))}
    pairs = [(k.encode(), v.encode()) for k, v in (error.headers | headers).items()]
    await send({"type": "http.response.start", "status": error.status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


def _takes(route: BaseRoute, request: Request) -> bool:
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
            paths = [getattr(one, "path", "") for one in app.routes if _takes(one, request)]
            # A client whose base URL lacks /v1 asks for the rest of the path.
            near = [f"/v1{path}"] if f"/v1{path}" in paths else []
            near += difflib.get_close_matches(path, paths, n=1, cutoff=0.75)
            text += f"; did you mean {near[0]}?" if near else ""
        if "GET" in headers.get("Allow", ""):
            headers["Allow"] = "GET, HEAD"  # the edge makes one the other
        code = _STATUS.get(error.status_code)
        return await api(request, ApiError(error.status_code, text, code=code, headers=headers))

    async def child(request: Request, error: Exception) -> Response:
        """Answer what a helper process was needed for: another server may have one."""
        headers = {"retry-after": "5"}
        return await api(request, ApiError(503, str(error), code="no_process", headers=headers))

    async def bug(request: Request, error: Exception) -> Response:
        return await api(request, ApiError(500, "something went wrong; the server's log says what"))

    app.exception_handler(Exception)(bug)  # the edge logs it
    app.exception_handler(ApiError)(api)
    app.exception_handler(ChildProcessError)(child)
    app.exception_handler(HTTPException)(http)
