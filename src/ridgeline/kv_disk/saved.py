"""Sequences that clients saved by a name: a small file each, with tokens alone.

Their blocks stand in the segments, where those of all prompts do. ``PATH/slots/OWNER/NAME`` is a
checksum in a line, and JSON. An owner is a key, and no other sees its files.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

from ridgeline.machine import write_whole

_MOST_FILES = 256  # of an owner: then the one that was saved first goes
_MOST_NAME_BYTES = 255  # as file systems have it
_FOLDER_MODE = 0o700


class SavedSequences:
    """The files of one folder, of which those that name this form can be used."""

    def __init__(self, folder: Path, form: str) -> None:
        """``form`` is the digest by which segments of the same model, formats and code go."""
        self._folder, self._form = folder, form

    def write(self, owner: str, name: str, model: str, root: bytes, tokens: Sequence[int]) -> int:
        """Save the tokens behind a root, in the place of an earlier file; return its bytes.

        Raises ValueError, in a line, for a name that cannot be one, and OSError.
        """
        path = self._path(owner, name)
        for folder in (self._folder, path.parent):
            folder.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
        fields = {"model": model, "form": self._form, "root": root.hex(), "tokens": [*tokens]}
        body = json.dumps(fields).encode()
        data = _digest(body) + b"\n" + body
        write_whole(path, lambda file: file.write(data))
        others = [one for one in path.parent.iterdir() if one != path]
        oldest_first = sorted(others, key=lambda one: one.stat().st_mtime_ns)
        for one in oldest_first[: max(0, len(others) + 1 - _MOST_FILES)]:
            one.unlink(missing_ok=True)
        return len(data)

    def read(self, owner: str, name: str, model: str) -> tuple[bytes, tuple[int, ...], int]:
        """Return a file's root and tokens, and its bytes.

        Raises ValueError, in a line, if there is none that ``model``, as it is now, can use.
        """
        try:
            data = self._path(owner, name).read_bytes()
        except FileNotFoundError:
            raise ValueError(f"nothing was saved as {name!r}") from None
        except OSError as error:
            raise ValueError(f"{name!r} cannot be read: {error.strerror}") from None
        check, _, body = data.partition(b"\n")
        if check != _digest(body):
            raise ValueError(f"{name!r} is damaged: save the slot again")
        fields = json.loads(body)
        if fields["form"] != self._form:
            saved = f"{fields['model']} ({fields['form'][:12]})"
            here = f"{model} ({self._form[:12]})"
            raise ValueError(
                f"{name!r} was saved by {saved}, and this is {here}: neither has a use for the "
                "other's cache, so restore it where it was saved, or save again"
            )
        return bytes.fromhex(fields["root"]), tuple(fields["tokens"]), len(data)

    @staticmethod
    def check(name: str) -> None:
        """Raise ValueError, in a line, for what cannot be the name of a file."""
        has_controls = any(unicodedata.category(one) == "Cc" for one in name)
        if name in ("", ".") or "/" in name or ".." in name or has_controls:
            raise ValueError(
                f"{name!r} cannot be a file's name: leave out '/', '..' and control characters"
            )
        if len(name.encode()) > _MOST_NAME_BYTES:
            raise ValueError(f"the name has more than {_MOST_NAME_BYTES} bytes")

    def _path(self, owner: str, name: str) -> Path:
        self.check(name)
        return self._folder / blake2b(owner.encode(), digest_size=16).hexdigest() / name


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=16).hexdigest().encode()
