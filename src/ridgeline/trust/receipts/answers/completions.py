"""An answer of completions, of a chat or of a text: OpenAI's, Ollama's, or llama.cpp's own."""

from __future__ import annotations

import json

from ridgeline.trust.receipts.answers.shown import Fields, ShownAnswer, ShownChoice

_DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def read_completion(shown: ShownAnswer, whole: Fields) -> None:
    """Read an object of completions, or a chunk of one."""
    whole.judged(id="id", model="model", system_fingerprint="fingerprint")
    kinds = ("chat.completion", "chat.completion.chunk", "text_completion")
    whole.same("object", *kinds)
    whole.told("created", "metrics", "timings", "__verbose", "prompt_progress", "prompt_logprobs")
    whole.judged(prompt_token_ids="prompt ids")
    choices = list(whole.each("choices"))
    for one in choices:
        _openai_choice(shown, one)
    usage = whole.one("usage")
    if choices and shown.is_stream:
        usage.told("prompt_tokens", "completion_tokens", "total_tokens")
    usage.judged(prompt_tokens="prompt", completion_tokens="completion", total_tokens="total")
    usage.told("prompt_tokens_details", "completion_tokens_details")
    usage.end()
    whole.end()


def _openai_choice(shown: ShownAnswer, one: Fields) -> None:
    choice = shown.choice(one.get("index"))
    one.told("logprobs", "prompt_logprobs")
    one.judged(prompt_token_ids="prompt ids")
    ids = one.get("token_ids")
    choice.ids = [*(choice.ids or ()), *ids] if isinstance(ids, list) else choice.ids
    if "text" in one:
        choice.grow("content", one.text("text"))
    else:
        _read_message(shown, choice, one)
    choice.finish, choice.tells_stop = one.get("finish_reason") or choice.finish, True
    choice.stop = one.get("stop_reason") if "stop_reason" in one else choice.stop
    one.end()


def _read_message(shown: ShownAnswer, choice: ShownChoice, one: Fields) -> None:
    name = "delta" if "delta" in one else "message"
    message = one.one(name)
    message.same("role", "assistant")
    texts = {"reasoning": "reasoning_content", "content": "content", "refusal": "refusal"}
    for kind, place in texts.items():
        choice.grow(kind, message.text(place))
    for call in message.each("tool_calls"):
        function = call.one("function")
        at, call_name = call.get("index"), function.get("name")
        call.same("type", "function")
        call.told("id")
        num = sum(run.kind == "call" for run in choice.runs)
        if isinstance(call_name, str):
            choice.call(call_name, function.text("arguments"))
            num += 1
        elif choice.runs and choice.runs[-1].kind == "call":
            run = choice.runs[-1]
            choice.runs[-1] = run._replace(arguments=run.arguments + function.text("arguments"))
        if at not in ((None,) if name == "message" else (num - 1,)):
            shown.odd.append(call.place("index"))
        function.end()
        call.end()
    message.end()


def read_ollama(shown: ShownAnswer, said: Fields) -> None:
    """Read an answer of Ollama's, or a line of a streamed one."""
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


def read_llamacpp(shown: ShownAnswer, said: Fields, index: int = 0) -> None:
    """Read an answer of llama.cpp's, one of several, or an event of a streamed one."""
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
