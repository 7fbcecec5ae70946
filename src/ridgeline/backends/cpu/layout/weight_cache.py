"""Packed weights on disk: packing takes seconds to minutes, reading it back takes none.

A file is a page that seals it, the arrays one after another, and a tail: the SHA-256 of the arrays,
a CRC-32 of each MiB of them, an index as JSON, the index's length in eight bytes. The seal is the
SHA-256 of the file's name, which says of which contents and code it is, and of the tail. So a file
that was damaged, cut or moved is known before it is used. What comes by accident a CRC finds, and
no digest in the standard library is quicker on every processor. The SHA-256 of the arrays, the same
wherever the same weights are packed, is not read at a start.

A file is on the disk before it gets its name. If one cannot be read or written, a start is only
slower. It knows nothing of what the arrays mean.
"""

from __future__ import annotations

import glob
import hashlib
import json
import math
import mmap
import os
import struct
import zlib
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.model.files.tensors import Checkpoint
from ridgeline.system.machine import DiskFull, usable_cpus, write_whole

_ELSEWHERE = "set RIDGELINE_HOME to a directory elsewhere"  # what to do about a full disk
_ALIGNMENT = 4096
_BLOCK_BYTES = 1 << 20
_READ_BYTES = 1 << 17  # at once: what stays in a processor's own cache
_DIGEST_BYTES = 32  # of SHA-256
_HEAD = struct.Struct("<32sQ")  # the seal, and where the tail begins
_MOST_THREADS = 8  # that read a file: more wait for memory


class PackedArray(NamedTuple):
    """An array and what kind of matrix it is; "" for anything else."""

    kind: str
    data: NDArray[Any]


def place_of(path: Path, dtype: str, part: str = "") -> str:
    """Return how the names of all begin that was ever packed from ``path`` for this dtype.

    ``part`` names some of its layers.
    """
    place = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]
    return f"{path.stem}.{dtype}{part and f'-{part}'}.{place}"


def file_name(place: str, contents: str) -> str:
    """Return a name for packed weights: their place, then the model's contents and our source.

    ``contents`` is the digest of the model's files.
    """
    digest = hashlib.sha256(f"{np.__version__} {contents}".encode())
    for source in sources():
        digest.update(source.read_bytes())
    return f"{place}.{digest.hexdigest()[:32]}.weights"


def mapped(
    folder: Path,
    checkpoint: Checkpoint,
    dtype: str,
    packed: Callable[[], Iterable[tuple[str, PackedArray]]],
    say: Callable[[str], None],
) -> dict[str, PackedArray] | None:
    """Return a model's packed weights, mapped from a file, which is made if need be.

    ``packed`` packs them one after another, ``say`` is told that a file was damaged. None is
    returned where no file can be kept.
    """
    place = place_of(checkpoint.path, dtype, checkpoint.part)

    def name() -> str:
        return file_name(place, checkpoint.contents.digest(folder))

    # To read the model's files through is quicker than to pack them, and slower than neither.
    arrays = None
    if checkpoint.contents.cached_digest(folder) is not None or any(_packed_from(folder, place)):
        arrays = _read_cached(folder / name(), say)
    if arrays is None:
        path = write(folder, name, packed(), checkpoint.nbytes, say)
        arrays = _read_cached(path, say) if path else None
    return arrays


def _read_cached(path: Path, say: Callable[[str], None]) -> dict[str, PackedArray] | None:
    """Return the arrays of a file; None if it is not there, or damaged, which is said."""
    try:
        return read(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        say(f"{path} cannot be used, so the weights are packed again: {why}")
        return None


def _packed_from(folder: Path, place: str) -> Iterator[Path]:
    return folder.glob(f"{glob.escape(place)}.*.weights")


def sources() -> list[Path]:
    """Return the files of code that a tensor passes from a model's file to a packed one.

    Those of gguf stand for its version: importing either takes a tenth of a start.
    """
    model = Path(__file__).parents[3] / "model"
    folders = (model / "shape", model / "files", Path(__file__).parent)
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    files += [model / "cost" / name for name in ("layers.py", "shapes.py")]
    files.append(Path(__file__).parents[2] / "arrays.py")
    spec = find_spec("gguf")
    if spec is not None and spec.origin is not None:
        files += [Path(spec.origin).with_name(name) for name in ("constants.py", "quants.py")]
    return files


def read(path: Path) -> dict[str, PackedArray]:
    """Return the arrays of a file, mapped, after all of it was read and compared with its digests.

    Copying them into memory of their own costs a start more than huge pages give back
    (docs/results.md#peers), and processes with the same model share the mapped file. Raises OSError
    if the file cannot be read, ValueError if it is not what was written.
    """
    with path.open("rb") as file:
        seal, tail_at = _HEAD.unpack(_exactly(file, _HEAD.size))
        size = file.seek(0, os.SEEK_END)
        if not _ALIGNMENT <= tail_at < size:
            raise ValueError("it is damaged")
        file.seek(tail_at)
        tail = file.read()
        if _seal(path, tail) != seal:
            raise ValueError("it is damaged, or of another model")
        num_blocks = -(-(tail_at - _ALIGNMENT) // _BLOCK_BYTES)
        crcs = array("I", tail[_DIGEST_BYTES:][: 4 * num_blocks])
        index_bytes = int.from_bytes(tail[-8:], "little")
        index = json.loads(tail[-8 - index_bytes : -8])
        _check_blocks(file.fileno(), tail_at, crcs)
        area = mmap.mmap(file.fileno(), tail_at, access=mmap.ACCESS_READ)
    arrays, content = {}, np.frombuffer(area, np.uint8)
    for name, (kind, dtype, shape, begin) in index.items():
        count = math.prod(shape) * np.dtype(dtype).itemsize
        part = content[begin : begin + count].view(dtype)
        arrays[name] = PackedArray(kind, part.reshape(shape))
    return arrays


def _exactly(file: IO[bytes], count: int) -> bytes:
    data = file.read(count)
    if len(data) < count:
        raise ValueError("it is damaged")
    return data


def _seal(path: Path, tail: bytes) -> bytes:
    return hashlib.sha256(path.name.encode() + tail).digest()


def _check_blocks(descriptor: int, end: int, crcs: array[int]) -> None:
    """Compare each block with its CRC; read, not mapped: a bad sector kills a process that maps it.

    Raises OSError or ValueError at the first that cannot be read or has another.
    """

    def check(first: int) -> None:
        buffer = memoryview(bytearray(_READ_BYTES))
        for number in range(first, len(crcs), num_readers):
            begin, crc = _ALIGNMENT + number * _BLOCK_BYTES, 0
            stop = min(begin + _BLOCK_BYTES, end)
            for place in range(begin, stop, _READ_BYTES):
                part = buffer[: min(_READ_BYTES, stop - place)]
                num_read = os.preadv(descriptor, [part], place)
                crc = zlib.crc32(part[:num_read], crc)
            if crc != crcs[number]:
                raise ValueError(f"it is damaged at byte {begin:,} or behind")

    from concurrent.futures import ThreadPoolExecutor  # it takes logging along: not at every start

    num_readers = max(1, min(usable_cpus(), _MOST_THREADS, len(crcs)))
    with ThreadPoolExecutor(num_readers) as pool:
        for _ in pool.map(check, range(num_readers)):
            pass


class _DigestWriter:
    """Writes the arrays of a file, and computes their digests on the way."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._digest, self.crcs = hashlib.sha256(), array("I")
        self._crc, self._room = 0, _BLOCK_BYTES  # of the block that was begun

    def write(self, data: memoryview) -> None:
        self._file.write(data)
        self._digest.update(data)
        while len(data):
            part = data[: self._room]
            self._crc = zlib.crc32(part, self._crc)
            self._room -= len(part)
            data = data[len(part) :]
            if not self._room:
                self._end_block()

    def _end_block(self) -> None:
        self.crcs.append(self._crc)
        self._crc, self._room = 0, _BLOCK_BYTES

    def digests(self) -> bytes:
        """Return the SHA-256 of all, then the CRC of each block, the last one included."""
        if self._room < _BLOCK_BYTES:
            self._end_block()
        return self._digest.digest() + self.crcs.tobytes()


def write(
    folder: Path,
    file_name: Callable[[], str],
    arrays: Iterable[tuple[str, PackedArray]],
    least_bytes: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Path | None:
    """Write arrays, each with its name, into a file as they come; return where it is.

    ``file_name`` is asked for its name when all are written. None is returned if the folder
    cannot be written or has no room; that not even ``least_bytes`` fit is said. Older files of the
    same model and dtype, of another version of either, go.
    """

    final_name = cache(file_name)

    def write_all(file: IO[bytes]) -> None:
        index = {}
        file.write(bytes(_ALIGNMENT))
        content = _DigestWriter(file)
        for name, (kind, data) in arrays:
            index[name] = (kind, data.dtype.str, data.shape, file.tell())
            content.write(np.ascontiguousarray(data).reshape(-1).view(np.uint8).data)
            content.write(memoryview(bytes(-file.tell() % _ALIGNMENT)))
        tail_at, text = file.tell(), json.dumps(index).encode()
        tail = content.digests() + text + len(text).to_bytes(8, "little")
        file.write(tail)
        file.seek(0)
        file.write(_HEAD.pack(_seal(folder / final_name(), tail), tail_at))

    try:
        write_whole(
            folder / "packed-weights",
            write_all,
            final_name,
            least_bytes=least_bytes,
            instead=_ELSEWHERE,
        )
        path = folder / final_name()
    except DiskFull as problem:
        say(f"each start packs the weights anew: {problem}")
        return None
    except OSError:
        return None
    with suppress(OSError):
        for old in _packed_from(folder, path.name.rsplit(".", 2)[0]):
            if old != path:
                old.unlink(missing_ok=True)
    return path
