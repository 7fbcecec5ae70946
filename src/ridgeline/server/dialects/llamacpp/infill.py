"""POST /infill and /completion, as llama.cpp has them: what may be asked, and the answers.

A request for the middle of a text is a completion whose prompt ``text.infill`` makes, so all of
sampling, streaming and limits is that of ``/v1/completions``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Self

from pydantic import Field, field_validator, model_validator

from ridgeline.api.text_side import TextProcessor
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
_NO_SETTINGS = {"prompt", "input_prefix", "input_suffix", "input_extra", "response_fields"}
_NO_SETTINGS |= {*_ABSENT, "stream", "return_token_ids", "return_tokens_as_token_ids"}


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
    return_tokens: bool = False
    n_probs: int = Field(0, ge=0, le=20)  # tokens shown in the place of each
    # What to show of the whole answer, as "content" or "timings/prompt_n":
    response_fields: list[str] | None = Field(None, max_length=64, fail_fast=True)

    @field_validator("prompt", mode="before", check_fields=False)
    @classmethod
    def _in_object(cls, prompt: Any) -> Any:
        """Take an object with a text too, which may have pictures beside it: here it has none."""
        if not isinstance(prompt, dict):
            return prompt
        if prompt.get("multimodal_data"):
            raise ValueError("it has multimodal_data, but this model reads only text")
        return prompt.get("prompt_string")

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _listed(cls, biases: Any) -> Any:
        """Take pairs of an id and a bias too, of which false rules the token out."""
        if not isinstance(biases, list):
            return biases
        if not all(isinstance(one, list) and len(one) == 2 for one in biases):
            raise ValueError("it must be an object, or a list of pairs of a token id and a bias")
        return {str(token): -100 if bias is False else bias for token, bias in biases}

    @model_validator(mode="after")
    def _translated(self) -> Self:
        if self.seed == -1:
            self.seed = None
        if self.n_probs:
            self.logprobs, self.return_tokens_as_token_ids = self.n_probs, True
        self.return_token_ids = self.return_tokens or bool(self.stream) or self.return_token_ids
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
        prompt: Sequence[int],
        text: TextProcessor,
        is_truncated: bool,
    ) -> None:
        """Write ``answers`` to a ``prompt``; ``is_truncated``: some of the input was left out."""
        self._answers, self._model, self._is_truncated = answers, model, is_truncated
        self._prompt, self._text, self._body = prompt, text, body
        self._fields, self._is_streamed = body.response_fields or [], bool(body.stream)
        self._shows_tokens = body.return_tokens or self._is_streamed
        self._end: Choice = {}
        self._has_new_line = False

    def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        (self._end,) = self._answers.whole()
        return self._last(self._end)

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
        return sse(self._object(choice, is_end=False))

    def ending(self) -> bytes:
        """Return the event that ends a stream."""
        return sse(self._last({"text": ""}))

    def failure(self, error: ApiError) -> bytes:
        """Return the server-sent event of a stream that fails."""
        return sse(error.body())

    def _object(self, choice: Choice, *, is_end: bool) -> dict[str, Any]:
        usage, text = self._answers.usage(), choice["text"]
        self._has_new_line |= "\n" in text
        shown = {
            "index": 0,
            "content": text,
            "tokens": (choice.get("token_ids") or []) if self._shows_tokens else [],
            "stop": is_end,
            "id_slot": -1,  # no slot keeps a conversation: prefixes are cached for all
            "tokens_predicted": usage["completion_tokens"],
            "tokens_evaluated": usage["prompt_tokens"],
        }
        if self._body.n_probs and choice.get("logprobs"):
            shown["completion_probabilities"] = self._probabilities(choice["logprobs"])
        return shown

    def _last(self, choice: Choice) -> dict[str, Any]:
        reason = self._end.get("stop_reason")
        is_cut = self._end["finish_reason"] == "length" or reason == ENDED
        word = reason if isinstance(reason, str) else ""
        shown = self._object(choice, is_end=True)
        last = {
            **shown,
            "model": self._model,
            "generation_settings": self._settings(),
            "prompt": self._text.tokenizer.decode(self._prompt),
            "has_new_line": self._has_new_line,
            "stop_type": "limit" if is_cut else "word" if word else "eos",
            "stopping_word": word,
            "tokens_cached": shown["tokens_predicted"] + shown["tokens_evaluated"],
            "truncated": self._is_truncated,
            "timings": self._timings(),
        }
        if not self._fields:
            return last
        values = {path: _at(path, last) for path in self._fields}
        return {path: value for path, value in values.items() if value is not None}

    def _settings(self) -> dict[str, Any]:
        """Return what was asked of sampling, and the model's own recommendations beside it."""
        asked = self._body.model_dump(exclude_none=True, exclude=_NO_SETTINGS)
        return {**self._text.generation_defaults, **asked, "n_predict": self._body.n_predict}

    def _probabilities(self, logprobs: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the tokens of a piece of text, each with the likeliest in its place."""
        names = ("tokens", "token_logprobs", "top_logprobs")
        return [
            self._token(name, logprob)
            | {"top_logprobs": [self._token(*one) for one in _best(top, self._body.n_probs)]}
            for name, logprob, top in zip(*(logprobs[one] for one in names), strict=True)
        ]

    def _token(self, name: str, logprob: float) -> dict[str, Any]:
        token = int(name.removeprefix("token_id:"))
        data = self._text.tokenizer.token_bytes(token)
        spelled = self._text.spell(token)
        return {"id": token, "token": spelled, "bytes": list(data), "logprob": logprob}

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


def _best(top: dict[str, float], most: int) -> list[tuple[str, float]]:
    """Return the likeliest of some tokens, best first."""
    return sorted(top.items(), key=lambda one: -one[1])[:most]


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
