"""What llama.cpp's quantiser stores each matrix in, by the name that a file goes by (Q4_K_M).

A name is of a mix, not of one format: the head keeps more bits, and so do the matrices whose errors
hurt most, in all layers or in some of them. The rules are those of ``llama_tensor_get_type`` in
``llama-quant.cpp`` (2026): without an importance matrix, but for the mixes of 1 to 3 bits whose
files it does not write without one (iq1_s to iq3_xxs). They stand here alone, by the roles of
matrices: the planner finds these by Hugging Face's names of modules (``mixed_modules``), and
``engine.quantise.targets`` by names of GGUF tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ridgeline.model.cost.shapes import Matrix, ModelShape

# What a matrix is for. "value" is a projection to values, alone or in one matrix with those to keys
# and queries; "up" leads into a network (up and gate), "down" and "out" out of it and of attention.
Role = Literal["embedding", "head", "query", "key", "value", "up", "down", "out", "other"]

_BLOCK = 256  # weights; a row that is no multiple of it is stored in smaller blocks
_SMALL_BLOCK = 32
_SMALL_FORMATS = {
    "q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0",
    **dict.fromkeys(
        ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq4_xs"), "iq4_nl"
    ),
}  # fmt: skip
_MANY_SHARE = 4  # queries that share a key and value, or experts beside it: values are small then
_LAYERS_OF_70B, _SHARE_OF_70B, _EXPERTS_OF_MIXTRAL = 80, 8, 8  # models that have rules of their own


class _At(NamedTuple):
    """Which layer it is, of how many; what else rules ask of a model (see ``Mix``)."""

    layer: int
    num: int
    per_key: int
    num_experts: int
    num_down: int

    @property
    def is_sensitive(self) -> bool:
        """Whether it keeps more bits in mixes that end in M: at both ends, and each third."""
        eighth = self.num // 8
        is_end = self.layer < eighth or self.layer >= 7 * self.num // 8
        return is_end or (self.layer - eighth) % 3 == 2


_Rule = Callable[[_At], str]  # the format of a matrix; "" is the mix's own


def _own(at: _At) -> str:
    return ""


def _always(name: str) -> _Rule:
    return lambda at: name


def _where_sensitive(name: str) -> _Rule:
    return lambda at: name if at.is_sensitive else ""


def _where_shared(name: str, else_name: str = "") -> _Rule:
    return lambda at: name if at.per_key >= _MANY_SHARE else else_name


def _where_small(name: str, else_name: str) -> _Rule:
    return lambda at: name if max(at.per_key, at.num_experts) >= _MANY_SHARE else else_name


def _first_tensors(name: str) -> _Rule:
    """Return a rule for as many tensors as an eighth has layers, in whatever layers they are."""
    return lambda at: name if at.layer * at.num_down < at.num // 8 else ""


def _middle(name: str) -> _Rule:
    return lambda at: name if at.num // 8 <= at.layer < 7 * at.num // 8 else ""


def _first_part_or_sensitive_of_8(at: _At) -> str:
    has_8 = at.num_experts == _EXPERTS_OF_MIXTRAL
    return "q4_k" if at.layer < at.num // 8 or (has_8 and at.is_sensitive) else ""


def _first(num: int, name: str, else_name: str = "") -> _Rule:
    return lambda at: name if at.layer < num else else_name


def _first_part(parts: int, name: str, else_name: str = "") -> _Rule:
    return lambda at: name if at.layer < at.num // parts else else_name


@dataclass(frozen=True, slots=True)
class _Rules:
    """A mix.

    Attributes:
        base: of most matrices.
        value, down, out, up: of matrices with these roles.
        head: of the head, or of the embedding that is the head.
        out_of_8: of "out" where there are 8 experts.
        embedding: of one that is not the head; empty as most matrices.
        query: of queries, and of keys; empty as most matrices.
        attention_of_8: of keys and values where there are 8 experts.
        value_of_70b: of values of a 70B that would have 3 or 4 bits; empty if they keep them.
        beside_experts: of all but experts; empty if they are as others.
    """

    base: str
    value: _Rule = _own
    down: _Rule = _own
    out: _Rule = _own
    head: str = "q6_k"
    out_of_8: str = ""
    embedding: str = ""
    query: str = ""
    up: _Rule = _own
    attention_of_8: str = "q8_0"
    value_of_70b: str = "q5_k"
    beside_experts: str = ""


def _of_1_or_2_bits(base: str, wider: str, out: str, embedding: str) -> _Rules:
    """Return a mix with an importance matrix whose more sensitive parts are ``wider``."""
    return _Rules(
        base,
        _where_small("q4_k", wider),
        _first_tensors(wider),
        _always(out) if out else _own,
        head="q5_k",
        out_of_8="q5_k",
        embedding=embedding,
        attention_of_8="q4_k",
        value_of_70b="",
    )


_RULES: Mapping[str, _Rules] = {
    "iq1_s": _of_1_or_2_bits("iq1_s", "q2_k", "iq2_xxs", "q2_k"),
    "iq1_m": _of_1_or_2_bits("iq1_m", "q2_k", "iq2_xxs", "q2_k"),
    "iq2_xxs": _of_1_or_2_bits("iq2_xxs", "q2_k", "", "q2_k"),
    "iq2_xs": _of_1_or_2_bits("iq2_xs", "q2_k", "", "q2_k"),
    "iq2_s": _of_1_or_2_bits("iq2_xs", "iq3_s", "iq3_s", "iq3_s"),
    "iq2_m": _of_1_or_2_bits("iq2_s", "iq3_s", "iq3_s", "iq3_s"),
    "iq3_xxs": _Rules(
        "iq3_xxs",
        _where_shared("q4_k"),
        out=_always("iq3_s"),
        head="q5_k",
        out_of_8="q5_k",
        embedding="iq3_s",
        query="iq2_s",
    ),
    "iq3_xs": _Rules(
        "iq3_s", _where_shared("q4_k"), out_of_8="q5_k", query="iq3_xxs", up=_middle("iq3_xxs")
    ),
    "iq3_s": _Rules("iq3_s", _where_shared("q4_k"), out_of_8="q5_k"),
    "iq3_m": _Rules(
        "iq3_s", _always("q4_k"), _first_part_or_sensitive_of_8, _always("q4_k"), out_of_8="q5_k"
    ),
    "q2_k": _Rules(
        "q2_k", _where_shared("q4_k", "q3_k"), _always("q3_k"), _always("q3_k"), out_of_8="q5_k"
    ),
    "q2_k_s": _Rules("q2_k", _where_shared("q4_k"), _first_part(8, "q4_k")),
    "q3_k_s": _Rules("q3_k", out_of_8="q5_k"),
    "q3_k_m": _Rules(
        "q3_k",
        _first(2, "q5_k", "q4_k"),
        _first_part(16, "q5_k", "q4_k"),
        _always("q4_k"),
        out_of_8="q5_k",
    ),
    "q3_k_l": _Rules("q3_k", _always("q5_k"), _always("q5_k"), _always("q5_k")),
    "q4_0": _Rules("q4_0"),
    "q4_1": _Rules("q4_1"),
    "q4_k_s": _Rules("q4_k", _first(4, "q5_k"), _first_part(8, "q5_k"), out_of_8="q5_k"),
    "q4_k_m": _Rules("q4_k", _where_sensitive("q6_k"), _where_sensitive("q6_k"), out_of_8="q5_k"),
    "q5_0": _Rules("q5_0"),
    "q5_1": _Rules("q5_1"),
    "q5_k_s": _Rules("q5_k"),
    "q5_k_m": _Rules("q5_k", _where_sensitive("q6_k"), _where_sensitive("q6_k")),
    "q6_k": _Rules("q6_k"),
    "q8_0": _Rules("q8_0", head="q8_0"),
    "iq4_nl": _Rules("iq4_nl", _where_shared("q5_k"), _first_part(8, "q5_k"), out_of_8="q5_k"),
    "iq4_xs": _Rules("iq4_xs", _where_shared("q5_k"), _first_part(8, "q5_k"), out_of_8="q5_k"),
    "mxfp4_moe": _Rules("mxfp4", head="q8_0", beside_experts="q8_0"),
}
# What people call a mix without its letter.
MIX_NAMES = {"q3_k": "q3_k_m", "q4_k": "q4_k_m", "q5_k": "q5_k_m"}
MIXES: Mapping[str, str] = {name: rules.base for name, rules in _RULES.items()}  # to most's format


@dataclass(frozen=True, slots=True)
class Mix:
    """A mix, for one model.

    Attributes:
        name: one of ``MIXES``.
        num_layers: of the model.
        per_key: queries that share a key.
        num_experts: of a layer; 1 without any.
        is_tied: the head is the embedding.
        num_down: matrices that lead out of a layer's networks: 2 with a shared expert.
    """

    name: str
    num_layers: int
    per_key: int = 1
    num_experts: int = 1
    is_tied: bool = False
    num_down: int = 1

    def format_of(self, role: Role, layer: int, columns: int, *, is_expert: bool = False) -> str:
        """Return the name of the format of a matrix that is converted.

        Args:
            role: what it is for.
            layer: its number, from 0; any for a matrix outside of layers.
            columns: its inputs. Where no block divides them the name is f16.
            is_expert: it is one of several, of which a token uses some.
        """
        rules = _RULES[self.name]
        if rules.beside_experts and not is_expert:
            name = rules.beside_experts
        else:
            name = self._by_role(rules, role, layer) or rules.base
        if columns % _BLOCK:
            is_head = role == "head" or (role == "embedding" and self.is_tied)
            name = "q8_0" if is_head else _SMALL_FORMATS.get(name, name)
        return name if columns % _SMALL_BLOCK == 0 else "f16"

    def _by_role(self, rules: _Rules, role: Role, layer: int) -> str:
        """Return the format that a rule gives to matrices of a role; empty if none does."""
        at = _At(
            layer=layer,
            num=self.num_layers,
            per_key=self.per_key,
            num_experts=self.num_experts,
            num_down=self.num_down,
        )
        has_8 = self.num_experts == _EXPERTS_OF_MIXTRAL
        match role:
            case "head":
                return rules.head
            case "embedding":
                return rules.head if self.is_tied else rules.embedding
            case "value" | "key" if has_8:
                return rules.attention_of_8
            case "query" | "key":
                return rules.query
            case "value":
                name = rules.value(at)
                is_70b = (self.num_layers, self.per_key) == (_LAYERS_OF_70B, _SHARE_OF_70B)
                is_narrow = is_70b and (name or rules.base) in ("q3_k", "q4_k")
                return (rules.value_of_70b or name) if is_narrow else name
            case "up":
                return rules.up(at)
            case "down":
                return rules.down(at)
            case "out":
                return rules.out_of_8 if has_8 else rules.out(at)
        return ""


# --- by Hugging Face's names of modules ---------------------------------------------------------

# Last steps of names. What is not here is of no role: routers, projections of states and so on.
_ROLES: dict[str, Role] = {
    "embed_tokens": "embedding",
    "embed_tokens_per_layer": "embedding",
    "lm_head": "head",
    "q_proj": "query",
    "k_proj": "key",
    "v_proj": "value",
    "kv_b_proj": "value",
    "qkv": "value",
    "up_proj": "up",
    "gate_proj": "up",
    "down_proj": "down",
    "o_proj": "out",
}
_FUSED = ("q_proj", "k_proj", "v_proj")
_KEPT = "per_layer_model_projection"  # the one matrix that converters leave in 16 bits


@dataclass(frozen=True, slots=True)
class MixedModules:
    """The modules of a model in a mix.

    Attributes:
        mix: the rules, for this model.
        fused_qkv: files have queries, keys and values of a layer in one matrix.
    """

    mix: Mix
    fused_qkv: bool

    def format_of(self, full_name: str, matrix: Matrix) -> str:
        """Return the name of the format of a matrix; f32 or bf16 for what is never converted."""
        steps = full_name.split(".")
        role = _ROLES.get(steps[-1], "other")
        if self.fused_qkv and steps[-1] in _FUSED:
            role = "value"
        if not (matrix.linear or role == "embedding"):
            return "f32"
        if steps[-1] == _KEPT:
            return "bf16"
        layer = int(steps[steps.index("layers") + 1]) if "layers" in steps else 0
        return self.mix.format_of(role, layer, matrix.columns, is_expert=matrix.copies > 1)


def mixed_modules(name: str, shape: ModelShape) -> MixedModules:
    """Return what the modules of a model are in a mix of ``MIXES``."""
    return MixedModules(mix_of(name, shape), shape.fused_qkv)


def mix_of(name: str, shape: ModelShape) -> Mix:
    """Return a mix of ``MIXES`` for a model."""
    copies = (matrix.copies for layer in shape.layers for matrix in layer.matrices)
    downs = (
        sum(matrix.name.endswith(".down_proj") for matrix in layer.matrices)
        for layer in shape.layers
    )
    return Mix(
        name,
        num_layers=len(shape.layers),
        per_key=shape.num_heads // max(1, shape.num_kv_heads),
        num_experts=max(copies, default=1),
        is_tied=shape.is_tied,
        num_down=max(1, *downs),
    )
