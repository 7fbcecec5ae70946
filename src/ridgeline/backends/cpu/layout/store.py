"""Packed weights on disk: packing takes seconds to minutes, reading it back takes none.

A file is the arrays one after another, then an index as JSON, then the index's length in eight
bytes. It appears by renaming, so it is complete or not there. If a file cannot be read or written,
a start is only slower. It knows nothing of what the arrays mean.
"""

from __future__ import annotations

import glob
import hashlib
import json
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.machine import available_bytes
from ridgeline.models.gguf_parts import part_paths

_ALIGNMENT = 4096


class Packed(NamedTuple):
    """An array and what kind of matrix it is; "" for anything else."""

    kind: str
    data: NDArray[Any]


def file_name(path: Path, dtype: str) -> str:
    """Return a name for a model's packed weights: the model, then its files and our source.

    The part before the last two is the same for everything that was ever packed from ``path``.
    """
    digest = hashlib.sha256(np.__version__.encode())
    for source in sources():
        digest.update(source.read_bytes())
    for file in sorted(path.iterdir()) if path.is_dir() else part_paths(path):
        stat = file.stat()
        digest.update(f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    return f"{path.stem}.{dtype}.{place}.{digest.hexdigest()[:32]}.weights"


def sources() -> list[Path]:
    """Return the files of code that a tensor passes from a model's file to a packed one.

    Those of gguf stand for its version: importing either takes a tenth of a start.
    """
    package = Path(__file__).parents[3]
    folders = (package / "models", Path(__file__).parent)
    facts = ("arch.py", "latent.py", "recurrent.py", "rope.py", "text_defaults.py")
    files = [package / "physics" / name for name in facts]
    files += [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    spec = find_spec("gguf")
    if spec is not None and spec.origin is not None:
        files += [Path(spec.origin).with_name(name) for name in ("constants.py", "quants.py")]
    return files


def read(path: Path) -> dict[str, Packed] | None:
    """Return the arrays of a file, mapped; None if it cannot be used.

    Copying them into memory of their own costs a start more than huge pages give back (LOG.md),
    and processes with the same model share the mapped file.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(-8, os.SEEK_END)
            index_bytes = int.from_bytes(file.read(8), "little")
            end = file.seek(size - index_bytes)
            index = json.loads(file.read(index_bytes))
            area = mmap.mmap(file.fileno(), end, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_WILLNEED") and end < available_bytes():
            area.madvise(mmap.MADV_WILLNEED)
        arrays, content = {}, np.frombuffer(area, np.uint8)
        for name, (kind, dtype, shape, begin) in index.items():
            count = int(np.prod(shape)) * np.dtype(dtype).itemsize
            part = content[begin : begin + count].view(dtype)
            arrays[name] = Packed(kind, part.reshape(shape))
    except (OSError, ValueError, TypeError, AttributeError, LookupError):
        return None
    return arrays


def write(path: Path, arrays: Iterable[tuple[str, Packed]]) -> bool:
    """Write arrays, each with its name, into a file as they come; return whether it is there.

    It is not if the directory cannot be written or has no room. Older files of the same model and
    dtype, of another version of either, go.
    """

    def content(file: IO[bytes]) -> None:
        index = {}
        for name, (kind, data) in arrays:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            index[name] = (kind, data.dtype.str, data.shape, file.tell())
            file.write(np.ascontiguousarray(data).data)
        file.write(bytes(-file.tell() % _ALIGNMENT))
        text = json.dumps(index).encode()
        file.write(text + len(text).to_bytes(8, "little"))

    try:
        write_whole(path, content)
    except OSError:
        return False
    with suppress(OSError):
        for old in path.parent.glob(f"{glob.escape(path.name.rsplit('.', 2)[0])}.*.weights"):
            if old != path:
                old.unlink(missing_ok=True)
    return True


def write_whole(path: Path, content: Callable[[IO[bytes]], object]) -> None:
    """Let a complete file appear at ``path``; raise OSError if none can be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            content(file)
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)
