"""A line of an audit log: how it is chained to the line before it, signed, and read again.

A line is JSON. ``before`` is the SHA-256 of the line before it, and ``mac``, its last field, an
HMAC-SHA256 of all that stands before it under the log's key. Without the key
nobody can write or change a line; with it both are noticed. The first line of a file also has the
log's id and the file's number, so that neither can take the place of another. This module writes
only a new key.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import secrets
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.system.machine import make_once

FIRST = "0" * 64  # stands for the hash of the line before the first
HEAD_FILE = "head.json"
_MAC = b',"mac":"'
_MAC_BYTES = len(_MAC) + 64 + len(b'"}')
_PREFIX, _SUFFIX = "audit-", ".jsonl"
_KEY_BYTES = 32
_HEAD_BYTES = 256  # of its file: written in place, within a sector


class ChainPosition(NamedTuple):
    """A place in a chain: a line's number, from 0, and its hash; before the first -1."""

    seq: int
    digest: str


START = ChainPosition(-1, FIRST)


class Head(NamedTuple):
    """Where a log ends, and its id; that is empty if an earlier version has written it."""

    place: ChainPosition
    log: str


def files_of(folder: Path) -> list[Path]:
    """Return the files of a log, in order."""
    return sorted(one for one in folder.glob(f"{_PREFIX}*{_SUFFIX}") if number_of(one) is not None)


def file_name(number: int) -> str:
    """Return what a log's file of this number is called."""
    return f"{_PREFIX}{number:08d}{_SUFFIX}"


def number_of(file: Path) -> int | None:
    """Return the number of a log's file; None if it is none."""
    digits = file.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
    return int(digits) if digits.isdecimal() and file.name == file_name(int(digits)) else None


def data_of(file: Path) -> bytes:
    """Return what a file has. Raises OSError, also for a pipe or a device: those may never end."""
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(file))
        with open(descriptor, "rb", closefd=False) as opened:
            return opened.read()
    finally:
        os.close(descriptor)


def written_time(now_s: float) -> str:
    """Return a time of the epoch as lines have it: UTC, to the millisecond."""
    return datetime.fromtimestamp(now_s, UTC).isoformat(timespec="milliseconds")


def written(fields: dict[str, Any], after: ChainPosition, now_s: float, key: bytes) -> bytes:
    """Return a line, with its end, that follows the one at ``after``."""
    whole = {"seq": after.seq + 1, "time": written_time(now_s), "before": after.digest, **fields}
    body = json.dumps(whole, separators=(",", ":"), default=str).encode()[:-1]
    return body + _MAC + _mac(body, key) + b'"}\n'


def digest_of(line: bytes) -> str:
    """Return the hash of a line, with or without its end."""
    return hashlib.sha256(line.rstrip(b"\n")).hexdigest()


def is_signed(line: bytes, key: bytes) -> bool:
    """Whether a line was written with this key, and not changed."""
    line = line.rstrip(b"\n")
    body, mac = line[:-_MAC_BYTES], line[-_MAC_BYTES:]
    return hmac.compare_digest(mac, _MAC + _mac(body, key) + b'"}')


def read(line: bytes) -> dict[str, Any] | None:
    """Return the fields of a line; None if it is none."""
    try:
        fields = json.loads(line)
        is_whole = type(fields["seq"]) is int and fields["seq"] >= 0
        is_whole &= all(isinstance(fields[name], str) for name in ("time", "before", "mac"))
    except (ValueError, TypeError, LookupError, RecursionError):
        return None
    return fields if is_whole else None


def written_head(head: Head, key: bytes) -> bytes:
    """Return the content of the file that says where a log ends."""
    said: dict[str, Any] = {"seq": head.place.seq, "head": head.place.digest}
    said |= {"log": head.log, "mac": _mac(_said(head), key).decode()}
    return json.dumps(said).encode().ljust(_HEAD_BYTES - 1) + b"\n"


def read_head(folder: Path, key: bytes | None) -> Head:
    """Return where a log ended when that was last written.

    Raises ValueError if nothing says so, or not with this key.
    """
    file = folder / HEAD_FILE
    try:
        said = json.loads(data_of(file))
        place, mac = ChainPosition(int(said["seq"]), str(said["head"])), str(said["mac"])
        head = Head(place, str(said.get("log", "")))
    except FileNotFoundError:
        raise ValueError(f"{file} is missing: it says where the log ends") from None
    except (OSError, ValueError, TypeError, LookupError, RecursionError):
        raise ValueError(f"{file} cannot be read: it says where the log ends") from None
    if key is not None and not hmac.compare_digest(mac.encode(), _mac(_said(head), key)):
        raise ValueError(f"{file} was changed, or written with another key")
    return head


def key_of(file: Path) -> bytes:
    """Return the key in a file, which is made if there is none. Raises OSError or ValueError."""
    make_once(file, lambda: secrets.token_hex(_KEY_BYTES).encode() + b"\n")
    return read_key(file)


def read_key(file: Path) -> bytes:
    """Return the key in a file. Raises OSError or ValueError."""
    try:
        key = bytes.fromhex(file.read_text().strip())
    except ValueError:  # a text that is not UTF-8 is one too
        key = b""
    if len(key) != _KEY_BYTES:
        raise ValueError(
            f"{file} is not the key of an audit log: it must have {2 * _KEY_BYTES} hexadecimal "
            "digits"
        )
    return key


def _mac(body: bytes, key: bytes) -> bytes:
    return hmac.new(key, body, hashlib.sha256).hexdigest().encode()


def _said(head: Head) -> bytes:
    said = f"head {head.place.seq} {head.place.digest}"
    return (f"{said} {head.log}" if head.log else said).encode()
