"""An answer of Anthropic's messages: one object, or events of its blocks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from ridgeline.trust.receipts.answers.shown import Fields, ShownAnswer, ShownChoice, ShownRun

_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "tool_use": "tool_calls",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "refusal": "content_filter",
}


def read_message(shown: ShownAnswer, whole: Fields) -> None:
    """Read a message."""
    choice = shown.choice(0)
    whole.judged(id="id", model="model")
    whole.same("type", "message")
    whole.same("role", "assistant")
    for block in whole.each("content"):
        choice.runs.append(_block(block))
    _anthropic_end(shown, choice, whole)
    whole.end()


def _anthropic_end(shown: ShownAnswer, choice: ShownChoice, said: Fields) -> None:
    """Read why a message ended, and its counts."""
    reason, choice.tells_stop = said.get("stop_reason"), True
    choice.stop = said.get("stop_sequence")
    choice.finish = None if reason is None else _REASONS.get(str(reason), "unknown")
    if (reason == "stop_sequence") != (choice.stop is not None):
        shown.odd.append(said.place("stop_reason"))
    if reason == "model_context_window_exceeded":
        shown.judged.append((said.place("stop_reason"), "is full", True))
    elif reason == "max_tokens":
        shown.judged.append((said.place("stop_reason"), "is full", False))
    _anthropic_usage(said)


def _anthropic_usage(said: Fields) -> None:
    usage = said.one("usage")
    if usage:
        usage.same("cache_creation_input_tokens", 0)
        usage.told("input_tokens", "cache_read_input_tokens")
        usage.judged(output_tokens="completion")
    usage.end()


def _block(block: Fields) -> ShownRun:
    kind = block.get("type")
    if kind == "tool_use":
        block.told("id")
        run = ShownRun("call", block.text("name"), json.dumps(block.get("input")))
    elif kind == "thinking":
        block.same("signature", "")
        run = ShownRun("reasoning", block.text("thinking"))
    else:
        run = ShownRun("content" if kind == "text" else "unknown", block.text("text"))
    block.end()
    return run


def read_message_events(shown: ShownAnswer, events: Sequence[Any]) -> None:
    """Read a stream: blocks that begin, grow and end, one after the other."""
    choice, inputs = shown.choice(0), list[str]()
    choice.tells_stop = True
    for i, value in enumerate(events):
        event = Fields(shown, value, f"event {i}")
        kind, index = str(event.get("type")), event.get("index")
        if kind == "message_start":
            _anthropic_start(shown, event.one("message"))
        elif kind == "content_block_start":
            choice.goes_on |= choice.finish is not None
            run = _block(event.one("content_block"))
            if run.arguments not in ("", "{}"):
                shown.odd.append(event.place("content_block.input"))
            choice.runs.append(run)
            inputs.append("")
        elif kind == "content_block_delta" and choice.runs:
            choice.goes_on |= choice.finish is not None
            delta, run = event.one("delta"), choice.runs[-1]
            names = {"content": "text", "reasoning": "thinking", "call": "partial_json"}
            types = {"content": "text_delta", "reasoning": "thinking_delta"}
            delta.same("type", types.get(run.kind, "input_json_delta"))
            text = delta.text(names.get(run.kind, ""))
            delta.end()
            if run.kind == "call":
                inputs[-1] += text
            else:
                choice.runs[-1] = run._replace(text=run.text + text)
        elif kind == "message_delta":
            delta = event.one("delta")
            _anthropic_end(shown, choice, delta)
            delta.end()
            _anthropic_usage(event)
        elif kind not in ("content_block_stop", "message_stop", "ping"):
            shown.odd.append(event.place("type"))
        if kind.startswith("content_block") and index != len(choice.runs) - 1:
            shown.odd.append(event.place("index"))
        event.end()
    for i, run in enumerate(choice.runs):
        if run.kind == "call":
            choice.runs[i] = run._replace(arguments=inputs[i])


def _anthropic_start(shown: ShownAnswer, message: Fields) -> None:
    message.judged(id="id", model="model")
    message.same("type", "message")
    message.same("role", "assistant")
    message.same("content", [])
    message.same("stop_reason", None)
    message.same("stop_sequence", None)
    message.told("usage")
    message.end()


def as_object(arguments: str) -> str:
    """Return the arguments of a call, as APIs show them that have objects; they may be cut."""
    return json.dumps(from_json(arguments or "{}", allow_partial=True))
