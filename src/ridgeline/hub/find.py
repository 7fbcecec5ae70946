"""From MODEL, as people type it, to a place on disk. It fetches nothing."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.hub.names import parse_hub_name
from ridgeline.hub.places import Stores
from ridgeline.hub.short_names import ALIASES, SHORT_NAMES, packaged


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


def find_model(model: str, stores: Stores, room_bytes: int) -> LocalModel:
    """Return what ``model`` means.

    Args:
        model: a short name; a .gguf file; a directory; ``owner/name`` of the hub, perhaps with
            ``@revision``, and ``:Q4_K_M`` or a file's name behind it; or a name that Ollama has;
            tried in this order. A local directory called like a short name is ``./name``.
        stores: where models may lie.
        room_bytes: memory that is free: decides between files if none is named.

    Raises:
        NotPulledError: it has not been pulled yet.
        ValueError: there is no such model, or it does not fit.
    """
    path = Path(model)
    if entry := packaged(model):
        file = stores.home / "models" / entry.file_name
        if file.exists():
            return LocalModel(file, entry.sampling)
    elif model and (path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf")):
        return LocalModel(path, {})
    elif path.is_file():
        raise ValueError(f"{model!r} is not a .gguf file; for safetensors give their directory")
    elif name := parse_hub_name(model):
        if chosen := stores.find_repository(name, room_bytes):
            place, why = chosen
            return LocalModel(place.path, place.sampling, why)
    elif model and (place_of := stores.find_ollama(model)):
        return LocalModel(place_of.path, place_of.sampling)
    else:
        raise ValueError(_no_such(model, stores))
    raise NotPulledError(f"{model!r} is not here yet: run `ridgeline pull {model}` first")


def _no_such(model: str, stores: Stores) -> str:
    ollama = (place.name.removeprefix("ollama:") for place in stores.of_ollama())
    known = [*SHORT_NAMES, *ALIASES, *ollama]
    near = difflib.get_close_matches(model, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"there is no model {model!r}: {hint}give a short name ({', '.join(SHORT_NAMES)}), a .gguf "
        f"file, a directory, or a name of the hub, owner/name or owner/name:Q4_K_M"
    )
