"""Sequences that clients saved by a name: a small file each, with tokens alone.

Their blocks stand in the segments, where those of all prompts do. ``PATH/slots/OWNER/NAME`` is a
checksum in a line, and JSON. An owner is a key, and no other sees its files.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from ridgeline.system.machine import write_whole

_MOST_FILES = 256  # of an owner: then the one that was saved first goes
_MOST_NAME_BYTES = 255  # as file systems have it
_FOLDER_MODE = 0o700
_MOST_SAID = 31  # letters of a setting: a longer one is kept as its digest, which has 32


class SavedSequences:
    """The files of one folder, of which those that name this form can be used."""

    def __init__(self, folder: Path, form: str, settings: Mapping[str, object]) -> None:
        """``form`` is the digest by which segments of the same model, formats and code go.

        It is made from ``settings``, by name, which say what differs where a digest does.
        """
        self._folder, self._form = folder, form
        self._settings = {name: _in_short(value) for name, value in settings.items()}

    def write(self, owner: str, name: str, model: str, root: bytes, tokens: Sequence[int]) -> int:
        """Save the tokens behind a root, in the place of an earlier file; return its bytes.

        Raises ValueError, in a line, for a name that cannot be one, and OSError.
        """
        path = self._path(owner, name)
        for folder in (self._folder, path.parent):
            folder.mkdir(_FOLDER_MODE, parents=True, exist_ok=True)
        fields = {"model": model, "form": self._form, "root": root.hex(), "tokens": [*tokens]}
        body = json.dumps(fields | {"settings": self._settings}).encode()
        data = _digest(body) + b"\n" + body
        write_whole(path, lambda file: file.write(data))
        others = [one for one in path.parent.iterdir() if one != path]
        oldest_first = sorted(others, key=lambda one: one.stat().st_mtime_ns)
        for one in oldest_first[: max(0, len(others) + 1 - _MOST_FILES)]:
            one.unlink(missing_ok=True)
        return len(data)

    def read(self, owner: str, name: str) -> tuple[bytes, tuple[int, ...], int]:
        """Return a file's root and tokens, and its bytes.

        Raises ValueError, in a line, if there is none that the model, as it is now, can use.
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
            raise ValueError(
                f"{name!r} was saved by {fields['model']} with {self._differing(fields)}: its "
                "cache is of no use here, so restore it where it was saved, or save again"
            )
        return bytes.fromhex(fields["root"]), tuple(fields["tokens"]), len(data)

    def _differing(self, fields: Mapping[str, Any]) -> str:
        """Return which settings a file was saved with that are others here."""
        then = fields.get("settings", {})
        differing = [name for name, here in self._settings.items() if then.get(name) != here]
        if not then or not differing:
            return "other settings, which it does not name"
        said = [
            f"{name} {then[name]} (here {self._settings[name]})"
            if max(len(then.get(name, "")), len(self._settings[name])) <= _MOST_SAID
            and name in then
            else f"another {name}"
            for name in differing
        ]
        return ", ".join(said)

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


def _in_short(setting: object) -> str:
    """Return a setting as a few words; a long one as its digest."""
    text = " ".join(map(str, setting)) if isinstance(setting, list | tuple) else str(setting)
    return text if len(text) <= _MOST_SAID else _digest(text.encode()).decode()


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=16).hexdigest().encode()
