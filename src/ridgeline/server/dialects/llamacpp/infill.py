"""POST /infill and /completion, as llama.cpp has them: what may be asked, and the answers.

A request for the middle of a text is a completion whose prompt ``text.infill`` makes, so all of
sampling, streaming and limits is that of ``/v1/completions``.
"""

from __future__ import annotations

import time
from typing import Any, Self

from pydantic import Field, model_validator

from ridgeline.decoding.lines import ENDED, LineRules, LineText
from ridgeline.server.dialects import fields
from ridgeline.server.dialects.openai.conversation import Rendering
from ridgeline.server.dialects.openai.protocol import CompletionRequest, NewText
from ridgeline.server.dialects.openai.reply import PING, SSE, sse
from ridgeline.server.dialects.openai.response_builder import Choice, ResponseBuilder
from ridgeline.server.engine.request_stream import StreamEvent
from ridgeline.server.http.errors import ApiError
from ridgeline.server.http.request_model import Strict
from ridgeline.text.infill import File

_MAX_FILES = 1 << 10
_ABSENT = ("echo", "include_timings", "logprobs", "max_tokens", "n", "stream_options", "suffix")


class ExtraFile(Strict):
    """A file, or a piece of one, that helps to understand the open one."""

    extras = fields.TIME_OF_FILE

    text: str
    filename: str = "tmp"


class LlamaCppRequest(CompletionRequest):
    """POST /completion."""

    extras = fields.INFILL
    absent = _ABSENT

    n_predict: int = Field(-1, ge=-1, lt=1 << 63)  # -1: as many as the model has room for
    seed: int | None = Field(None, ge=-1, lt=1 << 63)  # -1: a fresh one
    # Where the answer ends by its lines (``decoding.lines``):
    n_indent: int = Field(0, ge=0, lt=1 << 31)
    t_max_predict_ms: float = Field(0, ge=0, lt=1e15)
    # What to show of the whole answer, as "content" or "timings/prompt_n":
    response_fields: list[str] | None = Field(None, max_length=64, fail_fast=True)

    @model_validator(mode="after")
    def _translated(self) -> Self:
        if self.seed == -1:
            self.seed = None
        return self

    def watched(self, new_text: NewText) -> NewText:
        """Return what makes the texts of answers, with the rules for their lines."""
        rules = LineRules(self.n_indent, self.t_max_predict_ms / 1e3)
        if rules == LineRules():
            return new_text
        return lambda prompt, params: LineText(new_text(prompt, params), rules, time.monotonic)


class TemplateRequest(Rendering):
    """POST /apply-template."""

    model: str | None = None


class InfillRequest(LlamaCppRequest):
    """POST /infill."""

    input_prefix: str
    input_suffix: str
    input_extra: list[ExtraFile] = Field([], max_length=_MAX_FILES, fail_fast=True)
    prompt: str = ""  # follows the prefix: the part of the line before the cursor

    def texts(self, max_chars: int) -> tuple[str, str, list[File]]:
        """Return what stands before and behind the cursor, and the last of the other files.

        Of each not much more than ``max_chars``, beyond which nothing can fit.
        """
        files: list[File] = []
        left = max_chars
        for one in reversed(self.input_extra):
            left -= len(one.filename) + len(one.text)
            if left < 0:
                break
            files.insert(0, File(one.filename, one.text))
        prefix = self.input_prefix[-max_chars:] + self.prompt[-max_chars:]
        return prefix, self.input_suffix[:max_chars], files


class LlamaCppShape:
    """llama.cpp's objects. A stream ends with one that has everything but the text."""

    stream_type, ping = SSE, PING

    def __init__(
        self,
        answers: ResponseBuilder,
        body: LlamaCppRequest,
        request_id: str,
        model: str,
        fingerprint: str,
        *,
        is_truncated: bool,
    ) -> None:
        """Write ``answers``; ``is_truncated`` says that some of the input was left out."""
        self._answers, self._model, self._is_truncated = answers, model, is_truncated
        self._fields, self._is_streamed = body.response_fields or [], bool(body.stream)
        self._end: Choice = {}

    def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        (self._end,) = self._answers.whole()
        return self._last(self._end["text"])

    def take(self, event: StreamEvent) -> list[bytes]:
        """Take an event; return the new parts of a streamed answer as server-sent events."""
        if self._is_streamed:
            return list(map(self._chunk, self._answers.take_chunks(event)))
        self._answers.take(event)
        return []

    def _chunk(self, choice: Choice) -> bytes:
        """Return an event with a piece of the text; the end is held until all is known of it."""
        if choice["finish_reason"]:
            self._end = choice
            return b""
        return sse(self._object(choice["text"], is_end=False))

    def ending(self) -> bytes:
        """Return the event that ends a stream."""
        return sse(self._last(""))

    def failure(self, error: ApiError) -> bytes:
        """Return the server-sent event of a stream that fails."""
        return sse(error.body())

    def _object(self, text: str, *, is_end: bool) -> dict[str, Any]:
        usage = self._answers.usage()
        return {
            "index": 0,
            "content": text,
            "stop": is_end,
            "tokens_predicted": usage["completion_tokens"],
            "tokens_evaluated": usage["prompt_tokens"],
        }

    def _last(self, text: str) -> dict[str, Any]:
        reason = self._end.get("stop_reason")
        is_cut = self._end["finish_reason"] == "length" or reason == ENDED
        word = reason if isinstance(reason, str) else ""
        last = {
            **self._object(text, is_end=True),
            "model": self._model,
            "stop_type": "limit" if is_cut else "word" if word else "eos",
            "stopping_word": word,
            "truncated": self._is_truncated,
            "timings": self._timings(),
        }
        if not self._fields:
            return last
        values = {path: _at(path, last) for path in self._fields}
        return {path: value for path, value in values.items() if value is not None}

    def _timings(self) -> dict[str, Any]:
        times = self._answers.timings()
        if not times:
            return {}
        usage = self._answers.usage()
        num_cached, num_predicted = self._answers.num_cached, usage["completion_tokens"]
        prompt_ms = times["time_to_first_token_ms"] - times["queue_time_ms"]
        return {
            "cache_n": num_cached,
            **_pace("prompt", usage["prompt_tokens"] - num_cached, prompt_ms),
            **_pace("predicted", num_predicted, times["generation_time_ms"]),
        }


def _at(path: str, value: Any) -> Any:
    """Return what stands at a path of names, None for nothing."""
    for name in path.split("/"):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _pace(name: str, count: int, time_ms: float) -> dict[str, Any]:
    """Return a number of tokens, the time that they took, and the ratios of the two."""
    return {
        f"{name}_n": count,
        f"{name}_ms": time_ms,
        f"{name}_per_token_ms": time_ms / count if count else None,
        f"{name}_per_second": 1e3 * count / time_ms if time_ms else None,
    }
