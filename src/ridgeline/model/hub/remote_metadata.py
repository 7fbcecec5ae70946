"""The outline of a model on the hub: its config, and of its weights the headers alone.

Files of weights are sparse: they have the size of the real ones, and zeros behind the header. So
whatever reads headers and never weights reads them as it reads a model on disk.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.error import HTTPError

from ridgeline.model.files.families import BESIDE
from ridgeline.model.files.gguf.file import read_gguf
from ridgeline.model.files.tensors import ModelFileError
from ridgeline.model.hub.fetch.download import WAY_OUT
from ridgeline.model.hub.fetch.index import IndexSource
from ridgeline.model.hub.fetch.repos import Entry, fetch_file, files_of, place_of, wanted_of
from ridgeline.model.hub.library import HubName

_OF_WEIGHTS = re.compile(r"(?!consolidated)[\w-][\w.-]*\.safetensors")
_FIRST_BYTES = 1 << 20  # a header of safetensors is rarely longer
_MOST_BYTES = 128 << 20
_MOST_SHARDS = 64  # more of them are not looked into: then the config.json says what there is
_ANY_ROOM = 1 << 62


@contextmanager
def fetch_metadata(name: HubName) -> Iterator[Path]:
    """Fetch a model's outline for as long as the block runs; its .gguf file, or its directory.

    Raises ValueError as ``repos.fetch`` does, or if a header is damaged. Without files of weights
    that are understood, a config.json is enough.
    """
    revision, files = files_of(name)
    if "config.json" in files and not name.tag:
        wanted, path = [file for file in files if _OF_WEIGHTS.fullmatch(file)], ""
        if len(wanted) > _MOST_SHARDS:
            wanted = []
    else:
        wanted, path, _ = wanted_of(name, files, _ANY_ROOM)
    with TemporaryDirectory(prefix="ridgeline-") as folder:
        root = Path(folder) / name.repo
        if not path:
            for file in ("config.json", *({BESIDE} & files.keys())):
                fetch_file(name.repo, revision, file, files.get(file, Entry(0, None)), root)
        for file in wanted:
            target = root / file
            target.parent.mkdir(parents=True, exist_ok=True)
            _write_header(place_of(name.repo, revision, file), target, files[file])
        yield root / path


def _write_header(source: IndexSource, path: Path, announced: Entry) -> None:
    """Write the header of a file of weights, and a hole in place of what is behind it."""
    path.touch()
    num_bytes, size = _FIRST_BYTES, announced.size
    while True:
        _append(source, path, min(num_bytes, size))
        needed = _header_bytes(path, size)
        if needed <= min(num_bytes, size):
            break
        if num_bytes >= min(size, _MOST_BYTES):
            raise ValueError(f"{path.name}: its header does not end within {num_bytes:,} bytes")
        num_bytes = max(4 * num_bytes, needed) if needed < _MOST_BYTES else 4 * num_bytes
    with path.open("r+b") as file:
        file.truncate(size)


def _header_bytes(path: Path, size: int) -> int:
    """Return how long a header is, as far as what is there of the file says; more, if it is cut."""
    with path.open("r+b") as file:
        there = file.seek(0, 2)
        file.seek(0)
        if path.suffix == ".safetensors":
            return 8 + int.from_bytes(file.read(8), "little")
        file.truncate(size)
    try:
        _, tensors = read_gguf(path)
        return size - sum(tensor.nbytes for tensor in tensors.values())
    except ModelFileError:
        if there >= min(size, _MOST_BYTES):
            raise
        return there + 1
    finally:
        with path.open("r+b") as file:
            file.truncate(there)


def _append(source: IndexSource, path: Path, upto: int) -> None:
    """Append to a file's beginning, up to ``upto`` bytes."""
    done = path.stat().st_size
    headers = dict(source.headers) | {"Range": f"bytes={done}-{upto - 1}"}
    try:
        with source.network.open(source.url, headers) as response, path.open("ab") as file:
            if response.status != HTTPStatus.PARTIAL_CONTENT:  # a server without ranges
                file.truncate(0)
                done = 0
            while done < upto and (chunk := response.read(min(_FIRST_BYTES, upto - done))):
                done += file.write(chunk)
    except HTTPError as error:
        error.close()
        raise ValueError(f"cannot read {path.name} from the hub ({error}); {WAY_OUT}") from error
    except (OSError, HTTPException) as error:
        raise ValueError(f"cannot read {path.name} from the hub ({error}); {WAY_OUT}") from error
    if done < upto:
        raise ValueError(f"{path.name}: the hub has {done:,} bytes of it, and announced more")
