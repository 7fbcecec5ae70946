"""A file's tensors become the canonical ones of an architecture, their shapes checked.

What a family stores otherwise is put right here: turned, stacked, offset, or sorted by head first.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.families.family import Family
from ridgeline.model.files.rope_tables import log
from ridgeline.model.files.tensors import Tensor
from ridgeline.model.shape.model import Attention, Experts, ModelArch
from ridgeline.model.shape.recurrent import Delta

# Numbers of plain types, as what has no meaning but a size.
_ITEMS: dict[str, np.dtype[Any]] = {
    "F32": np.dtype(np.uint32),
    "F16": np.dtype(np.uint16),
    "BF16": np.dtype(np.uint16),
}
Order = NDArray[np.intp]
_BEFORE = "../"  # begins what stands in the layer before


def bind(
    config: ConfigReader,
    arch: ModelArch,
    raw: Mapping[str, Tensor],
    family: Family,
    ignored: Set[str],
) -> dict[str, Tensor]:
    """Return the canonical tensors, shapes checked; refuse what is missing or left over."""
    shapes = arch.matrix_shapes()
    has_one_type = config.values.get("tokenizer.ggml.token_type_count") == 1  # so of DistilBERT
    if "types" in family.outer and (family.outer["types"] in raw or not has_one_type):
        raw = _with_types(config, raw, family)
    if "embed_norm" in family.outer:
        raw = _with_normed_rows(config, arch, raw, family)
    raw = _with_turned_keys(arch, raw, family)
    if family.plain_norms or family.plain_head_norms:
        raw = _with_plain_norms(arch, raw, family)
    tensors: dict[str, Tensor] = {}
    used = set[str]()
    for in_file, parts in names_in_file(arch, family, raw).items():
        num_rows = sum(shapes[part][0] for part in parts)
        wanted = (num_rows, *shapes[parts[0]][1:])
        tensor, names = _find_tensor(config, raw, in_file, wanted, family)
        used.update(names)
        if halves := expert_halves(arch, family, parts, tensor):
            tensors |= zip(parts, halves, strict=True)
            continue
        order = row_order(arch, family, parts)
        if order is not None:
            tensor = tensor.reordered(order)
        begin = 0
        for part in parts:
            end = begin + shapes[part][0]
            whole = len(parts) == 1
            tensors[part] = tensor if whole else tensor.rows(slice(begin, end), f"{in_file}/{part}")
            begin = end

    left_over = sorted(raw.keys() - used - ignored)
    if left_over:
        config.fail(f"tensor {left_over[0]!r} is not part of this architecture as supported")
    if family.interleaved:
        _rotate_halves(arch, tensors)
    for name in tensors if family.decays else ():
        if name.endswith(".a_log"):
            tensors[name] = _logarithm(config, tensors[name])
    if family.norm_offset:
        for name in tensors:
            if name.endswith("norm"):
                tensors[name] = _raised(tensors[name], family.norm_offset)
    for name in tensors:
        if name.endswith(family.scaled_by_sqrt_hidden):
            tensors[name] = _divided(tensors[name], arch.hidden_size**0.5)
    return {name: tensors[name] for name in shapes}


def names_in_file(arch: ModelArch, family: Family, raw: Container[str]) -> dict[str, list[str]]:
    """Return the names of a file's tensors, each with those of the canonical ones that it holds.

    ``raw`` has the names of a file that is there: it may have a tensor under its other name.
    """
    stacked: dict[str, list[str]] = {}
    for name in arch.matrix_shapes():
        if name in family.outer:
            in_file = family.outer[name].format(arch.num_layers - 1)
        else:
            _, index, part = name.split(".")
            number = number_in_file(arch, family, int(index), part)
            in_file = family.layer[part]
            if in_file.startswith(_BEFORE):
                number, in_file = number - 1, in_file.removeprefix(_BEFORE)
            prefix, instead = family.prefix.format(number), family.alternatives.get(part, "")
            in_file = prefix + (instead if prefix + instead in raw else in_file)
        stacked.setdefault(in_file, []).append(name)
    return stacked


def number_in_file(arch: ModelArch, family: Family, index: int, part: str) -> int:
    """Return the number of the layer of a file that has a part of our layer ``index``."""
    if not family.layers_are_halves:
        return index
    layer = arch.layers[index]
    before = sum(2 if one.ffn.size else 1 for one in arch.layers[:index])
    is_behind = part == "mlp_norm" or part in layer.ffn.shapes(arch.hidden_size)
    return before + is_behind


def _with_types(
    config: ConfigReader, raw: Mapping[str, Tensor], family: Family
) -> dict[str, Tensor]:
    """Return the tensors with positions for each segment of a text, one below the other.

    What a type of tokens adds is added to them: the tokens of a segment are all of one type.
    Without learnt positions it is added to the embedding.
    """
    added_to = "positions" if "positions" in family.outer else "embed"
    names = [family.outer[name] for name in (added_to, "types")]
    for name in names:
        if name not in raw:
            config.fail(f"tensor {name!r} is missing")
    positions, types = (np.atleast_2d(raw[name].to_f32()) for name in names)
    if len(types) < family.num_segments or types.shape[1:] != positions.shape[1:]:
        config.fail(f"tensor {names[1]!r} has shape {types.shape}, wanted a row for each segment")
    values = np.concatenate([positions + row for row in types[: family.num_segments]])
    table = Tensor(names[0], "F32", values.shape, values.view(np.uint8))
    return {name: tensor for name, tensor in raw.items() if name != names[1]} | {names[0]: table}


def _with_turned_keys(
    arch: ModelArch, raw: Mapping[str, Tensor], family: Family
) -> Mapping[str, Tensor]:
    """Return the tensors with each "k_b" as ``[heads * nope, rank]``.

    Files that do not have it in one tensor with "v_b" have it as ``[heads, rank, nope]``. It is
    decoded and turned each time it is asked for.
    """
    tensors = dict(raw)
    for i, layer in enumerate(arch.layers):
        name = family.prefix.format(i) + family.alternatives.get("k_b", "")
        tensor = raw.get(name)
        if layer.attention is None or layer.attention.latent is None or tensor is None:
            continue
        if len(tensor.shape) == 3:
            heads, rank, nope = tensor.shape
            make = partial(_turned, tensor)
            shape = (heads * nope, rank)
            tensors[name] = Tensor.converted(name, "F32", shape, tensor.nbytes, make)
    return tensors


def _with_plain_norms(
    arch: ModelArch, raw: Mapping[str, Tensor], family: Family
) -> dict[str, Tensor]:
    """Return the tensors with weights of 1 for norms over the residual stream, or over heads."""
    sizes = {family.outer["norm"]: arch.hidden_size} if family.plain_norms else {}
    for i, layer in enumerate(arch.layers):
        prefix, mixer = family.prefix.format(i), layer.attention
        if family.plain_norms:
            names = layer.norm_names
            sizes |= {prefix + family.layer[norm]: arch.hidden_size for norm in names}
        elif mixer is not None and mixer.qk_norm:
            names = ("q_norm", "k_norm")
            sizes |= {prefix + family.layer[norm]: mixer.head_dim for norm in names}
    ones = {size: np.ones((size, 1), np.float32).view(np.uint8) for size in sizes.values()}
    norms = {name: Tensor(name, "F32", (size,), ones[size]) for name, size in sizes.items()}
    return {**raw, **norms}


def _turned(tensor: Tensor) -> NDArray[np.uint8]:
    """Return the bytes of f32 rows of matrices ``[count, out, in]``, each of them turned."""
    values = np.ascontiguousarray(tensor.to_f32().swapaxes(1, 2))
    return values.reshape(-1, tensor.shape[1]).view(np.uint8)


def _with_normed_rows(
    config: ConfigReader, arch: ModelArch, raw: Mapping[str, Tensor], family: Family
) -> dict[str, Tensor]:
    """Return the tensors with an embedding whose rows are normed: each is what its token adds."""
    names = [family.outer[name] for name in ("embed", "embed_norm")]
    for name in names:
        if name not in raw:
            config.fail(f"tensor {name!r} is missing")
    rows, weight = (raw[name].to_f32() for name in names)
    if rows.shape[1:] != weight.shape:
        config.fail(f"tensor {names[1]!r} has shape {weight.shape}, wanted {rows.shape[1:]}")
    centred = rows - rows.mean(axis=1, keepdims=True, dtype=np.float64).astype(np.float32)
    squares = np.square(centred, dtype=np.float64).mean(axis=1, keepdims=True)
    values = (centred / np.sqrt(squares + arch.norm_eps) * weight).astype(np.float32)
    table = Tensor(names[0], "F32", values.shape, values.view(np.uint8))
    return {name: tensor for name, tensor in raw.items() if name != names[1]} | {names[0]: table}


def _find_tensor(
    config: ConfigReader,
    raw: Mapping[str, Tensor],
    in_file: str,
    wanted: tuple[int, ...],
    family: Family,
) -> tuple[Tensor, list[str]]:
    """Return a tensor of this shape, and the names of what it is made of: of each expert one."""
    names = [in_file]
    if "{e}" in in_file:
        begin, end = in_file.split("{e}")
        indices = [name[len(begin) : -len(end)] for name in raw if name.startswith(begin)]
        count = len({index for index in indices if index.isdigit()})
        names = [f"{begin}{e}{end}" for e in range(count)] or [f"{begin}0{end}"]
    for name in names:
        if name not in raw:
            config.fail(f"tensor {name!r} of shape {wanted} is missing")
    parts = [raw[name] for name in names]
    tensor = parts[0]
    # A quantised matrix has its outputs first, as usual.
    is_turned = family.transposed and tensor.make is None
    if is_turned and len(wanted) == 2 and in_file not in family.outer.values():
        tensor = _transposed(tensor)
    elif len(parts) > 1:
        tensor = Tensor.stacked(in_file, parts)
    elif wanted == (1, *tensor.shape):
        tensor = replace(tensor, shape=wanted, stored=tensor.stored.reshape(1, -1))
    elif len(tensor.shape) > len(wanted):
        tensor = _stack_of_experts(tensor, family)
    elif wanted == (1, *tensor.shape):
        tensor = replace(tensor, shape=wanted)
    if tensor.shape != wanted:
        config.fail(f"tensor {in_file!r} has shape {tensor.shape}, wanted {wanted}")
    return tensor, names


def _stack_of_experts(tensor: Tensor, family: Family) -> Tensor:
    """Return the rows of all experts, one below the other; or all their biases."""
    if len(tensor.shape) == 2:
        count = tensor.shape[0] * tensor.shape[1]
        return replace(tensor, shape=(count,), stored=tensor.stored.reshape(count, -1))
    if family.gates_by_turns and tensor.dtype in ("F32", "F16", "BF16"):
        values = np.ascontiguousarray(tensor.to_f32().swapaxes(1, 2))
        tensor = Tensor(tensor.name, "F32", values.shape, values.view(np.uint8))
    if family.experts_turned and tensor.dtype in _ITEMS:
        return _turned_experts(tensor)
    num, rows, width = tensor.shape
    stored = tensor.stored.reshape(num * rows, -1)
    return replace(tensor, shape=(num * rows, width), stored=stored)


def _turned_experts(tensor: Tensor) -> Tensor:
    """Return matrices ``[in, out]`` of experts as one below the other ``[out, in]``.

    Each is turned whenever it is asked for: all together would not fit into memory.
    """
    num, rows, width = tensor.shape
    size, room = rows * width * _ITEMS[tensor.dtype].itemsize, tensor.stored.reshape(num, -1)
    parts = [
        Tensor.converted(
            f"{tensor.name}/{e}",
            tensor.dtype,
            (width, rows),
            size,
            partial(_turned_bytes, room[e], _ITEMS[tensor.dtype], (rows, width)),
        )
        for e in range(num)
    ]
    return Tensor.stacked(tensor.name, parts)


def _turned_bytes(
    stored: NDArray[np.uint8], item: np.dtype[Any], shape: tuple[int, int]
) -> NDArray[np.uint8]:
    turned = np.ascontiguousarray(stored.view(item).reshape(shape).T)
    return turned.view(np.uint8).reshape(shape[1], -1)


def _transposed(matrix: Tensor) -> Tensor:
    values = np.ascontiguousarray(matrix.to_f32().T)
    return Tensor(matrix.name, "F32", values.shape, values.view(np.uint8))


def _logarithm(config: ConfigReader, decay: Tensor) -> Tensor:
    """Return the "a_log" that minus the exponential of is a tensor."""
    values = decay.to_f32()
    if not (values < 0).all():  # also where one is no number
        config.fail(f"tensor {decay.name!r} has values that are not below 0: states would grow")
    logs = np.array([log(-float(value)) for value in values], np.float32)
    return Tensor(decay.name, "F32", logs.shape, logs.reshape(-1, 1).view(np.uint8))


def _raised(norm: Tensor, offset: float) -> Tensor:
    values = norm.to_f32() + np.float32(offset)
    return Tensor(norm.name, "F32", norm.shape, values.reshape(-1, 1).view(np.uint8))


def _divided(vector: Tensor, divisor: float) -> Tensor:
    values = vector.to_f32() / np.float32(divisor)
    return Tensor(vector.name, "F32", vector.shape, values.reshape(-1, 1).view(np.uint8))


def _rotate_halves(arch: ModelArch, tensors: dict[str, Tensor]) -> None:
    """Reorder rows of q and k in place so that rope pairs channel ``i`` with ``i + dim / 2``.

    Rows are whole blocks, so they move while quantised; scores do not depend on channel order.
    """
    for i, layer in enumerate(arch.layers):
        attention = layer.attention
        if attention is None or attention.rope is None or attention.latent is not None:
            continue
        for name in (f"layers.{i}.{part}" for part in ("q", "k", "q_bias", "k_bias")):
            if name in tensors:
                order = halves_order(attention, tensors[name].shape[0])
                tensors[name] = tensors[name].reordered(order)


def halves_order(mixer: Attention, num_rows: int) -> NDArray[np.intp]:
    """Return which of a file's rows of q or k, stored for neighbours that turn, stands where."""
    order = np.arange(mixer.head_dim)
    dim = mixer.rope.dim if mixer.rope else 0
    order[:dim] = order[:dim].reshape(-1, 2).T.reshape(-1)
    heads = np.arange(0, num_rows, mixer.head_dim)
    return np.asarray((heads[:, None] + order).reshape(-1))


# --- the order of rows in tensors that hold several parts, sorted by head first in some families


def row_order(arch: ModelArch, family: Family, parts: list[str]) -> Order | None:
    """Return which row of a file's tensor comes where, if its ``parts`` are not one by one there.

    ``parts`` are canonical names of the tensors that it holds, in order.
    """
    if parts[0].startswith("layers.") and (order := _of_latent(arch, family, parts)) is not None:
        return order
    index, names = parts[0].split(".")[1:2], tuple(part.rpartition(".")[2] for part in parts)
    if family.heads_inside and len(parts) == 3:  # of each key head: its queries, itself, its values
        one = arch.attentions[0]
        served = one.num_heads // one.num_kv_heads
        return _by_part((served * one.head_dim, one.head_dim, one.head_dim), one.num_kv_heads)
    if names in (("gate", "up"), ("gate_bias", "up_bias")):
        ffn = arch.layers[int(index[0])].ffn
        if not isinstance(ffn, Experts):
            return None
        run = 1 if family.gates_by_turns else ffn.size
        return _by_part((run, run), ffn.num * ffn.size // run)
    if names == ("q", "q_gate"):
        attention = arch.layers[int(index[0])].known_attention
        return _by_part((attention.head_dim,) * 2, attention.num_heads)
    if names in (("qkv", "z"), ("beta", "decay")):
        mixer = arch.layers[int(index[0])].mixer
        assert isinstance(mixer, Delta)
        served = mixer.num_value_heads // mixer.num_key_heads
        values = served * mixer.value_dim
        sizes = (
            (mixer.key_dim, mixer.key_dim, values, values) if names[0] == "qkv" else (served,) * 2
        )
        return _by_part(sizes, mixer.num_key_heads)
    return None


def _of_latent(arch: ModelArch, family: Family, parts: list[str]) -> Order | None:
    """Return the order of rows of latent attention: of a query head what turns comes first.

    Files have it last, as behind the latent in "kv_a".
    """
    index, names = int(parts[0].split(".")[1]), [part.rpartition(".")[2] for part in parts]
    mixer = arch.layers[index].attention
    if mixer is None or mixer.latent is None:
        return None
    latent, turning = mixer.latent, np.arange(mixer.rope_dim)
    if family.interleaved:
        turning = turning.reshape(-1, 2).T.reshape(-1)
    if names == ["k_b", "v_b"]:
        return _by_part((latent.nope_dim, latent.v_dim), mixer.num_heads)
    if names not in (["q"], ["q_b"], ["kv_a"]):
        return None
    before, count = (latent.kv_rank, 1) if names == ["kv_a"] else (latent.nope_dim, mixer.num_heads)
    of_head = np.concatenate([before + turning, np.arange(before)])
    begins = np.arange(count) * len(of_head)
    return np.asarray((begins[:, None] + of_head).reshape(-1))


def expert_halves(
    arch: ModelArch, family: Family, parts: list[str], tensor: Tensor
) -> list[Tensor] | None:
    """Return gates and inner values of all experts, of a tensor that has each expert's in turn.

    Each is a stack of rows that stay in the file: in order they would be copied, all of them. None
    for other tensors.
    """
    names = tuple(part.rpartition(".")[2] for part in parts)
    if names != ("gate", "up") or family.gates_by_turns or tensor.make is not None:
        return None
    ffn = arch.layers[int(parts[0].split(".")[1])].ffn
    if not isinstance(ffn, Experts):
        return None
    halves: list[Tensor] = []
    for half in range(2):
        if tensor.parts:  # each of an expert
            own = slice(half * ffn.size, (half + 1) * ffn.size)
            rows = [part.rows(own) for part in tensor.parts]
            halves.append(Tensor.stacked(f"{tensor.name}/{parts[half]}", rows))
            continue
        begins = ((2 * e + half) * ffn.size for e in range(ffn.num))
        rows = [tensor.rows(slice(begin, begin + ffn.size)) for begin in begins]
        halves.append(Tensor.stacked(f"{tensor.name}/{parts[half]}", rows))
    return halves


def _by_part(sizes: tuple[int, ...], num_heads: int) -> Order:
    """Return the order that takes rows sorted by head to rows sorted by part.

    ``sizes`` are the rows of each part in a head.
    """
    rows = np.arange(num_heads * sum(sizes)).reshape(num_heads, -1)
    ends = np.cumsum(sizes)[:-1]
    return np.concatenate([part.reshape(-1) for part in np.split(rows, ends, axis=1)])
