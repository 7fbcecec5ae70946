"""Ridgeline's directory (models, compiled kernels, packed weights), and where a model lies.

The model of a name may also be another program's; it is pulled if it is not on this machine.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from ridgeline.engine.setup.progress import bytes_bar, say
from ridgeline.model.hub.local_models import ModelStores
from ridgeline.model.hub.search import LocalModel, NotPulledError, find_model, home_expanded
from ridgeline.system.append_log import HAS_LOCKS, FileLock
from ridgeline.system.machine import available_bytes, users_home
from ridgeline.system.report import gb


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
        files = _listed(owner)
        if all(file.name.startswith(".") and file.suffix == ".lock" for file in files):
            for file in files:
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
    with suppress(OSError):
        lock = FileLock(file)
        if HAS_LOCKS:  # else it may be another's
            file.unlink(missing_ok=True)
        lock.release()


def why_unwritable(directory: Path) -> str | None:
    """Return why nothing can be kept in ``directory``, which may not exist yet; None if it can."""
    places = (directory, *directory.absolute().parents)
    place = next(path for path in places if os.path.exists(path))  # unreadable is not there
    try:
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return error.strerror or str(error)


def stores() -> ModelStores:
    """Return where models may lie for this user, who may have no home."""
    return ModelStores.of(home := default_home(), os.environ, users_home() or home)


def locate(model: str, *, verify: bool = False) -> LocalModel:
    """Return where ``model`` is, pulled if it is not here or, with ``verify``, if it is damaged.

    Says, once, which file it is where there was a choice, or where another program has put it.

    Raises:
        ValueError: there is no such model, it cannot be reached, or it does not fit into memory.
        ModelFileError: what arrived is not what its publisher announced.
    """
    places, free_bytes = stores(), available_bytes()
    try:
        located = None if verify else find_model(model, places, free_bytes)
    except NotPulledError:
        located = None
    if located is None:
        # Imported here: what a download needs is a tenth of a start that downloads nothing.
        from ridgeline.model.hub.pull import pull

        done_bytes = 0

        def note(done: int, total: int) -> None:
            nonlocal done_bytes
            done_bytes = done
            report(done, total)

        try:
            with bytes_bar(f"Pulling {model}") as report:
                located = pull(model, places, budget_bytes=free_bytes, announce=say, progress=note)
        except KeyboardInterrupt:
            say(f"stopped: the same command resumes from {gb(done_bytes)}")
            raise
    is_in_home = located.path.is_relative_to(places.home)
    is_theirs = not is_in_home and located.path != home_expanded(model)
    if located.note or is_theirs:  # of several, or of another program's
        _say_once(f"{model}: {located.note + '; ' if located.note else ''}{located.path}")
    return located


_say_once = cache(say)
