"""Which key a caller has, and whether it is an operator's.

Keys are kept as hashes and compared in constant time; only the label of a key is ever shown.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ANYONE = "-"  # the label of callers where no key is needed
_ADMIN = "admin"  # behind a key in the file


class _Key(NamedTuple):
    label: str
    digest: bytes
    is_operator: bool


class Keys:
    """The keys that open the server, each with a label."""

    def __init__(
        self, keys: Iterable[str], file: Path | None, admin_keys: Iterable[str] = ()
    ) -> None:
        """Take ``keys``, labelled key1, key2 ..., and those in ``file``.

        ``admin_keys``, labelled admin1, admin2 ..., are an operator's. Raises ValueError or OSError
        if the file is no list of keys, or two keys have one label.
        """
        self._from_flags = [
            *(_Key(f"key{i}", _digest(key.encode()), False) for i, key in enumerate(keys, start=1)),
            *(
                _Key(f"{_ADMIN}{i}", _digest(key.encode()), True)
                for i, key in enumerate(admin_keys, start=1)
            ),
        ]
        self._file = file
        self.reload()

    def reload(self) -> None:
        """Read the file again; the old keys stay if that fails."""
        known = [*self._from_flags, *(_read(self._file) if self._file else ())]
        if len({key.label for key in known}) < len(known):
            where = self._file.name if self._file else "the flags"
            raise ValueError(
                f"{where} has two keys with the same label, or one with the label of a flag's key"
            )
        self._keys = known

    @property
    def are_needed(self) -> bool:
        """Whether there is any key."""
        return bool(self._keys)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels, in order."""
        return tuple(key.label for key in self._keys)

    def owner_of(self, label: str) -> str:
        """Return what names the key of this label itself: a label may come to mean another key."""
        return next((_owner(key) for key in self._keys if key.label == label), ANYONE)

    @property
    def owners(self) -> dict[str, str]:
        """The labels by what names the keys themselves."""
        return {_owner(key): key.label for key in self._keys} or {ANYONE: ANYONE}

    def is_operator(self, label: str) -> bool:
        """Whether the key of this label is an operator's; so is the only key, and all, without."""
        if len(self._keys) < 2:
            return not self._keys or label == self._keys[0].label
        return any(key.label == label and key.is_operator for key in self._keys)

    def notes(self, are_isolated: bool) -> list[str]:
        """Return what is to be said of several keys at the start."""
        if len(self._keys) < 2:
            return []
        shares = "keys share cached prefixes: each can tell what another sent (--no-isolate-keys)"
        apart = "each key has cached prefixes of its own; --no-isolate-keys shares them"
        nobody = "no key is an operator's: nobody sees all metrics or loads adapters (mark one "
        nobody += "with admin in --api-key-file, or give --admin-api-key)"
        has_operator = any(key.is_operator for key in self._keys)
        return [apart if are_isolated else shares, *(() if has_operator else (nobody,))]

    def proof(self, secret: bytes) -> str:
        """Return what two servers with the same keys and the same ``secret`` have in common."""
        known = repr(sorted(self._keys)).encode()
        return hmac.new(secret, known, "sha256").hexdigest()

    def label_of(self, authorization: bytes | None, api_key: bytes | None = None) -> str | None:
        """Return the label of the key in these headers, None if it is unknown.

        Anthropic's clients send it alone in x-api-key; if there is an Authorization, that counts.
        """
        if authorization is None and api_key is not None:
            authorization = b"Bearer " + api_key
        scheme, _, key = (authorization or b"").partition(b" ")
        digest, match = _digest(key.strip()), None
        for known in self._keys:  # compare with all of them, for constant time
            if hmac.compare_digest(digest, known.digest):
                match = known.label
        return match if scheme.lower() == b"bearer" else None


def _owner(key: _Key) -> str:
    return hashlib.sha256(b"owner " + key.digest).hexdigest()[:32]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _read(file: Path) -> list[_Key]:
    keys: list[_Key] = []
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        words = line.split("#")[0].split()
        if len(words) > 3 or (len(words) == 3 and words[2] != _ADMIN):
            raise ValueError(
                f"{file.name}:{number}: a line must be a key, or a label and a key, and then "
                f"perhaps the word {_ADMIN}"
            )
        if words:
            label, key = (f"line{number}", words[0]) if len(words) == 1 else words[:2]
            keys.append(_Key(label, _digest(key.encode()), len(words) == 3))
    if not keys:
        raise ValueError(f"{file.name} does not contain a key")
    return keys
