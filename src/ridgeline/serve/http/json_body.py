"""Bodies of requests: JSON to checked models at a bounded cost, long ones away from the event loop.

The values in a body are counted before it is parsed: a few MB of JSON can become a GB of objects,
and seconds of complaints about each. It knows nothing of fields; ``answer.protocol`` says what is
valid.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Annotated, Any

from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import Response

from ridgeline.serve.http.errors import ApiError, validation_error
from ridgeline.serve.http.request_model import STRICT
from ridgeline.serve.http.turns import WorkTurns

MAX_VALUES = 1 << 18  # values in one body, such as token ids
MAX_PARTS = 1 << 16  # strings, lists and objects among them
IGNORED = "x-ridgeline-ignored"  # names what was dropped
CAPPED = "x-ridgeline-capped"  # says which limit was above what the context leaves, and what it is
ENDED = "x-ridgeline-ended"  # says which bound ended a whole answer
MOST_NAMED, _MOST_SHOWN = 20, 200  # names; characters of one
_WINDOW_BYTES = 1 << 16
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_LONG_NUMBER = b"0" * 1000  # to read it takes as long as that number of values
_LONG_BYTES = 1 << 13  # from here on, parsing may take milliseconds: a thousand small messages do


class BodyRoute(APIRoute):
    """A route whose body is read here, so that FastAPI gets a validated model."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler; if the route has a body, the handler reads that first."""
        handle = super().get_route_handler()
        if self.body_field is None:
            return handle
        info = self.body_field.field_info
        kind: Any = Annotated[info.annotation, info]
        adapter = TypeAdapter[Any](kind)

        async def read_first(request: Request) -> Response:
            data = await self.json_of(request)
            state = request.app.state
            is_strict = getattr(state, "is_strict", False)
            model = await in_turn(state.work, adapter, data, is_strict=is_strict)
            response = await handle(_Read(request, data, model))
            note_ignored(response, model.ignored())
            return response

        return read_first

    async def json_of(self, request: Request) -> bytes:
        """Return the JSON of a request's body."""
        return await request.body()


def note_ignored(response: Response, names: Sequence[str]) -> None:
    """Say in a header what the request asks for and its answer is not held to."""
    already = response.headers.get(IGNORED, "")
    shown = [_shown(name) for name in names[:MOST_NAMED]]
    shown += ["..."] * (len(names) > MOST_NAMED)
    if value := ", ".join(filter(None, [*shown, already])):
        response.headers[IGNORED] = value


def _shown(name: str) -> str:
    """Return a name as it can stand in a header: clients choose the names in schemas."""
    text = name.encode("ascii", "backslashreplace").decode()
    text = "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in text)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


class _Read(Request):
    """A request whose body has become a model."""

    def __init__(self, request: Request, data: bytes, model: object) -> None:
        super().__init__(request.scope, request.receive)
        self._body, self._model = data, model

    async def json(self) -> Any:
        return self._model


async def in_turn(
    work: WorkTurns, adapter: TypeAdapter[Any], data: bytes, *, is_strict: bool = False
) -> Any:
    """Return what ``read`` does, of a long body in a thread, when it is its turn."""
    if len(data) < _LONG_BYTES:
        return read(adapter, data, is_strict=is_strict)
    return await work.bodies.run(partial(read, adapter, data, is_strict=is_strict))


def read(adapter: TypeAdapter[Any], data: bytes, *, is_strict: bool = False) -> Any:
    """Return the model that a body describes; raises ApiError that names what is wrong.

    With ``is_strict`` nothing is dropped that was asked for (``request_model.Extra``).
    If a body has too much in it, only its beginning is validated: an error found there says more.
    """
    end = _affordable(data)
    gc.disable()  # it would search all of the body, many times, and find nothing
    try:
        value = from_json(data[:end], allow_partial=end is not None)
    except ValueError as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None
    finally:
        gc.enable()
    try:
        model = adapter.validate_python(value, context=STRICT if is_strict else None)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        if end is not None:  # a missing field may come later
            problems = [problem for problem in problems if problem["type"] != "missing"]
        if problems:
            raise validation_error(problems) from None
    if end is None:
        return model
    param = next(reversed(value), "body")
    raise ApiError(
        400,
        f"{param} has too many values: a request may have at most {MAX_VALUES}, of which at most "
        f"{MAX_PARTS} are strings, lists or objects",
        param=param,
        code="invalid_value",
    )


def _affordable(data: bytes) -> int | None:
    """Return the length of the beginning that has not too much in it, None if that is all.

    Commas, brackets and so on count outside of strings, that is, in every second of the pieces
    between quotation marks. No call is long, because the whole process waits during each.
    """
    start, in_string, num_values, num_parts = 0, 0, 0, 0
    while start < len(data):
        window = data[start : start + _WINDOW_BYTES].replace(rb"\\", b"  ")
        end = start + _WINDOW_BYTES + window.endswith(b"\\")  # with what that one escapes
        pieces = window.replace(rb"\"", b"  ").split(b'"')
        outside = b"".join(pieces[in_string::2])
        in_string = (in_string + len(pieces) - 1) % 2
        num_values += outside.count(b",")
        num_values += len(_LONG_NUMBER) * outside.translate(_DIGITS).count(_LONG_NUMBER)
        num_parts += len(pieces) // 2 + outside.count(b"[") + outside.count(b"{")
        if num_values > MAX_VALUES or num_parts > MAX_PARTS:
            return start
        start = end
    return None
