"""A decoder whose tokens are letters, some of them in two halves."""

from __future__ import annotations

HALF = 0  # a token that begins a character and never finishes it


class Letters:
    """Token ids are code points; ``HALF`` gives nothing until the next token replaces it."""

    def __init__(self) -> None:
        self._incomplete = False

    def __call__(self, token_id: int, /) -> str:
        self._incomplete = token_id == HALF
        return "" if token_id == HALF else chr(token_id)

    @property
    def is_whole(self) -> bool:
        return not self._incomplete

    def flush(self) -> str:
        return "\ufffd" if self._incomplete else ""
