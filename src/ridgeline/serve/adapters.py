"""Adapters of a server: the one that a request names, those in the list, loading and unloading."""

from __future__ import annotations

import os
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

from ridgeline.core.request import Adapter
from ridgeline.engine.adapters import Adapters, NoRoom
from ridgeline.engine.setup.identity import with_adapter
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.fair_pool import in_thread

_NAME = re.compile(r"[\w.:/-]{1,128}")
_MOST_LOADED = 256  # adapters: each stands in the list of models and in the metrics


class Loras:
    """The adapters that a server has beside its model."""

    def __init__(self, adapters: Adapters, model: str, folder: Path | None) -> None:
        """Serve ``adapters`` of ``model``; more may be loaded from below ``folder``.

        Raises ValueError if an adapter has the model's name, or ``folder`` is none.
        """
        self._adapters, self._model = adapters, model
        self._folder = folder and Path(os.path.realpath(folder))
        self._created: dict[str, int] = dict.fromkeys(adapters.names, int(time.time()))
        self._most = len(adapters.names) + _MOST_LOADED
        if model in adapters.names:
            raise ValueError(f"--lora: {model!r} is the name of the model itself")
        if self._folder and not self._folder.is_dir():
            raise ValueError(f"--allow-lora-loading: {folder} is not a directory")

    @property
    def names(self) -> list[str]:
        """Names that requests may give for the model's."""
        return self._adapters.names

    def digest_of(self, name: str) -> bytes:
        """Return the digest of an adapter's values; nothing of one that is not there."""
        return self._adapters.digest_of(name)

    async def lease(self, name: str) -> Adapter:
        """Return the adapter that a request names.

        Raises ApiError if there is none, or no memory for it now.
        """
        try:
            if lease := self._adapters.lease_now(name):
                return lease
            return await in_thread(self._adapters.lease, name)
        except NoRoom as error:
            headers = {"retry-after": "5"}
            raise ApiError(503, str(error), code="no_room", headers=headers) from None
        except (ValueError, OSError) as error:
            text = self._error_text(error, self._adapters.path_of(name), name)
            raise ApiError(404, text, param="model", code="model_not_found") from None

    def entries(self, base: dict[str, Any]) -> list[dict[str, Any]]:
        """Return each adapter as an entry of the list of models; ``base`` is the model's."""
        fingerprint = base["system_fingerprint"]
        return [
            base
            | {"id": name, "parent": self._model, "created": self._created.get(name, 0)}
            | {"system_fingerprint": with_adapter(fingerprint, self._adapters.digest_of(name))}
            for name in self._adapters.names
        ]

    async def load(self, name: str, path: str, *, in_place: bool = False) -> None:
        """Load an adapter from below the folder; ``in_place`` of one that has the name.

        Raises ApiError if that cannot be.
        """
        if not _NAME.fullmatch(name) or name == self._model:
            message = f"lora_name is {name[:80]!r}: write 1 to 128 letters, digits and ._:/-, and "
            message += "not the model's own name"
            raise ApiError(400, message, param="lora_name", code="invalid_value")
        is_new = name not in self._adapters.names
        if is_new and len(self._adapters.names) >= self._most:
            message = f"there are {self._most} adapters, the most there may be: unload one first"
            raise ApiError(400, message, param="lora_name", code="too_many_adapters")
        try:
            target = Path(os.path.realpath(self._allowed() / path))
        except ValueError:
            message = "lora_path has a character that no path can have"
            raise ApiError(400, message, param="lora_path", code="invalid_value") from None
        if not target.is_relative_to(self._allowed()):
            message = f"lora_path is {path[:80]!r}: adapters are loaded from below the folder of "
            message += "--allow-lora-loading alone"
            raise ApiError(403, message, param="lora_path", code="invalid_value")
        try:
            await in_thread(partial(self._adapters.load, name, target, in_place=in_place))
        except (ValueError, OSError) as error:
            text = self._error_text(error, target, path or ".")
            raise ApiError(400, text, param="lora_path", code="invalid_value") from None
        self._created[name] = int(time.time())

    def unload(self, name: str) -> None:
        """Forget an adapter; requests under way keep it. Raises ApiError if there is none."""
        self._allowed()
        try:
            self._adapters.unload(name)
            self._created.pop(name, None)
        except ValueError as error:
            raise ApiError(404, str(error), param="lora_name", code="model_not_found") from None

    def _error_text(self, error: Exception, path: Path | None, name: str) -> str:
        """Return what an error says, without where the server's files lie."""
        if isinstance(error, OSError):
            return f"{name}: {error.strerror}"
        text = str(error).replace(str(path), name) if path else str(error)
        return text.replace(f"{self._folder}{os.sep}", "")  # of a path that was cut

    def _allowed(self) -> Path:
        if self._folder is None:
            message = "adapters are not loaded over HTTP here: start with --allow-lora-loading DIR"
            raise ApiError(403, message, code="not_allowed")
        return self._folder
