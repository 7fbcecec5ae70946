"""A model of a Hugging Face directory as a GGUF file has it: keys, names, the order of rows.

Nothing of a family is described here. The tables of ``families`` say what GGUF files call tensors
and facts; how rows are stored is learnt from the reader, which is given a file whose rows hold
nothing but their own numbers; and in what is to be written the reader must at last find the same
architecture and the same vectors. So a model that GGUF has no words for is refused, and none is
written wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.model.files.families import GGUF_FAMILIES, TABLES, Family, model_from_gguf
from ridgeline.model.files.families.weight_names import names_in_file
from ridgeline.model.files.lossy.facts import rope_tensors, values_of
from ridgeline.model.files.tensors import Checkpoint, ModelFileError, Tensor
from ridgeline.model.shape.model import Experts, ModelArch

_NEAR = 1e-6  # files have numbers in 32 bits
# Small matrices of which llama.cpp's converters make 32 bits, whatever the directory has.
_WIDE = (
    "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight",
    "token_types.weight",
)  # fmt: skip
Ints = NDArray[np.int32]


class GGUFForm(NamedTuple):
    """What a GGUF file says of a model, but for its texts: keys and values, and tensors."""

    values: dict[str, Any]
    tensors: dict[str, Tensor]


def as_gguf(checkpoint: Checkpoint) -> GGUFForm:
    """Return a directory's model as a GGUF file has it; no matrix is read yet.

    Raises:
        ModelFileError: GGUF has no words for it, or not all of them.
    """
    arch, where = checkpoint.arch, str(checkpoint.path)
    has_experts = any(isinstance(layer.ffn, Experts) for layer in arch.layers)
    names = [f"{checkpoint.family} of experts"] * has_experts + [checkpoint.family]
    in_gguf = next((TABLES.gguf_of_class[n] for n in names if n in TABLES.gguf_of_class), None)
    is_plain = all(m is not None and m.latent is None for m in (a.attention for a in arch.layers))
    if in_gguf is None or not is_plain or arch.pooling:
        raise ModelFileError(
            f"{where}: how a {checkpoint.family} is written as a GGUF file is not known; convert "
            f"it to one of 16 bits first, with llama.cpp's convert_hf_to_gguf.py"
        )
    family = GGUF_FAMILIES[in_gguf]
    name = in_gguf.partition(" ")[0]
    own = {f"{name}.{key}": _rounded(value) for key, value in values_of(arch, family).items()}
    values = {"general.architecture": name} | own
    tensors = _tensors(checkpoint, family, values)
    _check(checkpoint, name, *model_from_gguf(values, tensors, where))
    return GGUFForm(values, tensors)


def _rounded(value: Any) -> Any:
    """Return a number as the file keeps it."""
    return float(np.float32(value)) if type(value) is float else value


def _tensors(
    checkpoint: Checkpoint, family: Family, values: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the file's tensors, made of the canonical ones."""
    arch, shapes = checkpoint.arch, checkpoint.arch.matrix_shapes()
    in_file = names_in_file(arch, family, ())
    ropes = {name: _vector(name, divisors) for name, divisors in rope_tensors(arch).items()}
    probes = dict(ropes)
    for name, parts in in_file.items():
        num_rows, rest = sum(shapes[part][0] for part in parts), shapes[parts[0]][1:]
        shape = _stack_shape(arch, parts, (num_rows, *rest))
        probes[name] = numbered(name, shape) if rest else numbered_vector(name, num_rows)
    _, bound = model_from_gguf(values, probes, str(checkpoint.path))
    tensors = {}
    for name, parts in in_file.items():
        rows = np.concatenate([numbers_of(bound[part]) for part in parts])
        if not np.array_equal(np.sort(rows), np.arange(len(rows))):
            raise ModelFileError(f"{checkpoint.path}: {name} of GGUF files cannot be written yet")
        order = np.argsort(rows)
        found = [checkpoint.tensors[part] for part in parts]
        if len(probes[name].shape) == 1:
            vector = np.concatenate([tensor.to_f32().reshape(-1) for tensor in found])[order]
            tensors[name] = _vector(name, vector)
            continue
        whole = found[0] if len(found) == 1 else Tensor.stacked(name, found)
        if (order[1:] < order[:-1]).any():
            whole = whole.reordered(order)
        tensors[name] = replace(whole, name=name, shape=probes[name].shape)
        if name.endswith(_WIDE):
            tensors[name] = _widened(tensors[name])
    return tensors | ropes


def _widened(tensor: Tensor) -> Tensor:
    """Return a matrix in 32 bits; nothing is read yet."""
    size = 4 * math.prod(tensor.shape)
    make = partial(_f32_rows, tensor)
    return Tensor.converted(tensor.name, "F32", tensor.shape, size, make)


def _f32_rows(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return tensor.to_f32().reshape(-1, tensor.shape[-1]).view(np.uint8)


def _stack_shape(arch: ModelArch, parts: list[str], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a tensor in the file, which counts the experts of a stack apart."""
    _, *within = parts[0].split(".")
    if len(within) < 2 or within[1] not in ("gate", "up", "down"):
        return shape
    ffn = arch.layers[int(within[0])].ffn
    return (ffn.num, shape[0] // ffn.num, *shape[1:]) if isinstance(ffn, Experts) else shape


def _vector(name: str, values: np.ndarray[Any, np.dtype[np.float32]]) -> Tensor:
    stored = np.ascontiguousarray(values, np.float32).reshape(-1, 1).view(np.uint8)
    return Tensor(name, "F32", values.shape, stored)


def _check(
    checkpoint: Checkpoint, name: str, arch: ModelArch, tensors: Mapping[str, Tensor]
) -> None:
    """Raise ModelFileError unless the reader finds the same model in what is to be written."""
    where, own = checkpoint.path, dict(_facts(checkpoint.arch))
    for fact, found in _facts(arch):
        wanted = own.get(fact)
        if isinstance(found, float) and isinstance(wanted, float):
            is_same = math.isclose(found, wanted, rel_tol=_NEAR)
        else:
            is_same = found == wanted
        if not is_same:
            raise ModelFileError(
                f"{where}: its {fact} is {wanted!r:.60}; in a GGUF file of {name!r} it would be "
                f"read as {found!r:.60}, so it cannot be written as one"
            )
    for part, tensor in tensors.items():
        is_vector = len(tensor.shape) == 1
        if is_vector and not np.array_equal(tensor.to_f32(), checkpoint.tensors[part].to_f32()):
            raise ModelFileError(f"{where}: {part} would not be read from a GGUF file as it is")


def _facts(arch: ModelArch) -> Iterator[tuple[str, Any]]:
    """Yield each fact that matters by its place; a scale that is not said is what it means."""
    layers = []
    for layer in arch.layers:
        one = layer.known_attention
        rope = one.rope
        if rope and not (rope.long_divisors or rope.query_growth):
            rope = replace(rope, original_max_position=0)
        mixer = replace(one, scale=one.score_scale, rope=rope)
        layers.append(replace(layer, mixer=mixer))
    yield from _leaves("", asdict(replace(arch, layers=tuple(layers))))


def _leaves(place: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _leaves(f"{place}.{key}" if place else str(key), one)
    elif isinstance(value, tuple | list):
        yield f"{place}'s length", len(value)
        for i, one in enumerate(value):
            yield from _leaves(f"{place}[{i}]", one)
    else:
        yield place, value


def numbered(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return matrices ``[..., out, in]`` in F32 whose rows, all together, hold their number."""
    num_rows = int(np.prod(shape[:-1]))
    return Tensor.converted(name, "F32", shape, 4 * num_rows, partial(_numbers, num_rows))


def numbered_vector(name: str, size: int) -> Tensor:
    """Return a vector of F32 that counts its values from 0."""
    values = np.arange(size, dtype=np.float32)
    return Tensor(name, "F32", (size,), values.reshape(-1, 1).view(np.uint8))


def numbers_of(tensor: Tensor) -> Ints:
    """Return which rows of the file's tensor a reader has put into one that it made of it."""
    if tensor.make is None:
        return tensor.to_f32().reshape(-1).astype(np.int32)
    return tensor.data.view(np.int32).reshape(-1)


def _numbers(rows: int) -> NDArray[np.uint8]:
    return np.arange(rows, dtype=np.int32).reshape(-1, 1).view(np.uint8)
