"""How large a model's weights will be once they are packed: known before any of them is read."""

from __future__ import annotations

import math

import numpy as np

from ridgeline.backends.cpu.layout.formats import FORMATS, TILE
from ridgeline.backends.cpu.layout.latent import head_shape
from ridgeline.backends.cpu.layout.model_sizes import model_sizes
from ridgeline.backends.cpu.layout.model_weights import (
    PLAIN,
    embedding_type,
    file_names,
    head_dtype,
    outer_sizes,
    vector_sizes,
)
from ridgeline.backends.cpu.layout.pack import packed_kind, padded
from ridgeline.backends.cpu.layout.recurrent import TENSORS, places
from ridgeline.backends.cpu.layout.recurrent import vector_sizes as recurrent_sizes
from ridgeline.backends.cpu.layout.shapes import LayerVariant
from ridgeline.model.files.tensors import Checkpoint, Tensor

_PARTS = {
    "q": "attention", "q_gate": "attention", "k": "attention", "v": "attention", "o": "attention",
    "gate": "MLP", "up": "MLP", "down": "MLP", "dense_gate": "MLP", "dense_up": "MLP",
    "dense_down": "MLP", "input_gate": "MLP", "input_down": "MLP", "in": "recurrent",
    "qkv": "recurrent", "z": "recurrent", "beta": "recurrent", "decay": "recurrent",
    "out": "recurrent", "q_a": "attention", "q_b": "attention", "kv_a": "attention",
}  # fmt: skip


def packed_bytes(checkpoint: Checkpoint, dtype: str, kv_cache_dtype: str) -> dict[str, int]:
    """Return the bytes of the arrays that ``load.load_weights`` makes, by part of the model."""
    arch, sizes = checkpoint.arch, model_sizes(checkpoint.arch, dtype, kv_cache_dtype)
    embedding = arch.vocab_size * sizes.hidden * np.dtype(embedding_type(dtype)).itemsize
    by_part = {"embedding": embedding, "attention": 0, "MLP": 0, "norms": 0}
    by_part |= {"recurrent": 0} if sizes.recurrence else {}
    outer = outer_sizes(arch, sizes)
    for name, tensor in checkpoint.tensors.items():
        if name.startswith("layers."):
            _, index, part = name.split(".")
            layer = sizes.layers[int(index)]
            group, size = _part_bytes(layer, part, tensor, dtype, norm_bias=sizes.norm_bias)
            by_part[group] += size
        elif name == "relative_bias":
            by_part["norms"] += math.prod(tensor.shape) * 4
        elif name in outer:
            by_part["norms"] += outer[name] * 4
    if arch.embed_norm:
        by_part["norms"] += 2 * arch.hidden_size * 4
    by_part["embedding"] += arch.position_rows * sizes.hidden * 4
    if sizes.inputs:  # their table stays in the file
        kind = packed_kind(checkpoint.tensors["inputs_proj"], dtype)
        by_part["embedding"] += _matrix_bytes(kind, sizes.inputs_stride // 4, arch.hidden_size)
        by_part["norms"] += sizes.inputs.size * 4
    if not arch.has_head:
        return by_part
    name = "embed" if arch.tied_embeddings else "head"
    tensor = checkpoint.tensors[name]
    kind = packed_kind(tensor, head_dtype(dtype, tensor.dtype))
    by_part["head"] = _matrix_bytes(kind, *tensor.shape)
    if kind == "w8" and not arch.head_bias:
        outputs = padded(tensor.shape[0]) + TILE  # one tile more, of what all have in common
        by_part["proxy of the head"] = _matrix_bytes("s5", outputs, tensor.shape[1])
        by_part["proxy of the head"] += padded(tensor.shape[0]) * 4
    return by_part


def _part_bytes(
    layer: LayerVariant, part: str, tensor: Tensor, dtype: str, *, norm_bias: bool
) -> tuple[str, int]:
    """Return which group a layer's tensor belongs to, and its bytes once it is packed."""
    heads, vectors = layer.heads, vector_sizes(layer, norm_bias=norm_bias)
    rows = dict.fromkeys(("q", "q_gate"), layer.attention) | dict.fromkeys(
        "kv", heads.num_kv_heads * heads.size
    )
    part = {there: here for here, there in file_names(layer).items()}.get(part, part)
    shape = layer.recurrence
    if shape and part in TENSORS:
        return "recurrent", 4 * recurrent_sizes(shape).get(TENSORS[part], 0)
    if shape and _PARTS.get(part) == "recurrent":
        index, columns = places(shape).get(part, (None, None))
        outputs = tensor.shape[0] if index is None else len(index)
        kind = packed_kind(tensor, dtype, columns_moved=columns is not None)
        num_inputs = tensor.shape[1] if columns is None else len(columns)
        return "recurrent", _matrix_bytes(kind, outputs, num_inputs)
    latent = heads.latent
    if latent and part in ("k_b", "v_b"):
        inputs, outputs = head_shape(part, latent)
        return "attention", heads.num_heads * inputs * outputs * latent.weight_type().itemsize
    if latent:
        columns_of = latent.columns(heads.num_heads)
        rows = dict.fromkeys(("q", "q_b"), columns_of["kv_a"])
        rows["kv_a"] = columns_of["q_a"] - columns_of["kv_a"]
    if part in _PARTS:
        moved = part == "o" and heads.out_size * heads.num_heads != tensor.shape[1]
        outputs = rows.get(part, tensor.shape[0])
        if layer.ffn.experts and part in ("gate", "up", "down"):
            outputs = layer.ffn.experts.num * (layer.hidden if part == "down" else layer.ffn.size)
        kind = packed_kind(tensor, dtype, columns_moved=moved)
        num_inputs = layer.attention if moved else tensor.shape[1]
        return _PARTS[part], _matrix_bytes(kind, outputs, num_inputs)
    if part in PLAIN:
        return "MLP", tensor.shape[0] * layer.hidden * 4
    if part in ("q_norm", "k_norm"):
        return "norms", (rows[part[0]] if heads.attention.qk_norm == "width" else heads.size) * 4
    if part in ("q_bias", "k_bias", "v_bias"):
        return "norms", rows[part[0]] * 4 * (2 if part == "k_bias" else 1)  # and its spread
    return "norms", vectors[part] * 4


def _matrix_bytes(kind: str, num_outputs: int, num_inputs: int) -> int:
    packed = FORMATS[kind]
    return padded(num_outputs) // TILE * packed.tile_bytes(packed.num_records(num_inputs))
