"""An answer of Ollama's, or a line of a streamed one."""

from __future__ import annotations

import json

from ridgeline.trust.receipts.answers.shown import Fields, ShownAnswer

_DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def read_ollama(shown: ShownAnswer, said: Fields) -> None:
    """Read an answer, or a line of a streamed one."""
    choice = shown.choice(0)
    said.told("model", "created_at", "logprobs", *_DURATIONS)
    said.judged(prompt_eval_count="prompt", eval_count="completion")
    reason = said.get("done_reason")
    said.same("done", reason is not None)
    message = said
    if "message" in said:
        message = said.one("message")
        message.same("role", "assistant")
    choice.grow("reasoning", message.text("thinking"))
    choice.grow("content", message.text("content" if message is not said else "response"))
    for call in message.each("tool_calls"):
        call.told("id")
        function = call.one("function")
        choice.call(function.text("name"), json.dumps(function.get("arguments")))
        function.end()
        call.end()
    if message is not said:
        message.end()
    choice.finish = choice.finish if reason is None else str(reason)
    said.end()
