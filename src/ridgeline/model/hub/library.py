"""Names that people know from Ollama's library, and the repositories of the hub they stand for.

``library.csv`` has a row for each size; the first of a name is what the name alone means. A row
says whose files they are, and whether they were checked: *page* where a stored copy of the
repository's page was seen, *no* where the row is from memory. Where there are two repositories,
the second is tried if the first gives nothing.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from ridgeline.model.hub.names import HubName, parse_hub_name
from ridgeline.model.hub.short_names import packaged

# "8b-instruct-q4_K_M" is a size, a kind and a quantisation.
_QUANTISED = re.compile(r"(?P<size>[a-z0-9.]+)(?:-.*)?-(?P<format>i?q\d\w*|b?f\d\d|fp16)", re.I)
_KIND = re.compile(r"-(?:instruct|chat|it|text|latest)$", re.I)


class LibraryRow(NamedTuple):
    """What a name stands for.

    Attributes:
        name: as Ollama has it.
        tag: the size, as it is typed behind a colon.
        repositories: of the hub, in the order in which they are tried.
        whose: "publisher" if the first belongs to the maker of the model, else "others".
        checked: what was seen of it, or "no".
    """

    name: str
    tag: str
    repositories: tuple[str, ...]
    whose: str
    checked: str


@cache
def library() -> tuple[LibraryRow, ...]:
    """Return all rows."""
    text = (files("ridgeline.model.hub") / "library.csv").read_text(encoding="utf-8")
    return tuple(
        LibraryRow(
            row["name"],
            row["tag"],
            tuple(row["repositories"].split()),
            row["whose"],
            row["checked"],
        )
        for row in csv.DictReader(text.splitlines())
    )


def tags_of(name: str) -> list[str]:
    """Return the sizes that a name has; none if the library has no such name."""
    return [row.tag for row in library() if row.name == name.partition(":")[0]]


def row_of(model: str) -> tuple[LibraryRow, str] | None:
    """Return the row of ``name`` or ``name:tag``, and the quantisation that the tag asks for."""
    name, _, tag = model.partition(":")
    quantised = _QUANTISED.fullmatch(tag)
    size, wanted = (quantised["size"], quantised["format"].upper()) if quantised else (tag, "")
    size = _KIND.sub("", size).lower()
    for row in library():
        if row.name == name and size in ("", "latest", row.tag):
            return row, wanted
    return None


def hub_names(model: str) -> Sequence[HubName]:
    """Return what a model is called on the hub, in the order to be tried; nothing if unknown."""
    if entry := packaged(model):
        texts: Sequence[str] = (entry.hub,)
    elif found := row_of(model):
        texts = [f"{repo}:{found[1]}" if found[1] else repo for repo in found[0].repositories]
    else:
        texts = (model,)
    return [name for name in map(parse_hub_name, texts) if name is not None]
