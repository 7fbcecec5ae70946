"""The answer of POST /v1/responses: items, and the events that tell how they grow.

Both are made of ``answer.items``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import chain
from typing import Any

from ridgeline.serve.answer.items import Item, Items
from ridgeline.serve.answer.reply import PING, SSE, sse
from ridgeline.serve.answer.response_builder import Choice, ResponseBuilder, progress_of
from ridgeline.serve.dialects.responses import schemas
from ridgeline.serve.dialects.responses.protocol import ResponsesRequest
from ridgeline.serve.engine.request_stream import PromptProgress, StreamEvent
from ridgeline.serve.http.errors import ApiError

# By the kind of an item: how ids begin, what it is called, and what its part is.
_PREFIX = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}
_TYPE = {"text": "message", "reasoning": "reasoning", "call": "function_call"}
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_PART = {"text": "output_text", "reasoning": "reasoning_text"}
_PLACES = {  # of texts, by the kind of an item and its attribute
    ("text", "text"): "output[{}].content[0].text",
    ("reasoning", "text"): "output[{}].content[0].text",
    ("call", "name"): "output[{}].name",
    ("call", "text"): "output[{}].arguments",
}


class ResponsesWriter:
    """OpenAI's response object."""

    stream_type, ping = SSE, PING

    def __init__(
        self, answers: ResponseBuilder, model: str, fingerprint: str, *, body: ResponsesRequest
    ) -> None:
        """Write ``answers`` to the request of this ``body``."""
        self._answers, self._body = answers, body
        self._id, self._model = f"resp_{answers.stream.name}", model
        self._created = answers.created_s
        self._items = Items()
        self._ids: list[str] = []  # by item
        self._shown: list[list[Any]] = []  # logprobs, by item
        self._finish_reason: str | None = None
        self._number = 0  # of events so far
        self._logprobs: list[Any] = []  # of tokens whose text is still to come
        self._num_reasoning = 0  # tokens so far

    def whole(self) -> dict[str, Any]:
        """Return the whole response."""
        return self._response() | {**self._answers.ends(partial(self._items.texts, _PLACES))}

    def take(self, event: StreamEvent) -> list[bytes]:
        """Take an event; return the new parts of the answer as server-sent events."""
        if isinstance(event[1], PromptProgress):
            more = {"prompt_progress": progress_of(event[1])}
            begin = list(self._begin())
            return [*begin, self._event("in_progress", response=self._response(), **more)]
        news = self._answers.take_chunks(event)
        return [one for choice in news for one in (*self._begin(), *self._take(choice))]

    def ending(self) -> bytes:
        """Return the server-sent event that ends a stream."""
        name = "incomplete" if self._finish_reason in _INCOMPLETE else "completed"
        begin = b"".join(self._begin())
        return begin + self._event(name, response=self.whole(), **self._pace())

    def failure(self, error: ApiError) -> bytes:
        """Return the server-sent event of a stream that fails."""
        response = self._response() | {"status": "failed", "error": error.body()["error"]}
        return self._event("failed", response=response)

    # --- events --------------------------------------------------------------------------------

    def _event(self, kind: str, **fields: Any) -> bytes:
        if not self._body.stream:
            return b""
        name = f"response.{kind}"
        data = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {name}\n".encode() + sse(data)

    def _begin(self) -> Iterator[bytes]:
        if not self._number:
            yield self._event("created", response=self._response())
            yield self._event("in_progress", response=self._response())

    def _take(self, choice: Choice) -> Iterator[bytes]:
        """Put a delta into the items, and yield the events that say so."""
        self._hold_logprobs(choice)
        self._finish_reason = choice["finish_reason"]
        changes = self._items.take(choice)
        if self._finish_reason == "stop" and not self._items.all:
            changes = chain(self._items.grow("text", ""), changes)  # clients look for one
        for change, item, text in changes:
            if change == "begins":
                yield from self._open(item)
            elif change == "ends":
                yield from self._close(item)
            else:
                optional = {"logprobs": self._take_logprobs()} if item.kind == "text" else {}
                kind = f"{_PART.get(item.kind, 'function_call_arguments')}.delta"
                yield self._event(kind, **self._place(item), delta=text, **optional, **self._pace())

    def _pace(self) -> dict[str, Any]:
        """Return the times so far, if they were asked for."""
        pace = self._answers.pace() if self._body.timings_per_token else None
        return {"timings": pace} if pace else {}

    def _hold_logprobs(self, choice: Choice) -> None:
        """Keep the logprobs of tokens until their text comes; text has them, nothing else does.

        A delta without text belongs to a token that is held back, or only marks an end.
        """
        self._logprobs += (choice["logprobs"] or {}).get("content", [])
        before, self._num_reasoning = self._num_reasoning, self._answers.num_reasoning
        is_call = (item := self._items.open) is not None and item.kind == "call"
        is_call = "tool_calls" in choice["delta"] or (is_call and not choice["delta"])
        if self._num_reasoning > before or is_call:
            self._logprobs = []

    def _take_logprobs(self) -> list[Any]:
        """Put the logprobs of tokens so far into the part of the last item, and return them."""
        news, self._logprobs = self._logprobs, []
        self._shown[-1] += news
        return news

    def _open(self, item: Item) -> Iterator[bytes]:
        self._ids.append(self._answers.new_id(_PREFIX[item.kind], item.index))
        self._shown.append([])
        empty = {"content": list[Any]()} if item.kind in _PART else {}
        shown = self._item(item) | empty
        yield self._event("output_item.added", output_index=item.index, item=shown)
        if item.kind in _PART:
            yield self._event("content_part.added", **self._place(item), part=self._part(item))

    def _close(self, item: Item) -> Iterator[bytes]:
        if item.kind == "call":
            done = {"arguments": item.text, "name": item.name}
            yield self._event("function_call_arguments.done", **self._place(item), **done)
        else:
            optional = {}
            if item.kind == "text":
                self._take_logprobs()
                optional["logprobs"] = self._shown[item.index]
            place, part = self._place(item), self._part(item)
            yield self._event(f"{part['type']}.done", **place, text=item.text, **optional)
            yield self._event("content_part.done", **place, part=part)
        yield self._event("output_item.done", output_index=item.index, item=self._item(item))

    def _place(self, item: Item) -> dict[str, Any]:
        place = {"item_id": self._ids[item.index], "output_index": item.index}
        return place if item.kind == "call" else place | {"content_index": 0}

    # --- the object ----------------------------------------------------------------------------

    def _item(self, item: Item) -> dict[str, Any]:
        is_cut = self._finish_reason in _INCOMPLETE and item is self._items.all[-1]
        status = "incomplete" if is_cut else "completed"
        status = "in_progress" if item is self._items.open else status
        shown = {"id": self._ids[item.index], "type": _TYPE[item.kind], "status": status}
        if item.kind == "call":
            return shown | {"call_id": item.call_id, "name": item.name, "arguments": item.text}
        role: dict[str, Any] = {"role": "assistant"} if item.kind == "text" else {"summary": []}
        return shown | role | {"content": [self._part(item)]}

    def _part(self, item: Item) -> Any:
        if item.kind == "reasoning":
            thought: schemas.ReasoningText = {"type": "reasoning_text", "text": item.text}
            return thought
        logprobs = self._shown[item.index]
        text: schemas.OutputText
        text = {"type": "output_text", "text": item.text, "annotations": [], "logprobs": logprobs}
        return text

    def _response(self) -> dict[str, Any]:
        body, reason = self._body, self._finish_reason
        form = body.text and body.text.format
        why_cut = _INCOMPLETE.get(reason or "")
        status = "incomplete" if why_cut else "completed" if reason else "in_progress"
        said = self._answers.shown_fields(body.model_dump(
            include={"instructions", "max_output_tokens", "metadata", "temperature", "tool_choice",
                     "tools", "top_p", "user", "top_logprobs"}
        ))  # fmt: skip
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": {"reason": why_cut} if why_cut else None,
            **self._answers.ended_by(),
            "model": self._model,
            "output": list(map(self._item, self._items.all)),
            "previous_response_id": None,
            "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
            "store": False,
            "text": {"format": self._answers.shown(form) or {"type": "text"}},
            "truncation": "disabled",
            "usage": self._usage() if reason else None,
            **said,
            "parallel_tool_calls": self._answers.is_parallel,
            "tools": said["tools"] or [],
            "tool_choice": said["tool_choice"] or "auto",
        }

    def _usage(self) -> schemas.ResponseUsage:
        usage = self._answers.usage()
        details = usage.get("completion_tokens_details", {})
        return {
            "input_tokens": usage["prompt_tokens"],
            # Nobody is charged for writing to the cache.
            "input_tokens_details": {"cache_write_tokens": 0, **usage["prompt_tokens_details"]},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": details.get("reasoning_tokens", 0)},
            "total_tokens": usage["total_tokens"],
        }
