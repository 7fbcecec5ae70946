"""Model families: from names in files to canonical names and structural facts.

Literal tables say all that a family's name implies (``hf``, ``gguf``); everything else is read from
the file. Every key of a config is read, refused, or on one list of harmless keys: a key that nobody
knows may change what the model computes, so it ends in a message. This package opens no file and
decodes no matrix.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ridgeline.models.facts import Facts
from ridgeline.models.families.encoders import FAMILIES as _ENCODERS
from ridgeline.models.families.encoders import GGUF_FAMILIES as _GGUF_ENCODERS
from ridgeline.models.families.gemma4 import FAMILIES as _GEMMA_4
from ridgeline.models.families.gemma4 import GGUF_FAMILIES as _GGUF_GEMMA_4
from ridgeline.models.families.gguf import FAMILIES as _GGUF_DECODERS
from ridgeline.models.families.gguf import HARMLESS as HARMLESS_IN_GGUF
from ridgeline.models.families.gguf_recurrent import FAMILIES as _GGUF_RECURRENT
from ridgeline.models.families.hf import FAMILIES as _DECODERS
from ridgeline.models.families.hf import HARMLESS as HARMLESS_IN_HF
from ridgeline.models.families.layers import (
    NO_LIMIT,
    layers_from_config,
    layers_from_gguf,
    num_guessing_layers,
)
from ridgeline.models.families.rows import expert_halves, row_order
from ridgeline.models.families.table import Family
from ridgeline.models.portable_math import log
from ridgeline.models.tensors import Tensor
from ridgeline.physics.arch import Attention, Layer, ModelArch
from ridgeline.physics.text_defaults import TEXT_DEFAULTS

__all__ = [
    "GGUF_FAMILIES",
    "HF_FAMILIES",
    "TEXT_HALVES",
    "Family",
    "arch_from_config",
    "architecture",
    "halves_order",
    "model_from_config",
    "model_from_gguf",
]

_GGUF_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
HF_FAMILIES = _DECODERS | _GEMMA_4 | _ENCODERS
GGUF_FAMILIES = _GGUF_DECODERS | _GGUF_GEMMA_4 | _GGUF_RECURRENT | _GGUF_ENCODERS
_POOLINGS = ("", "mean", "cls", "last")  # GGUF's numbers
_ACTIVATION = "sbert_ce_default_activation_function"
_OF_PAIRS = "sentence_transformers"  # newer files have it in this object
_BEFORE = "../"  # begins what stands in the layer before
# Of models that also see: their text half stands below one of these.
TEXT_HALVES = ("language_model.model.", "model.language_model.")
_OF_BOTH_HALVES = ("tie_word_embeddings", "quantization_config")
_OF_OTHER_HALVES = ("audio_config", "audio_token_id", "boa_token_id", "boi_token_id",
                    "boi_token_index", "eoa_token_id", "eoa_token_index", "eoi_token_id",
                    "eoi_token_index", "image_token_index", "image_token_id",
                    "mm_tokens_per_image", "multimodal_projector_bias", "projector_hidden_act",
                    "spatial_merge_size", "video_token_id", "vision_config", "vision_end_token_id",
                    "vision_feature_layer", "vision_soft_tokens_per_image",
                    "vision_start_token_id")  # fmt: skip
_OTHER_HALVES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.",
                 "model.multi_modal_projector.", "model.visual.", "model.audio_tower.",
                 "model.embed_audio.", "model.embed_vision.")  # fmt: skip


def model_from_config(
    values: Mapping[str, Any],
    raw: Mapping[str, Tensor],
    where: str,
    spare: Set[str] = frozenset(),
) -> tuple[ModelArch, dict[str, Tensor]]:
    """Return the architecture and the canonical tensors of a Hugging Face directory.

    Args:
        values: config.json.
        raw: tensors under the file's names.
        where: the directory, for messages.
        spare: names of tensors that may be left over.

    Raises:
        ModelFileError: something is missing, out of range, misshapen or not supported.
    """
    raw = _with_prefix(raw)
    arch = arch_from_config(values, raw, where)
    family = _family_of(values)
    assert family is not None
    if _has_other_halves(values):
        raw = _text_tensors(raw)
    buffers = (".rotary_emb.inv_freq", *family.buffers)
    ignored = [name for name in raw if name.endswith(buffers) or name.startswith(family.others)]
    if arch.tied_embeddings:
        ignored.append(family.outer.get("head", ""))
    ignored += _keys_of_others(arch, family)
    return arch, _bind(Facts(values, where), arch, raw, family, {*ignored, *spare})


def arch_from_config(values: Mapping[str, Any], raw: Mapping[str, Tensor], where: str) -> ModelArch:
    """Return the architecture alone; of the tensors only that of learnt positions is looked at.

    Raises:
        ModelFileError: something is missing, out of range or not supported.
    """
    family = _family_of(values)
    if type(of_pairs := values.get(_OF_PAIRS)) is dict:
        values = {**values, _ACTIVATION: of_pairs.get("activation_fn"), _OF_PAIRS: None}
    if family is None:
        known = ", ".join(name for name in HF_FAMILIES if " " not in name)
        name = architecture(values)
        Facts(values, where).fail(f"architecture {name!r} is not supported; supported: {known}")
    if _has_other_halves(values):
        values, raw = _text_half(values, where), _text_tensors(raw)
    values = {family.aliases.get(key, key): value for key, value in values.items()}
    values = {**family.defaults, **values}
    config = Facts(values, where, tensors=raw.keys())
    _refuse(config, (*family.refuse, "quantization_config"))
    _insist(config, family)
    layers, max_position = layers_from_config(config, family)
    arch = _model(config, family, layers, raw, max_position=max_position)
    _all_understood(config, HARMLESS_IN_HF | {*family.unused})
    return arch


def architecture(values: Mapping[str, Any]) -> Any:
    """Return the first name under a config's ``architectures``."""
    named = values.get("architectures")
    return named[0] if type(named) is list and named else named


def _family_of(values: Mapping[str, Any]) -> Family | None:
    """Return the family of a config, which may have a table of its own for models of experts."""
    name, half = architecture(values), values.get("text_config")
    text = half if type(half) is dict else values
    if text.get("enable_moe_block") is True and f"{name} of experts" in HF_FAMILIES:
        return HF_FAMILIES[f"{name} of experts"]
    return HF_FAMILIES.get(name) if type(name) is str else None


def model_from_gguf(
    metadata: Mapping[str, Any], raw: Mapping[str, Tensor], where: str
) -> tuple[ModelArch, dict[str, Tensor]]:
    """Return the architecture and the canonical tensors of a GGUF file.

    Args:
        metadata: the file's keys and values.
        raw: tensors under the file's names.
        where: the file, for messages.

    Raises:
        ModelFileError: something is missing, out of range, misshapen or not supported.
    """
    name = Facts(metadata, where).text("general.architecture")
    meta = Facts(metadata, where, prefix=f"{name}.", tensors=raw.keys())
    if name not in GGUF_FAMILIES:
        known = ", ".join(name for name in GGUF_FAMILIES if " " not in name)
        meta.fail(f"architecture {name!r} is not supported; supported: {known}")
    family = GGUF_FAMILIES[name]
    if meta.get("expert_count") and f"{name} of experts" in GGUF_FAMILIES:
        family = GGUF_FAMILIES[f"{name} of experts"]
    _refuse(meta, family.refuse)
    _insist(meta, family)
    if "token_embd.weight" not in raw:
        meta.fail("tensor 'token_embd.weight' is missing")
    pooling: dict[str, Any] = {}
    if meta.get("pooling_type") is not None:
        number = meta.integer("pooling_type", low=0)
        if number >= len(_POOLINGS):
            meta.fail(f"{meta.prefix}pooling_type is {number}: supported are 0 to 3, no ranks")
        pooling = {"pooling": _POOLINGS[number]}
    arch = _model(
        meta,
        family,
        layers_from_gguf(meta, family, raw),
        raw,
        max_position=min(
            meta.integer("context_length"), 1 << 62 if family.has_attention else NO_LIMIT
        ),
        vocab_size=raw["token_embd.weight"].shape[0],
        tied_embeddings="output.weight" not in raw,
        **pooling,
    )
    _all_understood(meta, HARMLESS_IN_GGUF | {*family.unused})
    first = arch.num_layers
    guessing = tuple(f"blk.{first + i}." for i in range(num_guessing_layers(meta)))
    spare = {name for name in raw if guessing and name.startswith(guessing)}
    ignored = {*_GGUF_ROPE_TENSORS, *_keys_of_others(arch, family), *spare}
    return arch, _bind(meta, arch, raw, family, ignored)


def _keys_of_others(arch: ModelArch, family: Family) -> list[str]:
    """Return names of tensors that stand in files of layers that read others' keys and values."""
    parts = ("k", "v", "k_bias", "v_bias", "k_norm")
    names = [family.layer[part] for part in parts if part in family.layer]
    shared = [
        i
        for i, layer in enumerate(arch.layers)
        if layer.attention is not None and layer.attention.kv_of is not None
    ]
    return [family.prefix.format(i) + name for i in shared for name in names]


def _has_other_halves(values: Mapping[str, Any]) -> bool:
    return type(values.get("text_config")) is dict


def _text_half(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the config of a model's text half, under the whole model's name."""
    of_all = {key: values[key] for key in _OF_BOTH_HALVES if key in values}
    outside = {key: value for key, value in values.items() if key != "text_config"}
    _all_understood(Facts(outside, where), HARMLESS_IN_HF | {*of_all, *_OF_OTHER_HALVES})
    of_text = {key: value for key, value in values["text_config"].items() if value is not None}
    defaults = TEXT_DEFAULTS.get(str(of_text.get("model_type")), {})
    return {**defaults, **of_all, **of_text, "architectures": values["architectures"]}


def _text_tensors(raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a model's text half, under the names of a model of text alone."""
    found = {}
    for name, tensor in raw.items():
        if name.startswith(_OTHER_HALVES):
            continue
        for prefix in TEXT_HALVES:
            if name.startswith(prefix):
                name = "model." + name.removeprefix(prefix)
        found[name.removeprefix("language_model.")] = tensor
    return found


def _with_prefix(raw: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a decoder's tensors under the names of a whole model's.

    sentence-transformers saves the model without its head, whose names lack a prefix then.
    """
    if "embed_tokens.weight" not in raw:
        return raw
    return {f"model.{name}": tensor for name, tensor in raw.items()}


def _model(
    facts: Facts,
    family: Family,
    layers: tuple[Layer, ...],
    raw: Mapping[str, Tensor],
    **known: Any,
) -> ModelArch:
    if "positions" in family.outer:
        in_file = family.outer["positions"]
        if in_file not in raw:
            facts.fail(f"tensor {in_file!r} is missing")
        num_rows = raw[in_file].shape[0]
        known |= {"position_rows": num_rows * family.num_segments}
        known |= {"num_segments": family.num_segments}
    found = family.read(facts) | known
    if "positions" in family.outer:
        longest = num_rows - found.get("position_offset", 0)
        found["max_position"] = min(found["max_position"], longest)
    arch = ModelArch(layers=layers, **found)
    if "layer.input_size" in family.facts:
        num_rows = facts.get("vocab_size_per_layer_input")
        if arch.input_size and num_rows not in (None, arch.vocab_size):
            facts.fail("vocab_size_per_layer_input differs from vocab_size, which is not supported")
    return arch


def _refuse(facts: Facts, keys: tuple[str, ...]) -> None:
    for key in keys:
        value = facts.get(key)
        if isinstance(value, np.ndarray) or value:  # an array has no truth value of its own
            facts.fail(f"{facts.prefix}{key} is set, which is not supported")


def _insist(facts: Facts, family: Family) -> None:
    """Refuse another value of a key than the only one that is supported."""
    for key, value in family.must.items():
        if facts.get(key) not in (None, value):
            facts.fail(
                f"{facts.prefix}{key} is {facts.get(key)!r}, which is not supported; "
                f"supported: {value}"
            )


def _all_understood(facts: Facts, harmless: Set[str]) -> None:
    """Refuse a key that says something and that nobody has read."""
    for key, value in facts.values.items():
        if not key.startswith(facts.prefix) or key in facts.seen:
            continue
        name = key.removeprefix(facts.prefix)
        says_something = isinstance(value, np.ndarray) or bool(value)
        if says_something and name not in harmless:
            facts.fail(
                f"{key} is set, which is not supported: nobody here knows whether it changes what "
                f"the model computes"
            )


def _bind(
    facts: Facts, arch: ModelArch, raw: Mapping[str, Tensor], family: Family, ignored: Set[str]
) -> dict[str, Tensor]:
    """Return the canonical tensors, shapes checked; refuse what is missing or left over."""
    shapes = arch.matrix_shapes()
    if "types" in family.outer:
        raw = _with_types(facts, raw, family)
    if "embed_norm" in family.outer:
        raw = _with_normed_rows(facts, arch, raw, family)
    stacked: dict[str, list[str]] = {}  # name in the file -> its parts
    for name in shapes:
        if name in family.outer:
            in_file = family.outer[name].format(arch.num_layers - 1)
        else:
            _, index, part = name.split(".")
            number, in_file = int(index), family.layer[part]
            if in_file.startswith(_BEFORE):
                number, in_file = number - 1, in_file.removeprefix(_BEFORE)
            prefix, other = family.prefix.format(number), family.instead.get(part, "")
            in_file = prefix + (other if prefix + other in raw else in_file)
        stacked.setdefault(in_file, []).append(name)

    tensors: dict[str, Tensor] = {}
    used = set[str]()
    for in_file, parts in stacked.items():
        num_rows = sum(shapes[part][0] for part in parts)
        wanted = (num_rows, *shapes[parts[0]][1:])
        tensor, names = _found(facts, raw, in_file, wanted, family)
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
        facts.fail(f"tensor {left_over[0]!r} is not part of this architecture as supported")
    if family.interleaved:
        _rotate_halves(arch, tensors)
    for name in tensors if family.decays else ():
        if name.endswith(".a_log"):
            tensors[name] = _logarithm(facts, tensors[name])
    if family.norm_offset:
        for name in tensors:
            if name.endswith("norm"):
                tensors[name] = _raised(tensors[name], family.norm_offset)
    for name in tensors:
        if name.endswith(family.lacks_root):
            tensors[name] = _divided(tensors[name], arch.hidden_size**0.5)
    return {name: tensors[name] for name in shapes}


def _with_types(facts: Facts, raw: Mapping[str, Tensor], family: Family) -> dict[str, Tensor]:
    """Return the tensors with positions for each segment of a text, one below the other.

    What a type of tokens adds is added to them: the tokens of a segment are all of one type.
    Without learnt positions it is added to the embedding.
    """
    added_to = "positions" if "positions" in family.outer else "embed"
    names = [family.outer[name] for name in (added_to, "types")]
    for name in names:
        if name not in raw:
            facts.fail(f"tensor {name!r} is missing")
    positions, types = (np.atleast_2d(raw[name].to_f32()) for name in names)
    if len(types) < family.num_segments or types.shape[1:] != positions.shape[1:]:
        facts.fail(f"tensor {names[1]!r} has shape {types.shape}, wanted a row for each segment")
    values = np.concatenate([positions + row for row in types[: family.num_segments]])
    made = Tensor(names[0], "F32", values.shape, values.view(np.uint8))
    return {name: tensor for name, tensor in raw.items() if name != names[1]} | {names[0]: made}


def _with_normed_rows(
    facts: Facts, arch: ModelArch, raw: Mapping[str, Tensor], family: Family
) -> dict[str, Tensor]:
    """Return the tensors with an embedding whose rows are normed: each is what its token adds."""
    names = [family.outer[name] for name in ("embed", "embed_norm")]
    for name in names:
        if name not in raw:
            facts.fail(f"tensor {name!r} is missing")
    rows, weight = (raw[name].to_f32() for name in names)
    if rows.shape[1:] != weight.shape:
        facts.fail(f"tensor {names[1]!r} has shape {weight.shape}, wanted {rows.shape[1:]}")
    centred = rows - rows.mean(axis=1, keepdims=True, dtype=np.float64).astype(np.float32)
    squares = np.square(centred, dtype=np.float64).mean(axis=1, keepdims=True)
    values = (centred / np.sqrt(squares + arch.norm_eps) * weight).astype(np.float32)
    made = Tensor(names[0], "F32", values.shape, values.view(np.uint8))
    return {name: tensor for name, tensor in raw.items() if name != names[1]} | {names[0]: made}


def _found(
    facts: Facts,
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
            facts.fail(f"tensor {name!r} of shape {wanted} is missing")
    parts = [raw[name] for name in names]
    tensor = parts[0]
    # Whoever quantises a matrix turns it the usual way round.
    is_turned = family.transposed and tensor.make is None
    if is_turned and len(wanted) == 2 and in_file not in family.outer.values():
        tensor = _transposed(tensor)
    elif len(parts) > 1:
        tensor = Tensor.stacked(in_file, parts)
    elif wanted == (1, *tensor.shape):
        tensor = replace(tensor, shape=wanted, stored=tensor.stored.reshape(1, -1))
    elif len(tensor.shape) > len(wanted):
        tensor = _stack_of_experts(tensor, family)
    if tensor.shape != wanted:
        facts.fail(f"tensor {in_file!r} has shape {tensor.shape}, wanted {wanted}")
    return tensor, names


def _stack_of_experts(tensor: Tensor, family: Family) -> Tensor:
    """Return the rows of all experts, one below the other; or all their biases."""
    if len(tensor.shape) == 2:
        count = tensor.shape[0] * tensor.shape[1]
        return replace(tensor, shape=(count,), stored=tensor.stored.reshape(count, -1))
    if family.gates_by_turns and tensor.dtype in ("F32", "F16", "BF16"):
        values = np.ascontiguousarray(tensor.to_f32().swapaxes(1, 2))
        tensor = Tensor(tensor.name, "F32", values.shape, values.view(np.uint8))
    num, rows, width = tensor.shape
    stored = tensor.stored.reshape(num * rows, -1)
    return replace(tensor, shape=(num * rows, width), stored=stored)


def _transposed(matrix: Tensor) -> Tensor:
    values = np.ascontiguousarray(matrix.to_f32().T)
    return Tensor(matrix.name, "F32", values.shape, values.view(np.uint8))


def _logarithm(facts: Facts, decay: Tensor) -> Tensor:
    """Return the "a_log" that minus the exponential of is a tensor."""
    values = decay.to_f32()
    if not (values < 0).all():  # also where one is no number
        facts.fail(f"tensor {decay.name!r} has values that are not below 0: states would grow")
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
        if attention is None or attention.rope is None:
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
