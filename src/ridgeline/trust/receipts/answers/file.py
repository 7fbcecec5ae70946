"""The answer in a file: which API's it is, whole or as a stream."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from ridgeline.trust.receipts.answers.anthropic import read_message, read_message_events
from ridgeline.trust.receipts.answers.completions import read_completion, read_llamacpp, read_ollama
from ridgeline.trust.receipts.answers.responses import read_response, read_response_events
from ridgeline.trust.receipts.answers.shown import Fields, ShownAnswer

_EVENT = re.compile(rb"(event: [a-z._]+|: [a-z]+|data: \[DONE\]|)")  # lines without an object


def shown_in(data: bytes) -> ShownAnswer | None:
    """Return what a file shows beside its receipt; None if that is all it has.

    Raises ValueError for what can be read in two ways.
    """
    values, is_whole = objects_in(data)
    values = [body for body in map(_without_receipt, values) if body is not None]
    if is_whole:
        return _whole(values[0]) if values else None
    if any(_is_batch_line(one) for one in values):
        values = [one["response"] for one in values if one["response"].pop("receipt", None)]
        return _whole(values[0]["body"])
    return _stream(values)


def _is_batch_line(value: Any) -> bool:
    return isinstance(value, dict) and "custom_id" in value and isinstance(value["response"], dict)


def _without_receipt(value: Any) -> Any:
    """Return what stands beside a receipt; None if it stands alone."""
    if isinstance(value, list) and value:
        return [*value[:-1], _without_receipt(value[-1])]
    if not isinstance(value, dict):
        return value
    if "payloadType" in value:
        return None
    if isinstance(body := value.get("response"), dict):
        of_batch = isinstance(body.get("body"), dict)
        inner = _without_receipt(body["body"] if of_batch else body)
        return value | {"response": body | {"body": inner} if of_batch else inner}
    return {name: one for name, one in value.items() if name != "receipt"}


def _whole(value: Any) -> ShownAnswer:
    """Read one answer."""
    shown = ShownAnswer()
    if isinstance(value, dict) and isinstance(body := value.get("response"), dict):
        value = body.get("body", body)
    if isinstance(value, list):
        shown.style = "llama.cpp's list"
        for i, one in enumerate(value):
            read_llamacpp(shown, Fields(shown, one, f"[{i}]"), i)
        return shown
    whole = Fields(shown, value)
    if "choices" in whole:
        shown.style = "chat" if str(value.get("object")).startswith("chat") else "text"
        shown.is_ordered = False
        read_completion(shown, whole)
    elif "output" in whole:
        shown.style = "response"
        shown.choices[0] = read_response(shown, whole)
    elif "stop_reason" in whole:
        shown.style = "message"
        read_message(shown, whole)
    elif "done" in whole:
        shown.style = "Ollama's chat" if "message" in whole else "Ollama's text"
        shown.is_ordered = False
        read_ollama(shown, whole)
    else:
        shown.style = "llama.cpp's"
        read_llamacpp(shown, whole, 0)
    return shown


def _stream(values: Sequence[Any]) -> ShownAnswer:
    """Read the events of a streamed answer."""
    shown, events = ShownAnswer(is_stream=True), list(values)
    first = events[0] if isinstance(events[0], dict) else {}
    kind = str(first.get("type"))
    read_one: Callable[[ShownAnswer, Fields], object] | None = None
    if "choices" in first:
        shown.style = "chat" if str(first.get("object")).startswith("chat") else "text"
        read_one = read_completion
    elif kind.startswith("response."):
        shown.style = "response"
        read_response_events(shown, events)
    elif kind != "None":
        shown.style = "message"
        read_message_events(shown, events)
    elif "done" in first:
        shown.style = "Ollama's chat" if "message" in first else "Ollama's text"
        read_one = read_ollama
    else:
        shown.style = "llama.cpp's"
        read_one = read_llamacpp
    for i, value in enumerate(events):
        if read_one is not None:
            read_one(shown, Fields(shown, value, f"event {i}"))
    return shown


def objects_in(data: bytes) -> tuple[list[Any], bool]:
    """Return the objects of a file, and whether it is one alone; else those of its lines.

    Raises ValueError for a field that is there twice, and for a line that is none of a stream.
    """
    try:
        from_json(data)
    except ValueError:
        return list(_lines(data)), False
    return [_loaded(data)], True


def _lines(data: bytes) -> Iterator[Any]:
    for number, line in enumerate(data.splitlines(), start=1):
        text = line.removeprefix(b"data:").strip()
        try:
            from_json(text)
        except ValueError:
            if not _EVENT.fullmatch(line.strip()):
                raise ValueError(f"line {number} is not JSON that can be read") from None
        else:
            yield _loaded(text)


def _loaded(data: bytes) -> Any:
    """Return the value of JSON that can be read. Raises ValueError for a field that is twice."""

    def fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the field {twice:.80} is there twice")
        return found

    try:
        return json.loads(data, object_pairs_hook=fields)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
