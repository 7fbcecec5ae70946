"""The answer of POST /v1/messages: content blocks, and the events that tell how they grow.

Both are made of the deltas of a streamed chat (``openai.response_builder``), so a streamed message
and a whole one are the same. A block is closed before the next one begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic_core import from_json

from ridgeline.server.dialects.openai.protocol import ChatRequest
from ridgeline.server.dialects.openai.reply import SSE, event
from ridgeline.server.dialects.openai.response_builder import Answers, Choice
from ridgeline.server.http.errors import ApiError, anthropic_body

_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_EMPTY: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "text": ""},
    "thinking": {"type": "thinking", "thinking": "", "signature": ""},
}


class MessageShape:
    """Anthropic's message object."""

    stream_type = SSE

    def __init__(
        self, answers: Answers, body: ChatRequest, request_id: str, model: str, fingerprint: str
    ) -> None:
        """Write ``answers`` to what ``body`` asks."""
        self._answers, self._is_streamed = answers, bool(body.stream)
        self._id, self._model = f"msg_{request_id}", model
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False  # the last block
        self._arguments = ""  # of the call that is open, as far as they came
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None
        self._has_begun = False
        answers.in_chunks = True  # a whole message is made of them too

    def whole(self) -> dict[str, Any]:
        """Return the whole message."""
        return self._message()

    def chunk(self, choice: Choice) -> bytes:
        """Return the new part of the answer as server-sent events."""
        return b"".join([*self._begin(), *self._take(choice)])

    def ending(self) -> bytes:
        """Return the server-sent events that end a stream."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence}
        last = self._event("message_delta", delta=delta, usage=self._usage())
        return b"".join([*self._begin(), last, self._event("message_stop")])

    def failure(self, error: ApiError) -> bytes:
        """Return the server-sent event of a stream that fails."""
        body = anthropic_body(error, self._id.removeprefix("msg_"))
        return b"event: error\n" + event(body)

    # --- events --------------------------------------------------------------------------------

    def _event(self, name: str, **fields: Any) -> bytes:
        if not self._is_streamed:
            return b""
        return f"event: {name}\n".encode() + event({"type": name, **fields})

    def _begin(self) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            yield self._event("message_start", message=self._message())

    def _take(self, choice: Choice) -> Iterator[bytes]:
        """Put a delta into the blocks, and yield the events that say so."""
        delta = choice["delta"]
        if text := delta.get("reasoning_content"):
            yield from self._grow("thinking", text)
        if text := delta.get("content"):
            yield from self._grow("text", text)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                name = call["function"]["name"]
                yield from self._open({"type": "tool_use", "id": call["id"], "name": name})
            if piece := call["function"].get("arguments"):
                self._arguments += piece
                yield self._grown("input_json_delta", partial_json=piece)
        if choice["finish_reason"]:
            yield from self._close()
            self._end(choice)

    def _end(self, choice: Choice) -> None:
        reason = _REASONS[choice["finish_reason"]]
        stopped_by = choice.get("stop_reason")
        if reason == "end_turn" and any(block["type"] == "tool_use" for block in self._blocks):
            reason = "tool_use"
        elif reason == "end_turn" and isinstance(stopped_by, str):
            reason, self._stop_sequence = "stop_sequence", stopped_by
        self._stop_reason = reason

    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        if not self._is_open or self._blocks[-1]["type"] != kind:
            yield from self._open(dict(_EMPTY[kind]))
        self._blocks[-1][kind] += text
        yield self._grown(f"{kind}_delta", **{kind: text})

    def _grown(self, kind: str, **fields: str) -> bytes:
        index = len(self._blocks) - 1
        return self._event("content_block_delta", index=index, delta={"type": kind, **fields})

    def _open(self, block: dict[str, Any]) -> Iterator[bytes]:
        yield from self._close()
        if block["type"] == "tool_use":
            block["input"], self._arguments = {}, ""
        self._blocks.append(block)
        self._is_open = True
        index = len(self._blocks) - 1
        yield self._event("content_block_start", index=index, content_block=dict(block))

    def _close(self) -> Iterator[bytes]:
        """End the block that is open, if one is."""
        if not self._is_open:
            return
        self._is_open = False
        if self._blocks[-1]["type"] == "tool_use":  # max_tokens may have cut its arguments
            self._blocks[-1]["input"] = from_json(self._arguments or "{}", allow_partial=True)
        yield self._event("content_block_stop", index=len(self._blocks) - 1)

    # --- the object ----------------------------------------------------------------------------

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [dict(block) for block in self._blocks],
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "usage": self._usage(),
        }

    def _usage(self) -> dict[str, int]:
        """Return Anthropic's counts: what the cache had is not among the input tokens."""
        usage = self._answers.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }
