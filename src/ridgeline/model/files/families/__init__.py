"""Model families: from names in files to canonical names and structural facts.

A row of a table says all that a family's name implies (``tables``); everything else is read from
the file. A key that may change what the model computes and is not read ends in a message
(``understood``). This package opens no file and decodes no matrix.

Models that make vectors alone are decoders saved without a head, and encoders with another one.
Both are named by their class: ``MistralModel`` is ``MistralForCausalLM`` without its head, and
``BertForMaskedLM`` is ``BertModel`` with one that no vector needs. Whether a head is the embedding
is said by a config, and shown by its file: trainers and tools that merge models leave
``tie_word_embeddings`` as it was, so the tensors count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from typing import Any

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.families.family import Family
from ridgeline.model.files.families.fields import const
from ridgeline.model.files.families.gguf import HARMLESS as HARMLESS_IN_GGUF
from ridgeline.model.files.families.gguf_config import config_of_gguf
from ridgeline.model.files.families.hf_names import HARMLESS as HARMLESS_IN_HF
from ridgeline.model.files.families.hf_names import OF_OTHER_HALVES, ONLY
from ridgeline.model.files.families.layers import arch_of
from ridgeline.model.files.families.lookup import (
    CHANGING_IN_GGUF,
    CHANGING_IN_HF,
    GGUF_FAMILIES,
    HF_FAMILIES,
    OF_ANSWERS,
    TABLES,
    architecture,
    family_of,
    family_of_gguf,
    refuse_unknown,
)
from ridgeline.model.files.families.unread_keys import (
    refuse_keys,
    refuse_unread_keys,
    require,
    unsaid,
)
from ridgeline.model.files.families.weight_names import bind, halves_order
from ridgeline.model.files.tensors import Tensor, same_bytes
from ridgeline.model.shape.model import ModelArch

__all__ = [
    "BESIDE",
    "GGUF_FAMILIES",
    "HF_FAMILIES",
    "ONLY",
    "TABLES",
    "TEXT_HALVES",
    "Family",
    "arch_from_config",
    "arch_of",
    "architecture",
    "family_of",
    "family_of_gguf",
    "halves_order",
    "in_usual_names",
    "model_from_config",
    "model_from_gguf",
    "with_quantization",
    "without_quantization",
]

_GGUF_ROPE_TENSORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
BESIDE = "hf_quant_config.json"  # where ModelOpt says what others say in config.json
_ACTIVATION = "sbert_ce_default_activation_function"
_OF_PAIRS = "sentence_transformers"  # newer files have it in this object
# Of models that also see: their text half stands below one of these.
TEXT_HALVES = ("language_model.model.", "model.language_model.")
_OF_BOTH_HALVES = ("tie_word_embeddings", "quantization_config")
_MOST_PARTS, _MOST_LETTERS = 4, 60  # of tensors that are not read, in a line
Note = Callable[[str], None]  # is told a line
_OTHER_HALVES = ("vision_model.", "vision_tower.", "multi_modal_projector.", "model.vision_tower.",
                 "model.multi_modal_projector.", "model.visual.", "model.audio_tower.",
                 "model.embed_audio.", "model.embed_vision.")  # fmt: skip
_KEY = "tie_word_embeddings"
_OF_ATTENTION = "attn_config"  # MPT has an object of it


def model_from_config(
    values: Mapping[str, Any],
    raw: Mapping[str, Tensor],
    where: str,
    spare: Set[str] = frozenset(),
    note: Note = unsaid,
) -> tuple[ModelArch, dict[str, Tensor]]:
    """Return the architecture and the canonical tensors of a Hugging Face directory.

    Args:
        values: config.json.
        raw: tensors under the file's names.
        where: the directory, for messages.
        spare: names of tensors that may be left over.
        note: is told what is not gone by, a line each.

    Raises:
        ModelFileError: something is missing, out of range, misshapen or not supported.
    """
    family = family_of(values)
    if family is not None:
        values = named_by_what_it_has(values, raw, family)
        raw = under_own_names(raw, family)
    arch = arch_from_config(values, raw, where, note)
    family = family_of(values)
    assert family is not None
    dropped: list[str] = []
    if _has_other_halves(values):
        dropped = [name for name in raw if name.startswith(_OTHER_HALVES)]
        raw = _text_tensors(raw)
    arch, raw = tied_as_stored(arch, values, raw, family, note)
    buffers = (".rotary_emb.inv_freq", *family.buffers)
    ignored = [name for name in raw if name.endswith(buffers)]
    if arch.tied_embeddings:  # the same once more
        ignored.append(family.outer.get("head", ""))
    prefixes = tuple(family.prefix.format(arch.num_layers + i) for i in range(arch.num_guessing))
    unread = [name for name in raw if name.startswith((*family.ignored_tensors, *prefixes))]
    unread += [name for name in _keys_of_others(arch, family) if name in raw]
    if not arch.has_head and (bias := family.outer.get("head_bias", "")) in raw:
        unread.append(bias)
    ignored += unread
    _note_dropped([*dropped, *unread], note)
    return arch, bind(ConfigReader(values, where), arch, raw, family, {*ignored, *spare})


def _note_dropped(names: list[str], note: Note) -> None:
    """Say in a line which tensors are not read, by the first parts of their names."""
    if names:
        parts = dict.fromkeys(".".join(name.split(".")[:2])[:_MOST_LETTERS] for name in names)
        shown = ", ".join(list(parts)[:_MOST_PARTS]) + (", ..." if len(parts) > _MOST_PARTS else "")
        note(f"tensors of parts that do not run here are not read: {len(names)}, of {shown}")


def arch_from_config(
    values: Mapping[str, Any], raw: Mapping[str, Tensor], where: str, note: Note = unsaid
) -> ModelArch:
    """Return the architecture alone; of the tensors only that of learnt positions is looked at.

    ``note`` is told what is not gone by.

    Raises:
        ModelFileError: something is missing, out of range or not supported.
    """
    family = family_of(values)
    if type(of_pairs := values.get(_OF_PAIRS)) is dict:
        values = {**values, _ACTIVATION: of_pairs.get("activation_fn"), _OF_PAIRS: None}
    if family is None:
        own_code = bool(values.get("auto_map"))
        refuse_unknown(
            ConfigReader(values, where), architecture(values), HF_FAMILIES, own_code=own_code
        )
    if _has_other_halves(values):
        values, raw = _text_half(values, where, note), _text_tensors(raw)
    values = {**family.defaults, **in_usual_names(values, family)}
    config = ConfigReader(values, where, tensors=raw.keys())
    refuse_keys(config, family, "quantization_config")
    arch = arch_of(config, family, family.read(config), raw)
    # What the family reads of parts that this model lacks changes nothing.
    config.read_keys.update(key for reader in family.facts.values() for key in reader.keys)
    require(config, {key: ONLY[key] for key in ONLY if key not in config.read_keys})
    refuse_unread_keys(config, HARMLESS_IN_HF | {*family.ignored_keys}, CHANGING_IN_HF, note)
    return arch


def in_usual_names(values: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return a config without the family's own names of keys, and without MPT's inner object.

    What that object says of attention stands under longer names.
    """
    if type(of_attention := values.get(_OF_ATTENTION)) is dict:
        said = {key: of_attention[key] for key in of_attention if key not in HARMLESS_IN_HF}
        inner = {f"{_OF_ATTENTION}.{key}": value for key, value in said.items()}
        values = {**values, **inner, _OF_ATTENTION: None}
    return {family.aliases.get(key, key): value for key, value in values.items()}


def model_from_gguf(
    metadata: Mapping[str, Any], raw: Mapping[str, Tensor], where: str, note: Note = unsaid
) -> tuple[ModelArch, dict[str, Tensor]]:
    """Return the architecture and the canonical tensors of a GGUF file.

    Args:
        metadata: the file's keys and values.
        raw: tensors under the file's names.
        where: the file, for messages.
        note: is told what is not gone by, a line each.

    Raises:
        ModelFileError: something is missing, out of range, misshapen or not supported.
    """
    meta, family = family_of_gguf(metadata, raw, where)
    refuse_keys(meta, family)
    gguf = config_of_gguf(meta, family, raw)
    arch = arch_of(gguf.config, family, family.read(gguf.metadata), raw, **gguf.overrides)
    require(meta, {"attention.causal": not arch.is_encoder})
    refuse_unread_keys(meta, HARMLESS_IN_GGUF | {*family.ignored_keys}, CHANGING_IN_GGUF, note)
    guessing = tuple(f"blk.{arch.num_layers + i}." for i in range(arch.num_guessing))
    spare = {name for name in raw if guessing and name.startswith(guessing)}
    ignored = {*_GGUF_ROPE_TENSORS, *_keys_of_others(arch, family), *spare}
    return arch, bind(meta, arch, raw, family, ignored)


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


def _text_half(values: Mapping[str, Any], where: str, note: Note) -> dict[str, Any]:
    """Return the config of a model's text half, under the whole model's name.

    What both say counts as the half says it.
    """
    of_all = {key: values[key] for key in _OF_BOTH_HALVES if key in values}
    outside = {key: value for key, value in values.items() if key != "text_config"}
    harmless = HARMLESS_IN_HF | {*of_all, *OF_OTHER_HALVES}
    refuse_unread_keys(ConfigReader(outside, where), harmless, CHANGING_IN_HF, note)
    of_text = {key: value for key, value in values["text_config"].items() if value is not None}
    defaults = TABLES.text_defaults.get(str(of_text.get("model_type")), {})
    named = {"architectures": [architecture(values)]}
    return {**defaults, **of_all, **of_text, **named}


def with_quantization(
    config: Mapping[str, Any], beside: Mapping[str, Any], where: str
) -> dict[str, Any]:
    """Return a config with what the file ``BESIDE`` it says; its own word comes first.

    Raises ModelFileError for a file that does not say what is expected.
    """
    text = config.get("text_config")
    has_own = config.get("quantization_config") or (
        type(text) is dict and text.get("quantization_config")
    )
    if has_own:
        return dict(config)
    said = beside.get("quantization")
    if type(said) is not dict:
        ConfigReader(beside, f"{where}: {BESIDE}").fail(f"quantization is {said!r}, not an object")
    if said.get("quant_algo") is None:  # then no more than a cache is quantised
        return dict(config)
    return {**config, "quantization_config": {"quant_method": "modelopt", **said}}


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config without what it says of quantisation, of the text half as well."""
    plain = {key: value for key, value in config.items() if key != "quantization_config"}
    if type(text := config.get("text_config")) is dict:
        plain["text_config"] = {k: v for k, v in text.items() if k != "quantization_config"}
    return plain


def _text_tensors(raw: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a model's text half, under the names of a model of text alone."""
    tensors = {}
    for name, tensor in raw.items():
        if name.startswith(_OTHER_HALVES):
            continue
        for prefix in TEXT_HALVES:
            if name.startswith(prefix):
                name = "model." + name.removeprefix(prefix)
        tensors[name.removeprefix("language_model.")] = tensor
    return tensors


def named_by_what_it_has(
    values: Mapping[str, Any], raw: Mapping[str, Tensor], family: Family
) -> Mapping[str, Any]:
    """Return a config under the name of its bare class, if it is a decoder that has no answers.

    sentence-transformers saves a decoder without its head, and leaves the name of the whole. One
    whose tokens see what follows them predicts none.
    """
    name = architecture(values)
    suffix = next((suffix for suffix in OF_ANSWERS if name.endswith(suffix)), "")
    tied = family.facts.get("tied_embeddings", const(False))
    is_cut = family.outer["embed"] not in raw and family.outer.get("head") not in raw
    is_bare = is_cut and not tied.read(ConfigReader(values, ""))
    if suffix and (is_bare or values.get("is_causal") is False):
        return {**values, "architectures": [name.removesuffix(suffix) + "Model"]}
    return values


def under_own_names(raw: Mapping[str, Tensor], family: Family) -> Mapping[str, Tensor]:
    """Return tensors under the names of their family.

    Without a head the first part of each name is missing; the first files of GPT-2 and BLOOM lack
    it too. With one that stands beside an encoder, it is too much, and so are the head's tensors.
    """
    embed = family.outer["embed"]
    for name in raw if embed not in raw else ():
        if embed.endswith(f".{name}"):
            before = embed.removesuffix(name)
            return {before + other: tensor for other, tensor in raw.items()}
        if name.endswith(f".{embed}") and "has_head" in family.facts:
            before = name.removesuffix(embed)
            names = [other for other in raw if other.startswith(before)]
            return {other.removeprefix(before): raw[other] for other in names}
    return raw


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
