"""Kernels and the words that they read: both are named once, and used by name.

Between kernels everything is a 64-bit integer, so two arguments in the wrong order would be a write
to anywhere. A ``Kernel`` therefore declares its parameters once and is called by keyword, which is
checked when the call is emitted. Its body gets the parameters in the order of the declaration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ridgeline.backends.cpu.kernels.ir import F64, I64, Function, Operand, Value


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled function of 64-bit integers: its name, and those of its parameters."""

    name: str
    parameters: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check that no parameter occurs twice.

        Raises:
            TypeError: one does.
        """
        for parameter, count in Counter(self.parameters).items():
            if count > 1:
                raise TypeError(f"kernel {self.name} declares {parameter} {count} times")

    def of(self, number: int) -> Kernel:
        """Return the kernel of the same name that a module has for its ``number``-th shape."""
        return Kernel(f"{self.name}.{number}", self.parameters) if number else self

    def begin(self, module: object, new: type[Function] = Function) -> Function:
        """Begin to emit it; ``args`` of the result are its parameters, in the declared order."""
        return new(module, self.name, len(self.parameters))

    def call(self, fn: Function, /, **arguments: Operand) -> None:
        """Emit a call from ``fn`` with an argument for each parameter.

        Raises:
            TypeError: an argument is missing, or belongs to no parameter.
        """
        for name in arguments:
            if name not in self.parameters:
                names = ", ".join(self.parameters)
                raise TypeError(f"kernel {self.name} has no parameter {name}; it has: {names}")
        for parameter in self.parameters:
            if parameter not in arguments:
                raise TypeError(f"kernel {self.name} is called without {parameter}")
        fn.call(self.name, *(arguments[parameter] for parameter in self.parameters))


class Words:
    """An array of 64-bit words in memory, by name."""

    def __init__(self, fn: Function, base: Value, names: Sequence[str]) -> None:
        """See the words ``names`` at the address ``base``."""
        self._fn = fn
        self._base = base
        self._names = names

    def __getitem__(self, name: str) -> Value:
        return self._fn.load(self.address(name), I64, 8)

    def double(self, name: str) -> Value:
        """Return a word that is an f64."""
        return self._fn.load(self.address(name), F64, 8)

    def address(self, name: str) -> Value:
        """Return where a word is."""
        return self._base + 8 * self._names.index(name)
