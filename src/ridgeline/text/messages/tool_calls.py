"""One call of a tool, read as it is written: its name, then its arguments as JSON.

What is read here was written under a grammar (``messages.tool_grammar``), which fixes all but the
arguments. A reader is fed all text that it has not used so far, with what follows it. Where a value
ends is told by brackets and strings, no more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

_OPEN, _CLOSE = "{[", "}]"


class JsonScan:
    """Finds the end of one JSON value, of which at least the opening bracket is known to come."""

    def __init__(self) -> None:
        """Begin before the value."""
        self.is_over = False
        self._depth = 0
        self._in_string = self._is_escaped = False

    def feed(self, text: str) -> int:
        """Read on; return how many characters belong to the value."""
        for i, char in enumerate(text):
            self._see(char)
            if self.is_over:
                return i + 1
        return len(text)

    def _see(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._in_string:
            self._is_escaped = char == "\\"
            self._in_string = char != '"'
        elif char == '"':
            self._in_string = True
        elif char in _OPEN:
            self._depth += 1
        elif char in _CLOSE:
            self._depth -= 1
            self.is_over = not self._depth


class MessageDelta(NamedTuple):
    """A part of a message: ``kind`` is reasoning, content, call (its text: a name) or arguments."""

    kind: str
    text: str


class CallReader(Protocol):
    """Reads one call."""

    is_over: bool

    def feed(self, text: str) -> tuple[list[MessageDelta], str]:
        """Read on; return what became known, and the text that is still to be read."""


class JsonCall:
    """An object with a name and arguments, which are passed on as they come."""

    def __init__(self, key: str) -> None:
        """Expect the arguments under ``key``."""
        self.is_over = False
        parts = (r"\{", '"name"', ":", '"([^"]*)"', ",", f'"{key}"', r":", r"(?=\{)")
        self._head = re.compile(r"\s*".join(parts))
        self._scan: JsonScan | None = None

    def feed(self, text: str) -> tuple[list[MessageDelta], str]:
        """Read on; return what became known, and the text that is still to be read."""
        pieces = []
        if self._scan is None:
            head = self._head.match(text)
            if head is None:
                return [], text
            self._scan, text = JsonScan(), text[head.end() :]
            pieces.append(MessageDelta("call", head[1]))
        if not self._scan.is_over:
            end = self._scan.feed(text)
            pieces.append(MessageDelta("arguments", text[:end]))
            text = text[end:]
        if self._scan.is_over and text.lstrip().startswith("}"):
            self.is_over, text = True, text.lstrip()[1:]
        return pieces, text


_NAME = re.compile(r"<function=([^>]*)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>]*)>\n")
_END, _VALUE_END = re.compile(r"\s*</function>"), "\n</parameter>"


class XmlCall:
    """``<function=NAME>`` with a ``<parameter=NAME>`` for each argument: text, or JSON."""

    def __init__(self, parameters: Mapping[str, Mapping[str, Any]]) -> None:
        """Know the schemas of all tools: they say whose values are text."""
        self.is_over = False
        self._parameters = parameters
        self._properties: Mapping[str, Any] | None = None  # of the tool, once it is known
        self._num_values = 0
        self._is_inside = self._is_text = False  # a value, and one of text

    def feed(self, text: str) -> tuple[list[MessageDelta], str]:
        """Read on; return what became known, and the text that is still to be read."""
        pieces: list[MessageDelta] = []
        before = None
        while before != text and not self.is_over:
            before = text
            if self._properties is None:
                text = self._read_name(text, pieces)
            elif self._is_inside:
                text = self._read_value(text, pieces)
            else:
                text = self._read_between(text, pieces)
        return pieces, text

    def _read_name(self, text: str, pieces: list[MessageDelta]) -> str:
        match = _NAME.match(text)
        if match is None:
            return text
        self._properties = self._parameters[match[1]].get("properties", {})
        pieces += [MessageDelta("call", match[1]), MessageDelta("arguments", "{")]
        return text[match.end() :]

    def _read_between(self, text: str, pieces: list[MessageDelta]) -> str:
        """Read the opening of a parameter, or the end of all."""
        assert self._properties is not None
        if match := _PARAMETER.match(text):
            self._is_text = is_text(self._properties[match[1]])
            comma = ", " if self._num_values else ""
            quote = '"' if self._is_text else ""
            pieces.append(MessageDelta("arguments", f"{comma}{json.dumps(match[1])}: {quote}"))
            self._num_values += 1
            self._is_inside = True
        elif match := _END.match(text):
            pieces.append(MessageDelta("arguments", "}"))
            self.is_over = True
        return text[match.end() :] if match else text

    def _read_value(self, text: str, pieces: list[MessageDelta]) -> str:
        end = text.find(_VALUE_END)
        is_whole = end >= 0
        if not is_whole:
            end = len(text) - num_held(text, _VALUE_END)
        value = text[:end]
        if value:
            shown = json.dumps(value, ensure_ascii=False)[1:-1] if self._is_text else value
            pieces.append(MessageDelta("arguments", shown))
        if not is_whole:
            return text[end:]
        if self._is_text:
            pieces.append(MessageDelta("arguments", '"'))
        self._is_inside = False
        return text[end + len(_VALUE_END) :]


_OF_PLAIN_TEXT = {"type", "title", "description", "default", "examples", "enum"}


def is_text(schema: object) -> bool:
    """Return whether values of a schema are strings that XML has without quotes."""
    if not isinstance(schema, Mapping) or schema.get("type") != "string":
        return False
    options = schema.get("enum", [""])
    if not isinstance(options, list | tuple) or not options:
        return False
    is_plain = all(isinstance(text, str) and "\n" not in text for text in options)
    return is_plain and all(key in _OF_PLAIN_TEXT for key in schema)


def num_held(text: str, marker: str) -> int:
    """Return how many of the last characters may be the beginning of ``marker``."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)


def texts_of(pieces: Iterable[MessageDelta]) -> dict[str, str]:
    """Return the texts of a message, by their places in it."""
    texts = {"content": ""}
    calls, call = 0, ""
    for kind, text in pieces:
        if kind == "call":
            call, calls = f"tool_calls[{calls}].function.", calls + 1
            texts |= {f"{call}name": text, f"{call}arguments": ""}
        else:
            names = {"arguments": f"{call}arguments", "reasoning": "reasoning_content"}
            name = names.get(kind, kind)
            texts[name] = texts.get(name, "") + text
    return texts
