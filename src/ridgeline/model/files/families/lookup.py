"""Which row of the tables a file goes by, and what is said of a file that goes by none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.families.family import Family
from ridgeline.model.files.families.fields import const, flag
from ridgeline.model.files.families.inherit import tables_of
from ridgeline.model.files.families.suggestions import advice
from ridgeline.model.files.families.tables import (
    decoders,
    encoders,
    experts,
    gemma,
    layer_norm,
    plan_only,
    recurrent,
)
from ridgeline.model.files.tensors import Tensor

TABLES = tables_of((
    *decoders.ROWS, *gemma.ROWS, *layer_norm.ROWS, *experts.ROWS, *recurrent.ROWS, *encoders.ROWS,
    *plan_only.ROWS,
))  # fmt: skip
HF_FAMILIES, GGUF_FAMILIES = TABLES.hf, TABLES.gguf
COUNTED = HF_FAMILIES | TABLES.counted
OF_ANSWERS = ("ForCausalLM", "LMHeadModel")
_OF_ENCODERS = (
    "ForMaskedLM", "ForNextSentencePrediction", "ForPreTraining", "ForQuestionAnswering",
    "ForTokenClassification",
)  # fmt: skip
_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_HEADS = "attention.head_count"


def architecture(values: Mapping[str, Any]) -> Any:
    """Return the first name under a config's ``architectures``, else the class of its type."""
    named = first_class(values)
    half = values.get("text_config")
    text = half if type(half) is dict else {}
    return named or class_of_type(values) or class_of_type(text) or named


def first_class(values: Mapping[str, Any]) -> Any:
    """Return the first name under a config's ``architectures``, None if there is none."""
    named = values.get("architectures")
    return named[0] if type(named) is list and named else named or None


def family_of(
    values: Mapping[str, Any], families: Mapping[str, Family] = HF_FAMILIES
) -> Family | None:
    """Return the family of a config, which may have a table of its own for some of its models."""
    name, is_headless = _family_name(architecture(values), families)
    half = values.get("text_config")
    text = half if type(half) is dict else values
    has_experts = text.get("enable_moe_block") is True or text.get("num_local_experts")
    has_experts = has_experts or _has_expert_halves(text)
    counts = (text.get(key) for key in _NUM_EXPERTS)
    has_many = any(isinstance(count, int | float) and count > 1 for count in counts)
    has_latents = bool(text.get("kv_lora_rank"))
    kinds = {
        "of experts": has_experts,
        "of groups": text.get("new_decoder_architecture") is True or "n_head_kv" in text,
        "of keys by head": text.get("multi_query") is False,
        "of latent experts": has_latents and has_many,
        "of latents": has_latents,
        "of many experts": has_many,
    }
    names = [f"{name} {kind}" for kind, is_one in kinds.items() if is_one]
    family = next((families[one] for one in (*names, name) if one in families), None)
    return _without_head(family) if family is not None and is_headless else family


def _family_name(name: Any, families: Mapping[str, Family]) -> tuple[str, bool]:
    """Return the name in the tables for a class's, and whether the head of that one is missing."""
    name = str(name)
    if name in families:
        return name, False
    for suffix in _OF_ENCODERS:
        of_states = name.removesuffix(suffix) + "Model"
        if name.endswith(suffix) and of_states in families:
            return of_states, False
    of_answers = [name.removesuffix("Model") + suffix for suffix in OF_ANSWERS]
    found = [other for other in of_answers if name.endswith("Model") and other in families]
    return (found[0], True) if found else (name, False)


def _without_head(family: Family) -> Family:
    """Return a family of decoders whose files have no head; ``is_causal`` may say false of them."""
    facts = {**family.facts, "tied_embeddings": const(True), "has_head": const(False)}
    if family.has_attention:
        facts["mixer.causal"] = flag("is_causal", default=True)
    return replace(family, facts=facts, unused=(*family.unused, "tie_word_embeddings"))


def _has_expert_halves(values: Any) -> bool:
    """Return whether a config names a layer of experts alone."""
    names = values.get("layers_block_type")
    by_letter = values.get("hybrid_override_pattern")
    of_names = type(names) is list and "moe" in names
    return of_names or (type(by_letter) is str and "E" in by_letter)


def class_of_type(values: Mapping[str, Any]) -> str:
    """Return the class of a config's ``model_type``, "" if it is not known."""
    return TABLES.class_of_type.get(str(values.get("model_type")), "")


def family_of_gguf(
    metadata: Mapping[str, Any], raw: Mapping[str, Tensor], where: str
) -> tuple[ConfigReader, Family]:
    """Return what a GGUF file says, and its family. Raises ModelFileError if none has its name."""
    name = ConfigReader(metadata, where).text("general.architecture")
    meta = ConfigReader(metadata, where, prefix=f"{name}.", tensors=raw.keys())
    if name not in GGUF_FAMILIES:
        refuse_unknown(meta, name, GGUF_FAMILIES)
    family = GGUF_FAMILIES[name]
    if meta.get("expert_count") and f"{name} of experts" in GGUF_FAMILIES:
        family = GGUF_FAMILIES[f"{name} of experts"]
    unsaid = {meta.prefix + key: value for key, value in family.defaults.items()}
    heads = {meta.prefix + _HEADS: _one_number(meta, _HEADS)}
    known = {key: value for key, value in heads.items() if value is not None}
    return replace(meta, values={**unsaid, **metadata, **known}), family


def _one_number(meta: ConfigReader, key: str) -> Any:
    """Return a value, and of a list of equal numbers for all layers the number."""
    stored = meta.values.get(meta.prefix + key)
    if not isinstance(stored, np.ndarray | list):
        return stored
    distinct = set(np.asarray(stored).tolist())
    if len(distinct) != 1:
        meta.fail(f"{meta.prefix}{key} differs from layer to layer, which is not supported")
    return distinct.pop()


def _keys_of(families: Iterable[Family], counted: Iterable[Family] = ()) -> frozenset[str]:
    """Return the keys by which any of these families goes, or that it refuses.

    Of families that are only ``counted`` those too that change no size.
    """
    found = {key for one in counted for key in one.unused}
    aliases: dict[str, str] = {}
    for one in (*families, *counted):
        found.update(*(reader.keys for reader in one.facts.values()))
        found |= {*one.refuse, *one.must, *one.rope_keys}
        found |= {one.attention_layers, one.dense_layers, one.experts_every}
        aliases |= one.aliases
    return frozenset(found | {key for key, usual in aliases.items() if usual in found}) - {""}


# Keys that change what a model computes, in files of some family.
CHANGING_IN_HF = _keys_of(HF_FAMILIES.values(), TABLES.counted.values())
CHANGING_IN_GGUF = _keys_of(GGUF_FAMILIES.values())


def refuse_unknown(
    config: ConfigReader, name: Any, families: Mapping[str, Family], *, own_code: bool = False
) -> NoReturn:
    """Raise ModelFileError: say what runs in its place, and where all that runs is listed.

    ``own_code`` says that the model brings code, which is never run.
    """
    problem = f"architecture {repr(name)[:80]} is not supported"
    if own_code:
        problem += ", and its own code (auto_map) is never run"
    known = (key for key in families if " " not in key)
    if type(name) is str and (words := advice(name, known)):
        problem += f": {words}"
    config.fail(f"{problem}; ridgeline models --families lists what runs")
