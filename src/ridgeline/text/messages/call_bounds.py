"""Calls that end an answer: one that it has made already, and one too many.

No grammar knows what has come, so small models write one and the same call until the context is
full. The text of a further call is held back while the call may still be an earlier one once more.
It knows nothing of tokens and requests.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ridgeline.core.request import Text
from ridgeline.text.messages.message import MessageForm, MessageReader
from ridgeline.text.messages.tool_calls import JsonScan

MAX_CALLS = 16  # of one answer
REPEATED_CALL, TOO_MANY_CALLS = "repeated_call", "too_many_calls"  # why an answer ended
CALL_BOUNDS = (REPEATED_CALL, TOO_MANY_CALLS)

_BETWEEN = " \n\r\t,:"  # what stands between the parts of an object
_UNREADABLE = (ValueError, RecursionError)
_decode = json.JSONDecoder().raw_decode


class CallBounds:
    """Reads the text of a message, and lets it out as far as no bound can end it.

    Attributes:
        ended_by: which bound has ended the answer, if one has.
    """

    def __init__(self, form: MessageForm) -> None:
        """Begin before the first character of a message with calls."""
        self._reader = MessageReader(form)
        self._pending = ""
        self._calls: list[_ParsedCall] = []  # those that were let out
        self._name = self._arguments = ""  # of the call that is being read
        self._scan = JsonScan()
        self._is_new = False  # that call: it is none of those before
        self._may_end = True
        self.ended_by: str | None = None

    def feed(self, text: str, *, may_end: bool = True) -> str:
        """Take more text; return what may be shown now: all, if nothing may end the answer."""
        self._may_end, shown = may_end, ""
        for char in text:
            if self.ended_by:
                break
            self._pending += char
            for kind, piece in self._reader.feed(char):
                self._take(kind, piece)
            if not self._holds:
                shown, self._pending = shown + self._pending, ""
            if self._scan.is_over:
                self._is_new = False
        return shown

    def finish(self) -> str:
        """No text will follow: return what was held back, unless a bound ended the answer."""
        pending, self._pending = "" if self.ended_by else self._pending, ""
        return pending

    @property
    def _holds(self) -> bool:
        """Whether what was read last may belong to a call that is not to be shown."""
        if not self._may_end or not self._calls or self._is_new:
            return False
        return self._reader.is_at_calls or self._reader.num_held > 0

    def _take(self, kind: str, piece: str) -> None:
        if kind == "call":
            self._name, self._arguments, self._scan = piece, "", JsonScan()
            self._is_new = all(piece != one.name for one in self._calls)
            if len(self._calls) >= MAX_CALLS and self._may_end:
                self.ended_by = TOO_MANY_CALLS
        elif kind == "arguments":
            self._arguments += piece
            self._scan.feed(piece)
            if self._scan.is_over:
                self._end_call()
            elif not self._is_new:
                earlier = [one.arguments for one in self._calls if one.name == self._name]
                self._is_new = not any(may_become(self._arguments, one) for one in earlier)

    def _end_call(self) -> None:
        call = _call(self._name, self._arguments)
        earlier = ((one.name, one.written) for one in self._calls)
        if self._may_end and not self._is_new and (call.name, call.written) in earlier:
            self.ended_by = REPEATED_CALL
        else:
            self._calls.append(call)
            self._is_new = True


class BoundedCalls:
    """The text of an answer that its calls may end: a ``core.request.Text`` around another one."""

    def __init__(self, text: Text, form: MessageForm) -> None:
        """Watch ``text``, that of a message with calls."""
        self._text, self._bounds, self._ready = text, CallBounds(form), ""

    def feed(self, token: int, may_stop: bool) -> str | None:
        """Take one more token; return the stop string, or the bound, that ends the answer."""
        stop = self._text.feed(token, may_stop)
        self._ready += self._bounds.feed(self._text.take(), may_end=may_stop)
        return self._bounds.ended_by or stop

    def take(self) -> str:
        """Return the text that became final since the last call."""
        text, self._ready = self._ready, ""
        return text

    def finish(self) -> None:
        """No token will follow: held-back text is final, unless a bound ended the answer."""
        self._text.finish()
        self._ready += self._bounds.feed(self._text.take()) + self._bounds.finish()


def may_become(begun: str, whole: Mapping[str, Any]) -> bool:
    """Return whether the JSON of an object that begins so may end as ``whole``."""
    at = 1  # behind the bracket
    while True:
        at += _num_between(begun, at)
        try:
            name, at = _decode(begun, at)
        except _UNREADABLE:
            return True
        at += _num_between(begun, at)
        if name not in whole:
            return False
        try:
            value, end = _decode(begun, at)
        except _UNREADABLE:
            return _may_become_text(begun[at:], whole[name])
        if end == len(begun) and isinstance(value, int | float):  # there may be more of it
            return True
        if value != whole[name]:
            return False
        at = end


def _num_between(text: str, at: int) -> int:
    return len(text) - at - len(text[at:].lstrip(_BETWEEN))


def _may_become_text(begun: str, whole: Any) -> bool:
    """Return whether a value that begins so may end as ``whole``; of texts alone it is known."""
    if not begun.startswith('"'):
        return True
    escape = begun.rfind("\\")
    for prefix in (begun, begun[:escape]):  # the escape may not be complete
        try:
            return isinstance(whole, str) and whole.startswith(json.loads(f'{prefix}"'))
        except ValueError:
            continue
    return True


class _ParsedCall(NamedTuple):
    """A call: its arguments, and these as equal ones are written."""

    name: str
    arguments: dict[str, Any]
    written: str


def _call(name: str, arguments: str) -> _ParsedCall:
    try:
        parsed = json.loads(arguments, parse_float=_number)
        return _ParsedCall(name, parsed, json.dumps(parsed, sort_keys=True))
    except _UNREADABLE:  # too deep, or a number too long: it is equal only to itself
        return _ParsedCall(name, {}, arguments)


def _number(text: str) -> float:
    value = float(text)
    return int(value) if value.is_integer() else value
