"""Files of results: their ending says what is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ridgeline.system.machine import check_room, write_text
from ridgeline.system.report import Rows, as_csv, as_markdown

_MOST_BYTES = 1 << 20  # of rows, or of a picture


def check_out(path: Path | None, endings: Sequence[str] = (".svg", ".csv", ".md")) -> None:
    """Raise ValueError if a file to write has an ending that says nothing, or its disk is full."""
    if path is None:
        return
    if path.suffix not in endings:
        raise ValueError(f"--out {path}: its ending says what to write: {', '.join(endings)}")
    check_place(path)


def check_place(path: Path) -> None:
    """Raise ValueError if there is no folder for a file of results, or no room in it.

    What is measured for minutes should not be lost then.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{path}: there is no folder {folder}")
    check_room(folder, _MOST_BYTES, path.name, "name another folder")


def write_out(path: Path, rows: Rows, picture: str) -> None:
    """Write rows, or the picture, as the file's ending says; OSError if that cannot be."""
    texts = {".csv": as_csv, ".md": as_markdown}
    text = texts[path.suffix](rows) if path.suffix in texts else picture
    write_text(path, text)
