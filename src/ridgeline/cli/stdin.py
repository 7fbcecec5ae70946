"""Text from the command line and from standard input, whatever the locale and the terminal."""

from __future__ import annotations

import os
import select
import sys

from ridgeline.cli.flags import UsageError

_STDIN_WAIT_S = 10.0  # for the first of what another program may still have to compute
_MAX_STDIN_CHARS = 8 << 20


def as_text(argument: str, name: str = "") -> str:
    """Return an argument as the text it was, if the locale could not spell it.

    Raises UsageError, which calls it by its ``name`` or quotes it, for bytes that are not UTF-8.
    """
    if not any("\ud800" <= char <= "\udfff" for char in argument):
        return argument
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"{name or repr(argument)} is not UTF-8 at byte {error.start}"
        raise UsageError(f"{where}: {error.reason}") from error


def with_stdin(prompt: str | None) -> str | None:
    """Return PROMPT and after it what is piped in; None where a chat is meant."""
    if sys.stdin is not None and sys.stdin.isatty():
        return prompt
    piped = _piped(None if prompt is None else _STDIN_WAIT_S)
    if prompt is None and not piped.strip():
        raise UsageError("standard input is empty: give a PROMPT, or start a chat in a terminal")
    if not prompt or not piped.strip():
        return prompt or piped
    return f"{prompt}\n\n{piped}"


def _piped(wait_s: float | None) -> str:
    """Return standard input, "" where it is closed or stays silent for so long."""
    if sys.stdin is None:
        return ""
    if not select.select([sys.stdin], [], [], wait_s)[0]:
        print("note: nothing came on standard input; only PROMPT is answered", file=sys.stderr)
        return ""
    try:
        text = sys.stdin.read(_MAX_STDIN_CHARS + 1)
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not text: {error}") from error
    if len(text) > _MAX_STDIN_CHARS:
        raise UsageError(f"standard input has more than {_MAX_STDIN_CHARS:,} characters")
    return as_text(text, "standard input")
