"""Real models: pulled or fetched where they are not here, else the test is skipped in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline.engine.setup.home import locate
from ridgeline.model.files.tensors import ModelFileError

SHARED_MODELS = Path(__file__).parents[2] / "shared" / "models"
CACHE = Path(os.environ.get("RIDGELINE_HOME", Path.home() / ".cache" / "ridgeline")) / "shared"


def real_model(name: str) -> Path:
    """Return the file of a model that ``ridgeline pull`` knows; skip the test if it has none.

    A file that is damaged is an error.
    """
    try:
        return locate(name).path
    except ModelFileError:
        raise
    except (OSError, ValueError) as error:
        pytest.skip(f"{name} cannot be had: {error}")


def shared_files(*names: str) -> list[Path]:
    """Return files of ../shared/models/manifest.json; skip the test where that is absent."""
    paths = [CACHE / name for name in names]
    if not SHARED_MODELS.is_dir():
        pytest.skip(f"{', '.join(names)}: ../shared, where it comes from, is not here")
    if not all(path.exists() for path in paths):  # a file that is there was checked when it came
        fetch = [sys.executable, SHARED_MODELS / "fetch_model.py", *names, "--out", CACHE]
        done = subprocess.run(fetch, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{', '.join(names)} cannot be fetched: {done.stderr.strip()[-300:]}")
    return paths
