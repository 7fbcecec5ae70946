"""Models that make vectors alone: decoders saved without a head, and encoders with another one.

Both are named by their class: ``MistralModel`` is ``MistralForCausalLM`` without its head, and
``BertForMaskedLM`` is ``BertModel`` with one that no vector needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ridgeline.model.files.facts import Facts
from ridgeline.model.files.families.known import OF_ANSWERS, architecture
from ridgeline.model.files.families.table import Family, const
from ridgeline.model.files.tensors import Tensor


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
