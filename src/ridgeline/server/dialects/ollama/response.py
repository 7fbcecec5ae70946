"""The answers of /api/chat and /api/generate: a line of JSON for each piece, and one at the end.

They are made of the pieces of a streamed answer (``openai.response_builder``), so a streamed answer
and a whole one are the same. A call comes whole.
"""

from __future__ import annotations

import datetime
import json
from typing import Any

from pydantic_core import from_json

from ridgeline.server.dialects.openai.protocol import ChatRequest, CompletionRequest
from ridgeline.server.dialects.openai.response_builder import Answers, Choice
from ridgeline.server.http.errors import ApiError

NS_PER_MS = 1_000_000


class OllamaShape:
    """Ollama's objects."""

    stream_type = "application/x-ndjson"

    def __init__(
        self,
        answers: Answers,
        body: ChatRequest | CompletionRequest,
        request_id: str,
        model: str,
        fingerprint: str,
        *,
        is_chat: bool,
    ) -> None:
        """Write ``answers``, as messages or, unless ``is_chat``, as responses."""
        self._answers, self._is_streamed, self._is_chat = answers, bool(body.stream), is_chat
        self._model = body.model or model
        self._pieces: list[dict[str, Any]] = []  # of a whole answer
        self._calls: list[dict[str, Any]] = []
        self._arguments = ""  # of the last call, as far as they came
        self._logprobs: list[Any] = []
        self._reason = "stop"
        answers.in_chunks = True

    def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        merged: dict[str, Any] = {
            "content": "".join(one.get("content", "") for one in self._pieces)
        }
        if thoughts := "".join(one.get("thinking", "") for one in self._pieces):
            merged["thinking"] = thoughts
        if calls := [call for one in self._pieces for call in one.get("tool_calls", ())]:
            merged["tool_calls"] = calls
        shown = self._said(merged) | self._end()
        return shown | ({"logprobs": self._logprobs} if self._logprobs else {})

    def chunk(self, choice: Choice) -> bytes:
        """Return the new part of an answer as lines."""
        pieces = []
        delta = choice.get("delta", choice)
        if text := delta.get("reasoning_content"):
            pieces.append({"content": "", "thinking": text})
        if text := delta.get("content") or delta.get("text"):
            pieces.append({"content": text})
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                pieces += self._take_call()
                self._calls.append({"id": call["id"], "name": call["function"]["name"]})
            self._arguments += call["function"].get("arguments", "")
        if choice["finish_reason"]:
            pieces += self._take_call()
            self._reason = "length" if choice["finish_reason"] == "length" else "stop"
        logprobs = (choice.get("logprobs") or {}).get("content", [])
        if logprobs and not pieces:
            pieces = [{"content": ""}]
        if not self._is_streamed:
            self._pieces += pieces
            self._logprobs += logprobs
            return b""
        lines = [self._said(piece) | {"done": False} for piece in pieces]
        if logprobs:
            lines[0]["logprobs"] = logprobs
        return b"".join(map(_line, lines))

    def ending(self) -> bytes:
        """Return the line that ends a stream."""
        return _line(self._said({"content": ""}) | self._end())

    def failure(self, error: ApiError) -> bytes:
        """Return the line of a stream that fails."""
        return _line({"error": str(error)})

    def _take_call(self) -> list[dict[str, Any]]:
        """Return the last call, if one is open, as a piece of the answer."""
        if not self._calls:
            return []
        call = self._calls.pop()  # max_tokens may have cut its arguments
        arguments = from_json(self._arguments or "{}", allow_partial=True)
        self._arguments = ""
        function = {"name": call["name"], "arguments": arguments}
        return [{"content": "", "tool_calls": [{"id": call["id"], "function": function}]}]

    def _said(self, piece: dict[str, Any]) -> dict[str, Any]:
        shown = {"model": self._model, "created_at": now()}
        if self._is_chat:
            return shown | {"message": {"role": "assistant", **piece}}
        thinking = {"thinking": piece["thinking"]} if "thinking" in piece else {}
        return shown | {"response": piece["content"]} | thinking

    def _end(self) -> dict[str, Any]:
        """Return what the last object says besides: why it ended, tokens, and times in ns."""
        usage, times = self._answers.usage(), self._answers.timings()
        prompt_ms = times["time_to_first_token_ms"] - times["queue_time_ms"] if times else 0.0
        answer_ms = times["generation_time_ms"] if times else 0.0
        total_ms = times["time_to_first_token_ms"] + answer_ms if times else 0.0
        return {
            "done": True,
            "done_reason": self._reason,
            "total_duration": int(total_ms * NS_PER_MS),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": int(prompt_ms * NS_PER_MS),
            "eval_count": usage["completion_tokens"],
            "eval_duration": int(answer_ms * NS_PER_MS),
        }


def now() -> str:
    """Return the time as Ollama writes it."""
    return datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
