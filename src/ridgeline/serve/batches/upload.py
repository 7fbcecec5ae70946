"""The form around an uploaded file: how it is cut into parts is checked before it is parsed.

The parser runs on the event loop. It finds the next boundary as fast as memory is read, and looks
at each letter behind one: a body full of boundaries would take seconds of the loop's time.
"""

from __future__ import annotations

from python_multipart.multipart import parse_options_header
from starlette.requests import Request
from starlette.types import Message, Receive

from ridgeline.serve.http.errors import ApiError

MOST_FIELDS = 8  # beside the file
_MOST_BOUNDARIES = MOST_FIELDS + 3  # with the file's, the last one, and perhaps one at the start
_AFTER = (b"\r\n", b"--")  # a boundary: a part follows, or none
_NUM_AFTER = 2


def cut_in_few(request: Request) -> Request:
    """Return a request for a form, reading whose body raises ApiError 400 for too many parts.

    So does a line that begins with the boundary and goes on otherwise, which no part may contain
    (RFC 2046, 5.1.1), and so do spaces behind a boundary, which no client sends.
    """
    _, options = parse_options_header(request.headers["content-type"])
    if not (boundary := options.get(b"boundary")):
        raise _wrong("Content-Type names no boundary")
    return Request(request.scope, _checking(request.receive, b"\r\n--" + boundary))


def _checking(receive: Receive, boundary: bytes) -> Receive:
    """Return a ``receive`` that looks at each boundary, wherever the body is cut into messages."""
    rest, num_found = b"", 0

    async def checked() -> Message:
        nonlocal rest, num_found
        message = await receive()
        data = rest + message.get("body", b"")
        num_seen = len(data) - _NUM_AFTER  # a boundary that ends behind it comes again
        begin = data.find(boundary)
        while 0 <= begin <= num_seen - len(boundary):
            end = begin + len(boundary)
            num_found += 1
            if data[end : end + _NUM_AFTER] not in _AFTER:
                raise _wrong("a line begins with the boundary and goes on: choose another boundary")
            if num_found > _MOST_BOUNDARIES:
                raise _wrong(f"the form has more than one file and {MOST_FIELDS} fields")
            begin = data.find(boundary, end)
        rest = data[max(0, num_seen - len(boundary) + 1) :]
        return message

    return checked


def _wrong(reason: str) -> ApiError:
    return ApiError(400, reason, param="file", code="invalid_value")
