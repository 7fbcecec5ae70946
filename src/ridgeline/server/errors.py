"""Errors as OpenAI's clients expect them. It knows no route and no engine."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """Ends a request with a status and an error object; its words go to the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return the error object."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, kind)
        fields = {"message": str(self), "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}

    def encode(self) -> bytes:
        """Return the error object as JSON."""
        return json.dumps(self.body()).encode()


def validation_error(problems: Sequence[Mapping[str, Any]]) -> ApiError:
    """Turn pydantic's list of problems into one error about the deepest of them."""
    problem = max(problems, key=lambda found: len(_path(found["loc"])))
    path = _path(problem["loc"])
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)[1:]
    if problem["type"] == "extra_forbidden":
        return ApiError(
            400, f"{param} is not a parameter here", param=param, code="unknown_parameter"
        )
    if problem["type"] == "missing":
        return ApiError(400, f"{param} is missing", param=param, code="missing_parameter")
    text = problem["msg"].replace("Input should be", "it must be")
    return ApiError(400, f"{param} is wrong: {text}", param=param, code="invalid_value")


def _path(location: Sequence[str | int]) -> list[str | int]:
    """Return where in the body something is, without the names of a union's members."""
    types = {"str", "int", "bool", "float"}
    steps = [s for s in location[1:] if s not in types and not {"[", "-"} & set(str(s))]
    return steps if steps and isinstance(steps[0], str) else ["body"]
