"""How far a streamed answer has come, between a server and its router: its journal, and its bytes.

They go in frames: two lengths, lines of the journal, and bytes of the answer, which were made from
the events that these lines say. A frame that is not whole does not count, so what a client has read
and what the journal says always agree.

A server that goes on puts the events of the journal through the code that writes answers, and drops
what this writes. So it continues where the other one ended, in every dialect. The engine gets the
tokens. The last one of each answer is drawn again and compared, and so are the servers'
fingerprints (``engine.setup.identity``). So each move checks that the rest is the same answer,
instead of assuming it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from ridgeline.core.step import Event, FinishReason, TokenLogprobs
from ridgeline.serve.engine.request_stream import RequestStream, StreamError, StreamEvent

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
            whole = bytes(self._bytes[: middle + num_body])
            del self._bytes[: middle + num_body]
            yield whole[_LENGTHS.size : middle], whole[middle:]


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


DIVERGED = line({"diverged": True})  # of an answer that would not be the same


class ResumeLog:
    """How far an answer has come.

    Attributes:
        seed: of the request, if it brings none.
        only_reads: whether this server only reads what was shown, so that it can go on at once
            when the other one stops.
    """

    def __init__(self, lines: bytes, seed: int, *, only_reads: bool = False) -> None:
        """Begin with the lines of another server's, or none. Raises ValueError."""
        entries = [json.loads(one) for one in lines.splitlines()]
        self.seed, self.only_reads = seed, only_reads
        self._head: Any = entries[0] if entries else None
        self._before = [event_of(entry) for entry in entries[1:]]
        self._again: dict[tuple[int, int], deque[int | None]] = {}  # tokens to come once more
        self._is_anew = False
        self._notes: list[bytes] = []

    @property
    def goes_on(self) -> bool:
        """Whether another server began this answer."""
        return self._head is not None

    @property
    def has_read(self) -> bool:
        """Whether a server that only reads has: the last token of each answer was drawn again.

        What begins again from the start is not worth reading twice.
        """
        return self.only_reads and (self._is_anew or not any(self._again.values()))

    def begin(self, stream: RequestStream, fingerprint: str) -> list[StreamEvent]:
        """Let a stream go on where the journal ends; return the events that were shown.

        Raises StreamError if it is of another prompt, or of a server that computes differently.
        """
        stream.default_seed = self.seed
        prompts = repr([*map(tuple, stream.prompts)]).encode()
        head = [hashlib.blake2b(prompts, digest_size=16).hexdigest(), fingerprint]
        if not self.goes_on:
            self._notes.append(line(head))
            return []
        if self._head != head:
            raise self._diverged("the server that goes on is another")
        if stream.params.searches or stream.params.prompt_logprobs is not None:
            self._is_anew = True  # a prompt that draws nothing begins again
            for prompt, event in self._before:
                self._again.setdefault((prompt, event.seq_id[1]), deque()).append(event.token)
            return []
        self._tell(stream)
        return list(self._before)

    def _tell(self, stream: RequestStream) -> None:
        """Give a stream the tokens of its answers, all but the last of each that is not over."""
        counts = range(stream.params.num_answers)
        tokens: list[list[list[int]]] = [[[] for _ in counts] for _ in stream.prompts]
        ended = set[tuple[int, int]]()
        for prompt, event in self._before:
            place = prompt, event.seq_id[1]
            if prompt >= len(tokens) or place[1] not in counts or place in ended:
                raise StreamError(f"the journal has no answer {place}", 400)
            if event.token is not None:
                tokens[prompt][place[1]].append(event.token)
            if event.finish_reason:
                ended.add(place)
        for prompt, answers in enumerate(tokens):
            for i, answer in enumerate(answers):
                if answer and (prompt, i) not in ended:
                    self._again[prompt, i] = deque([answer.pop()])
            if all((prompt, i) in ended for i in counts):
                stream.close(prompt)
            stream.answers[prompt] = tuple(map(tuple, answers))

    def frames(self, one: StreamEvent, take: Callable[[StreamEvent], list[bytes]]) -> list[bytes]:
        """Return what an event adds to the answer, as ``take`` writes it, and note the event.

        Nothing is added by what was shown before. Raises StreamError if that was not the same.
        """
        prompt, event = one
        if not isinstance(event, Event):
            return take(one)
        if left := self._again.get((prompt, event.seq_id[1])):
            if left.popleft() != event.token:
                raise self._diverged("the server that goes on has another answer")
            if self._is_anew:
                take(one)
            return []
        frames = take(one)
        self._notes.append(line(entry_of(prompt, event)))
        return frames

    def notes(self) -> bytes:
        """Return the lines since the last call."""
        notes, self._notes = self._notes, []
        return b"".join(notes)

    def _diverged(self, why: str) -> StreamError:
        self._notes.append(DIVERGED)
        return StreamError(f"the server that answered has ended, and {why}: ask again", 503)


def spent_line(num_tokens: int) -> bytes:
    """Return the line after a whole journal: tokens of the caller's key since the start."""
    return line({"spent": num_tokens})


def spent_in(lines: bytes) -> int | None:
    """Return what that line says; None for any other."""
    return int(json.loads(lines)["spent"]) if lines.startswith(b'{"spent"') else None


def is_diverged(lines: bytes) -> bool:
    """Whether lines of a journal say that an answer could not be continued."""
    return lines.endswith(DIVERGED)
