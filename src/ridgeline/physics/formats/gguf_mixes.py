"""What llama.cpp's quantiser stores each matrix in, by the name that a file goes by (Q4_K_M).

A name is of a mix, not of one format: the head keeps more bits, and so do the matrices whose errors
hurt most, in all layers or in some of them. The rules are those of ``llama_tensor_get_type`` in
``llama-quant.cpp`` (2026) without an importance matrix. They stand here alone, by the roles of
matrices: the planner finds these by names of modules (``mixed_modules``), and ``quantise.targets``
by names of GGUF tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

# What a matrix is for. "value" is a projection to values, alone or in one matrix with those to keys
# and queries; "down" and "out" lead out of a network and out of attention.
Role = Literal["embedding", "head", "key", "value", "down", "out", "other"]

_BLOCK = 256  # weights; a row that is no multiple of it is stored in smaller blocks
_SMALL_BLOCK = 32
_SMALL_FORMATS = {
    "q2_k": "q4_0", "q3_k": "q4_0", "q4_k": "q5_0", "q5_k": "q5_1", "q6_k": "q8_0",
    "iq4_xs": "iq4_nl",
}  # fmt: skip
_MANY_SHARE = 4  # queries that share a key and value: then values are small
_LAYERS_OF_70B, _SHARE_OF_70B, _EXPERTS_OF_MIXTRAL = 80, 8, 8  # models that have rules of their own


class _At(NamedTuple):
    """Which layer it is, of how many, and how many queries share a key."""

    layer: int
    num: int
    per_key: int

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


def _first(num: int, name: str, else_name: str = "") -> _Rule:
    return lambda at: name if at.layer < num else else_name


def _first_part(parts: int, name: str, else_name: str = "") -> _Rule:
    return lambda at: name if at.layer < at.num // parts else else_name


@dataclass(frozen=True, slots=True)
class _Rules:
    """A mix.

    Attributes:
        base: of most matrices.
        value, down, out: of matrices with these roles.
        head: of the head, or of the embedding that is the head.
        out_of_8: of "out" where there are 8 experts.
    """

    base: str
    value: _Rule = _own
    down: _Rule = _own
    out: _Rule = _own
    head: str = "q6_k"
    out_of_8: str = ""


_RULES: Mapping[str, _Rules] = {
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
    """

    name: str
    num_layers: int
    per_key: int = 1
    num_experts: int = 1
    is_tied: bool = False

    def format_of(self, role: Role, layer: int, columns: int) -> str:
        """Return the name of the format of a matrix that is converted.

        Args:
            role: what it is for.
            layer: its number, from 0; any for a matrix outside of layers.
            columns: its inputs. Where no block divides them the name is f16.
        """
        rules = _RULES[self.name]
        name = self._by_role(rules, role, layer) or rules.base
        if name in _SMALL_FORMATS and columns % _BLOCK:
            name = _SMALL_FORMATS[name]
        return name if columns % _SMALL_BLOCK == 0 else "f16"

    def _by_role(self, rules: _Rules, role: Role, layer: int) -> str:
        """Return the format that a rule gives to matrices of a role; empty if none does."""
        at = _At(layer, self.num_layers, self.per_key)
        has_8 = self.num_experts == _EXPERTS_OF_MIXTRAL
        match role:
            case "head":
                return rules.head
            case "embedding":
                return rules.head if self.is_tied else ""
            case "value" | "key" if has_8:
                return "q8_0"
            case "value":
                name = rules.value(at)
                is_70b = (self.num_layers, self.per_key) == (_LAYERS_OF_70B, _SHARE_OF_70B)
                return "q5_k" if is_70b and (name or rules.base) in ("q3_k", "q4_k") else name
            case "down":
                return rules.down(at)
            case "out":
                return rules.out_of_8 if has_8 else rules.out(at)
        return ""
