"""An answer of llama.cpp's, one of several, or an event of a streamed one."""

from __future__ import annotations

from ridgeline.trust.receipts.answers.shown import Fields, ShownAnswer


def read_llamacpp(shown: ShownAnswer, said: Fields, index: int = 0) -> None:
    """Read an answer, one of several, or an event of a streamed one."""
    at = said.get("index")
    choice = shown.choice(at if isinstance(at, int) else index)
    choice.grow("content", said.text("content"))
    said.told("id_slot", "completion_probabilities", "timings", "model", "generation_settings")
    said.told("prompt", "has_new_line", "truncated", "prompt_progress", "tokens_cached")
    said.told(*[name for name in said.names() if "/" in name])  # as response_fields name them
    if shown.is_stream and "stop_type" not in said:
        said.told("tokens_predicted", "tokens_evaluated")
    predicted, evaluated = said.get("tokens_predicted"), said.get("tokens_evaluated")
    choice.num_tokens = choice.num_tokens if predicted is None else predicted
    choice.num_prompt = choice.num_prompt if evaluated is None else evaluated
    ids = said.get("tokens")
    choice.ids = [*(choice.ids or ()), *ids] if isinstance(ids, list) and ids else choice.ids
    said.same("stop", not shown.is_stream or "stop_type" in said)
    why, word = said.get("stop_type"), said.get("stopping_word")
    if why is not None:
        choice.finish = {"limit": "length", "word": "stop", "eos": "stop"}.get(str(why), "unknown")
        choice.tells_stop, choice.stop = True, word or None
        if (why == "word") != bool(word):
            shown.odd.append(said.place("stopping_word"))
    said.end()
