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
from ridgeline.model.files.families.fields import FieldReader
from ridgeline.model.files.families.gguf_config import STANDS_STILL
from ridgeline.model.files.families.rope import magnitude
from ridgeline.model.files.families.weight_names import names_in_file
from ridgeline.model.files.tensors import Checkpoint, ModelFileError, Tensor
from ridgeline.model.shape.model import Attention, Experts, Layer, ModelArch, Rope

_NEAR = 1e-6  # files have numbers in 32 bits
# Small matrices of which llama.cpp's converters make 32 bits, whatever the directory has.
_WIDE = (
    "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight", "position_embd.weight",
    "token_types.weight",
)  # fmt: skip
Ints = NDArray[np.int32]
Values = dict[str, Any]
_AS_IT_IS = ("integer", "number", "count", "cap", "optional", "flag")


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
    own = {f"{name}.{key}": _rounded(value) for key, value in _values_of(arch, family).items()}
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
    ropes = {name: _vector(name, divisors) for name, divisors in _rope_tensors(arch).items()}
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
        sources = [checkpoint.tensors[part] for part in parts]
        if len(probes[name].shape) == 1:
            vector = np.concatenate([tensor.to_f32().reshape(-1) for tensor in sources])[order]
            tensors[name] = _vector(name, vector)
            continue
        whole = sources[0] if len(sources) == 1 else Tensor.stacked(name, sources)
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
    for fact, value in _facts(arch):
        wanted = own.get(fact)
        if isinstance(value, float) and isinstance(wanted, float):
            is_same = math.isclose(value, wanted, rel_tol=_NEAR)
        else:
            is_same = value == wanted
        if not is_same:
            raise ModelFileError(
                f"{where}: its {fact} is {wanted!r:.60}; in a GGUF file of {name!r} it would be "
                f"read as {value!r:.60}, so it cannot be written as one"
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


# --- an architecture as keys: each fact by the reader that will read it -------------------------


def _values_of(arch: ModelArch, family: Family) -> Values:
    """Return keys, without the architecture in front of them, and values."""
    mixers = [layer.known_attention for layer in arch.layers]
    values: Values = {
        "block_count": arch.num_layers,
        "context_length": arch.max_position,
        "vocab_size": arch.vocab_size,
        "attention.head_count_kv": mixers[0].num_kv_heads,
        "attention.key_length": mixers[0].head_dim,
        "attention.value_length": mixers[0].head_dim,
        "feed_forward_length": arch.layers[0].ffn.size,
    }
    for name, reader in family.facts.items():
        part, _, fact = name.rpartition(".")
        value = getattr(_part(arch, part), fact, None)
        if reader.keys and value is not None:
            values |= _stored(reader, value)
    return values | _windows(arch, mixers, family) | _ropes(mixers, family)


def _part(arch: ModelArch, name: str) -> object:
    """Return what has the facts of this part of a family's table."""
    last: Layer = arch.layers[-1]
    ffn = last.ffn if isinstance(last.ffn, Experts) else None
    return {
        "": arch,
        "layer": last,
        "mixer": last.mixer,
        "ffn": last.ffn,
        "dense": arch.layers[0].ffn,
        "shared": ffn and ffn.shared,
        "beside": ffn and ffn.beside,
    }.get(name)


def _stored(reader: FieldReader, value: Any) -> Values:
    """Return the key and the value that a reader makes this fact of; nothing where it is made of
    other keys, or where 0 says that there is none."""
    key = reader.keys[0]
    match reader.kind:
        case _ if value == 0 and reader.kind != "flag":
            return {}
        case kind if kind in _AS_IT_IS:
            return {key: value}
        case "inverse":
            return {key: 1.0 / value}
        case "either":
            return {key: value == reader.options["yes"]}
        case "numbered":
            by_word = {word: number for number, word in reader.options["among"].items()}
            return {key: by_word[value]} if value in by_word else {}
    return {}


def _windows(arch: ModelArch, mixers: list[Attention], family: Family) -> Values:
    """Return how far layers see, where files of the family say it."""
    windows = [mixer.window for mixer in mixers]
    if family.windows == "none" or not any(windows):
        return {}
    values: Values = {"attention.sliding_window": max(window or 0 for window in windows)}
    if family.windows == "pattern" and not family.pattern:
        values["attention.sliding_window_pattern"] = [window is not None for window in windows]
    return values


def _ropes(mixers: list[Attention], family: Family) -> Values:
    """Return how positions turn, in layers that see everything and in those with a window."""
    of_full = next((m.rope for m in mixers if m.rope and not m.window), None)
    of_sliding = next((m.rope for m in mixers if m.rope and m.window), None)
    rope = of_full or of_sliding
    if rope is None:
        return {}
    values = _rope(rope)
    if "sliding" in family.ropes and of_sliding is not None:
        values["rope.freq_base_swa"] = of_sliding.theta
    return values


def _rope(rope: Rope) -> Values:
    values: Values = {"rope.freq_base": rope.theta, "rope.dimension_count": rope.dim}
    scaling = {"rope.scaling.original_context_length": rope.original_max_position}
    if rope.long_divisors:
        return values | scaling | {"rope.scaling.attn_factor": rope.attention_factor}
    if rope.original_max_position:  # YaRN: the slowest pairs are divided by the whole factor
        factor = max(rope.divisors, default=1.0)
        values |= scaling | {"rope.scaling.type": "yarn", "rope.scaling.factor": factor}
        own = rope.attention_factor / magnitude(factor)
        return values | ({} if math.isclose(own, 1.0) else {"rope.scaling.attn_factor": own})
    if rope.divisors and len(set(rope.divisors)) == 1:
        values |= {"rope.scaling.type": "linear", "rope.scaling.factor": rope.divisors[0]}
    return values


def _rope_tensors(arch: ModelArch) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """Return the divisors that files have as tensors, by name: Llama 3's and LongRoPE's."""
    ropes = [m.rope for m in arch.attentions if m.rope is not None and m.rope.divisors]
    if not ropes:
        return {}
    rope = ropes[0]
    if rope.long_divisors:
        named = {"short": rope.divisors, "long": rope.long_divisors}
        return {f"rope_factors_{name}.weight": _finite(one) for name, one in named.items()}
    if rope.original_max_position or len(set(rope.divisors)) == 1:
        return {}
    return {"rope_freqs.weight": _finite(rope.divisors)}


def _finite(divisors: tuple[float, ...]) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.minimum(np.array(divisors, np.float64), STANDS_STILL).astype(np.float32)
