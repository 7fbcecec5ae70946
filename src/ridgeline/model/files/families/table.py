"""What a family's name implies, as data: where facts and tensors stand, and how they are read.

A ``FactReader`` says how one fact is read from a config; there is a closed set of them, so tables
can be listed, checked and printed. This module opens no file and names no family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ridgeline.model.files.facts import Facts


class FactReader(NamedTuple):
    """How a fact is read: "const", a typed value of the first key there is, or made of one."""

    how: Literal[
        "const",
        "integer",
        "number",
        "cap",
        "numbers",
        "flag",
        "either",
        "count",
        "optional",
        "unless",
        "quotient",
        "same",
        "choice",
        "power",
        "inverse",
        "bias",
        "adjusted",
        "total",
        "product",
        "groups",
        "numbered",
        "slopes",
        "rank",
    ]
    keys: tuple[str, ...] = ()
    default: Any = None
    argument: Any = None

    @property
    def outcomes(self) -> tuple[Any, ...]:
        """Every value that it may give; none where there are too many to name."""
        match self.how:
            case "const":
                return (self.argument,)
            case "either":
                return tuple(self.argument)
            case "bias":
                return tuple(self.argument[1:])
            case "choice":
                return tuple(self.argument.values())
            case "numbered":
                return tuple(self.argument[0].values())
        return ()

    def read(self, facts: Facts) -> Any:
        """Return the value. Raises ModelFileError if it is missing or of another type."""
        wanted = self.keys if self.how in ("integer", "adjusted") else self.keys[:1]
        key = next((key for key in self.keys if facts.get(key) is not None), " or ".join(wanted))
        match self.how:
            case "const":
                return self.argument
            case "integer":
                if self.argument and facts.get(key) is None:
                    return self.argument * facts.integer("hidden_size")
                return facts.integer(key, self.default)
            case "number":
                return facts.number(key, self.default)
            case "cap":
                return 0.0 if facts.is_null(key) else facts.number(key, self.default)
            case "numbers":
                numbers = facts.get(key)
                return self.default if numbers is None else facts.numbers(key, len(self.default))
            case "count":
                return facts.integer(key, 0, low=0)
            case "optional":
                return facts.number(key) if facts.get(key) else 0.0
            case "flag":
                # As transformers reads it, null is no default but false.
                return facts.flag(key, False if facts.is_null(key) else self.default)
            case "either":
                yes, no = self.argument
                return yes if facts.flag(key, self.default) else no
            case "quotient":
                return _quotient(facts, *self.keys)
            case "same":
                return _same(facts, key, self.argument)
            case "unless":
                return not facts.flag(key, False)
            case "power":
                return facts.number(key, self.default) ** self.argument
            case "inverse":
                return 1.0 / facts.number(key, self.default)
            case "adjusted":
                return _adjusted(facts, key)
            case "bias":
                tensor, yes, no = self.argument
                return yes if any(name.endswith(tensor) for name in facts.tensors) else no
            case "total":
                return sum(facts.integer(key) for key in self.keys)
            case "product":
                return facts.integer(self.keys[0], 0, low=0) * facts.integer(self.keys[1])
            case "groups":
                limits = facts.text("topk_method", "") != "greedy"
                return facts.integer(key, 1) if limits else 1
            case "rank":
                said = facts.get(key)
                if said in (None, "auto"):
                    return -(-facts.integer("hidden_size") // 16)
                return facts.integer(key)
            case "slopes":
                return _slopes(facts.integer(key), facts.number(self.argument, 8.0))
            case "numbered":
                among, tensor = self.argument
                must = tensor and any(name.endswith(tensor) for name in facts.tensors)
                number = facts.integer(key, None if must else self.default)
                if number not in among:
                    known = ", ".join(map(str, among))
                    facts.fail(f"{facts.prefix}{key} {number} is not supported; supported: {known}")
                return among[number]
            case "choice":
                choice = facts.text(key, self.default)
                if choice not in self.argument:
                    known = ", ".join(self.argument)
                    facts.fail(
                        f"{facts.prefix}{key} {choice!r} is not supported; supported: {known}"
                    )
                return self.argument[choice]


def const(value: Any) -> FactReader:
    """The same for every model of the family."""
    return FactReader("const", argument=value)


def integer(*keys: str, default: int | None = None, times_hidden: int = 0) -> FactReader:
    """A whole number of at least 1; where it is missing, a multiple of the hidden size."""
    return FactReader("integer", keys, default, times_hidden)


def number(*keys: str, default: float | None = None) -> FactReader:
    """A positive number."""
    return FactReader("number", keys, default)


def cap(key: str, *, default: float) -> FactReader:
    """A positive number; 0, which caps nothing, where a file says null."""
    return FactReader("cap", (key,), default)


def count(*keys: str) -> FactReader:
    """A whole number; 0 where it is missing."""
    return FactReader("count", keys)


def optional(*keys: str) -> FactReader:
    """A positive number; 0 where it is missing."""
    return FactReader("optional", keys)


def numbers(key: str, *, default: tuple[float, ...]) -> FactReader:
    """A list of positive numbers, as many as there are by default."""
    return FactReader("numbers", (key,), default)


def flag(*keys: str, default: bool = False) -> FactReader:
    """True or false."""
    return FactReader("flag", keys, default)


def either(key: str, *, yes: Any, no: Any, default: bool = False) -> FactReader:
    """True or false, put into our words."""
    return FactReader("either", (key,), default, (yes, no))


def unless(key: str) -> FactReader:
    """True unless a key is."""
    return FactReader("unless", (key,))


def choice(*keys: str, among: Mapping[str, Any], default: str | None = None) -> FactReader:
    """A word, put into our words."""
    return FactReader("choice", keys, default, among)


def quotient(key: str, by: str) -> FactReader:
    """A whole number, divided by another that divides it."""
    return FactReader("quotient", (key, by))


def _quotient(facts: Facts, key: str, by: str) -> int:
    whole, parts = facts.integer(key), facts.integer(by)
    if whole % parts:
        facts.fail(f"{facts.prefix}{key} is {whole}, which {parts} ({by}) does not divide")
    return whole // parts


def same(key: str, other: str) -> FactReader:
    """A whole number that another key, if it is there, must say too."""
    return FactReader("same", (key,), argument=other)


def _same(facts: Facts, key: str, other: str) -> int:
    value, said = facts.integer(key), facts.get(other)
    if said not in (None, value):
        facts.fail(f"{facts.prefix}{other} is {said}, but {key} {value}, which is not supported")
    return value


def power(key: str, exponent: float, default: float | None = None) -> FactReader:
    """A number, raised to a power."""
    return FactReader("power", (key,), default, exponent)


def inverse(key: str, default: float | None = None) -> FactReader:
    """One over a number."""
    return FactReader("inverse", (key,), default)


def adjusted(*keys: str) -> FactReader:
    """An MLP's width as LFM2's configs say it: two thirds of a number, rounded up."""
    return FactReader("adjusted", keys)


def _adjusted(facts: Facts, key: str) -> int:
    size = facts.integer(key)
    is_wide = facts.flag("block_auto_adjust_ff_dim", True)
    factor = facts.number("block_ffn_dim_multiplier", 1.0)
    multiple = facts.integer("block_multiple_of", 256)
    return -(-int(factor * int(2 * size / 3)) // multiple) * multiple if is_wide else size


def has(tensor: str, *, yes: Any = True, no: Any = False) -> FactReader:
    """Whether the file has a tensor whose name ends so, put into our words."""
    return FactReader("bias", argument=(tensor, yes, no))


def total(*keys: str) -> FactReader:
    """A sum of whole numbers."""
    return FactReader("total", keys)


def product(count: str, size: str) -> FactReader:
    """A whole number times another; 0 where the first is missing."""
    return FactReader("product", (count, size))


def groups(key: str) -> FactReader:
    """A number of groups of experts; 1 where it is missing, or where they play no part."""
    return FactReader("groups", (key,))


def numbered(
    key: str, *, among: Mapping[int, str], default: int, must_beside: str = ""
) -> FactReader:
    """A number, put into our words; beside a tensor whose name ends so, the file must have it."""
    return FactReader("numbered", (key,), default, (among, must_beside))


def slopes(num_heads: str, largest: str) -> FactReader:
    """The slopes of a number of heads; the second key says the largest exponent, else it is 8."""
    return FactReader("slopes", (num_heads,), argument=largest)


def rank(key: str) -> FactReader:
    """A whole number; a sixteenth of the hidden size, rounded up, where none is said."""
    return FactReader("rank", (key,))


def _slopes(num_heads: int, largest: float) -> tuple[float, ...]:
    """Return powers of two in even steps; heads beyond a power of two stand between the first."""
    whole = 1 << (num_heads.bit_length() - 1)
    steps = [float(i) for i in range(1, whole + 1)]
    steps += [i + 0.5 for i in range(num_heads - whole)]
    return tuple(2.0 ** (-largest * step / whole) for step in steps)


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models.

    Attributes:
        outer: canonical names before and behind the layers to the file's; ``{}`` stands for the
            last layer's number. "types" is an embedding of kinds of tokens, added to positions;
            "embed_norm" is a norm of the embedding's rows.
        layer: canonical name within a layer to the file's; ``{e}`` stands for an expert's number.
            What begins with ``../`` stands in the layer before.
        instead: canonical name within a layer to the name that some files have for it.
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
        lacks_root: canonical names within a layer whose values lack a division by the square root
            of the hidden size.
        interleaved: rows of q and k are stored for rotating neighbours instead of halves.
        recurrent: what keeps a state in layers that ``layer_types`` does not call attention.
        beside: it stands beside attention instead, in every layer.
        by_halves: each layer of a file is half of one of ours: see ``halves``.
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
        others: prefixes of names of tensors that are not used.
        refuse: keys that change what a model computes, and that are refused if they are set. What
            they change of sizes is read all the same, for counting.
        unused: keys that stand in files of the family and that no model of it goes by.
        must: keys that have no other value, if they are there.
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
    facts: Mapping[str, FactReader]
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
    lacks_root: tuple[str, ...] = ()
    interleaved: bool = False
    recurrent: Literal["", "conv", "delta", "ssm"] = ""
    beside: bool = False
    by_halves: bool = False
    attention_layers: str = ""
    decays: bool = False
    has_experts: bool = False
    gates_by_turns: bool = False
    experts_turned: bool = False
    spare_positions: int = 0
    num_segments: int = 1
    instead: Mapping[str, str] = field(default_factory=dict)
    transposed: bool = False
    heads_inside: bool = False
    defaults: Mapping[str, Any] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    refuse: tuple[str, ...] = ()
    first_norms: Literal["", "before mlp"] = ""
    wide_scale_layers: tuple[int, ...] = ()
    dense_layers: str = ""
    experts_every: str = ""
    unused: tuple[str, ...] = ()
    must: Mapping[str, Any] = field(default_factory=dict)

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
        return fact in self.facts and not set(self.facts[fact].keys) & {*self.refuse}

    def read(self, facts: Facts) -> Parts:
        """Return the facts of all parts, such as "mixer"; those of the model by the name ""."""
        return Parts(self, facts)


class Parts:
    """The facts of a model by part, each part read once, when it is first asked for.

    So what a file does not say of a part that its model lacks is not missing.
    """

    def __init__(self, family: Family, facts: Facts) -> None:
        """Read nothing yet."""
        self._family, self._facts = family, facts
        self._read: dict[str, dict[str, Any]] = {}

    def __getitem__(self, part: str) -> dict[str, Any]:
        """Return the facts of a part. Raises ModelFileError for one that is wrong or missing."""
        if part not in self._read:
            self._read[part] = {}
            for name, reader in self._family.facts.items():
                where, _, fact = name.rpartition(".")
                if where == part:
                    self._read[part][fact] = reader.read(self._facts)
        return self._read[part]
