"""Ridgeline's directory: models, compiled kernels and packed weights."""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from ridgeline.system.machine import users_home

try:
    import fcntl
except ImportError:  # of no use, and not there, on Windows
    fcntl = None  # type: ignore[assignment]


def default_home() -> Path:
    """Return Ridgeline's directory: ``$RIDGELINE_HOME``, or ``~/.cache/ridgeline``.

    Raises ValueError if there is neither: kernels that anybody could have written are not run.
    """
    if named := os.environ.get("RIDGELINE_HOME"):
        return Path(named)
    if (home := users_home()) is None:
        raise ValueError(
            "this user has no home directory: set RIDGELINE_HOME to a directory that only this "
            "user may write to"
        )
    return home / ".cache" / "ridgeline"


def sweep(home: Path) -> None:
    """Remove what killed processes left: half-written files, and folders of pulls that failed.

    What another process holds a lock on stays.
    """
    for folder in ("packed", "kernels", "calibration", "roof"):
        for file in _listed(home / folder):
            if file.name.startswith(tempfile.gettempprefix()) and file.is_file():
                _remove_unlocked(file)
    for owner in _listed(home / "models"):
        if owner.name.startswith(".") or not owner.is_dir():
            continue
        held = _listed(owner)
        if all(file.name.startswith(".") and file.suffix == ".lock" for file in held):
            for file in held:
                _remove_unlocked(file)
            with suppress(OSError):  # it is not empty any more, or not ours
                owner.rmdir()


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _remove_unlocked(file: Path) -> None:
    """Remove a file unless a process has it locked, which ends with the process."""
    if fcntl is None:
        return
    with suppress(OSError), file.open("r+b") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.unlink(missing_ok=True)


def why_unwritable(directory: Path) -> str | None:
    """Return why nothing can be kept in ``directory``, which may not exist yet; None if it can."""
    places = (directory, *directory.absolute().parents)
    place = next(path for path in places if os.path.exists(path))  # unreadable is not there
    try:
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return error.strerror or str(error)
