"""An answer as a list of items: thoughts, texts and calls. One is closed before the next begins.

The items are made of the deltas of a streamed answer (``response_builder``), so a streamed
answer and a whole one are the same. A dialect says how an item and its growth are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

_TEXTS = {  # by their fields
    "reasoning_content": "reasoning",
    "content": "text",
    "text": "text",
    "refusal": "text",
}


@dataclass
class Item:
    """A part of an answer.

    Attributes:
        kind: "reasoning", "text" or "call".
        index: its place among the items.
        call_id: of a call, else nothing.
        name: of the function that is called, else nothing.
        text: what has come of it so far; of a call, its arguments.
    """

    kind: str
    index: int
    call_id: str
    name: str
    text: str = ""


Change = tuple[Literal["begins", "grows", "ends"], Item, str]  # the text by which it grows


class Items:
    """The items of one answer."""

    def __init__(self) -> None:
        self.all: list[Item] = []
        self._is_open = False

    @property
    def open(self) -> Item | None:
        """The item that may still grow."""
        return self.all[-1] if self._is_open else None

    def texts(self, places: Mapping[tuple[str, str], str]) -> dict[str, str]:
        """Return what stands in the items, by its place in the answer.

        ``places`` has them by the kind of an item and the name of the attribute, with ``{}`` for
        the item's index.
        """
        return {
            place.format(item.index): getattr(item, name)
            for item in self.all
            for (kind, name), place in places.items()
            if kind == item.kind
        }

    def take(self, choice: dict[str, Any]) -> Iterator[Change]:
        """Put a delta into the items, and yield what changes, in order."""
        delta = choice.get("delta", choice)
        for field, kind in _TEXTS.items():
            if text := delta.get(field):
                yield from self.grow(kind, text)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "id" in call:
                yield from self._begin("call", call["id"], function["name"])
            if piece := function.get("arguments"):
                yield from self.grow("call", piece)
        if choice["finish_reason"]:
            yield from self._end()

    def grow(self, kind: str, text: str) -> Iterator[Change]:
        """Add text to the item that is open, or to a new one if that is of another kind."""
        if not self._is_open or self.all[-1].kind != kind:
            yield from self._begin(kind)
        self.all[-1].text += text
        yield "grows", self.all[-1], text

    def _begin(self, kind: str, call_id: str = "", name: str = "") -> Iterator[Change]:
        yield from self._end()
        self.all.append(Item(kind, len(self.all), call_id, name))
        self._is_open = True
        yield "begins", self.all[-1], ""

    def _end(self) -> Iterator[Change]:
        if self._is_open:
            self._is_open = False
            yield "ends", self.all[-1], ""
