"""OpenAI's files and batches: what clients upload, and what is made of it when nobody waits.

A key sees its own files and batches, and no other's. The form around an uploaded file is checked
before it is parsed: the parser runs on the event loop, finds the next boundary as fast as memory is
read, and looks at each letter behind one, so a body full of boundaries would take seconds of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, BinaryIO

from fastapi import FastAPI, Request
from pydantic import BeforeValidator, Field
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.responses import FileResponse, Response
from starlette.types import Message, Receive

from ridgeline.serve.answer import fields
from ridgeline.serve.answer.protocol import Metadata
from ridgeline.serve.answer.schemas import ERRORS
from ridgeline.serve.batch_files.lines import URLS
from ridgeline.serve.batch_files.store import OwnerFiles, StoredBatch, StoredFile
from ridgeline.serve.batches.runner import Batches
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.fair_pool import in_thread
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.http.request_body import UPLOADS, RequestModel, too_long, wrong

_MOST_FILES = 10_000  # of a key
_MOST_OPEN = 100  # batches of a key that are not over
_MOST_UPLOADS = 4  # of a key at once: each takes as much of a disk as its file is long
_MOST_NAME_CHARS = 255
MOST_FIELDS = 8  # of a form, beside the file
_MOST_BOUNDARIES = MOST_FIELDS + 3  # with the file's, the last one, and perhaps one at the start
_AFTER = (b"\r\n", b"--")  # a boundary: a part follows, or none
_NUM_AFTER = 2
_FORM = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                    },
                }
            }
        },
    }
}


def _known_url(url: Any) -> Any:
    if url not in URLS:
        raise wrong("invalid_value", "", "is not a route for batches: see docs/batch.md")
    return url


class BatchRequest(RequestModel):
    """POST /v1/batches."""

    extras = fields.BATCH

    input_file_id: str
    endpoint: Annotated[str, BeforeValidator(_known_url)]
    completion_window: str = Field("24h", max_length=16)  # taken, and not held against a batch
    metadata: Metadata = None


def add_batches(app: FastAPI, batches: Batches | str, options: ServeOptions) -> None:
    """Add the routes to an application; instead of ``batches`` there may be why there are none."""

    def get_batches() -> Batches:
        if isinstance(batches, str):
            raise ApiError(503, batches, code="no_files")
        return batches

    _add_files(app, get_batches, options)
    _add_batches(app, get_batches)


def _add_files(app: FastAPI, get_batches: Callable[[], Batches], options: ServeOptions) -> None:
    most_bytes = options.max_stored_bytes
    num_uploads: Counter[str] = Counter()

    @contextmanager
    def one_upload(owner: str) -> Iterator[None]:
        if num_uploads[owner] >= _MOST_UPLOADS:
            message = f"{_MOST_UPLOADS} files of this key are being uploaded: wait for one"
            raise ApiError(429, message, code="too_many_uploads", headers={"retry-after": "5"})
        num_uploads[owner] += 1
        try:
            yield
        except OSError as error:
            why = error.strerror or str(error)
            raise ApiError(503, f"the file cannot be kept: {why}", code="no_files") from error
        finally:
            num_uploads[owner] -= 1

    @app.post(UPLOADS, responses=ERRORS, openapi_extra=_FORM)
    async def upload(request: Request) -> dict[str, Any]:
        """Keep a file of requests, for a batch."""
        owner = request.state.owner
        owned: OwnerFiles = get_batches().store.of(owner)
        if owned.num_bytes >= most_bytes or len(owned.files) >= _MOST_FILES:
            raise _full(owned, most_bytes)
        with one_upload(owner):
            async with cut_in_few(request).form(max_files=1, max_fields=MOST_FIELDS) as form:
                file, name = _checked(form)
                if (file.size or 0) > options.max_file_bytes:
                    raise too_long(options.max_file_bytes)
                if (file.size or 0) > most_bytes - owned.num_bytes:
                    raise _full(owned, most_bytes)
                content: BinaryIO = file.file
                file_id = await in_thread(owned.receive, content)
            return owned.note_file(file_id, name, "batch").shown()

    @app.get(UPLOADS, responses=ERRORS)
    async def files(request: Request) -> dict[str, Any]:
        """List the caller's files, the newest first unless ``order`` says otherwise."""
        files = list(get_batches().store.of(request.state.owner).files.values())
        purpose = request.query_params.get("purpose")
        files = [file for file in files if purpose in (None, file.purpose)]
        return _page(files, request.query_params, most=_MOST_FILES, usual=_MOST_FILES)

    @app.get(UPLOADS + "/{file_id}", responses=ERRORS)
    async def file(file_id: str, request: Request) -> dict[str, Any]:
        """Return what is known of a file."""
        return _file(get_batches(), request, file_id).shown()

    @app.get(UPLOADS + "/{file_id}/content", responses=ERRORS, response_class=FileResponse)
    async def content(file_id: str, request: Request) -> Response:
        """Return what stands in a file."""
        batches = get_batches()
        file = _file(batches, request, file_id)
        path = batches.store.of(request.state.owner).content(file.id)
        return FileResponse(path, media_type="application/jsonl")

    @app.delete(UPLOADS + "/{file_id}", responses=ERRORS)
    async def delete(file_id: str, request: Request) -> dict[str, Any]:
        """Delete a file that no batch reads any more."""
        batches = get_batches()
        file = _file(batches, request, file_id)
        owned: OwnerFiles = batches.store.of(request.state.owner)
        for batch in owned.batches.values():
            if file.id == batch.input_file_id and not batch.is_over:
                message = f"{batch.id} reads this file: cancel it first, or wait for its end"
                raise ApiError(409, message, param="file_id", code="file_in_use")
        owned.delete(file.id)
        return {"id": file.id, "object": "file", "deleted": True}


def _add_batches(app: FastAPI, get_batches: Callable[[], Batches]) -> None:
    path = "/v1/batches"

    @app.post(path, responses=ERRORS)
    async def create(body: BatchRequest, request: Request) -> dict[str, Any]:
        """Answer the requests of a file, while nobody waits for others."""
        batches: Batches = get_batches()
        file = _file(batches, request, body.input_file_id, "input_file_id")
        if file.purpose != "batch":
            message = f"the purpose of {file.id} is {file.purpose}: upload one with batch"
            raise ApiError(400, message, param="input_file_id", code="invalid_value")
        owner = request.state.owner
        is_open = [not batch.is_over for batch in batches.store.of(owner).batches.values()]
        if sum(is_open) >= _MOST_OPEN:
            message = f"{_MOST_OPEN} batches of this key are not over: wait for one, or cancel it"
            raise ApiError(429, message, code="too_many_batches", headers={"retry-after": "60"})
        options = {"completion_window": body.completion_window, "metadata": body.metadata}
        return batches.new(owner, body.endpoint, file.id, **options).shown()

    @app.get(path, responses=ERRORS)
    async def listing(request: Request) -> dict[str, Any]:
        """List the caller's batches, the newest first."""
        batches = list(get_batches().store.of(request.state.owner).batches.values())
        return _page(batches, request.query_params, most=100, usual=20)

    @app.get(path + "/{batch_id}", responses=ERRORS)
    async def batch(batch_id: str, request: Request) -> dict[str, Any]:
        """Return how far a batch is."""
        return _batch(get_batches(), request, batch_id).shown()

    @app.post(path + "/{batch_id}/cancel", responses=ERRORS)
    async def cancel(batch_id: str, request: Request) -> dict[str, Any]:
        """Ask no more of a batch's requests; what is answered can be read."""
        batches: Batches = get_batches()
        batch = _batch(batches, request, batch_id)
        if batch.is_over:
            message = f"{batch.id} is over: it is {batch.status}"
            raise ApiError(409, message, param="batch_id", code="batch_over")
        return batches.cancel(request.state.owner, batch.id).shown()


def _checked(form: FormData) -> tuple[UploadFile, str]:
    """Return the file of a form, and its name. Raises ApiError."""
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise ApiError(400, "file is missing", param="file", code="missing_parameter")
    if purpose != "batch":
        said = "is missing" if purpose is None else f"is {purpose!r:.80}"
        message = f"purpose {said}: files are kept for batches alone, send batch"
        raise ApiError(400, message, param="purpose", code="invalid_value")
    return file, (file.filename or "file")[:_MOST_NAME_CHARS]


def _file(batches: Batches, request: Request, file_id: str, param: str = "file_id") -> StoredFile:
    file = batches.store.of(request.state.owner).files.get(file_id)
    if file is None:
        raise ApiError(404, f"there is no file {file_id!r:.80}", param=param, code="not_found")
    return file


def _batch(batches: Batches, request: Request, batch_id: str) -> StoredBatch:
    batch = batches.store.of(request.state.owner).batches.get(batch_id)
    if batch is None:
        message = f"there is no batch {batch_id!r:.80}"
        raise ApiError(404, message, param="batch_id", code="not_found")
    return batch


def _full(owned: OwnerFiles, most_bytes: int) -> ApiError:
    message = f"this key already has {len(owned.files)} files with {owned.num_bytes} bytes: at "
    message += f"most {_MOST_FILES} files and {most_bytes} bytes (--max-stored) are allowed; "
    message += "delete some"
    return ApiError(413, message, param="file", code="files_full")


def _page(
    entries: Sequence[StoredFile | StoredBatch], query: Mapping[str, str], *, most: int, usual: int
) -> dict[str, Any]:
    """Return a part of a list as OpenAI does. Raises ApiError."""
    order, limit = query.get("order", "desc"), query.get("limit", str(usual))
    if order not in ("asc", "desc"):
        message = f"order is {order!r:.80}: it must be asc or desc"
        raise ApiError(400, message, param="order", code="invalid_value")
    if not (limit.isascii() and limit.isdigit() and len(limit) < 10 and 1 <= int(limit) <= most):
        message = f"limit is {limit!r:.80}: it must be a number from 1 to {most}"
        raise ApiError(400, message, param="limit", code="invalid_value")
    shown = [one.shown() for one in (entries[::-1] if order == "desc" else entries)]
    if (after := query.get("after")) is not None:
        ids = [one["id"] for one in shown]
        if after not in ids:
            raise ApiError(404, f"there is no {after!r:.80}", param="after", code="not_found")
        shown = shown[ids.index(after) + 1 :]
    part = shown[: int(limit)]
    return {
        "object": "list",
        "data": part,
        "first_id": part[0]["id"] if part else None,
        "last_id": part[-1]["id"] if part else None,
        "has_more": len(shown) > len(part),
    }


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
