"""The answers of /api/chat and /api/generate: a line of JSON for each piece, and one at the end.

They are made of ``answer.items``. A call comes whole.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic_core import from_json

from ridgeline.serve.answer.items import Item, Items
from ridgeline.serve.answer.response_builder import Choice, ResponseBuilder
from ridgeline.serve.dialects.ollama import schemas
from ridgeline.serve.engine.request_stream import StreamEvent
from ridgeline.serve.http.errors import ApiError

NS_PER_MS = 1_000_000


class OllamaWriter:
    """Ollama's objects."""

    stream_type, ping = "application/x-ndjson", b""  # each line is an object: there is no ping

    def __init__(
        self, answers: ResponseBuilder, model: str, fingerprint: str, *, is_chat: bool
    ) -> None:
        """Write ``answers``, as messages or, unless ``is_chat``, as responses."""
        body = answers.body
        self._answers, self._is_streamed, self._is_chat = answers, bool(body.stream), is_chat
        self._model, self._created_at = body.model or model, time_of(answers.created_s)
        self._items = Items()
        self._logprobs: list[Any] = []  # of a whole answer
        self._reason: Literal["stop", "length"] = "stop"

    def whole(self) -> schemas.ChatAnswered | schemas.GenerateAnswered:
        """Return the whole answer."""
        message: schemas.SaidMessage = {"role": "assistant", "content": self._text("text")}
        text: schemas.SaidText = {"response": message["content"]}
        if thoughts := self._text("reasoning"):
            message["thinking"] = text["thinking"] = thoughts
        if calls := [_call(item) for item in self._items.all if item.kind == "call"]:
            message["tool_calls"] = calls
        model, created_at, end = self._model, self._created_at, self._end()
        if self._is_chat:
            return {"model": model, "created_at": created_at, "message": message, **end}
        return {"model": model, "created_at": created_at, **text, **end}

    def take(self, event: StreamEvent) -> list[bytes]:
        """Take an event; return the new parts of an answer as lines."""
        return list(map(self._take, self._answers.take_chunks(event)))

    def _take(self, choice: Choice) -> bytes:
        pieces: list[dict[str, Any]] = []
        for change, item, text in self._items.take(choice):
            if item.kind == "call":
                pieces += [{"content": "", "tool_calls": [_call(item)]}] if change == "ends" else []
            elif change == "grows":
                is_text = item.kind == "text"
                pieces.append({"content": text} if is_text else {"content": "", "thinking": text})
        if choice["finish_reason"]:
            self._reason = "length" if choice["finish_reason"] == "length" else "stop"
        logprobs = (choice.get("logprobs") or {}).get("content", [])
        if not self._is_streamed:
            self._logprobs += logprobs
            return b""
        if logprobs and not pieces:
            pieces = [{"content": ""}]
        lines = [self._said(piece) | {"done": False} for piece in pieces]
        if logprobs:
            lines[0]["logprobs"] = logprobs
        return b"".join(map(_line, lines))

    def ending(self) -> bytes:
        """Return the line that ends a stream."""
        return _line(self._said({"content": ""}) | {**self._end()})

    def failure(self, error: ApiError) -> bytes:
        """Return the line of a stream that fails."""
        return _line({"error": str(error)})

    def _text(self, kind: str) -> str:
        return "".join(item.text for item in self._items.all if item.kind == kind)

    def _said(self, piece: dict[str, Any]) -> dict[str, Any]:
        shown = {"model": self._model, "created_at": self._created_at}
        if self._is_chat:
            return shown | {"message": {"role": "assistant", **piece}}
        thinking = {"thinking": piece["thinking"]} if "thinking" in piece else {}
        return shown | {"response": piece["content"]} | thinking

    def _end(self) -> schemas.Answered:
        """Return what else the last object says: why it ended, tokens, and times in ns."""
        usage, times = self._answers.usage(), self._answers.timings()
        prompt_ms = times["time_to_first_token_ms"] - times["queue_time_ms"] if times else 0.0
        answer_ms = times["generation_time_ms"] if times else 0.0
        ranked: schemas.RankedTokens = {"logprobs": self._logprobs} if self._logprobs else {}
        total_ms = times["time_to_first_token_ms"] + answer_ms if times else 0.0
        return {
            "model": self._model,
            "created_at": self._created_at,
            "done": True,
            "done_reason": self._reason,
            **self._answers.ended_by(),
            "total_duration": int(total_ms * NS_PER_MS),
            "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"],
            "prompt_eval_duration": int(prompt_ms * NS_PER_MS),
            "eval_count": usage["completion_tokens"],
            "eval_duration": int(answer_ms * NS_PER_MS),
            **self._answers.ends(self._texts),
            **ranked,
        }

    def _texts(self) -> dict[str, str]:
        """Return the texts of the answer by their places; the arguments of calls are none."""
        texts = {"message.content" if self._is_chat else "response": self._text("text")}
        if thoughts := self._text("reasoning"):
            texts["message.thinking" if self._is_chat else "thinking"] = thoughts
        calls = [item.name for item in self._items.all if item.kind == "call"]
        names = {f"message.tool_calls[{i}].function.name": one for i, one in enumerate(calls)}
        return texts | names


def _call(item: Item) -> schemas.CalledTool:
    arguments = from_json(item.text or "{}", allow_partial=True)  # max_tokens may have cut them
    return {"id": item.call_id, "function": {"name": item.name, "arguments": arguments}}


def time_of(seconds: float) -> str:
    """Return a time, seconds of the epoch, as Ollama writes it."""
    utc = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    return utc.isoformat().replace("+00:00", "Z")


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"
