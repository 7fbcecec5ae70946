"""From MODEL, as people type it, to a place on disk. It fetches nothing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.model.hub.library import hub_names, library, parse_hub_name, tags_of
from ridgeline.model.hub.local_models import ModelStores
from ridgeline.model.hub.short_names import ALIASES, SHORT_NAMES, packaged

_NEAREST = 3  # names beside one that is none


class NotPulledError(ValueError):
    """A model that could be pulled, and has not been."""


class LocalModel(NamedTuple):
    """A model on disk.

    Attributes:
        path: a .gguf file, or the first of several, or a Hugging Face directory.
        sampling: defaults that are known of it and stand in none of its files.
        note: why it is this file of several, in words; empty if there was no choice.
    """

    path: Path
    sampling: Mapping[str, Any]
    note: str = ""


def find_model(model: str, stores: ModelStores, budget_bytes: int) -> LocalModel:
    """Return what ``model`` means.

    Args:
        model: a short name; a .gguf file; a directory; ``owner/name`` of the hub, perhaps with
            ``@revision``, and ``:Q4_K_M`` or a file's name after it; a name that Ollama has here;
            or one of its library; tried in this order. A local directory called like a short name
            is ``./name``.
        stores: where models may lie.
        budget_bytes: memory that is free: decides between files if none is named.

    Raises:
        NotPulledError: it has not been pulled yet.
        ValueError: there is no such model, or it does not fit.
    """
    path = home_expanded(model)
    model = str(path) if model.startswith("~") else model
    if entry := packaged(model):
        file = stores.home / "models" / entry.file_name
        if file.exists():
            return LocalModel(file, entry.sampling)
        if local := _of_hub(model, stores, budget_bytes):  # its package is gone
            return local._replace(sampling=entry.sampling)
    elif model and (path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf")):
        return LocalModel(path, {})
    elif path.is_file():
        raise ValueError(f"{model!r} is not a .gguf file; for safetensors give their directory")
    elif model and not parse_hub_name(model) and (of_ollama := stores.find_ollama(model)):
        return LocalModel(of_ollama.path, of_ollama.sampling)
    elif hub_names(model):
        if local := _of_hub(model, stores, budget_bytes):
            return local
    else:
        raise ValueError(_no_such(model, stores))
    raise NotPulledError(f"{model!r} is not here yet: run `ridgeline pull {model}` first")


def is_hub_name(model: str) -> bool:
    """Whether a name is one that ``pull`` may fetch, whatever lies on this machine: no path."""
    return bool(packaged(model) or parse_hub_name(model) or hub_names(model))


def home_expanded(model: str) -> Path:
    """Return a path whose ``~`` a shell did not see, as in a unit file or behind quotes."""
    try:
        return Path(model).expanduser()
    except RuntimeError:  # there is no such user
        return Path(model)


def _of_hub(model: str, stores: ModelStores, budget_bytes: int) -> LocalModel | None:
    """Return what was pulled from the hub under the names of a model; None if nothing was."""
    for name in hub_names(model):
        if chosen := stores.find_repository(name, budget_bytes):
            place, why = chosen
            return LocalModel(place.path, place.sampling, why)
    return None


def _no_such(model: str, stores: ModelStores) -> str:
    if model.startswith(("/", "./", "../")) or model.lower().endswith((".gguf", ".safetensors")):
        return f"there is no model {model!r}: no such file or directory"
    near, tags = _nearest(model, stores), tags_of(model)
    if tags:  # then it is the size that does not exist
        name = model.partition(":")[0]
        near = [other for other in near if other.partition(":")[0] == name]
    hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    if tags:
        hint += f"its sizes are {', '.join(tags)}. "
    return (
        f"there is no model {model!r}: {hint}give a short name ({', '.join(SHORT_NAMES)}), a name "
        f"of Ollama's library such as llama3.2, a .gguf file, a directory, or a name of the hub, "
        f"owner/name or owner/name:Q4_K_M"
    )


def _nearest(model: str, stores: ModelStores) -> list[str]:
    """Return the names that are written most like one, of models here and in Ollama's library.

    Of one that is written so but for case, spaces and the like nothing else is returned.
    """
    here = (place.name.removeprefix("ollama:") for place in stores.all())
    of_library = dict.fromkeys(row.name for row in library())
    sizes = (f"{row.name}:{row.tag}" for row in library())
    by_letters: dict[str, str] = {}
    for name in (*ALIASES, *SHORT_NAMES, *here, *of_library, *sizes):
        by_letters.setdefault(_letters(name), name)
    wanted = _letters(model)
    if wanted in by_letters:
        return [by_letters[wanted]]
    near = difflib.get_close_matches(wanted, by_letters, n=_NEAREST)
    return [by_letters[letters] for letters in near]


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
