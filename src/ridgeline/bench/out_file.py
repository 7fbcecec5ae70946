"""Files of results: their ending says what is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ridgeline.tables import Rows, as_csv, as_markdown


def check_out(path: Path | None, endings: Sequence[str] = (".svg", ".csv", ".md")) -> None:
    """Raise ValueError if a file to write has an ending that says nothing."""
    if path is not None and path.suffix not in endings:
        raise ValueError(f"--out {path}: its ending says what to write: {', '.join(endings)}")


def write_out(path: Path, rows: Rows, picture: str) -> None:
    """Write rows, or the picture, as the file's ending says; OSError if that cannot be."""
    texts = {".csv": as_csv, ".md": as_markdown}
    text = texts[path.suffix](rows) if path.suffix in texts else picture
    path.write_text(text, encoding="utf-8")
