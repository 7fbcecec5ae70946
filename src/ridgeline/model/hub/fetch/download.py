"""Downloads that go on where they stopped, and whose bytes are checked by their hash.

A file is complete wherever it is: it is locked, written under a hidden name, then renamed.
"""

from __future__ import annotations

import http.client
import ssl
import urllib.error
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ridgeline.model.files.tensors import ModelFileError
from ridgeline.model.hub.fetch.index import IndexSource, without_login
from ridgeline.system.machine import sha256_of

# Called with (bytes so far, bytes in all); the second is 0 where the server does not say.
Progress = Callable[[int, int], None]

WAY_OUT = "download it where there is a connection and give its .gguf file or directory instead"
_CHUNK_BYTES = 1 << 20
_ATTEMPTS = 5
# Named one by one, because a full disk is an OSError too and must not be called a network fault.
_NETWORK_ERRORS = (
    urllib.error.URLError,
    http.client.HTTPException,
    ssl.SSLError,
    ConnectionError,
    TimeoutError,
)
ELSEWHERE = "set RIDGELINE_HOME to a directory elsewhere"  # what to do about a disk that is full


def download(
    source: IndexSource,
    path: Path,
    checksum: str,
    progress: Progress | None = None,
    *,
    size: int | None = None,
    checksum_of: Callable[[Path], str] = sha256_of,
) -> None:
    """Download to ``path``, continuing what is there, and verify.

    A cut connection is taken up again a few times; what arrived stays for the next call. A file
    that was continued and turns out wrong (its beginning was damaged) is fetched again.

    Args:
        source: where the file is.
        path: where it goes; its directory exists.
        checksum: of the file, in hex; empty if it is not known.
        progress: called with (bytes so far, bytes in all).
        size: bytes of the file, if they are known; of a server that says otherwise, or sends
            more, no more is read.
        checksum_of: what ``checksum`` was made with.

    Raises:
        ValueError: the server cannot be reached, or keeps cutting the connection.
        ModelFileError: a download in one piece is not the announced file; ``path`` is removed.
    """
    shown, problem = without_login(source.url).partition("?")[0], None  # without a signature
    for _ in range(_ATTEMPTS):
        size_before = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab") as file:
                is_continued = _append(source, file, progress, size)
        except _NETWORK_ERRORS as error:
            problem = error
            if path.stat().st_size > size_before:
                continue  # it moved, so another try may finish it
            break
        if not checksum or (actual := checksum_of(path)) == checksum:
            return
        path.unlink()
        if not is_continued:
            raise ModelFileError(
                f"{shown} has checksum {actual}, not {checksum}: the server or a proxy has another "
                f"file; {WAY_OUT}"
            )
    raise ValueError(
        f"cannot download {shown} ({problem}); try again, it resumes where it stopped; or {WAY_OUT}"
    ) from problem


def _append(
    source: IndexSource, file: BinaryIO, progress: Progress | None, size: int | None
) -> bool:
    """Append what is missing in ``file``; return whether its old beginning was kept."""
    done = file.tell()
    headers = dict(source.headers) | ({"Range": f"bytes={done}-"} if done else {})
    try:
        response = source.network.open(source.url, headers)
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE and done:
            return True  # nothing is missing; the hash decides whether the file is right
        raise
    with response:
        is_kept: bool = response.headers.get("Content-Range", "").startswith(f"bytes {done}-")
        if not is_kept:  # a server without ranges sends all of it
            file.truncate(0)
            done = 0
        length = response.headers.get("Content-Length")
        total = done + int(length) if length else size or 0
        if size not in (None, total):
            raise ModelFileError(
                f"the server has {total:,} bytes of a file that should have {size:,}"
            )
        while chunk := response.read(_CHUNK_BYTES):
            if size is not None and done + len(chunk) > size:  # it may never end
                file.truncate(0)
                raise ModelFileError(
                    f"the server sends more than the {size:,} bytes that the file should have"
                )
            file.write(chunk)
            done += len(chunk)
            if progress:
                progress(done, total)
    if done < total:
        raise ConnectionError(f"the connection was cut after {done:,} of {total:,} bytes")
    return is_kept


def hidden(target: Path, suffix: str) -> Path:
    """Return the hidden name beside ``target`` for what belongs to it while it is made."""
    return target.with_name(f".{target.name}.{suffix}")


@contextmanager
def only_one(target: Path) -> Iterator[None]:
    """Wait until no other process on this machine writes ``target``. Makes its directory.

    Raises OSError, which names the way out, if the directory cannot be written.
    """
    from filelock import FileLock  # here: what only looks for models does not need it

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(hidden(target, "lock")).acquire()
    except OSError as error:
        raise OSError(
            f"models cannot be kept in {target.parent} ({error.strerror}): set RIDGELINE_HOME to a "
            f"directory that can be written"
        ) from error
    with lock:
        yield
