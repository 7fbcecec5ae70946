"""Models that make vectors alone: decoders saved without a head, and encoders with another one.

Both are named by their class: ``MistralModel`` is ``MistralForCausalLM`` without its head, and
``BertForMaskedLM`` is ``BertModel`` with one that no vector needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ridgeline.models.facts import Facts
from ridgeline.models.families.table import Family, const, flag
from ridgeline.models.tensors import Tensor

_OF_ANSWERS = ("ForCausalLM", "LMHeadModel")
_OF_ENCODERS = (
    "ForMaskedLM", "ForNextSentencePrediction", "ForPreTraining", "ForQuestionAnswering",
    "ForTokenClassification",
)  # fmt: skip


def family_name(name: Any, families: Mapping[str, Family]) -> tuple[str, bool]:
    """Return the name in the tables for a class's, and whether the head of that one is missing."""
    name = str(name)
    if name in families:
        return name, False
    for suffix in _OF_ENCODERS:
        of_states = name.removesuffix(suffix) + "Model"
        if name.endswith(suffix) and of_states in families:
            return of_states, False
    of_answers = [name.removesuffix("Model") + suffix for suffix in _OF_ANSWERS]
    found = [other for other in of_answers if name.endswith("Model") and other in families]
    return (found[0], True) if found else (name, False)


def without_head(family: Family) -> Family:
    """Return a family of decoders whose files have no head; ``is_causal`` may say false of them."""
    facts = {**family.facts, "tied_embeddings": const(True), "has_head": const(False)}
    if family.has_attention:
        facts["mixer.causal"] = flag("is_causal", default=True)
    return replace(family, facts=facts, unused=(*family.unused, "tie_word_embeddings"))


def named_by_what_it_has(
    values: Mapping[str, Any], raw: Mapping[str, Tensor], family: Family
) -> Mapping[str, Any]:
    """Return a config under the name of its bare class, if it is a decoder that has no answers.

    sentence-transformers saves a decoder without its head, and leaves the name of the whole. One
    whose tokens see what follows them predicts none.
    """
    name = values["architectures"][0]
    suffix = next((suffix for suffix in _OF_ANSWERS if name.endswith(suffix)), "")
    tied = family.facts.get("tied_embeddings", const(False))
    is_cut = family.outer["embed"] not in raw and family.outer.get("head") not in raw
    is_bare = is_cut and not tied.read(Facts(values, ""))
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
            found = [other for other in raw if other.startswith(before)]
            return {other.removeprefix(before): raw[other] for other in found}
    return raw
