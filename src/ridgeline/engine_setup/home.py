"""Ridgeline's directory: models, compiled kernels and packed weights."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def default_home() -> Path:
    """Return Ridgeline's directory: ``$RIDGELINE_HOME``, or ``~/.cache/ridgeline``."""
    return Path(os.environ.get("RIDGELINE_HOME") or Path.home() / ".cache" / "ridgeline")


def why_unwritable(directory: Path) -> str | None:
    """Return why nothing can be kept in ``directory``, which may not exist yet; None if it can."""
    places = (directory, *directory.absolute().parents)
    place = next(path for path in places if os.path.exists(path))  # unreadable is not there
    try:
        with tempfile.TemporaryFile(dir=place):
            return None
    except OSError as error:
        return error.strerror or str(error)
