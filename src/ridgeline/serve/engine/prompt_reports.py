"""What streams are told of their prompts while these are computed, if they ask.

To be called in the thread that runs the engine.
"""

from __future__ import annotations

from collections.abc import Iterator

from ridgeline.core.request import Request
from ridgeline.serve.engine.request_stream import PromptProgress, RequestStream, StreamEvent


class PromptReports:
    """Prompts whose progress is told, until they are computed."""

    def __init__(self) -> None:
        self._open: dict[int, tuple[RequestStream, int, Request]] = {}  # by the request's id
        self._told: dict[int, int] = {}  # how far each was when it was last told

    def add(self, stream: RequestStream, index: int, request: Request) -> None:
        """Tell of a prompt of a stream from now on."""
        self._open[request.id] = stream, index, request

    def drop(self, request_id: int) -> None:
        """Tell no more of a request that is over."""
        self._open.pop(request_id, None)
        self._told.pop(request_id, None)

    def clear(self) -> None:
        """Tell no more of any."""
        self._open.clear()
        self._told.clear()

    def take(self, now_s: float) -> Iterator[tuple[RequestStream, StreamEvent]]:
        """Yield what is new since the last call; first of each prompt, how much was cached."""
        for request_id, (stream, index, request) in tuple(self._open.items()):
            if request.scheduled_s is None:
                continue
            length, num_cached = len(request.prompt), request.num_cached_tokens
            is_done = request.first_token_s is not None
            num_computed = length if is_done else min(request.sequences[0].num_computed, length)
            if request_id not in self._told:
                self._told[request_id] = num_cached
                yield stream, (index, PromptProgress(length, num_cached, num_cached, 0.0))
            if num_computed > self._told[request_id]:
                self._told[request_id] = num_computed
                time_s = now_s - request.scheduled_s
                yield stream, (index, PromptProgress(length, num_cached, num_computed, time_s))
            if num_computed == length:
                self.drop(request_id)
