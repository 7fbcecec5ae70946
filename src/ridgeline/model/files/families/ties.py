"""Whether the head is the embedding: what a config says of it, and what its file shows.

Trainers and tools that merge models leave ``tie_word_embeddings`` as it was, so the tensors count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ridgeline.model.files.families.table import Family
from ridgeline.model.files.tensors import Tensor, same_bytes
from ridgeline.model.shape.model import ModelArch

_KEY = "tie_word_embeddings"


def tied_as_stored(
    arch: ModelArch,
    values: Mapping[str, Any],
    raw: Mapping[str, Tensor],
    family: Family,
    note: Callable[[str], None],
) -> tuple[ModelArch, Mapping[str, Tensor]]:
    """Return the model with the head that its file has, and the tensors with an embedding.

    As in transformers 5, a head that differs from the embedding is the head, whatever the config
    says; one that is the same is not kept twice. Without one the embedding serves, if the config or
    its text half says that they are tied. Either may stand for both. ``note`` is told of a head
    beside a config that says there is none.
    """
    embed, head = family.outer["embed"], family.outer.get("head")
    if head is None or not arch.has_head:
        return arch, raw
    if head not in raw:
        half = values.get("text_config")
        said = values.get(_KEY), half.get(_KEY) if type(half) is dict else None
        return (replace(arch, tied_embeddings=True) if True in said else arch), raw
    if not arch.tied_embeddings:
        return arch, raw
    if embed not in raw:
        return arch, {**raw, embed: raw[head]}
    if same_bytes(raw[head], raw[embed]):
        return arch, raw
    note(f"{head} differs from {embed}, so it is used, though {_KEY} is true")
    return replace(arch, tied_embeddings=False), raw
