"""Which models a router has, by the names that requests give. It loads nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

_PART = re.compile(r"-(\d{5})-of-\d{5}$")  # of a file in several parts
_NO_MODEL = ("mmproj", "adapter")  # .gguf files that are parts of something else


class Catalogue:
    """The models that were named, and those in a folder, which may change.

    Attributes:
        write: takes a line for the log about what is wrong with the folder; each problem is told
        once.
    """

    def __init__(
        self, models: Sequence[str], folder: Path | None, names: Sequence[str] = ()
    ) -> None:
        """Take models as people type them, and the folder of ``--models-dir``.

        The one model has the ``names``, if there are any; answers have the first.

        Raises ValueError if two have one name, or if there is none, and OSError if the folder
        cannot be read.
        """
        self.write: Callable[[str], object] = lambda line: None
        self._named, self._models = dict[str, str](), dict[str, str]()
        for model in models:
            name = names[0] if names else Path(model).name
            if (first := self._named.setdefault(name, model)) != model:
                raise ValueError(_two(name, first, model))
        self._other_names, self._folder = names[1:], folder
        if folder is not None and not folder.is_dir():
            raise ValueError(f"--models-dir {folder} is not a folder")
        self._models, problems = self._models_and_problems(_models_in(folder))
        if problems:
            raise ValueError(problems[0])
        if not self._models:
            raise ValueError(
                f"there is no model in --models-dir {folder}: no .gguf file and no model directory"
            )
        self._written: list[str] = []

    def models(self) -> Mapping[str, str]:
        """Return the models, as people type them, by name; those that were named come first.

        If two have the same name, the one that was there first counts.
        """
        try:
            models, problems = self._models_and_problems(_models_in(self._folder))
        except OSError as error:  # it was removed, or its disk is not mounted
            models = dict(self._named)
            problems = [f"--models-dir {self._folder} cannot be read: {error.strerror}"]
        for problem in problems:
            if problem not in self._written:
                self.write(f"warning: {problem}")
        self._models, self._written = models, problems
        return models

    def add(self, name: str) -> None:
        """Have one more model, by the name that people type; any thread may call."""
        self._named = self._named | {name: name}

    def _models_and_problems(self, paths: Iterable[Path]) -> tuple[dict[str, str], list[str]]:
        """Return the models by name, and what is wrong with those of the folder."""
        models, problems = dict(self._named), list[str]()
        for path in paths:
            name = path.name if path.is_dir() else _PART.sub("", path.stem)
            model, first = str(path), models.get(name, str(path))
            if name not in self._named and self._models.get(name) == model:
                model, first = first, model
            models[name] = first
            if model != first:
                problems.append(_two(name, first, model))
        return models, problems

    @property
    def other_names(self) -> Sequence[str]:
        """Further names of the one model."""
        return self._other_names

    def find(self, name: str) -> str | None:
        """Return the name that a request means, without ``:latest``, which Ollama adds."""
        models = self.models()
        names = name, name.removesuffix(":latest")
        if not {*self._other_names}.isdisjoint(names):
            return next(iter(models), None)
        return next((one for one in names if one in models), None)


def _two(name: str, first: str, second: str) -> str:
    return f"two models are called {name!r}: {first} and {second}"


def _models_in(folder: Path | None) -> list[Path]:
    """Return the .gguf files, first parts alone, and the directories with weights, sorted."""
    if folder is None:
        return []
    return [path for path in sorted(folder.iterdir()) if _is_model(path)]


def _is_model(path: Path) -> bool:
    try:
        if path.is_dir():
            return (path / "config.json").is_file() and any(path.glob("*.safetensors"))
    except PermissionError:  # such as lost+found
        return False
    part = _PART.search(path.stem)
    is_gguf = path.suffix.lower() == ".gguf" and not path.name.startswith(_NO_MODEL)
    return is_gguf and (part is None or int(part[1]) == 1)
