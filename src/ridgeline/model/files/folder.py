"""A model's directory: its files by name, none of them outside of it, and their JSON.

Nothing here is ever unpickled or executed, and no file outside the directory is opened, whatever
the directory's files and links say. This module does not know what any file means.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from ridgeline.model.files.tensors import ModelFileError, naming, refuse_pointer

MAX_JSON_BYTES = 16 << 20


@dataclass(frozen=True)
class Folder:
    """A directory whose files are found by name and never outside of it.

    Attributes:
        path: of the directory.
        paths: where the files are that were asked for and are there, by name.
    """

    path: Path
    paths: dict[str, Path] = field(default_factory=dict)

    @cached_property
    def _root(self) -> Path:
        root = Path(os.path.realpath(self.path))
        # A snapshot in the hub's cache consists of links into its sibling "blobs".
        repository = root.parent.parent
        is_snapshot = root.parent.name == "snapshots" and repository.name.startswith("models--")
        return repository if is_snapshot else root

    def find(self, name: str) -> Path | None:
        """Return where the file called ``name`` really is, None when there is none."""
        if "\0" in name:
            raise ModelFileError(f"{self.path}: {name!r} is not a file name")
        target = Path(os.path.realpath(self.path / name))
        if not target.is_relative_to(self._root):  # through a link, "..", or a leading "/"
            raise ModelFileError(
                f"{self.path}: {name!r} leads out of the directory; put the file itself there"
            )
        try:
            if not stat.S_ISREG(target.stat().st_mode):
                return None
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:  # such as a name that is too long
            raise ModelFileError(f"{self.path / name}: {error.strerror}") from None
        self.paths[name] = target
        return target

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """Return the bytes of a small file, None when there is none."""
        target = self.find(name)
        if target is None:
            return None
        size = target.stat().st_size
        if size > max_bytes:
            raise ModelFileError(f"{self.path / name}: {size} bytes, more than {max_bytes}")
        with naming(self.path / name):
            content = target.read_bytes()
        refuse_pointer(self.path / name, content)
        return content

    def json(self, name: str, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any] | None:
        """Return the JSON object in the file called ``name``, None when there is none."""
        content = self.read(name, max_bytes)
        return None if content is None else parse_object(content, self.path / name)


def _number_of_object(value: dict[str, Any]) -> Any:
    """Return an object as it is, but an infinite number where transformers wrote one as an object.

    JSON has no such number.
    """
    return float("inf") if value == {"__float__": "Infinity"} else value


def parse_object(content: bytes, where: Path) -> dict[str, Any]:
    """Return a JSON object; a byte order mark in front of it is no error.

    Raises ModelFileError that names ``where``.
    """
    try:
        value = json.loads(content, object_hook=_number_of_object)
    except ValueError as error:
        raise ModelFileError(f"{where}: not JSON: {error}") from None
    except RecursionError:
        raise ModelFileError(f"{where}: the JSON is nested too deeply") from None
    if type(value) is not dict:
        raise ModelFileError(f"{where}: the JSON is not an object")
    return value
