"""Names of models as people type them: those of the hub, and those of Ollama's library.

``library.csv`` says which repositories of the hub the latter stand for. It has a row for each size;
the first of a name is what the name alone means. A row says whose files they are, and whether they
were checked: *page* where a stored copy of the repository's page was seen, *no* where the row is
from memory. Where there are two repositories, the second is tried if the first gives nothing.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from ridgeline.model.hub.short_names import packaged

_PREFIX = re.compile(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/|hf://", re.IGNORECASE)
# Neither part may begin with a dot: that refuses "../x" and keeps our temporary names apart.
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_REPO = re.compile(rf"({_NAME}/{_NAME})(?:@({_NAME}))?(?::({_NAME}))?")
# "8b-instruct-q4_K_M" is a size, a kind and a quantisation.
_QUANTISED = re.compile(r"(?P<size>[a-z0-9.]+)(?:-.*)?-(?P<format>i?q\d\w*|b?f\d\d|fp16)", re.I)
_KIND = re.compile(r"-(?:instruct|chat|it|text|latest)$", re.I)


class HubName(NamedTuple):
    """A repository, which of its GGUF files, and which version of it.

    Attributes:
        repo: ``owner/name``.
        tag: a quantisation such as Q4_K_M, or the name of a file; empty where none is given.
        revision: a branch, a tag or a commit; empty for what is newest.
    """

    repo: str
    tag: str
    revision: str = ""

    @property
    def folder(self) -> str:
        """``owner/name`` or ``owner/name@revision``: where it is kept, apart from others."""
        return f"{self.repo}@{self.revision}" if self.revision else self.repo


def parse_hub_name(model: str) -> HubName | None:
    """Return what ``owner/name`` or ``owner/name:Q4_K_M`` names, None if it has another form.

    ``@revision`` may follow the repository, and ``hf.co/`` or the hub's address before it.
    """
    text = _PREFIX.sub("", model, count=1) if _PREFIX.match(model) else model
    match = _REPO.fullmatch(text.removesuffix("/"))
    if match is None or match[1].lower().endswith(".gguf"):
        return None
    return HubName(match[1], match[3] or "", match[2] or "")


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
    elif match := row_of(model):
        texts = [f"{repo}:{match[1]}" if match[1] else repo for repo in match[0].repositories]
    else:
        texts = (model,)
    return [name for name in map(parse_hub_name, texts) if name is not None]
