"""What clients may ask of OpenAI's routes: the fields that are honoured.

Types and OpenAI's own limits are checked here, what depends on the model elsewhere. It computes
nothing and renders no answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    Tag,
    ValidationInfo,
    model_validator,
)

from ridgeline.core.decoding.search import check_search
from ridgeline.core.params import SamplingParams
from ridgeline.core.request import Text
from ridgeline.serve.answer import fields
from ridgeline.serve.answer.conversation import Prediction, Rendering
from ridgeline.serve.answer.response_format import FIELDS
from ridgeline.serve.answer.samplers import (
    MAX_BIASES,
    NAMES,
    AllowedLength,
    Base,
    Breakers,
    LastN,
    Multiplier,
    Share,
    Sigmas,
    TokenIds,
    Words,
    check_biases,
    switched_off,
)
from ridgeline.serve.answer.tools import wanted_tools
from ridgeline.serve.deadlines.field import HEADER, LONGEST_MS, Deadline
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.http.request_body import STRICT, RequestModel, contradiction, wrong
from ridgeline.text.messages.tools import ToolUse

NewText = Callable[[tuple[int, ...], SamplingParams], Text]

_INT31, _INT64 = 1 << 31, 1 << 63
_MAX_METADATA = 16
_MAX_STOP_IDS = 1 << 12
_MAX_STOP_CHARS = 1 << 10

# Fields that mean the same to the engine.
_PLAIN = (
    *("best_of", "early_stopping", "length_penalty", "penalty_alpha", "use_beam_search"),
    *("frequency_penalty", "ignore_eos", "min_p", "min_tokens", "n", "presence_penalty"),
    *("repetition_penalty", "seed", "stop", "stop_token_ids", "temperature", "top_k", "top_p"),
    *("include_stop_str_in_output", "skip_special_tokens", "truncate_prompt_tokens"),
)


def _check_metadata(pairs: Any) -> Any:
    """Drop nulls, and raise for too many pairs, before each of them is looked at."""
    if not isinstance(pairs, dict):
        return pairs
    if len(pairs) > _MAX_METADATA:
        raise ValueError(f"it has {len(pairs)} pairs, at most {_MAX_METADATA} are allowed")
    return _without_nulls(pairs)


Metadata = (
    Annotated[
        dict[str, str | None], BeforeValidator(_check_metadata), Field(max_length=_MAX_METADATA)
    ]
    | None
)


def _without_nulls(pairs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in pairs.items() if value is not None}


class StreamOptions(RequestModel):
    """What a stream sends besides the answer."""

    extras = fields.STREAM_OPTIONS

    continuous_usage_stats: bool | None = None
    include_usage: bool | None = None


def _check_length(length: int) -> int:
    if not length:
        raise ValueError("it must be at least 1, or -1 for as many as there is room for")
    return length


Length = Annotated[
    int,
    Field(ge=-1, lt=_INT64, json_schema_extra={"not": {"const": 0}}),
    AfterValidator(_check_length),
]
LENGTHS = ("max_completion_tokens", "max_tokens", "n_predict")  # how long an answer may be
_StopString = Annotated[str, Field(max_length=_MAX_STOP_CHARS)]


class _SamplingFields(RequestModel):
    """The fields that both kinds of completion share."""

    extras = fields.COMPLETION

    model: str | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)] | None],
            BeforeValidator(check_biases),
            Field(max_length=MAX_BIASES),
        ]
        | None
    ) = None
    max_tokens: int | None = Field(None, ge=-1, lt=_INT64)  # -1: as many as there is room for
    n: int | None = Field(None, ge=1, le=128)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    stop: _StopString | Annotated[list[_StopString], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    # Written to the log and used for nothing else:
    metadata: Metadata = None
    prompt_cache_key: str | None = Field(None, max_length=256)
    safety_identifier: str | None = Field(None, max_length=64)
    user: str | None = Field(None, max_length=256)
    # What vLLM's users send as well:
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # the same, as SGLang calls it
    # Keep the last; -1: what fits.
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=_INT31)
    skip_special_tokens: bool | None = None
    include_timings: bool | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=1024)  # others find no prefix
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    deadline: Deadline | None = None  # ours alone
    receipt: bool | None = None  # ours too: what the answer is a function of, signed
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0, lt=_INT64)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    stop_token_ids: Annotated[list[int], Field(max_length=_MAX_STOP_IDS, fail_fast=True)] | None = (
        None
    )
    top_k: int | None = Field(None, ge=-1, lt=_INT64)
    # llama.cpp's names:
    timings_per_token: bool | None = None
    return_progress: bool | None = None  # of a stream: how far the prompt is computed
    verbose: bool | None = None  # show the prompt as well
    n_predict: int | None = Field(None, ge=-1, lt=_INT64)
    repeat_penalty: float | None = Field(None, gt=0, le=100)
    repeat_last_n: int | None = Field(None, ge=-1, lt=_INT64)
    samplers: list[str] | None = Field(None, max_length=32, fail_fast=True)  # the others are off
    # Samplers of llama.cpp and vLLM:
    typical_p: Share | None = None
    top_n_sigma: Sigmas | None = None
    xtc_probability: Share | None = None
    xtc_threshold: Share | None = None
    dry_multiplier: Multiplier | None = None
    dry_base: Base | None = None
    dry_allowed_length: AllowedLength | None = None
    dry_penalty_last_n: LastN | None = None
    dry_sequence_breakers: Breakers | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Words | None = None
    # Answers that are chosen among others; OpenAI has the first in its older completions:
    best_of: int | None = Field(None, ge=0, le=128)  # OpenAI's least value, 0, chooses among none
    use_beam_search: bool | None = None
    length_penalty: float | None = Field(None, ge=-10, le=10)
    early_stopping: bool | Literal["never"] | None = None
    penalty_alpha: float | None = Field(None, ge=0, le=1)
    # The form of the answer, under all names that clients use (``response_format``):
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    format: str | dict[str, Any] | None = None

    @model_validator(mode="after")
    def _consistent(self, info: ValidationInfo) -> Self:
        if self.stream_options is not None and not self.stream:
            if info.context == STRICT:
                raise contradiction("stream_options", "it needs stream: true")
            self._dropped += ("stream_options",)
        if self.prompt_logprobs is not None and self.stream:
            raise contradiction("prompt_logprobs", "a stream does not show them")
        if self.receipt:
            self._check_receipt()
        lengths = {length for name in LENGTHS if (length := getattr(self, name, None)) is not None}
        if len(lengths) > 1:
            raise contradiction("max_tokens", f"{self.length_field} says something else")
        for name, value in switched_off(self.samplers).items():
            setattr(self, name, value)
        return self

    def _check_receipt(self) -> None:
        """Raise an error for what a receipt cannot state of an answer."""
        odd = {"echo": getattr(self, "echo", None), self.length_field: self.longest == 0}
        if names := [name for name, is_odd in odd.items() if is_odd]:
            raise contradiction("receipt", f"{names[0]} shows other text than was drawn")

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a chunk that counts tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_continuous_usage(self) -> bool:
        """Whether each chunk of the stream counts the tokens so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def form_fields(self) -> dict[str, Any]:
        """What was said of the answer's form."""
        names = (*FIELDS, "guided_whitespace_pattern")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def length_field(self) -> str:
        """Where the request says how long an answer may be."""
        said = [name for name in LENGTHS if getattr(self, name, None) is not None]
        return said[0] if said else "max_tokens"

    @property
    def longest(self) -> int | None:
        """How many tokens an answer may have at most, None where the request does not say."""
        longest: int | None = getattr(self, self.length_field)
        return longest

    @property
    def narrows(self) -> bool:
        """Whether llama.cpp's sampler for the middle of a text acts (``sampler.rule.narrowed``)."""
        return "infill" in (self.samplers or ())

    @property
    def lost(self) -> dict[str, str]:
        """What the answer is not held to, by its name, and why."""
        if self.repeat_penalty in (None, 1) or self.repeat_last_n in (-1, 0):
            return {}
        return {"repeat_last_n": "repeat_penalty counts all tokens: set it to -1"}

    def deadline_by(self, header: str | None) -> Deadline | None:
        """Return the deadline that the request has, if any; ``header`` says when it must end.

        Raises ApiError if the header is no time, or says something else than the field.
        """
        if header is None:
            return self.deadline
        try:
            total_ms = float(header)
        except ValueError:
            total_ms = 0.0
        if not 0 < total_ms <= LONGEST_MS:
            message = f"{HEADER} is {header[:80]!r}: write milliseconds, above 0 and at most a day"
            raise ApiError(400, message, param=HEADER, code="invalid_value")
        if self.deadline is not None and self.deadline.total_ms != total_ms:
            raise contradiction("deadline", f"the header {HEADER} says something else")
        return self.deadline or Deadline(total_ms=total_ms)

    def check_bounds(self, params: SamplingParams, options: ServeOptions) -> None:
        """Raise ApiError for what OpenAI's specification allows and the server's flags do not."""
        biases = (params.logit_bias or {}).values()
        logprobs = "top_logprobs" if isinstance(self, ChatRequest) else "logprobs"
        for name, value, maximum in (
            ("n", params.n, options.max_n),
            ("best_of", params.best_of or 0, options.max_n),
            ("stop", len(params.stop), options.max_stop),
            (logprobs, params.logprobs or 0, options.max_logprobs),
            ("prompt_logprobs", self.prompt_logprobs or 0, options.max_logprobs),
            ("temperature", self.temperature or 0, options.max_temperature),
            ("logit_bias", max(map(abs, biases), default=0), options.max_logit_bias),
        ):
            if value > maximum:
                message = f"{name} asks for {value:g}: this server allows at most {maximum:g}"
                raise ApiError(400, message, param=name, code="invalid_value")

    def watched(self, new_text: NewText) -> NewText:
        """Return ``new_text`` with this request's own rules for the texts of its answers."""
        return new_text

    def sampling(
        self,
        default: Callable[..., SamplingParams],
        vocab_size: int,
        default_longest: int | None,
        **overrides: Any,
    ) -> SamplingParams:
        """Return the parameters for the engine: from ``overrides`` and here, else defaults.

        An answer without a limit has ``default_longest``; None means to the model's length, and 0
        is 1, as the engine cannot generate nothing: an answer of that length drops it.
        Raises ApiError that names the field at fault.
        """
        values = {name: getattr(self, name) for name in (*_PLAIN, *NAMES)} | overrides
        values = {name: value for name, value in values.items() if value is not None}
        longest = default_longest if self.longest is None else self.longest or 1
        values["max_tokens"] = None if longest in (None, -1) else min(longest, _INT31)
        if self.repeat_penalty is not None and self.repeat_last_n != 0:
            values.setdefault("repetition_penalty", self.repeat_penalty)
        if not values.get("best_of") and not self.use_beam_search:
            values.pop("best_of", None)
        if self.no_stop_trim:
            values.setdefault("include_stop_str_in_output", True)
        if self.top_k is not None:
            values["top_k"] = min(self.top_k, _INT31)  # more than any model has means all
        if self.logit_bias:
            values["logit_bias"] = {int(key): bias for key, bias in self.logit_bias.items()}
        try:
            params = default(**values)
            params.validate_ids(vocab_size)
            check_search(params, is_stream=bool(self.stream))
        except ValueError as error:  # begins with the field's name
            name, _, problem = str(error).partition(" ")
            name = self.length_field if name == "max_tokens" else name
            raise ApiError(400, f"{name} {problem}", param=name, code="invalid_value") from None
        return params


class ChatRequest(Rendering, _SamplingFields):
    """POST /v1/chat/completions."""

    extras = fields.CHAT

    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    prediction: Prediction | None = None

    echo: bool | None = None  # the answer begins with the message that it continues
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=-1, lt=_INT64)
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def use(self) -> ToolUse | None:
        """What may be called; raises ApiError."""
        tools = [one.tool for one in self.tools or ()]
        return wanted_tools(tools, self.tool_choice, self.parallel_tool_calls)

    def params(self, default: Callable[..., SamplingParams], vocab_size: int) -> SamplingParams:
        """Return the parameters for the engine; raises ApiError."""
        if self.top_logprobs is not None and not self.logprobs:
            raise contradiction("top_logprobs", "it needs logprobs: true")
        return self.sampling(
            default,
            vocab_size,
            None,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )


_Ids = Annotated[list[int], Field(fail_fast=True)]
EACH = Field(fail_fast=True, max_length=1 << 14)  # more prompts would take too long to check


def kind_of_prompt(prompt: Any) -> str:
    """Return which kind a prompt is, by its first element, so that only that kind is validated."""
    if not isinstance(prompt, list):
        return "[text]"
    first = prompt[0] if prompt else ""
    if isinstance(first, str):
        return "[texts]"
    return "[lists of ids]" if isinstance(first, list) else "[ids]"


TextOrIds = Annotated[
    Annotated[str, Tag("[text]")]
    | Annotated[list[str], EACH, Tag("[texts]")]
    | Annotated[_Ids, Tag("[ids]")]
    | Annotated[list[_Ids], EACH, Tag("[lists of ids]")],
    Discriminator(kind_of_prompt),
]


class CompletionRequest(_SamplingFields):
    """POST /v1/completions."""

    lists_logprobs: ClassVar[bool] = True  # as four lists; else token by token, as a chat's

    prompt: TextOrIds
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=5)
    suffix: str | None = None  # empty: the answer just continues the prompt

    @model_validator(mode="after")
    def _echoes_no_middle(self) -> Self:
        if self.suffix and self.echo:
            raise contradiction("echo", "a prompt with a suffix cannot be echoed")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, also where one stands alone."""
        prompt: Any = self.prompt
        alone = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        return [prompt] if alone else prompt

    def params(self, default: Callable[..., SamplingParams], vocab_size: int) -> SamplingParams:
        """Return the parameters for the engine; raises ApiError."""
        if self.use_beam_search and self.echo and self.logprobs is not None:
            raise contradiction("echo", "use_beam_search excludes logprobs of the prompt")
        echoed = self.logprobs if self.echo else None
        shown = [one for one in (echoed, self.prompt_logprobs) if one is not None]
        return self.sampling(
            default,
            vocab_size,
            16,
            logprobs=self.logprobs,
            prompt_logprobs=max(shown, default=None),
        )


class TokenizeRequest(RequestModel):
    """POST /tokenize of a text."""

    extras = fields.ANY

    prompt: str | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    # As llama.cpp has it:
    content: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False

    @model_validator(mode="after")
    def _has_text(self) -> Self:
        if self.prompt is None and self.content is None:
            raise wrong("invalid_value", "prompt", "is missing")
        if self.prompt is not None and self.content is not None:
            raise contradiction("content", "prompt is the same")
        return self

    @property
    def text(self) -> str:
        """What is to be tokenised."""
        return (self.content if self.prompt is None else self.prompt) or ""

    @property
    def adds_special(self) -> bool:
        """Whether the model's special tokens stand around it."""
        return self.add_special if self.prompt is None else self.add_special_tokens is not False


class TokenizeChatRequest(Rendering):
    """POST /tokenize of a conversation."""

    model: str | None = None
    return_token_strs: bool | None = None


def _kind_of_text(body: Any) -> str:
    """Return which kind of request to tokenise this is, also where it is one already."""
    if isinstance(body, dict):
        return "[text]" if body.get("messages") is None else "[chat]"
    return "[chat]" if isinstance(body, Rendering) else "[text]"


AnyTokenizeRequest = Annotated[
    Annotated[TokenizeRequest, Tag("[text]")] | Annotated[TokenizeChatRequest, Tag("[chat]")],
    Discriminator(_kind_of_text),
]


class DetokenizeRequest(RequestModel):
    """POST /detokenize."""

    extras = fields.ANY

    tokens: list[int] = Field(fail_fast=True)
    model: str | None = None
