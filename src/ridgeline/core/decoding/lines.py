"""Where an answer ends by its lines: llama.cpp's ``n_indent`` and ``t_max_predict_ms``.

They are for an editor: what leaves the block that the cursor is in is of no use, nor what comes too
late. The clock is a parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ridgeline.core.request import Text

ENDED = ""  # what ``feed`` returns in place of a stop string


class LineRules(NamedTuple):
    """When an answer ends; the first line goes on with the text before it, and has no indent.

    Attributes:
        least_indent: white space that each further line must begin with, in characters; 0 asks for
            none. A line with less ends the answer and is cut off behind its white space, an empty
            one too.
        most_seconds: the first line to end so long after the first token is the last; 0 is never.
    """

    least_indent: int = 0
    most_seconds: float = 0.0


class LineText:
    """The text of an answer that ends by its lines: a ``core.request.Text`` around another one."""

    def __init__(self, text: Text, rules: LineRules, clock: Callable[[], float]) -> None:
        """Watch ``text``; ``clock`` returns seconds and never goes back."""
        self._text, self._rules, self._clock = text, rules, clock
        self._first_s: float | None = None  # when the first token came
        self._ready = ""  # final, not yet taken
        self._indent: int | None = None  # of a line of which nothing but white space came
        self._ended = False

    def feed(self, token: int, may_stop: bool) -> str | None:
        """Take one more token; return the stop string that it completed, or ``ENDED``."""
        if self._first_s is None:
            self._first_s = self._clock()
        stop = self._text.feed(token, may_stop)
        piece = self._text.take()
        end = self._end(piece, may_stop)
        self._ready += piece[:end]
        self._ended = end is not None
        return ENDED if self._ended else stop

    def take(self) -> str:
        """Return the text that became final since the last call."""
        text, self._ready = self._ready, ""
        return text

    def finish(self) -> None:
        """No token will follow: held-back text is final, unless a line ended the answer."""
        if not self._ended:
            self._text.finish()
            self._ready += self._text.take()

    def _end(self, piece: str, may_stop: bool) -> int | None:
        """Return behind which of its characters the answer ends, None if it goes on."""
        for i, char in enumerate(piece):
            if self._indent is not None:
                if char in " \t":
                    self._indent += 1
                elif self._indent < self._rules.least_indent and may_stop:
                    return i
                else:
                    self._indent = None
            if char == "\n":
                self._indent = 0
                if may_stop and self._is_late():
                    return i + 1
        return None

    def _is_late(self) -> bool:
        assert self._first_s is not None
        most_s = self._rules.most_seconds
        return most_s > 0 and self._clock() - self._first_s > most_s
