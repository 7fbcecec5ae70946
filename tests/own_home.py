"""A Ridgeline directory of the tests' own: what they learn of models is not the user's."""

from __future__ import annotations

from pathlib import Path

# What is the same for everybody, and takes long to make: it lies in the user's directory.
_EVERYBODYS = (
    "kernels", "kernels-of-tests", "models", "packed", "roof", "shared", "vocabularies",
)  # fmt: skip


def own_home(folder: Path, users: Path) -> dict[str, str]:
    """Let a directory, new or not, share with the user's; return the variables that name it."""
    folder.mkdir(exist_ok=True)
    for name in _EVERYBODYS:
        (users / name).mkdir(parents=True, exist_ok=True)
        if not (folder / name).exists():
            (folder / name).symlink_to((users / name).resolve())
    return {"RIDGELINE_HOME": str(folder)}
