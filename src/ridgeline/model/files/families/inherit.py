"""One row for a family: what it is called, and what it has unlike an earlier row, in all files.

GGUF files name and say things alike whatever the model. So the half of a row that is for GGUF is
made of the other half with the names and keys of these files; a row says what differs there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ridgeline.model.files.families.gguf as gguf
from ridgeline.model.files.families.family import Family
from ridgeline.model.files.families.fields import FieldReader, const

Changes = Mapping[str, Any]
_NAMES = ("outer", "layer", "alternatives")
_LISTS = (
    "ignored_keys", "refused_keys", "ignored_tensors", "buffers", "rope_keys",
    "scaled_by_sqrt_hidden",
)  # fmt: skip
# What is so of a family in whichever file.
_IN_ALL_FILES = (
    "windows", "pattern", "full_first", "heads_by_layer", "plain_norms", "plain_head_norms",
    "scaled_by_sqrt_hidden", "interleaved", "recurrent", "parallel_mixer", "layers_are_halves",
    "has_experts", "num_segments", "first_norms",
)  # fmt: skip
_ROPES_IN_ALL_FILES = ("full", "no_rope_layers")


@dataclass(frozen=True, slots=True)
class FamilyRow:
    """A family as it stands in a table; see ``row``."""

    name: str
    like: str
    hf: str
    types: str
    gguf: str
    written_as: str
    runs: bool
    text_defaults: Mapping[str, Any]
    changes: Changes
    in_gguf: Changes


def row(
    name: str,
    *,
    like: str = "decoder",
    hf: str = "",
    types: str | None = None,
    gguf: str = "",
    written_as: str = "",
    runs: bool = True,
    text_defaults: Mapping[str, Any] | None = None,
    in_gguf: Changes | None = None,
    **changes: Any,
) -> FamilyRow:
    """Return a row of a table of families.

    Args:
        name: what later rows call it by.
        like: the row that it is like, but for ``changes``, fields of ``Family``. Mappings and lists
            of words are added to those of that row; None takes an entry away, and so does a minus
            before a word. In names of tensors ``"q k": "attn.qk."`` stands for a module of both,
            its weight and its bias. A fact that is no reader is the same for every model.
        hf: classes in Hugging Face's configs, with a comma between two.
        types: values of ``model_type``; ``name`` unless said.
        gguf: values of ``general.architecture``, with a comma between two.
        written_as: that of the files into which its models are written, if no row is its own.
        runs: False for a family that is only counted.
        text_defaults: what the config of a text half leaves out: only what differs from the
            defaults of a class is written into such a half.
        in_gguf: changes in GGUF files beside those that follow from ``changes``.
    """
    types = ("" if " " in name else name) if types is None else types
    return FamilyRow(
        name,
        like,
        hf=hf,
        types=types,
        gguf=gguf,
        written_as=written_as,
        runs=runs,
        text_defaults=text_defaults or {},
        changes=changes,
        in_gguf=in_gguf or {},
    )


@dataclass(frozen=True, slots=True)
class FamilyTables:
    """Families by what files call them.

    Attributes:
        hf: by a class in ``architectures``.
        counted: the same, of families that do not run.
        gguf: by ``general.architecture``.
        class_of_type: ``model_type`` to the class: halves of models that also see have it alone.
        class_of_gguf: ``general.architecture`` to the class, whose modules adapters of PEFT name.
        gguf_of_class: a class to the ``general.architecture`` of files that its models become.
        text_defaults: by ``model_type``, see ``row``.
    """

    hf: dict[str, Family] = field(default_factory=dict)
    counted: dict[str, Family] = field(default_factory=dict)
    gguf: dict[str, Family] = field(default_factory=dict)
    class_of_type: dict[str, str] = field(default_factory=dict)
    class_of_gguf: dict[str, str] = field(default_factory=dict)
    gguf_of_class: dict[str, str] = field(default_factory=dict)
    text_defaults: dict[str, Mapping[str, Any]] = field(default_factory=dict)


def tables_of(rows: Iterable[FamilyRow]) -> FamilyTables:
    """Return the families of these rows, each of which is like one before it or like none."""
    tables = FamilyTables()
    changes: dict[str, tuple[Changes, Changes]] = {"": ({}, {})}
    for one in rows:
        of_hf, of_gguf = changes[one.like]
        of_hf, of_gguf = _merged(of_hf, one.changes), _merged(of_gguf, one.in_gguf)
        changes[one.name] = of_hf, of_gguf
        fields, classes = _settled(of_hf), _names(one.hf)
        for name in classes:
            (tables.hf if one.runs else tables.counted)[name] = Family(**fields)
        for name in _names(one.gguf or one.written_as)[:1]:
            tables.gguf_of_class.update(dict.fromkeys(classes, name))
        for name in _names(one.gguf):
            tables.gguf[name] = _in_gguf(_settled(_merged(_half_of_gguf(fields), of_gguf)))
            if " " not in name:
                tables.class_of_gguf[name] = classes[0]
        for kind in one.types.split():
            tables.class_of_type[kind] = classes[0]
            if one.text_defaults:
                tables.text_defaults[kind] = one.text_defaults
    return tables


def _names(listed: str) -> list[str]:
    return listed.split(", ") if listed else []


def _merged(fields: Changes, changes: Changes) -> dict[str, Any]:
    """Return the fields of a family with changes, as ``row`` says it."""
    merged = dict(fields)
    for name, new in changes.items():
        if name in _LISTS:
            words = [*merged.get(name, ()), *(new.split() if isinstance(new, str) else new)]
            away = {word.removeprefix("-") for word in words if word.startswith("-")}
            merged[name] = tuple(word for word in words if word.removeprefix("-") not in away)
        elif isinstance(new, Mapping):
            merged[name] = {**merged.get(name, {}), **(_spelt(new) if name in _NAMES else new)}
        else:
            merged[name] = new
    return merged


def _settled(fields: Changes) -> dict[str, Any]:
    """Return fields without what is taken away, each fact as a reader."""
    settled: dict[str, Any] = {}
    for name, value in fields.items():
        settled[name] = value
        if isinstance(value, Mapping):
            settled[name] = {key: one for key, one in value.items() if one is not None}
    facts = settled["facts"].items()
    return settled | {"facts": {k: v if isinstance(v, FieldReader) else const(v) for k, v in facts}}


def _spelt(names: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return a tensor's name for each part; a name that ends with a dot is a module's."""
    spelt: dict[str, str | None] = {}
    for parts, in_file in names.items():
        for part in parts.split():
            if in_file is not None and in_file.endswith("."):
                spelt |= {part: f"{in_file}weight", f"{part}_bias": f"{in_file}bias"}
            else:
                spelt[part] = in_file
    return spelt


_OUTER, _LAYER = _spelt(gguf.OUTER), _spelt(gguf.LAYER)


def _half_of_gguf(fields: Changes) -> dict[str, Any]:
    """Return what the fields of a family for Hugging Face's files say of GGUF files."""
    half = {name: fields[name] for name in _IN_ALL_FILES if name in fields}
    half["outer"] = {part: name for part, name in _OUTER.items() if part in fields["outer"]}
    half["layer"], half["prefix"] = {**_LAYER}, gguf.PREFIX
    half["facts"] = _facts_in_gguf(fields)
    half["ropes"] = {k: v for k, v in fields.get("ropes", {}).items() if k in _ROPES_IN_ALL_FILES}
    match fields.get("windows"):
        case "switch" | "switch of all":  # a converter copies a window that is switched off
            half |= {"windows": "none", "ignored_keys": ("attention.sliding_window",)}
        case "all":
            half["default_window"] = 0
    if Family(**fields).fused_qkv:  # one tensor here is one tensor there
        half["layer"] |= _spelt(gguf.QKV)
    if fields.get("has_experts"):
        half["layer"] |= _spelt(gguf.EXPERTS)
    if _first_are_dense(fields):
        half["dense_layers"] = "leading_dense_block_count"
        half["alternatives"] = _spelt(gguf.DENSE)
    half["decays"] = fields.get("recurrent", "conv") != "conv"
    return half


def _facts_in_gguf(fields: Changes) -> dict[str, FieldReader]:
    """Return the readers of a family's facts: by a key of GGUF, or what is so of all its models.

    These files name no activation, and the like: it is the default. Attention has the biases that
    the file has.
    """
    readers = gguf.FACTS | (gguf.FACTS_OF_EXPERTS if fields.get("has_experts") else {})
    if fields["facts"].get("norm") == const("layer"):
        readers |= gguf.FACTS_OF_LAYER_NORM
    facts = dict(gguf.BIASES) if "mixer.num_heads" in fields["facts"] else {}
    for name, reader in fields["facts"].items():
        if name.startswith("dense.") and not _first_are_dense(fields):
            continue
        if reader.kind == "const":
            facts[name] = reader
        elif name in readers:
            facts[name] = readers[name]
        elif reader.kind == "choice" and "default" in reader.options:
            facts[name] = const(reader.options["among"][reader.options["default"]])
    return facts


def _first_are_dense(fields: Changes) -> bool:
    return bool(fields.get("dense_layers")) and not fields.get("experts_every")


def _in_gguf(fields: Changes) -> Family:
    """Return a family of GGUF files, which refuses what changes an answer and is not read."""
    family = Family(**fields)
    read = {key for reader in family.facts.values() for key in reader.keys} | {*family.rope_keys}
    if family.windows == "pattern":
        read.add("attention.sliding_window_pattern")
    refuse = (*family.refused_keys, *(key for key in gguf.OF_SOME if key not in read))
    return replace(family, refused_keys=refuse)
