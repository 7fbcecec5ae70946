"""Which models a router has, by the names that requests give. It loads nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_PART = re.compile(r"-(\d{5})-of-\d{5}$")  # of a file in several parts
_NO_MODEL = ("mmproj", "adapter")  # .gguf files that are parts of something else


class Catalogue:
    """The models that were named, and those in a folder, which may change."""

    def __init__(self, models: Sequence[str], folder: Path | None) -> None:
        """Take models as people type them, and the folder of ``--models-dir``.

        Raises ValueError if two have one name, or if there is none.
        """
        self._named: dict[str, str] = {}
        for model in models:
            _add_model(self._named, Path(model).name, model)
        self._folder = folder
        if folder is not None and not folder.is_dir():
            raise ValueError(f"--models-dir {folder} is no folder")
        if not self.models():
            raise ValueError(f"there is no model in --models-dir {folder}: no .gguf, no directory")

    def models(self) -> Mapping[str, str]:
        """Return the models, as people type them, by name; those that were named come first.

        Raises ValueError if two have one name.
        """
        models = dict(self._named)
        for path in _models_in(self._folder) if self._folder else ():
            _add_model(models, path.name if path.is_dir() else _PART.sub("", path.stem), str(path))
        return models

    def find(self, name: str) -> str | None:
        """Return the name that a request means: ``:latest``, which Ollama adds, says nothing."""
        known = self.models()
        return next((one for one in (name, name.removesuffix(":latest")) if one in known), None)


def _add_model(models: dict[str, str], name: str, model: str) -> None:
    if models.setdefault(name, model) != model:
        raise ValueError(f"two models are called {name!r}: {models[name]} and {model}")


def _models_in(folder: Path) -> Iterator[Path]:
    """Yield the .gguf files, first parts alone, and the directories with weights, sorted."""
    for path in sorted(folder.iterdir()):
        if path.is_dir():
            if (path / "config.json").is_file() and any(path.glob("*.safetensors")):
                yield path
        elif path.suffix.lower() == ".gguf" and not path.name.startswith(_NO_MODEL):
            part = _PART.search(path.stem)
            if part is None or int(part[1]) == 1:
                yield path
