"""What an answer shows, read from a file that anybody may have written: texts, thoughts and calls.

It is read strictly, in the form of each API, whole or as a stream. What is no part of a message
must be a field that the API has there: what can be compared with a receipt is, and the rest is
named as told by the server alone. All else is odd: no receipt is about it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class ShownRun(NamedTuple):
    """A piece of a message: content, reasoning or refusal, or a call with its arguments."""

    kind: str
    text: str
    arguments: str = ""


@dataclass
class ShownChoice:
    """One of the answers in a file.

    Attributes:
        runs: what it shows, in the order of the file.
        finish: why it ended, in OpenAI's words; None if that is not told.
        stop: what stopped it; None for nothing. ``tells_stop``: whether that would be told.
        num_tokens: of the answer, if that is told; ``num_prompt``: of its prompt.
        ids: of its tokens, if they are told.
        goes_on: whether something came after its end, where clients may have stopped reading.
    """

    runs: list[ShownRun] = field(default_factory=list)
    finish: str | None = None
    stop: str | int | None = None
    tells_stop: bool = False
    num_tokens: int | None = None
    num_prompt: int | None = None
    ids: list[int] | None = None
    goes_on: bool = False

    def grow(self, kind: str, text: str) -> None:
        """Add text to the last run, or to a new one if that is of another kind."""
        self.goes_on |= bool(text) and self.finish is not None
        if self.runs and self.runs[-1].kind == kind:
            self.runs[-1] = self.runs[-1]._replace(text=self.runs[-1].text + text)
        elif text:
            self.runs.append(ShownRun(kind, text))

    def call(self, name: str, arguments: str) -> None:
        """Begin a call."""
        self.goes_on |= self.finish is not None
        self.runs.append(ShownRun("call", name, arguments))


@dataclass
class ShownAnswer:
    """What a file shows beside its receipt.

    Attributes:
        style: of its API: how its texts are placed.
        choices: by their index.
        is_stream: whether they came piece by piece.
        is_ordered: whether texts, thoughts and calls stand in an order there.
        judged: places and values of what a receipt says too, by what that is.
        told: places of what only the server says.
        odd: places of what no receipt is about.
    """

    style: str = ""
    choices: dict[int, ShownChoice] = field(default_factory=dict)
    is_stream: bool = False
    is_ordered: bool = True
    judged: list[tuple[str, str, Any]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)

    def choice(self, index: object) -> ShownChoice:
        """Return the choice of an index."""
        return self.choices.setdefault(index if isinstance(index, int) else -1, ShownChoice())


class Fields:
    """The fields of an object, which are taken one by one; what is left is odd."""

    def __init__(self, shown: ShownAnswer, value: object, at: str = "") -> None:
        """Read ``value``, which stands ``at`` a place of what is ``shown``."""
        self._shown, self._at = shown, at
        self._left = dict(value) if isinstance(value, dict) else {}
        if not isinstance(value, dict):
            shown.odd.append(at or "the answer")

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def __bool__(self) -> bool:
        return bool(self._left)

    def names(self) -> list[str]:
        """Return what is left."""
        return list(self._left)

    def place(self, name: str) -> str:
        """Return where a field stands."""
        return f"{self._at}.{name}".removeprefix(".")

    def get(self, name: str) -> Any:
        """Take a field, of any kind."""
        return self._left.pop(name, None)

    def text(self, name: str) -> str:
        """Take a text, or null."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            self._shown.odd.append(self.place(name))
        return value if isinstance(value, str) else ""

    def same(self, name: str, *values: object) -> None:
        """Take what can only be one of some values, or be missing."""
        if name in self and not any(_is_same(self._left[name], one) for one in values):
            self._shown.odd.append(self.place(name))
        self.get(name)

    def must(self, name: str, value: object) -> None:
        """Take what must be there, and be this."""
        if name not in self:
            self._shown.odd.append(self.place(name))
        self.same(name, value)

    def told(self, *names: str) -> None:
        """Take what only the server says."""
        self._shown.told += [self.place(one) for one in names if self.get(one) is not None]

    def judged(self, **names: str) -> None:
        """Take what a receipt says too; ``names`` say what that is, by the fields."""
        for name, what in names.items():
            if name in self:
                self._shown.judged.append((self.place(name), what, self.get(name)))

    def each(self, name: str) -> Iterator[Fields]:
        """Take a list of objects."""
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            self._shown.odd.append(self.place(name))
        for i, one in enumerate(value if isinstance(value, list) else ()):
            yield Fields(self._shown, one, f"{self.place(name)}[{i}]")

    def one(self, name: str) -> Fields:
        """Take an object; null has no fields."""
        return Fields(self._shown, self.get(name) or {}, self.place(name))

    def end(self) -> None:
        """Say that nothing else may be there."""
        self._shown.odd += map(self.place, self._left)


def _is_same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other
