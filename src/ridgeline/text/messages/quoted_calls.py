"""One call in Gemma 4's notation, read as it is written: see ``messages.quoted_grammar``."""

from __future__ import annotations

import json
import re

from ridgeline.text.messages.calls import Piece, num_held
from ridgeline.text.messages.json_scan import JsonScan

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

    def feed(self, text: str) -> tuple[list[Piece], str]:
        """Read on; return what became known, and the text that is still to be read."""
        pieces = []
        if self._scan is None and not self._open:
            head = _HEAD.match(text)
            if head is None:
                return [], text
            pieces.append(Piece("call", head[1]))
            text = text[head.end() :]
            if head[2] == '"':
                self._scan = JsonScan()
        arguments, text = self._json(text) if self._scan else self._notation(text)
        return [*pieces, *([Piece("arguments", arguments)] if arguments else [])], text

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
