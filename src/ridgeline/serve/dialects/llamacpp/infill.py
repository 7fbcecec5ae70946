"""POST /infill and /completion, as llama.cpp has them: what may be asked, and the answers.

A request for the middle of a text is a completion whose prompt ``text.infill`` makes, so sampling,
streaming and limits are those of ``/v1/completions``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, field_validator, model_validator, with_config

from ridgeline.core.decoding.lines import ENDED, LineRules, LineText
from ridgeline.core.params import SamplingParams
from ridgeline.core.request import Request
from ridgeline.serve.answer import fields
from ridgeline.serve.answer.conversation import Rendering
from ridgeline.serve.answer.protocol import (
    EACH,
    CompletionRequest,
    NewText,
)
from ridgeline.serve.answer.reply import PING, SSE, sse
from ridgeline.serve.answer.response_builder import Choice, ResponseBuilder, progress_of
from ridgeline.serve.answer.samplers import MAX_BIASES, is_bias, is_token
from ridgeline.serve.answer.schemas import InfillTimings, StageFields
from ridgeline.serve.engine.request_stream import PromptProgress, StreamEvent
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.request_body import RequestModel, contradiction, wrong
from ridgeline.text.infill import File

_MAX_FILES = 1 << 10
_ABSENT = (
    *("echo", "include_timings", "logprobs", "max_tokens", "n", "stream_options", "suffix"),
    *("truncate_prompt_tokens", "verbose"),
)
_NO_SETTINGS = {"prompt", "input_prefix", "input_suffix", "input_extra", "response_fields"}
_NO_SETTINGS |= {"id_slot"}
_NO_SETTINGS |= {*_ABSENT, "receipt", "stream", "return_token_ids", "return_tokens_as_token_ids"}
_Pieces = Annotated[list[int | str], Field(fail_fast=True)]  # of one prompt: ids, and texts


def _kind_of_prompt(prompt: Any) -> str:
    """Return the kind of a prompt: a text, pieces of which at least one is an id, or several."""
    if not isinstance(prompt, list):
        return "[text]"
    return "[pieces]" if any(type(one) is int for one in prompt) else "[prompts]"


def _text_in(prompt: Any) -> Any:
    """Return the text of a prompt that is an object. Raises ValueError if it has pictures."""
    if not isinstance(prompt, dict):
        return prompt
    if prompt.get("multimodal_data"):
        raise ValueError("it has multimodal_data, but this model reads only text")
    return prompt.get("prompt_string")


class ExtraFile(RequestModel):
    """A file, or a piece of one, that helps to understand the open one."""

    extras = fields.TIME_OF_FILE

    text: str
    filename: str = "tmp"


class LlamaCppRequest(CompletionRequest):
    """POST /completion."""

    extras = fields.INFILL
    absent = _ABSENT

    prompt: Annotated[  # type: ignore[assignment]  # beyond OpenAI's: pieces of both kinds
        Annotated[str, Tag("[text]")]
        | Annotated[_Pieces, Tag("[pieces]")]
        | Annotated[list[str | _Pieces], EACH, Tag("[prompts]")],
        Discriminator(_kind_of_prompt),
    ]
    n_predict: int = Field(-1, ge=-1, lt=1 << 63)  # -1: as many as the model has room for
    seed: int | None = Field(None, ge=-1, lt=1 << 63)  # -1: a fresh one
    # Where the answer ends by its lines (``core.decoding.lines``):
    n_indent: int = Field(0, ge=0, lt=1 << 31)
    t_max_predict_ms: float = Field(0, ge=0, lt=1e15)
    id_slot: int = Field(-1, ge=-1, lt=1 << 31)  # whose last request this is (``slots``); -1: none
    return_tokens: bool = False
    n_probs: int = Field(0, ge=0, le=20)  # tokens shown in the place of each
    post_sampling_probs: bool = False  # with what the filters leave of their probabilities
    logit_bias: Any = Field(None, json_schema_extra={"type": ["object", "array", "null"]})
    # What to show of the whole answer, as "content" or "timings/prompt_n":
    response_fields: list[str] | None = Field(None, max_length=64, fail_fast=True)

    @field_validator("prompt", mode="before", check_fields=False)
    @classmethod
    def _in_object(cls, prompt: Any) -> Any:
        """Take objects with a text too, which may have pictures beside it: here they have none."""
        return [_text_in(one) for one in prompt] if isinstance(prompt, list) else _text_in(prompt)

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _paired(cls, biases: Any) -> list[tuple[int | str, float]] | None:
        """Return pairs of an id or a text, and a bias; a bias of false rules the tokens out."""
        if biases is None:
            return None
        if isinstance(biases, dict):
            named = [(int(key) if is_token(key) else key, bias) for key, bias in biases.items()]
            biases = [list(pair) for pair in named if pair[1] is not None]
        if not isinstance(biases, list) or len(biases) > MAX_BIASES:
            raise ValueError(f"it must be an object or a list, of at most {MAX_BIASES} pairs")
        pairs = []
        for one in biases:
            if not isinstance(one, list) or len(one) != 2 or type(one[0]) not in (int, str):
                raise ValueError("it must have pairs of a token id, or a text, and a bias")
            bias = -100 if one[1] is False else one[1]
            if not is_bias(bias):
                raise wrong("invalid_value", str(one[0]), "is wrong: write a number, -100 to 100")
            pairs.append((one[0], bias))
        return pairs

    @property
    def prompts(self) -> list[Any]:
        """The prompts, each a text or a list of ids and texts, also where one stands alone."""
        return self.prompt if self.is_batch else [self.prompt]  # type: ignore[return-value]

    @property
    def is_batch(self) -> bool:
        """Whether the answers come as a list."""
        return _kind_of_prompt(self.prompt) == "[prompts]"

    def _check_receipt(self) -> None:
        super()._check_receipt()
        for name in ("n_indent", "t_max_predict_ms"):
            if getattr(self, name):
                raise contradiction("receipt", f"no receipt says what {name} does to an answer")

    def encode_biases(self, encode: Callable[[str], Sequence[int]]) -> None:
        """Give the bias of a text to each of its tokens; ``encode`` returns their ids."""
        biases: dict[str, float] = {}
        for key, bias in self.logit_bias or ():
            biases |= dict.fromkeys(map(str, [key] if isinstance(key, int) else encode(key)), bias)
        self.logit_bias = biases or None

    @model_validator(mode="after")
    def _translated(self) -> Self:
        if self.seed == -1:
            self.seed = None
        if self.n_probs:
            self.logprobs, self.return_tokens_as_token_ids = self.n_probs, True
        self.return_token_ids = self.return_tokens or bool(self.stream) or self.return_token_ids
        return self

    def params(self, default: Callable[..., SamplingParams], vocab_size: int) -> SamplingParams:
        """Return the parameters for the engine; raises ApiError."""
        return super().params(
            partial(default, post_sampling_probs=self.post_sampling_probs), vocab_size
        )

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
        """Return the text before and after the cursor, and the last part of the other files.

        Each has little more than ``max_chars`` characters, as no more can fit.
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


def _some_fields(schema: dict[str, Any]) -> None:
    schema["additionalProperties"] = {"description": "What stands at a path, as timings/prompt_n"}


@with_config(extra="forbid", json_schema_extra=_some_fields)
class Infilled(StageFields, total=False):
    """What POST /infill returns, unless it streams; of this only ``response_fields``, if given."""

    index: int
    content: str
    tokens: list[int]
    stop: Literal[True]
    id_slot: int
    model: str
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    truncated: bool
    timings: InfillTimings
    completion_probabilities: list[dict[str, Any]]


class LlamaCppWriter:
    """llama.cpp's objects. A stream ends with one that has everything but the text."""

    stream_type, ping = SSE, PING

    def __init__(
        self,
        answers: ResponseBuilder,
        model: str,
        fingerprint: str,
        *,
        body: LlamaCppRequest,
        prompts: Sequence[Sequence[int]],
        is_truncated: bool = False,
        remember: Callable[[Request], None] = lambda request: None,
    ) -> None:
        """Write ``answers`` to ``prompts``; ``is_truncated``: some of the input was left out.

        The last prompt that was answered is told to ``remember`` when the answer is over.
        """
        self._answers, self._model, self._is_truncated = answers, model, is_truncated
        self._prompts, self._text, self._body = prompts, answers.text, body
        self._fields, self._is_streamed = body.response_fields or [], bool(body.stream)
        self._shows_tokens = body.return_tokens or self._is_streamed
        self._remember, self._requests = remember, dict[int, Request]()  # by prompt
        self._ends: dict[int, Choice] = {}
        self._with_new_line: set[int] = set()

    def whole(self) -> Mapping[str, Any] | list[Mapping[str, Any]]:
        """Return the whole answer, or those to several prompts."""
        self._note_slot()
        choices = self._answers.whole()
        self._ends = dict(enumerate(choices))
        answers = [self._last(choice) for choice in choices]
        return answers if self._body.is_batch else answers[0]

    def take(self, event: StreamEvent) -> list[bytes]:
        """Take an event; return the new parts of a streamed answer as server-sent events."""
        prompt, payload = event
        if isinstance(payload, Request):
            self._requests[prompt] = payload
        if isinstance(payload, PromptProgress):
            shown = self._object({"index": prompt, "text": ""})
            return [sse({**shown, "stop": False, "prompt_progress": progress_of(payload)})]
        return self._answers.take_written(event, self._chunk)

    def _chunk(self, choice: Choice) -> bytes:
        """Return an event with a piece of the text; the end is held until all is known of it."""
        if choice["finish_reason"]:
            self._ends[choice["index"]] = choice
            return b""
        return sse({**self._object(choice), "stop": False})

    def ending(self) -> bytes:
        """Return the event that ends a stream."""
        self._note_slot()
        ends = sorted(self._ends)
        return b"".join(sse(self._last({"index": index, "text": ""})) for index in ends)

    def _note_slot(self) -> None:
        if self._requests:
            self._remember(self._requests[max(self._requests)])

    def failure(self, error: ApiError) -> bytes:
        """Return the server-sent event of a stream that fails."""
        return sse(error.body())

    def _object(self, choice: Choice) -> Infilled:
        text, index = choice["text"], choice["index"]
        if "\n" in text:
            self._with_new_line.add(index)
        shown: Infilled = {
            "index": index,
            "content": text,
            "tokens": (choice.get("token_ids") or []) if self._shows_tokens else [],
            "stop": True,
            "id_slot": self._body.id_slot,
            "tokens_predicted": self._answers.num_tokens_of(index),
            "tokens_evaluated": len(self._prompts[index]),
        }
        if self._body.n_probs and choice.get("logprobs"):
            shown["completion_probabilities"] = self._probabilities(choice["logprobs"])
        if self._body.timings_per_token and (pace := self._answers.pace(index)):
            shown["timings"] = pace
        return shown

    def _last(self, choice: Choice) -> Mapping[str, Any]:
        index = choice["index"]
        end = self._ends[index]
        reason = end.get("stop_reason")
        is_cut = end["finish_reason"] in ("length", "content_filter") or reason == ENDED
        word = reason if isinstance(reason, str) else ""
        shown = self._object(choice)
        last: Infilled = {
            **shown,
            "model": self._model,
            "generation_settings": self._settings(),
            "prompt": self._answers.prompt_text(index),
            "has_new_line": index in self._with_new_line,
            "stop_type": "limit" if is_cut else "word" if word else "eos",
            "stopping_word": word,
            "tokens_cached": shown["tokens_predicted"] + shown["tokens_evaluated"],
            "truncated": self._is_truncated,
            "timings": self._answers.pace(index),
        }
        more = self._answers.ends(self._texts) if index == max(self._ends) else {}
        if not self._fields:
            return {**last, **more}
        values = {path: _at(path, last) for path in self._fields}
        return {path: value for path, value in values.items() if value is not None} | {**more}

    def _texts(self) -> dict[str, str]:
        """Return the texts of all answers, by their places."""
        place = "[{}].content" if self._body.is_batch else "content"
        return {place.format(one.index): one.shown_text for one in self._answers.chosen}

    def _settings(self) -> dict[str, Any]:
        """Return the sampling that was asked for, and the model's own recommendations with it."""
        settings = self._body.model_dump(exclude_none=True, exclude=_NO_SETTINGS)
        settings = self._answers.shown_fields(settings)
        return {**self._text.generation_defaults, **settings, "n_predict": self._body.n_predict}

    def _probabilities(self, logprobs: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the tokens of a piece of text, each with the likeliest in its place."""
        names = ("tokens", "token_logprobs", "top_logprobs")
        ranked = "top_probs" if self._body.post_sampling_probs else "top_logprobs"
        return [
            self._token(name, logprob)
            | {ranked: [self._token(*one) for one in _best(top, self._body.n_probs)]}
            for name, logprob, top in zip(*(logprobs[one] for one in names), strict=True)
        ]

    def _token(self, name: str, logprob: float) -> dict[str, Any]:
        token = int(name.removeprefix("token_id:"))
        data = self._text.tokenizer.token_bytes(token)
        shown = {"id": token, "token": self._text.spell(token), "bytes": list(data)}
        if self._body.post_sampling_probs:
            return shown | {"prob": math.exp(logprob)}
        return shown | {"logprob": logprob}


def _best(top: dict[str, float], most: int) -> list[tuple[str, float]]:
    """Return the likeliest of some tokens, best first."""
    return sorted(top.items(), key=lambda one: -one[1])[:most]


def _at(path: str, value: Any) -> Any:
    """Return what stands at a path of names, None for nothing."""
    for name in path.split("/"):
        value = value.get(name) if isinstance(value, dict) else None
    return value
