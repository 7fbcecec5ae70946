"""Which key a caller has.

Keys are kept as hashes and compared in constant time; only the label of a key is ever shown.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

ANYONE = "-"  # the label of callers where no key is needed


class Keys:
    """The keys that open the server, each with a label."""

    def __init__(self, keys: Iterable[str], file: Path | None) -> None:
        """Take ``keys``, labelled key1, key2 ..., and those in ``file``.

        Raises ValueError or OSError if the file is no list of keys.
        """
        self._from_flags = [(f"key{i}", key) for i, key in enumerate(keys, start=1)]
        self._file = file
        self.reload()

    def reload(self) -> None:
        """Read the file again; the old keys stay if that fails."""
        labelled_keys = [*self._from_flags, *(_read(self._file) if self._file else ())]
        self._digests = [(label, _digest(key.encode())) for label, key in labelled_keys]

    @property
    def are_needed(self) -> bool:
        """Whether there is any key."""
        return bool(self._digests)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels, in order."""
        return tuple(label for label, _ in self._digests)

    def label_of(self, authorization: bytes | None, api_key: bytes | None = None) -> str | None:
        """Return the label of the key in these headers, None if it is unknown.

        Anthropic's clients send it alone in x-api-key; if there is an Authorization, that counts.
        """
        if authorization is None and api_key is not None:
            authorization = b"Bearer " + api_key
        scheme, _, key = (authorization or b"").partition(b" ")
        digest, match = _digest(key.strip()), None
        for label, known in self._digests:  # compare with all of them, for constant time
            if hmac.compare_digest(digest, known):
                match = label
        return match if scheme.lower() == b"bearer" else None


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _read(file: Path) -> list[tuple[str, str]]:
    keys: list[tuple[str, str]] = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        words = line.split("#")[0].split()
        if len(words) > 2:
            raise ValueError(f"{file.name}:{number}: a line is a key, or a label and a key")
        if words:
            keys.append((words[0] if len(words) == 2 else f"line{number}", words[-1]))
    if not keys:
        raise ValueError(f"{file.name} does not contain a key")
    if len({label for label, _ in keys}) < len(keys):
        raise ValueError(f"{file.name} has two keys with one label")
    return keys
