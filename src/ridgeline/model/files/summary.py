"""What a checkpoint is, in the few facts that lists of models show."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ridgeline.model.files.tensors import Checkpoint


@dataclass(frozen=True, slots=True)
class Summary:
    """The facts of a checkpoint.

    Attributes:
        path: file or directory.
        family: the architecture as the file calls it, such as ``llama`` or ``qwen2``.
        num_parameters: all weights.
        num_bytes: of all tensors in the file's encoding.
        formats: how many tensors have which encoding, the commonest first, F32 last.
        context_length: tokens.
        embedding_length: width of the residual stream.
        modified_s: when the file was changed, seconds since 1970.
        has_head: whether it answers; else it makes vectors alone, or scores.
        can_chat: whether it has a chat template.
    """

    path: Path
    family: str
    num_parameters: int
    num_bytes: int
    formats: Mapping[str, int]
    context_length: int
    embedding_length: int
    modified_s: float
    has_head: bool
    can_chat: bool

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file, else it is a Hugging Face directory."""
        return self.path.is_file()

    @property
    def identity(self) -> str:
        """64 hexadecimal digits that another file, or another version of this one, has not.

        They are of its path, size and time: reading gigabytes for a digest takes too long.
        """
        facts = (str(self.path.resolve()), self.num_bytes, self.modified_s)
        return hashlib.sha256(repr(facts).encode()).hexdigest()


def summarise(checkpoint: Checkpoint) -> Summary:
    """Return the facts of a checkpoint; no weight is read."""
    stored = {id(tensor.stored): tensor for tensor in checkpoint.tensors.values()}.values()
    counts = Counter(tensor.dtype for tensor in stored)
    # Norms are F32 in all files: they say nothing.
    ordered = sorted(counts.items(), key=lambda one: (one[0] == "F32", -one[1]))
    arch = checkpoint.arch
    return Summary(
        path=checkpoint.path,
        family=_family(checkpoint),
        num_parameters=sum(math.prod(tensor.shape) for tensor in stored),
        num_bytes=checkpoint.nbytes,
        formats=dict(ordered),
        context_length=arch.max_position,
        embedding_length=arch.hidden_size,
        modified_s=checkpoint.path.stat().st_mtime,
        has_head=arch.has_head,
        can_chat=checkpoint.can_chat,
    )


def _family(checkpoint: Checkpoint) -> str:
    if isinstance(checkpoint.tokenizer, Mapping):
        return str(checkpoint.tokenizer.get("general.architecture", ""))
    config = json.loads((checkpoint.path / "config.json").read_bytes())
    return str(config.get("model_type", ""))
