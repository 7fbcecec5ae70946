"""What an answer shows, read from a file that anybody may have written: texts, thoughts and calls.

It is read strictly, in the form of each API, whole or as a stream. What is no part of a message
must be a field that the API has there: what can be compared with a receipt is, and the rest is
named as told by the server alone. All else is odd: no receipt is about it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic_core import from_json


class ShownRun(NamedTuple):
    """A piece of a message: content, reasoning or refusal, or a call with its arguments."""

    kind: str
    text: str
    arguments: str = ""


@dataclass
class ShownChoice:
    """One of the answers in a file.

    Attributes:
        runs: what it shows, in the order of the file.
        finish: why it ended, in OpenAI's words; None if that is not told.
        stop: what stopped it; None for nothing. ``tells_stop``: whether that would be told.
        num_tokens: of the answer, if that is told; ``num_prompt``: of its prompt.
        ids: of its tokens, if they are told.
        goes_on: whether something came after its end, where clients may have stopped reading.
    """

    runs: list[ShownRun] = field(default_factory=list)
    finish: str | None = None
    stop: str | int | None = None
    tells_stop: bool = False
    num_tokens: int | None = None
    num_prompt: int | None = None
    ids: list[int] | None = None
    goes_on: bool = False

    def grow(self, kind: str, text: str) -> None:
        """Add text to the last run, or to a new one if that is of another kind."""
        self.goes_on |= bool(text) and self.finish is not None
        if self.runs and self.runs[-1].kind == kind:
            self.runs[-1] = self.runs[-1]._replace(text=self.runs[-1].text + text)
        elif text:
            self.runs.append(ShownRun(kind, text))

    def call(self, name: str, arguments: str) -> None:
        """Begin a call."""
        self.goes_on |= self.finish is not None
        self.runs.append(ShownRun("call", name, arguments))


@dataclass
class ShownAnswer:
    """What a file shows beside its receipt.

    Attributes:
        style: of its API: how its texts are placed.
        choices: by their index.
        is_stream: whether they came piece by piece.
        is_ordered: whether texts, thoughts and calls stand in an order there.
        judged: places and values of what a receipt says too, by what that is.
        claims: places of what only the server says.
        odd: places of what no receipt is about.
    """

    style: str = ""
    choices: dict[int, ShownChoice] = field(default_factory=dict)
    is_stream: bool = False
    is_ordered: bool = True
    judged: list[tuple[str, str, Any]] = field(default_factory=list)
    claims: list[str] = field(default_factory=list)
    odd: list[str] = field(default_factory=list)

    def choice(self, index: object) -> ShownChoice:
        """Return the choice of an index."""
        return self.choices.setdefault(index if isinstance(index, int) else -1, ShownChoice())


class Fields:
    """The fields of an object, which are taken one by one; what is left is odd."""

    def __init__(self, shown: ShownAnswer, value: object, at: str = "") -> None:
        """Read ``value``, which stands ``at`` a place of what is ``shown``."""
        self._shown, self._at = shown, at
        self._left = dict(value) if isinstance(value, dict) else {}
        if not isinstance(value, dict):
            shown.odd.append(at or "the answer")

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def __bool__(self) -> bool:
        return bool(self._left)

    def names(self) -> list[str]:
        """Return what is left."""
        return list(self._left)

    def place(self, name: str) -> str:
        """Return where a field stands."""
        return f"{self._at}.{name}".removeprefix(".")

    def get(self, name: str) -> Any:
        """Take a field, of any kind."""
        return self._left.pop(name, None)

    def text(self, name: str) -> str:
        """Take a text, or null."""
        value = self.get(name)
        if value is not None and not isinstance(value, str):
            self._shown.odd.append(self.place(name))
        return value if isinstance(value, str) else ""

    def same(self, name: str, *values: object) -> None:
        """Take what can only be one of some values, or be missing."""
        if name in self and not any(_is_same(self._left[name], one) for one in values):
            self._shown.odd.append(self.place(name))
        self.get(name)

    def must(self, name: str, value: object) -> None:
        """Take what must be there, and be this."""
        if name not in self:
            self._shown.odd.append(self.place(name))
        self.same(name, value)

    def claims(self, *names: str) -> None:
        """Take what only the server says."""
        self._shown.claims += [self.place(one) for one in names if self.get(one) is not None]

    def judged(self, **names: str) -> None:
        """Take what a receipt says too; ``names`` say what that is, by the fields."""
        for name, what in names.items():
            if name in self:
                self._shown.judged.append((self.place(name), what, self.get(name)))

    def each(self, name: str) -> Iterator[Fields]:
        """Take a list of objects."""
        value = self.get(name)
        if value is not None and not isinstance(value, list):
            self._shown.odd.append(self.place(name))
        for i, one in enumerate(value if isinstance(value, list) else ()):
            yield Fields(self._shown, one, f"{self.place(name)}[{i}]")

    def one(self, name: str) -> Fields:
        """Take an object; null has no fields."""
        return Fields(self._shown, self.get(name) or {}, self.place(name))

    def end(self) -> None:
        """Say that nothing else may be there."""
        self._shown.odd += map(self.place, self._left)


def _is_same(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other


STYLES = (
    *("chat", "text", "response", "message", "Ollama's chat", "Ollama's text", "llama.cpp's"),
    "llama.cpp's list",
)


def places_of(style: str, answers: Mapping[int, Sequence[ShownRun]]) -> dict[str, str]:
    """Return the texts of answers by their places in the object of an API."""
    texts: dict[str, str] = {}
    for index, runs in answers.items():
        texts |= _places(style, index, runs)
    return texts


def _places(style: str, index: int, runs: Sequence[ShownRun]) -> dict[str, str]:
    """Return the texts of one answer."""
    joined = {kind: "".join(one.text for one in runs if one.kind == kind) for kind in _TEXTS}
    calls = [one for one in runs if one.kind == "call"]
    if style == "response":
        return {
            f"output[{i}].{name}": text
            for i, run in enumerate(runs)
            for name, text in (
                (("name", run.text), ("arguments", run.arguments))
                if run.kind == "call"
                else (("content[0].text", run.text),)
            )
        }
    if style == "message":
        names = {"call": "name", "reasoning": "thinking"}
        return {
            f"content[{i}].{names.get(run.kind, 'text')}": run.text for i, run in enumerate(runs)
        }
    whole = "".join(joined.values())
    if style == "text":
        return {f"choices[{index}].text": whole}
    if style.startswith("llama.cpp's"):
        return {"content" if style == "llama.cpp's" else f"[{index}].content": whole}
    texts = {"content": joined["content"]}
    texts |= {"reasoning_content": joined["reasoning"]} if joined["reasoning"] else {}
    texts |= {"refusal": joined["refusal"]} if joined["refusal"] else {}
    for i, call in enumerate(calls):
        texts[f"tool_calls[{i}].function.name"] = call.text
        texts[f"tool_calls[{i}].function.arguments"] = call.arguments
    if style == "chat":
        return {f"choices[{index}].message.{name}": text for name, text in texts.items()}
    texts = {name: text for name, text in texts.items() if not name.endswith("arguments")}
    refusal, thoughts = texts.pop("refusal", ""), texts.pop("reasoning_content", "")
    texts["content"] += refusal
    texts |= {"thinking": thoughts} if thoughts else {}
    if style == "Ollama's chat":
        return {f"message.{name}": text for name, text in texts.items()}
    return {"response" if name == "content" else name: text for name, text in texts.items()}


_TEXTS = ("reasoning", "content", "refusal")


_DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


def read_completion(shown: ShownAnswer, whole: Fields) -> None:
    """Read an object of completions, or a chunk of one."""
    whole.judged(id="id", model="model", system_fingerprint="fingerprint")
    kinds = ("chat.completion", "chat.completion.chunk", "text_completion")
    whole.same("object", *kinds)
    whole.claims("created", "metrics", "timings", "__verbose", "prompt_progress", "prompt_logprobs")
    whole.judged(prompt_token_ids="prompt ids")
    choices = list(whole.each("choices"))
    for one in choices:
        _openai_choice(shown, one)
    usage = whole.one("usage")
    if choices and shown.is_stream:
        usage.claims("prompt_tokens", "completion_tokens", "total_tokens")
    usage.judged(prompt_tokens="prompt", completion_tokens="completion", total_tokens="total")
    usage.claims("prompt_tokens_details", "completion_tokens_details")
    usage.end()
    whole.end()


def _openai_choice(shown: ShownAnswer, one: Fields) -> None:
    choice = shown.choice(one.get("index"))
    one.claims("logprobs", "prompt_logprobs")
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
        call.claims("id")
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
    said.claims("model", "created_at", "logprobs", *_DURATIONS)
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
        call.claims("id")
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
    said.claims("id_slot", "completion_probabilities", "timings", "model", "generation_settings")
    said.claims("prompt", "has_new_line", "truncated", "prompt_progress", "tokens_cached")
    said.claims(*[name for name in said.names() if "/" in name])  # as response_fields name them
    if shown.is_stream and "stop_type" not in said:
        said.claims("tokens_predicted", "tokens_evaluated")
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
    whole.claims("created_at", *_OF_REQUEST)
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
    usage.claims("input_tokens_details", "output_tokens_details")
    usage.end()
    whole.end()
    return choice


def _response_item(item: Fields) -> ShownRun:
    kind = item.get("type")
    item.claims("id", "status")
    if kind == "function_call":
        item.claims("call_id")
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
    part.claims("logprobs")
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
        event.claims("item_id", "timings", "prompt_progress", "logprobs")
        event.must("sequence_number", i)
        event.same("content_index", 0)
        event.claims("output_index")
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
        usage.claims("input_tokens", "cache_read_input_tokens")
        usage.judged(output_tokens="completion")
    usage.end()


def _block(block: Fields) -> ShownRun:
    kind = block.get("type")
    if kind == "tool_use":
        block.claims("id")
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
    message.claims("usage")
    message.end()


def as_object(arguments: str) -> str:
    """Return the arguments of a call, as APIs show them that have objects; they may be cut."""
    return json.dumps(from_json(arguments or "{}", allow_partial=True))


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
        value = dict(pairs)
        if len(value) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"the field {twice:.80} is there twice")
        return value

    try:
        return json.loads(data, object_pairs_hook=fields)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
