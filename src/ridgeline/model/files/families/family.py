"""What a family's name implies, as data: where facts and tensors stand.

This module opens no file and names no family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ridgeline.model.files.config import ConfigReader
from ridgeline.model.files.families.fields import FieldReader


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models.

    Attributes:
        outer: canonical names before and behind the layers to the file's; ``{}`` stands for the
            last layer's number. "types" is an embedding of kinds of tokens, added to positions;
            "embed_norm" is a norm of the embedding's rows.
        layer: canonical name within a layer to the file's; ``{e}`` stands for an expert's number.
            What begins with ``../`` stands in the layer before.
        alternatives: canonical name within a layer to the name that some files have for it.
        prefix: of a layer's tensors; ``{}`` stands for its number.
        facts: "mixer", "latent" (see ``model.shape.latent``), "recurrent", "ffn", "shared" (the
            expert of all tokens), "beside" (the network beside experts), "dense" (that of the first
            layers instead of experts), "chunk" (see ``context_end``) or "layer", a dot and a field,
            or a field of the model, to its reader. "rope.turns" says whether positions turn queries
            and keys at all.
        windows: how a layer's window is known: "none"; "all" of them; "switch", which needs a flag
            and spares the lower layers; "switch of all" layers; "pattern" for some in turn; or
            "named" for those that ``layer_types`` names.
        default_window: where the file does not mention one; in GGUF files 0 means none, and None
            that it must be there.
        pattern: one layer in this many sees everything, if the config does not say it.
        full_first: of those in turn the first sees everything; else the last does.
        ropes: what kinds of layers have another rope than the model's: of "sliding" and "full",
            to "none", to "none beside windows" (if others have one), or to the base of one that is
            not scaled: its key or its digits.
        rope_keys: keys that say more of rope, by which only models of some families go.
        heads_by_layer: layers that see everything have other heads than the rest, and those that
            read others' keys and values may have wider networks.
        norm_offset: norm weights lack this number.
        plain_norms: norms over the residual stream have no weights in the file: all are 1.
        plain_head_norms: norms of queries and keys have none either, and stand where these turn.
        scaled_by_sqrt_hidden: canonical names within a layer whose values lack a division by the
            square root of the hidden size.
        interleaved: rows of q and k are stored for rotating neighbours instead of halves.
        recurrent: what keeps a state in layers that ``layer_types`` does not call attention.
        parallel_mixer: it stands beside attention instead, in every layer.
        layers_are_halves: each layer of a file is half of one of ours: see ``halves``.
        attention_layers: the key of their numbers, or of a number that says that one in this many
            has attention (else ``pattern``), where the config has no ``layer_types``.
        decays: of each head that keeps a state the file has minus the exponential of "a_log".
        has_experts: the feed-forward network is a mixture of experts.
        gates_by_turns: of each expert a row of the gate comes first, then one of ups; else the
            whole gate. Such tensors are stored as ``(experts, in, out)`` unless they are quantised.
        experts_turned: they are stored so without turns.
        spare_positions: rows of learnt positions beyond those that a config says.
        num_segments: parts of a text, of which each has a type of tokens of its own.
        transposed: matrices of layers are stored as ``(in, out)``.
        heads_inside: rows of q, k and v in one tensor are sorted by key head first.
        defaults: values of keys that a config may leave out.
        aliases: the family's names of keys that all others call alike.
        buffers: suffixes of names of tensors that hold no weights.
        ignored_tensors: prefixes of names of tensors that are not used.
        refused_keys: keys that change what a model computes, and that are refused if they are set.
            What they change of sizes is read all the same, for counting.
        ignored_keys: keys that stand in files of the family and that no model of it goes by.
        required: keys that have no other value, if they are there.
        first_norms: where the first layer's norms stand, if elsewhere than the others'.
        wide_scale_layers: numbers of layers of models whose scores are divided by the root of the
            hidden size over the heads, not of a head's channels; their files do not say it.
        dense_layers: the key that says how many first layers have a dense network, not experts.
        experts_every: the key that says that one layer in this many has experts, but for those
            whose numbers ``dense_layers`` then lists.
    """

    outer: Mapping[str, str]
    layer: Mapping[str, str]
    prefix: str
    facts: Mapping[str, FieldReader]
    windows: Literal["none", "all", "switch", "switch of all", "pattern", "named"] = "none"
    default_window: int | None = None
    pattern: int = 0
    full_first: bool = False
    ropes: Mapping[str, str] = field(default_factory=dict)
    rope_keys: tuple[str, ...] = ()
    heads_by_layer: bool = False
    norm_offset: float = 0.0
    plain_norms: bool = False
    plain_head_norms: bool = False
    scaled_by_sqrt_hidden: tuple[str, ...] = ()
    interleaved: bool = False
    recurrent: Literal["", "conv", "delta", "ssm"] = ""
    parallel_mixer: bool = False
    layers_are_halves: bool = False
    attention_layers: str = ""
    decays: bool = False
    has_experts: bool = False
    gates_by_turns: bool = False
    experts_turned: bool = False
    spare_positions: int = 0
    num_segments: int = 1
    alternatives: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = False
    heads_inside: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    ignored_tensors: tuple[str, ...] = ()
    refused_keys: tuple[str, ...] = ()
    first_norms: Literal["", "before mlp"] = ""
    wide_scale_layers: tuple[int, ...] = ()
    dense_layers: str = ""
    experts_every: str = ""
    ignored_keys: tuple[str, ...] = ()
    required: Mapping[str, Any] = field(default_factory=dict)

    @property
    def has_attention(self) -> bool:
        """Whether any layer has attention."""
        return "mixer.num_heads" in self.facts

    @property
    def fused_qkv(self) -> bool:
        """Whether its files have queries, keys and values of a layer in one matrix."""
        return "q" in self.layer and self.layer["q"] == self.layer.get("v")

    def outcomes(self, fact: str) -> tuple[Any, ...]:
        """Return every value that a fact may have in models that run, but for numbers."""
        return self.facts[fact].outcomes if self.has_some(fact) else ()

    def has_some(self, fact: str) -> bool:
        """Return whether models that run may have a part of this name."""
        return fact in self.facts and not set(self.facts[fact].keys) & {*self.refused_keys}

    def read(self, config: ConfigReader) -> Parts:
        """Return the facts of all parts, such as "mixer"; those of the model by the name ""."""
        return Parts(self, config)


class Parts:
    """The facts of a model by part, each part read once, when it is first asked for.

    So what a file does not say of a part that its model lacks is not missing.
    """

    def __init__(self, family: Family, config: ConfigReader) -> None:
        """Read nothing yet."""
        self._family, self._config = family, config
        self._read: dict[str, dict[str, Any]] = {}

    def __getitem__(self, part: str) -> dict[str, Any]:
        """Return the facts of a part. Raises ModelFileError for one that is wrong or missing."""
        if part not in self._read:
            self._read[part] = {}
            for name, reader in self._family.facts.items():
                where, _, fact = name.rpartition(".")
                if where == part:
                    self._read[part][fact] = reader.read(self._config)
        return self._read[part]
