"""A streamed answer between a server and its router: pieces of its bytes, each with its journal.

A frame is two lengths, lines of a journal, and bytes of the answer. The lines say from which events
the bytes were made. A frame that is not whole does not count, so what a client has read and what
the journal says always agree.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

from ridgeline.core.step import Event, FinishReason, TokenLogprobs

_LENGTHS = struct.Struct("<II")  # bytes of the journal's lines, and of the answer
_MOST_BYTES = 64 << 20  # of a frame


def frame(lines: bytes, body: bytes) -> bytes:
    """Return a frame as bytes."""
    return _LENGTHS.pack(len(lines), len(body)) + lines + body


class Frames:
    """Cuts bytes into frames as they come."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield lines and bytes of each frame that is whole now.

        Raises ValueError for a frame that is longer than any may be; nothing is kept of it.
        """
        self._bytes += data
        while len(self._bytes) >= _LENGTHS.size:
            num_lines, num_body = _LENGTHS.unpack_from(self._bytes)
            if num_lines + num_body > _MOST_BYTES:
                self._bytes.clear()
                raise ValueError(f"a frame of {num_lines + num_body} bytes")
            middle = _LENGTHS.size + num_lines
            if len(self._bytes) < middle + num_body:
                return
            found = bytes(self._bytes[: middle + num_body])
            del self._bytes[: middle + num_body]
            yield found[_LENGTHS.size : middle], found[middle:]


def line(value: Any) -> bytes:
    """Return a JSON value as a line of a journal."""
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def entry_of(prompt: int, event: Event) -> list[Any]:
    """Return an event of a prompt's answers as it stands in a journal."""
    reason = event.finish_reason and event.finish_reason.value
    entry: list[Any] = [prompt, event.seq_id[1], event.token, event.text, reason]
    entry += [event.stop_reason, event.logprobs]
    while entry[-1] is None:
        entry.pop()
    return entry


def event_of(entry: Any) -> tuple[int, Event]:
    """Return the prompt and the event of an entry. Raises ValueError if it is no entry."""
    try:
        prompt, answer, token, text, reason, stop, ranked = [*entry, *[None] * 7][:7]
        is_right = type(prompt) is type(answer) is int and type(text) is str
        if not is_right or type(token) not in (int, type(None)) or min(prompt, answer) < 0:
            raise ValueError
        logprobs = None
        if ranked:
            drawn, logprob, rank, top = ranked
            logprobs = TokenLogprobs(drawn, logprob, rank, tuple(map(tuple, top)))
        finish = reason and FinishReason(reason)
        return prompt, Event((0, answer), token, text, logprobs, finish, stop, None)
    except (TypeError, ValueError, LookupError):
        raise ValueError(f"{json.dumps(entry)[:80]} is no entry of a journal") from None
