"""How one fact is read from a config: the words of the tables of families.

Each function below reads facts of one kind. In a table it stands with keys in place of a config:
``integer("head_dim", default=128)`` is a ``FieldReader``. There is a closed set of them, so tables
can be listed, checked and printed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NamedTuple

from ridgeline.model.files.config import ConfigReader

KINDS: dict[str, Callable[..., Any]] = {}  # the functions below, by name


class FieldReader(NamedTuple):
    """How a fact is read.

    Attributes:
        kind: the function that reads it.
        keys: in which it looks.
        options: of that function.
    """

    kind: str
    keys: tuple[str, ...]
    options: Mapping[str, Any]

    @property
    def outcomes(self) -> tuple[Any, ...]:
        """Every value that it may give; none where there are too many to name."""
        match self.kind:
            case "const":
                return (self.options["value"],)
            case "either" | "has":
                return (self.options["yes"], self.options["no"])
            case "choice" | "numbered":
                return tuple(self.options["among"].values())
        return ()

    def read(self, config: ConfigReader) -> Any:
        """Return the value. Raises ModelFileError if it is missing or of another type."""
        return KINDS[self.kind](config, *self.keys, **self.options)


def _of_keys(read: Callable[..., Any]) -> Callable[..., FieldReader]:
    """Make a word of a function that is given all keys."""
    kind = read.__name__
    KINDS[kind] = read

    @wraps(read)
    def word(*keys: str, **options: Any) -> FieldReader:
        return FieldReader(kind, keys, options)

    return word


def _of_first(read: Callable[..., Any]) -> Callable[..., FieldReader]:
    """Make a word of a function that is given the first of some keys which the config has."""

    @wraps(read)
    def read_first(config: ConfigReader, *keys: str, **options: Any) -> Any:
        return read(config, _first(config, keys) or keys[0], **options)

    return _of_keys(read_first)


def _first(config: ConfigReader, keys: tuple[str, ...]) -> str | None:
    return next((key for key in keys if config.get(key) is not None), None)


def const(value: Any) -> FieldReader:
    """The same for every model of the family."""
    return FieldReader("const", (), {"value": value})


KINDS["const"] = lambda config, value: value


def has(tensor: str, *, yes: Any = True, no: Any = False) -> FieldReader:
    """Whether the file has a tensor whose name ends so, put into our words."""
    return FieldReader("has", (), {"tensor": tensor, "yes": yes, "no": no})


KINDS["has"] = lambda config, tensor, yes, no: yes if _has(config, tensor) else no


def _has(config: ConfigReader, tensor: str) -> bool:
    return any(name.endswith(tensor) for name in config.tensors)


@_of_keys
def integer(
    config: ConfigReader, *keys: str, default: int | None = None, times_hidden: int = 0
) -> int:
    """A whole number of at least 1; where it is missing, a multiple of the hidden size."""
    key = _first(config, keys)
    if key is None and times_hidden:
        return times_hidden * config.integer("hidden_size")
    return config.integer(key or " or ".join(keys), default)


@_of_first
def number(config: ConfigReader, key: str, *, default: float | None = None) -> float:
    """A positive number."""
    return config.number(key, default)


@_of_first
def cap(config: ConfigReader, key: str, *, default: float) -> float:
    """A positive number; 0, which caps nothing, where a file says null."""
    return 0.0 if config.is_null(key) else config.number(key, default)


@_of_first
def count(config: ConfigReader, key: str) -> int:
    """A whole number; 0 where it is missing."""
    return config.integer(key, 0, low=0)


@_of_first
def optional(config: ConfigReader, key: str) -> float:
    """A positive number; 0 where it is missing."""
    return config.number(key) if config.get(key) else 0.0


@_of_first
def numbers(config: ConfigReader, key: str, *, default: tuple[float, ...]) -> tuple[float, ...]:
    """A list of positive numbers, as many as there are by default."""
    return default if config.get(key) is None else config.numbers(key, len(default))


@_of_first
def flag(config: ConfigReader, key: str, *, default: bool = False) -> bool:
    """True or false. As transformers reads it, null is no default but false."""
    return config.flag(key, False if config.is_null(key) else default)


@_of_first
def either(config: ConfigReader, key: str, *, yes: Any, no: Any, default: bool = False) -> Any:
    """True or false, put into our words."""
    return yes if config.flag(key, default) else no


@_of_first
def unless(config: ConfigReader, key: str) -> bool:
    """True unless a key is."""
    return not config.flag(key, False)


@_of_first
def choice(
    config: ConfigReader, key: str, *, among: Mapping[str, Any], default: str | None = None
) -> Any:
    """A word, put into our words."""
    word = config.text(key, default)
    if word not in among:
        names = ", ".join(among)
        config.fail(f"{config.name(key)} {word!r} is not supported; supported: {names}")
    return among[word]


@_of_first
def numbered(
    config: ConfigReader, key: str, *, among: Mapping[int, str], default: int, must_beside: str = ""
) -> str:
    """A number, put into our words; beside a tensor whose name ends so, the file must have it."""
    must = must_beside and _has(config, must_beside)
    number = config.integer(key, None if must else default)
    if number not in among:
        numbers = ", ".join(map(str, among))
        config.fail(f"{config.name(key)} {number} is not supported; supported: {numbers}")
    return among[number]


@_of_keys
def quotient(config: ConfigReader, size: str, by: str) -> int:
    """A whole number, divided by another that divides it."""
    whole, parts = config.integer(size), config.integer(by)
    if whole % parts:
        config.fail(f"{config.name(size)} is {whole}, which {parts} ({by}) does not divide")
    return whole // parts


@_of_first
def same(config: ConfigReader, key: str, *, other: str) -> int:
    """A whole number that another key, if it is there, must say too."""
    value, said = config.integer(key), config.get(other)
    if said not in (None, value):
        config.fail(f"{config.name(other)} is {said}, but {key} {value}, which is not supported")
    return value


@_of_first
def power(
    config: ConfigReader, key: str, *, exponent: float, default: float | None = None
) -> float:
    """A number, raised to a power."""
    return float(config.number(key, default) ** exponent)


@_of_first
def inverse(config: ConfigReader, key: str, *, default: float | None = None) -> float:
    """One over a number."""
    return 1.0 / config.number(key, default)


@_of_keys
def adjusted(config: ConfigReader, *keys: str) -> int:
    """An MLP's width as LFM2's configs say it: two thirds of a number, rounded up."""
    size = config.integer(_first(config, keys) or " or ".join(keys))
    is_wide = config.flag("block_auto_adjust_ff_dim", True)
    factor = config.number("block_ffn_dim_multiplier", 1.0)
    multiple = config.integer("block_multiple_of", 256)
    return -(-int(factor * int(2 * size / 3)) // multiple) * multiple if is_wide else size


@_of_keys
def total(config: ConfigReader, *keys: str) -> int:
    """A sum of whole numbers."""
    return sum(config.integer(key) for key in keys)


@_of_keys
def product(config: ConfigReader, count: str, size: str) -> int:
    """A whole number times another; 0 where the first is missing."""
    return config.integer(count, 0, low=0) * config.integer(size)


@_of_first
def groups(config: ConfigReader, key: str) -> int:
    """A number of groups of experts; 1 where it is missing, or where they play no part."""
    return config.integer(key, 1) if config.text("topk_method", "") != "greedy" else 1


@_of_first
def rank(config: ConfigReader, key: str) -> int:
    """A whole number; a sixteenth of the hidden size, rounded up, where none is said."""
    if config.get(key) in (None, "auto"):
        return -(-config.integer("hidden_size") // 16)
    return config.integer(key)


@_of_first
def slopes(config: ConfigReader, key: str, *, largest: str) -> tuple[float, ...]:
    """The slopes of a number of heads; another key says the largest exponent, else it is 8.

    They are powers of two in even steps; heads beyond a power of two stand between the first.
    """
    num_heads, exponent = config.integer(key), config.number(largest, 8.0)
    whole = 1 << (num_heads.bit_length() - 1)
    steps = [float(i) for i in range(1, whole + 1)]
    steps += [i + 0.5 for i in range(num_heads - whole)]
    return tuple(2.0 ** (-exponent * step / whole) for step in steps)
