"""How large a model's weights will be once they are packed: known before any of them is read."""

from __future__ import annotations

import numpy as np

from ridgeline.backends.cpu.layout.formats import FORMATS, TILE
from ridgeline.backends.cpu.layout.load import (
    embedding_type,
    head_dtype,
    outer_sizes,
    vector_sizes,
)
from ridgeline.backends.cpu.layout.of_model import model_sizes
from ridgeline.backends.cpu.layout.pack import packed_kind, padded
from ridgeline.models.tensors import Checkpoint

_PARTS = {
    "q": "attention", "k": "attention", "v": "attention", "o": "attention", "gate": "MLP",
    "up": "MLP", "down": "MLP",
}  # fmt: skip


def packed_bytes(checkpoint: Checkpoint, dtype: str, cache_dtype: str) -> dict[str, int]:
    """Return the bytes of the arrays that ``load.load_weights`` makes, by part of the model."""
    arch, sizes = checkpoint.arch, model_sizes(checkpoint.arch, dtype, cache_dtype)
    heads = sizes.heads
    rows = {"q": heads.num_heads * heads.size} | dict.fromkeys(
        "kv", heads.num_kv_heads * heads.size
    )
    if sizes.experts:
        inner, outer = sizes.experts.num * sizes.intermediate, sizes.experts.num * sizes.hidden
        rows |= {"gate": inner, "up": inner, "down": outer}
    moved = heads.size != heads.num_channels
    embedding = arch.vocab_size * sizes.hidden * np.dtype(embedding_type(dtype)).itemsize
    found = {"embedding": embedding, "attention": 0, "MLP": 0, "norms": 0}
    vectors = vector_sizes(sizes) | outer_sizes(arch, sizes)

    for name, tensor in checkpoint.tensors.items():
        part = name.rpartition(".")[2]
        if part in _PARTS:
            kind = packed_kind(tensor, dtype, columns_moved=part == "o" and moved)
            num_inputs = sizes.attention if part == "o" and moved else tensor.shape[1]
            size = _matrix_bytes(kind, rows.get(part, tensor.shape[0]), num_inputs)
            found[_PARTS[part]] += size
        elif part == "router":
            found["MLP"] += tensor.shape[0] * sizes.hidden * 4
        elif part in vectors:
            found["norms"] += vectors[part] * 4
        elif part in ("q_norm", "k_norm"):
            found["norms"] += (rows[part[0]] if heads.qk_norm == "width" else heads.size) * 4
        elif part in ("q_bias", "k_bias", "v_bias"):
            found["norms"] += rows[part[0]] * 4 * (2 if part == "k_bias" else 1)  # and its spread
    found["embedding"] += arch.position_rows * sizes.hidden * 4
    if arch.is_encoder:
        return found
    name = "embed" if arch.tied_embeddings else "head"
    tensor = checkpoint.tensors[name]
    kind = packed_kind(tensor, head_dtype(dtype, tensor.dtype))
    found["head"] = _matrix_bytes(kind, *tensor.shape)
    if kind == "w8" and not arch.head_bias:
        outputs = padded(tensor.shape[0]) + TILE  # one tile more, of what all have in common
        found["sketch of the head"] = _matrix_bytes("s5", outputs, tensor.shape[1])
        found["sketch of the head"] += padded(tensor.shape[0]) * 4
    return found


def _matrix_bytes(kind: str, num_outputs: int, num_inputs: int) -> int:
    tiles, records = padded(num_outputs) // TILE, padded(num_inputs) // TILE
    return tiles * FORMATS[kind].tile_bytes(records)
