"""What the form around an uploaded file may be like, and what an upload may cost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.types import Message

from ridgeline.serve.batches.routes import cut_in_few
from ridgeline.serve.http.errors import ApiError
from tests.serve.forms import EMPTY_FIELD, END, FILE, FORM, FORMS, GOES_ON, MANY, form
from tests.serve.serving import Served, serving
from tests.waiting import connected, eventually


@pytest.fixture
def kept(model: Path, tmp_path: Path) -> Iterator[Served]:
    with serving(model, home=tmp_path) as served:
        yield served


def read_in_pieces(body: bytes, *cuts: int) -> bytes:
    """Return what a route reads of a form that comes in so many pieces. Raises ApiError."""
    bounds = [0, *cuts, len(body)]
    pieces = [body[i:j] for i, j in pairwise(bounds)]
    pieces.reverse()

    async def receive() -> Message:
        return {"type": "http.request", "body": pieces.pop(), "more_body": bool(pieces)}

    scope = {"type": "http", "method": "POST", "headers": [(b"content-type", FORM.encode())]}

    async def read() -> bytes:
        return await cut_in_few(Request(scope, receive)).body()

    return asyncio.run(read())


def test_boundaries_are_seen_wherever_the_body_is_cut() -> None:
    good = FILE + b"\r\n--\r\r\n" + END
    wrong = FILE + b"a\r\n--xy" + END
    most = 9 * EMPTY_FIELD + b"--x--"
    for i in range(len(good)):
        assert read_in_pieces(good, i, min(i + 3, len(good))) == good
    for i in range(len(wrong)):
        with pytest.raises(ApiError, match=GOES_ON):
            read_in_pieces(wrong, i, min(i + 3, len(wrong)))
    for i in range(len(most)):
        assert read_in_pieces(most, i) == most
        with pytest.raises(ApiError, match=MANY):
            read_in_pieces(3 * EMPTY_FIELD + most, i)


@pytest.mark.parametrize("name", FORMS)
def test_hostile_forms_are_refused_with_a_reason(kept: Served, name: str) -> None:
    """What they would cost is a row of ``tests.faults``: B01."""
    reason = FORMS[name][-1]
    status, answer, _ = kept.call("/v1/files", form(name, 2 << 20), content_type=FORM)
    assert status == (400 if reason else 200), answer
    assert reason in str(answer)


def test_a_key_uploads_a_few_files_at_once(kept: Served) -> None:
    """A fifth is refused, and goes through once another has ended."""
    head = {"content-type": FORM, "content-length": str(len(FILE + END))}

    def fifth() -> int:
        return kept.call("/v1/files", FILE + END, content_type=FORM)[0]

    with ExitStack() as stack:
        open_uploads = [stack.enter_context(connected(kept.port)) for _ in range(4)]
        for connection in open_uploads:
            connection.putrequest("POST", "/v1/files")
            for name, value in head.items():
                connection.putheader(name, value)
            connection.endheaders()
            connection.send(FILE)
        eventually(lambda: fifth() == 429)
        open_uploads[0].send(END)
        assert open_uploads[0].getresponse().status == 200
        assert fifth() == 200


def test_a_form_without_a_boundary_is_refused(kept: Served) -> None:
    status, error = kept.refused("/v1/files", b"x", content_type="multipart/form-data")
    assert (status, error["message"]) == (400, "Content-Type names no boundary")
