"""An assistant's message, read as it is written: its reasoning, its text, its calls of tools.

Text goes in as it becomes final (``core.decoding.text``), pieces come out. However the text is cut,
the pieces joined are the same: a streamed message and a whole one are made of them. It knows
nothing of the wire. Calls in Gemma 4's notation are read here too: see ``messages.quoted_grammar``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import NamedTuple

from ridgeline.core.step import Event
from ridgeline.text.messages.tool_calls import (
    CallReader,
    JsonCall,
    JsonScan,
    MessageDelta,
    XmlCall,
    num_held,
)
from ridgeline.text.messages.tools import (
    ToolFormat,
    ToolUse,
    is_unmarked_call,
    without_markers,
)

_HEAD = re.compile(r"call:([^{]*)(?=\{\s*([^\s]))")
_PLAIN = re.compile(r"[^<{}\[\],]+")  # numbers and words, all that stands for itself in JSON too


class QuotedCall:
    """``call:NAME{key:value}``, whose arguments become JSON; or are JSON as they are."""

    def __init__(self, quote: str) -> None:
        """Know the marker around texts."""
        self.is_over = False
        self._quote = quote
        self._scan: JsonScan | None = None  # of arguments in JSON
        self._open: list[str] = []  # objects and lists that have begun
        self._is_text = self._wants_key = False

    def feed(self, text: str) -> tuple[list[MessageDelta], str]:
        """Read on; return what became known, and the text that is still to be read."""
        pieces = []
        if self._scan is None and not self._open:
            head = _HEAD.match(text)
            if head is None:
                return [], text
            pieces.append(MessageDelta("call", head[1]))
            text = text[head.end() :]
            if head[2] == '"':
                self._scan = JsonScan()
        arguments, text = self._json(text) if self._scan else self._notation(text)
        return [*pieces, *([MessageDelta("arguments", arguments)] if arguments else [])], text

    def _json(self, text: str) -> tuple[str, str]:
        assert self._scan is not None
        end = self._scan.feed(text)
        self.is_over = self._scan.is_over
        return text[:end], text[end:]

    def _notation(self, text: str) -> tuple[str, str]:
        """Return the arguments in JSON as far as they are known, and the rest of the text."""
        arguments, before = "", None
        while text and before != text and not self.is_over:
            before = text
            if self._is_text:
                part, text = self._of_text(text)
            elif text.startswith(self._quote):
                self._is_text, part, text = True, '"', text[len(self._quote) :]
            elif self._wants_key and text.lstrip()[:1] != "}":
                part, text = self._of_key(text)
            else:
                part, text = self._of_sign(text)
            arguments += part
        return arguments, text

    def _of_text(self, text: str) -> tuple[str, str]:
        end = text.find(self._quote)
        self._is_text = end < 0
        if self._is_text:
            end = len(text) - num_held(text, self._quote)
        shown = json.dumps(text[:end], ensure_ascii=False)[1:-1]
        if self._is_text:
            return shown, text[end:]
        return shown + '"', text[end + len(self._quote) :]

    def _of_key(self, text: str) -> tuple[str, str]:
        key, colon, after = text.partition(":")
        if not colon:
            return "", text
        self._wants_key = False
        return f"{json.dumps(key.strip())}: ", after

    def _of_sign(self, text: str) -> tuple[str, str]:
        sign = text[0]
        if sign in "{[":
            self._open.append(sign)
            self._wants_key = sign == "{"
        elif sign in "}]":
            self._open.pop()
            self._wants_key, self.is_over = False, not self._open
        elif sign == ",":
            self._wants_key = self._open[-1] == "{"
            return ", ", text[1:]
        elif plain := _PLAIN.match(text):
            return plain[0], text[plain.end() :]
        else:  # the beginning of a marker
            return "", text
        return sign, text[1:]


class ReasoningMarkers(NamedTuple):
    """The markers around what a model thinks before it answers.

    Attributes:
        begin: the first.
        end: the second.
        label: text behind the first that is no thought, but may not come.
    """

    begin: str = "<think>"
    end: str = "</think>"
    label: str = ""


REASONINGS = {  # by the names of their parsers
    "deepseek_r1": ReasoningMarkers(),
    "qwen3": ReasoningMarkers(),
    "gemma4": ReasoningMarkers("<|channel>", "<channel|>", "thought\n"),
}


class MessageForm(NamedTuple):
    """What a message may have.

    Attributes:
        reasoning: its markers, None for a model that does not reason.
        is_reasoning: whether the prompt has the first marker, so that the message begins inside.
        tools: how calls are written, and which there may be; None for none.
        has_body: whether its text follows a grammar of its own: then calls need their markers.
    """

    reasoning: ReasoningMarkers | None = None
    is_reasoning: bool = False
    tools: tuple[ToolFormat, ToolUse] | None = None
    has_body: bool = False

    @property
    def is_parallel(self) -> bool:
        """Whether nothing keeps it to one call."""
        return self.tools is None or self.tools[1].is_parallel


class MessageReader:
    """Reads one message. White space around reasoning and calls is dropped."""

    def __init__(self, form: MessageForm) -> None:
        """Begin before the first character."""
        self._reasoning, self._tools = form.reasoning, form.tools
        self._has_body = form.has_body
        self._text = ""  # not read yet
        self._space = ""  # read, and shown if more of the same kind follows
        self._strips = False  # white space that begins the next text
        self._call: CallReader | None = None
        self._pieces: list[MessageDelta] = []
        self._read: Callable[[], bool] = self._begin
        if form.is_reasoning:
            self._read, self._strips = self._think, True

    @property
    def _tools_given(self) -> tuple[ToolFormat, ToolUse]:
        assert self._tools is not None
        return self._tools

    @property
    def is_reasoning(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        return self._read in (self._label, self._think)

    @property
    def is_at_calls(self) -> bool:
        """Whether what comes next belongs to calls, or stands between them."""
        return self._read in (self._open, self._begin_call, self._read_call, self._end_call)

    @property
    def num_held(self) -> int:
        """Characters of the text so far of which nothing is known yet, such as half a marker."""
        return len(self._text) + len(self._space)

    def feed(self, text: str) -> list[MessageDelta]:
        """Take more text; return what it adds to the message."""
        self._text += text
        while self._read():
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> list[MessageDelta]:
        """No text will follow: return what was held back. The beginning of a call is dropped."""
        if self._read == self._think:
            self._show("reasoning", self._text)
        elif self._read in (self._begin, self._write):
            self._show("content", self._text)
            if self._space:
                self._pieces.append(MessageDelta("content", self._space))
        self._text = self._space = ""
        pieces, self._pieces = self._pieces, []
        return pieces

    # --- states: each reads what it can, and returns whether the next one should go on ---------

    def _begin(self) -> bool:
        """Find out whether the message begins with reasoning, or with a call without marker."""
        start = self._text.lstrip()
        marker = self._reasoning.begin if self._reasoning else ""
        is_call: bool | None = False
        if self._tools and self._tools[0].key and not self._has_body:
            is_call = is_unmarked_call(start, *self._tools)
        if is_call is None or (len(start) < len(marker) and marker.startswith(start)):
            return False
        if marker and start.startswith(marker):
            self._text, self._read, self._strips = start[len(marker) :], self._label, True
            return True
        if self._tools and is_call:
            form, use = self._tools
            self._tools = without_markers(form), use
            self._text = start[start.index("{") :]
            return self._turn(self._open)
        if self._tools and not self._tools[0].begin:
            self._tools = None
        return self._turn(self._write)

    def _label(self) -> bool:
        assert self._reasoning is not None
        label = self._reasoning.label
        if len(self._text) < len(label) and label.startswith(self._text):
            return False
        self._text, self._read = self._text.removeprefix(label), self._think
        return True

    def _think(self) -> bool:
        assert self._reasoning is not None
        if not self._take("reasoning", self._reasoning.end):
            return False
        return self._turn(self._begin_answer)

    def _begin_answer(self) -> bool:
        """Forget the reasoning: what follows is a message like any other."""
        self._reasoning = None
        return self._turn(self._begin)

    def _write(self) -> bool:
        if self._tools is None:
            self._show("content", self._text)
            self._text = ""
            return False
        if not self._take("content", self._tools[0].begin):
            return False
        return self._turn(self._open)

    def _open(self) -> bool:
        """Read what stands between a marker and the first call."""
        self._text = self._text.lstrip()
        return self._skip(self._tools_given[0].opening) and self._turn(self._begin_call)

    def _begin_call(self) -> bool:
        self._text = self._text.lstrip()
        if not self._text:
            return False
        self._call = _call_reader(*self._tools_given)
        return self._turn(self._read_call)

    def _read_call(self) -> bool:
        assert self._call is not None
        pieces, self._text = self._call.feed(self._text)
        self._pieces += pieces
        return self._call.is_over and self._turn(self._end_call)

    def _end_call(self) -> bool:
        """Read what follows a call: a separator and the next, or the end of calls."""
        self._text = self._text.lstrip()
        form, _ = self._tools_given
        if form.separator is not None and self._text and self._skip(form.separator):
            return self._turn(self._begin_call)
        ending = form.closing + form.end
        return bool(ending) and self._skip(ending) and self._turn(self._write)

    # --- text ----------------------------------------------------------------------------------

    def _turn(self, read: Callable[[], bool]) -> bool:
        """Read something else; of what was read before, white space at the end is dropped."""
        if self._read != self._begin:
            self._space, self._strips = "", True
        self._read = read
        return True

    def _skip(self, literal: str) -> bool:
        if not self._text.startswith(literal):
            return False
        self._text = self._text[len(literal) :]
        return True

    def _take(self, kind: str, marker: str) -> bool:
        """Pass text on until a marker; return whether the marker came, and is read."""
        before, separator, after = self._text.partition(marker)
        if not separator:
            cut = len(before) - num_held(before, marker)
            before, after = before[:cut], before[cut:]
        self._show(kind, before)
        self._text = after
        return bool(separator)

    def _show(self, kind: str, text: str) -> None:
        """Show text of a kind, but for white space at its end."""
        text = self._space + text
        if self._strips:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._strips = False
            self._pieces.append(MessageDelta(kind, shown))


class AnswerReader:
    """Reads the events of one answer as the pieces of a message; without a form, all is text.

    Attributes:
        num_reasoning: tokens of reasoning so far.
    """

    def __init__(self, form: MessageForm | None) -> None:
        """Begin before the first token."""
        self._reader = MessageReader(form) if form else None
        self.num_reasoning = 0

    @property
    def num_held(self) -> int:
        """Characters of the text so far of which nothing is known yet, such as half a marker."""
        return self._reader.num_held if self._reader else 0

    def take(self, event: Event) -> list[MessageDelta]:
        """Take the next event of the answer; return what it adds to the message."""
        if self._reader is None:
            return [MessageDelta("content", event.text)] if event.text else []
        was_reasoning = self._reader.is_reasoning
        pieces = self._reader.feed(event.text)
        is_reasoning = was_reasoning or self._reader.is_reasoning
        self.num_reasoning += event.token is not None and is_reasoning
        return pieces + self._reader.finish() if event.finish_reason else pieces


def _call_reader(form: ToolFormat, use: ToolUse) -> CallReader:
    """Return a reader for the next call in this format."""
    if form.key:
        return JsonCall(form.key)
    if form.quote:
        return QuotedCall(form.quote)
    return XmlCall({tool.name: tool.parameters for tool in use.tools})
