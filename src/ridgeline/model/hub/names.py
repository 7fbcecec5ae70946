"""Names of models on the Hugging Face hub, as people type them. It knows nothing but text."""

from __future__ import annotations

import re
from typing import NamedTuple

_PREFIX = re.compile(r"(?:https?://)?(?:www\.)?(?:hf\.co|huggingface\.co)/|hf://", re.IGNORECASE)
# Neither part may begin with a dot: that refuses "../x" and keeps our temporary names apart.
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]*"
_REPO = re.compile(rf"({_NAME}/{_NAME})(?:@({_NAME}))?(?::({_NAME}))?")


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
