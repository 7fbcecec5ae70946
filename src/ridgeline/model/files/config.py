"""Values of a model's configuration, read with type and range checked.

A configuration comes from a stranger: a list where a number belongs, a count of 10**18 or a NaN
must end in one clear line. This module does not know which keys mean what.
"""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ridgeline.model.files.tensors import ModelFileError

_MAX_INTEGER = 2**31 - 1
_MAX_NUMBER = 1e15


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """A mapping of strangers' values with typed access.

    A key that is absent or null gives the default; without a default it is an error.

    Attributes:
        values: as parsed.
        where: the file, for messages.
        prefix: put before each key.
        tensors: names of the tensors beside the configuration.
        read_keys: keys that were asked for.
        names: keys by which the file itself says something, if they are not the usual ones.
        beyond: what no config.json can say, by names of our own: see ``families.gguf_config``.
    """

    values: Mapping[str, Any]
    where: str
    prefix: str = ""
    tensors: Collection[str] = ()
    read_keys: set[str] = field(default_factory=set, compare=False)
    names: Mapping[str, str] = field(default_factory=dict)
    beyond: Mapping[str, Any] = field(default_factory=dict)

    def fail(self, problem: str) -> NoReturn:
        """Raise ModelFileError with the file's name in front of ``problem``."""
        raise ModelFileError(f"{self.where}: {problem}")

    def name(self, key: str) -> str:
        """Return what the file itself calls a key, for messages."""
        return self.prefix + self.names.get(key, key)

    def get(self, key: str) -> Any:
        """Return the value as it is, None where it is absent."""
        self.read_keys.add(self.prefix + key)
        return self.values.get(self.prefix + key)

    def has(self, key: str) -> bool:
        """Return whether the key is there, if only as null."""
        return self.prefix + key in self.values

    def is_null(self, key: str) -> bool:
        """Return whether the key is there, and null."""
        return self.get(key) is None and self.has(key)

    def integer(self, key: str, default: int | None = None, *, low: int = 1) -> int:
        """Return an integer of at least ``low`` that a 32-bit size can hold; 4096.0 is one."""
        value = self._required(key, default)
        if type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= _MAX_INTEGER:
            self._refuse(key, value, f"an integer from {low} to {_MAX_INTEGER}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive, finite number."""
        value = self._required(key, default)
        if type(value) not in (int, float) or not 0 < value <= _MAX_NUMBER:
            self._refuse(key, value, "a positive number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._required(key, default)
        if type(value) is not bool:
            self._refuse(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """Return a string."""
        value = self._required(key, default)
        if type(value) is not str:
            self._refuse(key, value, "a string")
        return value

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        """Return a list of ``count`` positive, finite numbers."""
        value = self._required(key, None)
        if type(value) is not list or len(value) != count:
            self._refuse(key, value, f"a list of {count} numbers")
        return positive(value, f"{self.where}: {self.name(key)}")

    def _required(self, key: str, default: Any) -> Any:
        value = self.get(key)
        value = default if value is None else value
        if value is None:
            self.fail(f"{self.name(key)} is missing")
        return value

    def _refuse(self, key: str, value: Any, wanted: str) -> NoReturn:
        self.fail(f"{self.name(key)} is {reprlib.repr(value)}, not {wanted}")


def positive(values: list[Any], name: str) -> tuple[float, ...]:
    """Return ``values`` as floats; raise ModelFileError unless all are positive and finite."""
    for i, value in enumerate(values):
        if type(value) not in (int, float) or not 0 < value <= _MAX_NUMBER:
            raise ModelFileError(f"{name}[{i}] is {reprlib.repr(value)}, not a positive number")
    return tuple(float(value) for value in values)
