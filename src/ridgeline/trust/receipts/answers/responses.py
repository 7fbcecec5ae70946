"""An answer of the Responses API: one object, or events that build it and then repeat it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.trust.receipts.answers.shown import Fields, ShownAnswer, ShownChoice, ShownRun

_OF_REQUEST = (  # what a response repeats of its request
    *("instructions", "max_output_tokens", "metadata", "temperature", "tool_choice", "tools"),
    *("top_p", "user", "top_logprobs", "parallel_tool_calls", "text", "reasoning"),
)
_INCOMPLETE = {"max_output_tokens": "length", "content_filter": "content_filter"}


def read_response(shown: ShownAnswer, whole: Fields) -> ShownChoice:
    """Read a response object; return what it shows."""
    choice = ShownChoice()
    whole.judged(id="id", model="model")
    whole.same("object", "response")
    for name, value in (("background", False), ("store", False), ("truncation", "disabled")):
        whole.same(name, value)
    for name in ("error", "previous_response_id"):
        whole.same(name, None)
    whole.told("created_at", *_OF_REQUEST)
    status, details = whole.get("status"), whole.one("incomplete_details")
    reason = details.get("reason")
    details.end()
    if status == "incomplete":
        choice.finish = _INCOMPLETE.get(str(reason), "unknown")
    elif status == "completed" and reason is None:
        choice.finish = "stop"
    elif status != "in_progress":
        shown.odd.append(whole.place("status"))
    for item in whole.each("output"):
        choice.runs.append(_response_item(item))
    usage = whole.one("usage")
    usage.judged(input_tokens="prompt", output_tokens="completion", total_tokens="total")
    usage.told("input_tokens_details", "output_tokens_details")
    usage.end()
    whole.end()
    return choice


def _response_item(item: Fields) -> ShownRun:
    kind = item.get("type")
    item.told("id", "status")
    if kind == "function_call":
        item.told("call_id")
        run = ShownRun("call", item.text("name"), item.text("arguments"))
    else:
        parts = [_response_part(part) for part in item.each("content")]
        item.same("summary", [])
        item.same("role", "assistant")
        names = {"message": "content", "reasoning": "reasoning"}
        run = ShownRun(names.get(str(kind), "unknown"), "".join(text for _, text in parts))
        if len(parts) > 1 or any(one not in ("", run.kind) for one, _ in parts):
            run = run._replace(kind="unknown")
    item.end()
    return run


def _response_part(part: Fields) -> tuple[str, str]:
    names = {"output_text": "content", "reasoning_text": "reasoning"}
    kind = names.get(str(part.get("type")), "unknown")
    part.same("annotations", [])
    part.told("logprobs")
    text = part.text("text")
    part.end()
    return kind, text


def read_response_events(shown: ShownAnswer, events: Sequence[Any]) -> None:
    """Read a stream: what grows, what each item is at its end, and the response at the end."""
    ended, last = ShownChoice(), ShownChoice()
    grown = shown.choice(0)
    for i, value in enumerate(events):
        event = Fields(shown, value, f"event {i}")
        kind = str(event.get("type")).removeprefix("response.")
        event.told("item_id", "timings", "prompt_progress", "logprobs")
        event.must("sequence_number", i)
        event.same("content_index", 0)
        event.told("output_index")
        if kind in ("created", "in_progress", "completed", "incomplete"):
            last = read_response(shown, event.one("response"))
            if last.runs and kind in ("created", "in_progress"):  # nothing is known yet
                shown.odd.append(event.place("response.output"))
        elif kind in ("output_item.added", "output_item.done"):
            run = _response_item(event.one("item"))
            if kind.endswith("done"):
                ended.runs.append(run)
            elif run.kind == "call":
                grown.call(run.text, run.arguments)
            else:
                grown.runs.append(run)
        elif kind in ("content_part.added", "content_part.done"):
            if grown.runs[-1:] != [ShownRun(*_response_part(event.one("part")))]:
                shown.odd.append(event.place("part"))
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            grown.grow({"o": "content", "r": "reasoning"}[kind[0]], event.text("delta"))
        elif kind == "function_call_arguments.delta" and grown.runs:
            run = grown.runs[-1]
            grown.runs[-1] = run._replace(arguments=run.arguments + event.text("delta"))
        elif kind in ("output_text.done", "reasoning_text.done") and grown.runs:
            event.must("text", grown.runs[-1].text)
        elif kind == "function_call_arguments.done" and grown.runs:
            event.must("name", grown.runs[-1].text)
            event.must("arguments", grown.runs[-1].arguments)
        else:
            shown.odd.append(event.place("type"))
        event.end()
    for one in (ended, last):
        if one.runs != grown.runs:
            shown.odd.append("an event that repeats what others have")
    grown.finish = last.finish
