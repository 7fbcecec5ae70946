"""The answer of POST /v1/messages: content blocks, and the events that tell how they grow.

Both are made of ``answer.items``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from ridgeline.serve.answer.items import Item, Items
from ridgeline.serve.answer.reply import SSE, sse
from ridgeline.serve.answer.response_builder import Choice, ResponseBuilder
from ridgeline.serve.answer.schemas import StageFields
from ridgeline.serve.dialects.anthropic import schemas
from ridgeline.serve.engine.request_stream import StreamEvent
from ridgeline.serve.http.errors import ApiError, anthropic_body

_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
# By the kind of an item: the type of a piece of it, and its field there.
_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
# Of texts, by the kind of an item and its attribute. The arguments of a call are none.
_PLACES = {
    ("text", "text"): "content[{}].text",
    ("reasoning", "text"): "content[{}].thinking",
    ("call", "name"): "content[{}].name",
}


class AnthropicWriter:
    """Anthropic's message object."""

    stream_type, ping = SSE, b"event: ping\n" + sse({"type": "ping"})

    def __init__(self, answers: ResponseBuilder, model: str, fingerprint: str) -> None:
        """Write ``answers`` of a model."""
        self._answers, self._is_streamed = answers, bool(answers.body.stream)
        self._id, self._model = f"msg_{answers.stream.name}", model
        self._items = Items()
        self._stop_reason: Any = None  # until the message has ended
        self._stop_sequence: str | None = None
        self._has_begun = False

    def whole(self) -> schemas.MessageObject:
        """Return the whole message."""
        return self._message(self._answers.ends(self._texts))

    def take(self, event: StreamEvent) -> list[bytes]:
        """Take an event; return the new parts of the answer as server-sent events."""
        news = self._answers.take_chunks(event)
        return [one for choice in news for one in (*self._begin(), *self._take(choice))]

    def ending(self) -> bytes:
        """Return the server-sent events that end a stream."""
        last = self._event("message_delta", delta=self._why(), usage=self._usage())
        return b"".join(
            [*self._begin(), last, self._event("message_stop", **self._answers.ends(self._texts))]
        )

    def _texts(self) -> dict[str, str]:
        return self._items.texts(_PLACES)

    def failure(self, error: ApiError) -> bytes:
        """Return the server-sent event of a stream that fails."""
        body = anthropic_body(error, self._id.removeprefix("msg_"))
        return b"event: error\n" + sse(body)

    # --- events --------------------------------------------------------------------------------

    def _event(self, name: str, **fields: Any) -> bytes:
        if not self._is_streamed:
            return b""
        return f"event: {name}\n".encode() + sse({"type": name, **fields})

    def _begin(self) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            yield self._event("message_start", message=self._message({}))

    def _take(self, choice: Choice) -> Iterator[bytes]:
        """Put a delta into the items, and yield the events that say so."""
        for change, item, text in self._items.take(choice):
            index = item.index
            if change == "begins":
                yield self._event("content_block_start", index=index, content_block=_block(item))
            elif change == "ends":
                yield self._event("content_block_stop", index=index)
            else:
                kind, field = _DELTAS[item.kind]
                delta = {"type": kind, field: text}
                yield self._event("content_block_delta", index=index, delta=delta)
        if choice["finish_reason"]:
            self._end(choice)

    def _end(self, choice: Choice) -> None:
        reason = _REASONS[choice["finish_reason"]]
        stopped_by = choice.get("stop_reason")
        if reason == "end_turn" and any(item.kind == "call" for item in self._items.all):
            reason = "tool_use"
        elif reason == "end_turn" and isinstance(stopped_by, str):
            reason, self._stop_sequence = "stop_sequence", stopped_by
        elif reason == "max_tokens" and self._answers.room is not None:
            reason = "model_context_window_exceeded"
        self._stop_reason = reason

    # --- the object ----------------------------------------------------------------------------

    def _message(self, stages: StageFields) -> schemas.MessageObject:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": list(map(_block, self._items.all)),
            **self._why(),
            "usage": self._usage(),
            **stages,
        }

    def _why(self) -> schemas.MessageEnd:
        """Return why the message has ended, if it has."""
        bounds, reason = self._answers.ended_by(), self._stop_reason
        return {"stop_reason": reason, "stop_sequence": self._stop_sequence, **bounds}

    def _usage(self) -> schemas.MessageUsage:
        """Return Anthropic's counts: what the cache had is not among the input tokens."""
        usage = self._answers.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }


def _block(item: Item) -> schemas.ContentBlock:
    if item.kind == "text":
        return {"type": "text", "text": item.text}
    if item.kind == "reasoning":
        return {"type": "thinking", "thinking": item.text, "signature": ""}
    arguments = from_json(item.text or "{}", allow_partial=True)  # max_tokens may have cut them
    return {"type": "tool_use", "id": item.call_id, "name": item.name, "input": arguments}
