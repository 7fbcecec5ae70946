"""The answer of POST /v1/responses: items, and the events that tell how they grow.

Both are made of the deltas of a streamed chat (``openai.response_builder``), so a streamed response
and a whole one are the same. An item is closed before the next one begins.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from ridgeline.server.dialects.openai.protocol import ChatRequest
from ridgeline.server.dialects.openai.reply import SSE, event
from ridgeline.server.dialects.openai.response_builder import Answers, Choice
from ridgeline.server.dialects.responses.protocol import ResponsesRequest
from ridgeline.server.http.errors import ApiError

_PREFIX = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}
_PART = {"message": "output_text", "reasoning": "reasoning_text"}


class ResponseShape:
    """OpenAI's response object."""

    stream_type = SSE

    def __init__(
        self,
        answers: Answers,
        body: ChatRequest,
        request_id: str,
        model: str,
        fingerprint: str,
        *,
        asked: ResponsesRequest,
    ) -> None:
        """Write ``answers`` to what was ``asked``."""
        self._answers, self._asked = answers, asked
        self._id, self._model, self._created = f"resp_{request_id}", model, int(time.time())
        self._items: list[dict[str, Any]] = []
        self._is_open = False  # the last item
        self._finish_reason: str | None = None
        self._number = 0  # of events so far
        self._logprobs: list[Any] = []  # of tokens whose text is still to come
        self._num_reasoning = 0  # tokens so far
        answers.in_chunks = True  # a whole response is made of them too

    def whole(self) -> dict[str, Any]:
        """Return the whole response."""
        return self._response()

    def chunk(self, choice: Choice) -> bytes:
        """Return the new part of the answer as server-sent events."""
        return b"".join([*self._begin(), *self._take(choice)])

    def ending(self) -> bytes:
        """Return the server-sent event that ends a stream."""
        name = "incomplete" if self._finish_reason == "length" else "completed"
        return b"".join([*self._begin(), self._event(name, response=self._response())])

    def failure(self, error: ApiError) -> bytes:
        """Return the server-sent event of a stream that fails."""
        response = self._response() | {"status": "failed", "error": error.body()["error"]}
        return self._event("failed", response=response)

    # --- events --------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> bytes:
        if not self._asked.stream:
            return b""
        name = f"response.{kind}"
        data = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {name}\n".encode() + event(data)

    def _begin(self) -> Iterator[bytes]:
        if not self._number:
            yield self._event("created", response=self._response())
            yield self._event("in_progress", response=self._response())

    def _take(self, choice: Choice) -> Iterator[bytes]:
        """Put a delta into the items, and yield the events that say so."""
        delta = choice["delta"]
        self._hold_logprobs(choice)
        if text := delta.get("reasoning_content"):
            yield from self._grow("reasoning", text)
        if text := delta.get("content"):
            yield from self._grow("message", text)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                name = call["function"]["name"]
                yield from self._open("function_call", call_id=call["id"], name=name, arguments="")
            if piece := call["function"].get("arguments"):
                self._items[-1]["arguments"] += piece
                yield self._event("function_call_arguments.delta", **self._place(), delta=piece)
        if choice["finish_reason"]:
            if not self._items and choice["finish_reason"] == "stop":
                yield from self._grow("message", "")  # clients look for one
            self._finish_reason = choice["finish_reason"]
            yield from self._close()

    def _hold_logprobs(self, choice: Choice) -> None:
        """Keep the logprobs of tokens until their text comes; text has them, nothing else does.

        A delta without text is of a token that is held back, or that only marks where things end.
        """
        self._logprobs += (choice["logprobs"] or {}).get("content", [])
        before, self._num_reasoning = self._num_reasoning, self._answers.num_reasoning
        is_call = self._is_open and self._items[-1]["type"] == "function_call"
        is_call = "tool_calls" in choice["delta"] or (is_call and not choice["delta"])
        if self._num_reasoning > before or is_call:
            self._logprobs = []

    def _grow(self, kind: str, text: str) -> Iterator[bytes]:
        if not self._is_open or self._items[-1]["type"] != kind:
            role: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._open(kind, **role, content=[])
            part: dict[str, Any] = {"type": _PART[kind], "text": ""}
            part |= {"annotations": [], "logprobs": []} if kind == "message" else {}
            yield self._event("content_part.added", **self._place(0), part=dict(part))
            self._items[-1]["content"].append(part)
        part = self._items[-1]["content"][0]
        part["text"] += text
        optional = {}
        if kind == "message":
            optional["logprobs"] = self._take_logprobs(part)
        yield self._event(f"{_PART[kind]}.delta", **self._place(0), delta=text, **optional)

    def _take_logprobs(self, part: dict[str, Any]) -> list[Any]:
        """Put the logprobs of tokens so far into a part of text, and return them."""
        news, self._logprobs = self._logprobs, []
        part["logprobs"] += news
        return news

    def _open(self, kind: str, **fields: Any) -> Iterator[bytes]:
        yield from self._close()
        item_id = _PREFIX[kind] + uuid4().hex[:24]
        item = {"id": item_id, "type": kind, "status": "in_progress", **fields}
        self._items.append(item)
        self._is_open = True
        shown = {**item, "content": []} if "content" in item else dict(item)
        yield self._event("output_item.added", output_index=len(self._items) - 1, item=shown)

    def _close(self) -> Iterator[bytes]:
        """End the item that is open, if one is."""
        if not self._is_open:
            return
        item, self._is_open = self._items[-1], False
        item["status"] = "incomplete" if self._finish_reason == "length" else "completed"
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield self._event("function_call_arguments.done", **self._place(), **done)
        else:
            part, optional = item["content"][0], {}
            if item["type"] == "message":
                self._take_logprobs(part)
                optional["logprobs"] = part["logprobs"]
            kind = f"{part['type']}.done"
            yield self._event(kind, **self._place(0), text=part["text"], **optional)
            yield self._event("content_part.done", **self._place(0), part=part)
        yield self._event("output_item.done", output_index=len(self._items) - 1, item=item)

    def _place(self, content_index: int | None = None) -> dict[str, Any]:
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return place if content_index is None else place | {"content_index": content_index}

    # --- the object ----------------------------------------------------------------------------

    def _response(self) -> dict[str, Any]:
        asked, reason = self._asked, self._finish_reason
        is_cut = reason == "length"
        status = "incomplete" if is_cut else "completed" if reason else "in_progress"
        said = asked.model_dump(
            include={"instructions", "max_output_tokens", "metadata", "temperature", "tool_choice",
                     "tools", "top_p", "user", "top_logprobs"}
        )  # fmt: skip
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": self._model,
            "output": [dict(item) for item in self._items],
            "previous_response_id": None,
            "reasoning": {"effort": asked.reasoning and asked.reasoning.effort, "summary": None},
            "store": False,
            "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
            "truncation": "disabled",
            "usage": self._usage() if reason else None,
            **said,
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "tools": said["tools"] or [],
            "tool_choice": said["tool_choice"] or "auto",
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._answers.usage()
        reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": usage["total_tokens"],
        }
