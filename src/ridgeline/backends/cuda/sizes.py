"""What a model takes on a device: its weights, the largest step, a token in the cache.

It imports no torch: plans and refusals are made on any machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ridgeline.backends.cuda.layer_spec import values_per_token
from ridgeline.backends.cuda.ranks.shard import Shard
from ridgeline.backends.interface import Footprint, Setup
from ridgeline.core.scheduling.speculate import max_draws
from ridgeline.model.cost.costs import state_bytes_per_seq
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.shape.cache_groups import one_group
from ridgeline.model.shape.model import Experts, ModelArch

FORMATS = ("bf16", "f32", "int8", "int4")
MOST_SLOTS = 4096  # partial results of attention in a step
_MOST_PARTIAL = 1 << 26  # numbers of them all
# Matrices that are never packed.
_WIDE = ("router", "shared_scale", "k_b", "v_b", "beta", "decay", "conv")
_OF_ATTENTION = ("q", "k", "v", "o", "q_gate", "q_a", "q_b", "kv_a", "k_b", "v_b")
_RECURRENT = ("in", "conv", "out", "qkv", "z", "beta", "decay")
_PACKED_INPUTS = 64  # a packed matrix has a multiple of them
_PACKED_BYTES = {8: 1 + 2 / 32, 4: 1 / 2 + 4 / 32}  # of a weight, with its part of the scales


_OVER_4_BITS = ("Q8_0", "Q5_0", "Q5_1", "Q5_K", "Q6_K")  # types of GGUF that lose by 4


def packed_bits(name: str, shape: tuple[int, ...], dtype: str, stored: str) -> int:
    """Return in how many bits a tensor is packed, by its canonical name; 0 if it is not.

    With int4 the head gets 8 bits, and so does a matrix that a file has in more than 4, by the type
    of GGUF in which it is ``stored``. Tables of which few rows are read, routers and matrices of
    odd widths are not packed.
    """
    stays = name in ("embed", "positions", "inputs") or name.rpartition(".")[2] in _WIDE
    if dtype not in ("int8", "int4") or stays or len(shape) < 2 or shape[-1] % _PACKED_INPUTS:
        return 0
    return 8 if dtype == "int8" or name == "head" or stored in _OVER_4_BITS else 4


def weight_bits(dtype: str) -> float:
    """Return the bits of most weights in a format, with their part of the scales."""
    return 8 * {"int8": _PACKED_BYTES[8], "int4": _PACKED_BYTES[4], "f32": 4}.get(dtype, 2)


def weights_bytes(checkpoint: Checkpoint, dtype: str, ranks: int = 1) -> Mapping[str, int]:
    """Return the bytes of the weights on a device, the fullest of ``ranks``, by part."""
    stored = {name: tensor.dtype for name, tensor in checkpoint.tensors.items()}
    return arch_bytes(checkpoint.arch, dtype, ranks, stored)


def arch_bytes(
    arch: ModelArch, dtype: str, ranks: int, stored: Mapping[str, str]
) -> Mapping[str, int]:
    """Return the same of a model that is known by its config alone.

    ``stored`` has the types of tensors in the file, by canonical name, as far as there is one.
    """
    by_part: dict[str, float] = {}
    share = Shard(arch, count=ranks)
    for name, whole in arch.matrix_shapes().items():
        shape = share.num_rows(name, whole[0]), *whole[1:]
        bits = packed_bits(name, shape, dtype, stored.get(name, ""))
        is_wide = len(shape) < 2 or name == "positions" or dtype == "f32"
        part = _part_of(name, len(shape))
        of_weight = _PACKED_BYTES[bits] if bits else 4 if is_wide else 2
        by_part[part] = by_part.get(part, 0) + math.prod(shape) * of_weight
    return {part: int(size) for part, size in by_part.items()}


def _part_of(name: str, num_axes: int) -> str:
    if name in ("embed", "positions", "inputs", "inputs_proj"):
        return "embedding"
    if num_axes < 2:
        return "norms"
    if name == "head":
        return "head"
    last = name.rpartition(".")[2]
    return "attention" if last in _OF_ATTENTION + _RECURRENT else "mlp"


def footprint(arch: ModelArch, setup: Setup) -> Footprint:
    """Return what a setup takes beside the weights: the largest step, and a token in the cache.

    A runner on a GPU measures the step: this is the estimate before it is loaded.
    """
    arch = Shard(arch, count=setup.tensor_parallel_size).arch
    wide = 4 if setup.dtype == "f32" else 2
    q_size = max((mixer.num_heads * mixer.key_dim for mixer in arch.attentions), default=0)
    kv_size = max((mixer.num_kv_heads * mixer.key_dim for mixer in arch.attentions), default=0)
    inner = max(map(_inner_size, (layer.ffn for layer in arch.layers)))
    of_token = 12 * arch.hidden_size + wide * (4 * arch.hidden_size + 4 * q_size + 2 * kv_size)
    of_token += (
        4 * 4 * arch.num_layers * arch.input_size + wide * 3 * inner + 4 * 6 * _recurrent_size(arch)
    )
    # Made, copied where penalties change them; and keys of 64 rows, by which they are ranked.
    logits = (3 * 4 * max_draws(setup.max_num_seqs) + 32 * 64) * arch.vocab_size
    step_bytes = setup.max_num_batched_tokens * of_token + 4 * attention_room(arch)[1] + logits
    in_cache = 4 if setup.kv_cache_dtype == "f32" else 2
    of_cache = in_cache * values_per_token(arch, setup.groups or one_group(arch))
    return Footprint(step_bytes, of_cache, 2 * state_bytes_per_seq(arch))  # see ``step.cache``


def _recurrent_size(arch: ModelArch) -> int:
    """Return the most rows of a recurrent layer's matrices: what it makes of a token at once."""
    shapes = (
        layer.recurrent.shapes(arch.hidden_size)
        for layer in arch.layers
        if layer.recurrent is not None
    )
    return max((max(rows for rows, *_ in of_layer.values()) for of_layer in shapes), default=0)


def attention_room(arch: ModelArch) -> tuple[int, int, int]:
    """Return room for partial results of attention in a step: slots, and float32 of two arrays."""
    channels = max((mixer.num_heads * mixer.value_dim for mixer in arch.attentions), default=0)
    heads = max((mixer.num_heads for mixer in arch.attentions), default=0)
    slots = min(MOST_SLOTS, _MOST_PARTIAL // max(channels, 1))
    return slots, slots * channels, slots * 2 * heads


def _inner_size(ffn: object) -> int:
    """Return the inner values of a token in a feed-forward network."""
    if isinstance(ffn, Experts):
        return ffn.size * ffn.per_token + (ffn.shared.size if ffn.shared else 0)
    return int(getattr(ffn, "size", 0))
