"""An answer of OpenAI's completions, of a chat or of a text, or a chunk of one."""

from __future__ import annotations

from ridgeline.trust.receipts.answers.shown import Fields, ShownAnswer, ShownChoice


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
