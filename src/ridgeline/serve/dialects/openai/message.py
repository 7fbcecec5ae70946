"""An assistant's message as OpenAI writes it, whole or in deltas, from what was read of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ridgeline.text.messages.calls import Piece

_FIELDS = {"content": "content", "reasoning": "reasoning_content", "refusal": "refusal"}


def message_of(pieces: Sequence[Piece], call_id: Callable[[int], str]) -> dict[str, Any]:
    """Return a whole message. Its content is null if it has calls and no text.

    ``call_id`` returns the id of a call, from its index.
    """
    calls: list[dict[str, Any]] = []
    texts = {"content": "", "reasoning": "", "refusal": ""}
    for kind, text in pieces:
        if kind == "call":
            calls.append(_call(text, call_id(len(calls))))
        elif kind == "arguments":
            calls[-1]["function"]["arguments"] += text
        else:
            texts[kind] += text
    content = texts["content"] or (None if calls else "")
    message: dict[str, Any] = {"role": "assistant", "content": content}
    message["refusal"] = texts["refusal"] or None
    if texts["reasoning"]:
        message["reasoning_content"] = texts["reasoning"]
    if calls:
        message["tool_calls"] = calls
    return message


def delta_of(piece: Piece, call: int, call_id: Callable[[int], str]) -> dict[str, Any]:
    """Return the delta of one piece; ``call`` is the index of the latest call."""
    kind, text = piece
    if kind == "call":
        return {"tool_calls": [{"index": call, **_call(text, call_id(call))}]}
    if kind == "arguments":
        return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}
    return {_FIELDS[kind]: text}


def _call(name: str, call_id: str) -> dict[str, Any]:
    function = {"name": name, "arguments": ""}
    return {"id": call_id, "type": "function", "function": function}
