"""Where a JSON value ends that comes in pieces. It looks at brackets and strings, no more."""

from __future__ import annotations

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
