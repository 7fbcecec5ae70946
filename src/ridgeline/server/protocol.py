"""What clients may ask: every field of OpenAI's requests, honoured or refused by name.

Types and OpenAI's own limits are checked here, what depends on the model elsewhere. It computes
nothing and renders no answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    Tag,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ridgeline.core.params import SamplingParams
from ridgeline.server.errors import ApiError
from ridgeline.server.structured import FIELDS

_INT64 = 1 << 63
_MAX_MESSAGES = 1 << 13
_MAX_METADATA = 16
_MAX_BIASES = 1 << 15
_MAX_STOP_IDS = 1 << 12
_MAX_STOP_CHARS = 1 << 10

# Fields that other servers know and this one does not, yet: values that change nothing pass.
_NOT_YET: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "priority": (0,),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}


_MAY_CALL = {"tools": "tool_choice", "functions": "function_call"}  # "none": it calls nothing

# Fields that mean the same to the engine.
_PLAIN = (
    *("frequency_penalty", "ignore_eos", "min_p", "min_tokens", "n", "presence_penalty"),
    *("repetition_penalty", "seed", "stop", "stop_token_ids", "temperature", "top_k", "top_p"),
)


def _document(schema: dict[str, Any], model: type[_Strict]) -> None:
    """Add to a model's JSON schema what the model accepts besides its fields."""
    schema["additionalProperties"] = {"type": "null"}
    dropped = {name: {"description": "Taken, and dropped."} for name in model.droppable}
    schema["properties"] = schema["properties"] | dropped


class _Strict(BaseModel):
    """No coercion, no unknown field, no NaN; the first field at fault, in the body's order.

    A null is absence, whatever its name: client libraries send the empty fields of their types.
    """

    model_config = ConfigDict(
        strict=True, extra="forbid", allow_inf_nan=False, json_schema_extra=_document
    )
    droppable: ClassVar[tuple[str, ...]] = ()  # cannot change an answer
    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    _dropped: tuple[str, ...] = ()

    @model_validator(mode="wrap")
    @classmethod
    def _take(cls, data: Any, make: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, dict):
            return make(data)
        given = {name: value for name, value in data.items() if value is not None}
        others = [name for name in given if name not in cls.model_fields]
        dropped = tuple(name for name in others if cls._drops(name, given))
        model = make({name: given[name] for name in given if name in cls.model_fields})
        model._dropped = dropped
        return model

    @classmethod
    def _drops(cls, name: str, given: Mapping[str, Any]) -> bool:
        """Return whether dropping a field loses something.

        Raises the error that refuses the request if that could change the answer.
        """
        if name in cls.droppable:
            return True
        if name not in cls.not_yet:
            raise _wrong("unknown_parameter", name, "is not a parameter here")
        if any(_same(given[name], void) for void in cls.not_yet[name]):
            return False
        if given.get(_MAY_CALL.get(name, "")) == "none":
            return True
        raise _wrong("unsupported_parameter", name, "is not supported yet: leave it out")

    def ignored(self) -> list[str]:
        """Return the names of what was dropped, each once."""
        return list(self._dropped)


def _check_metadata(pairs: Any) -> Any:
    """Drop nulls, and raise for too many pairs, before each of them is looked at."""
    if not isinstance(pairs, dict):
        return pairs
    if len(pairs) > _MAX_METADATA:
        raise ValueError(f"it has {len(pairs)} pairs, at most {_MAX_METADATA} are allowed")
    return _without_nulls(pairs)


def _check_biases(biases: Any) -> Any:
    """Drop nulls, and raise for the first wrong pair, or too many: pydantic would list them all."""
    if not isinstance(biases, dict):
        return biases
    if len(biases) > _MAX_BIASES:
        raise ValueError(f"it has {len(biases)} tokens, at most {_MAX_BIASES} are allowed")
    biases = _without_nulls(biases)
    for key, bias in biases.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise ValueError(f"it has the key {key!r:.40}, keys are token ids")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise _wrong("invalid_value", key, "is wrong: it must be a number from -100 to 100")
    return biases


def _without_nulls(pairs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in pairs.items() if value is not None}


class StreamOptions(_Strict):
    """What a stream sends besides the answer."""

    continuous_usage_stats: bool | None = None
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


_StopString = Annotated[str, Field(max_length=_MAX_STOP_CHARS)]


class _Sampled(_Strict):
    """The fields that both kinds of completion share."""

    not_yet = _NOT_YET

    model: str | None = None
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, Field(ge=-100, le=100)] | None],
            BeforeValidator(_check_biases),
            Field(max_length=_MAX_BIASES),
        ]
        | None
    ) = None
    max_tokens: int | None = Field(None, ge=0, lt=_INT64)
    n: int | None = Field(None, ge=1, le=128)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    seed: int | None = Field(None, ge=-_INT64, lt=_INT64)
    stop: _StopString | Annotated[list[_StopString], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    # Written to the log and used for nothing else:
    metadata: (
        Annotated[
            dict[str, str | None], BeforeValidator(_check_metadata), Field(max_length=_MAX_METADATA)
        ]
        | None
    ) = None
    prompt_cache_key: str | None = Field(None, max_length=256)
    safety_identifier: str | None = Field(None, max_length=64)
    user: str | None = Field(None, max_length=256)
    # What vLLM's users send as well:
    ignore_eos: bool | None = None
    include_timings: bool | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: int | None = Field(None, ge=0, lt=_INT64)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    stop_token_ids: Annotated[list[int], Field(max_length=_MAX_STOP_IDS, fail_fast=True)] | None = (
        None
    )
    top_k: int | None = Field(None, ge=-1, lt=_INT64)
    # The form of the answer, under all names that clients use (``server.structured``):
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_json_object: bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    grammar: str | None = None
    json_schema: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _contradiction("stream_options", "it needs stream: true")
        return self

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
        return "max_tokens"

    def sampling(
        self, default: Callable[..., SamplingParams], vocab_size: int, **more: Any
    ) -> SamplingParams:
        """Return the parameters for the engine: what is set here and in ``more``, else defaults.

        Raises ApiError that names the field at fault.
        """
        given = {name: getattr(self, name) for name in _PLAIN} | more
        given = {name: value for name, value in given.items() if value is not None}
        given["max_tokens"] = more["max_tokens"]  # None means: to the model's length
        if self.top_k is not None:
            given["top_k"] = min(self.top_k, 1 << 31)  # more than any model has means all
        if self.logit_bias:
            given["logit_bias"] = {int(key): bias for key, bias in self.logit_bias.items()}
        try:
            params = default(**given)
            params.validate_ids(vocab_size)
        except ValueError as error:  # begins with the field's name
            name, _, rest = str(error).partition(" ")
            name = self.length_field if name == "max_tokens" else name
            raise ApiError(400, f"{name} {rest}", param=name, code="invalid_value") from None
        return params


class TextPart(_Strict):
    """A piece of a message; other types of parts come later."""

    droppable = ("cache_control",)

    type: Literal["text"]
    text: str


def _document_message(schema: dict[str, Any], model: type[_Strict]) -> None:
    """Say as well that a message has content or calls tools."""
    _document(schema, model)
    said = {"properties": {"content": {"type": ["string", "array"]}}, "required": ["content"]}
    calls = {
        "properties": {"tool_calls": {"type": "array", "minItems": 1}},
        "required": ["tool_calls"],
    }
    schema["anyOf"] = [said, calls]


class Message(_Strict):
    """One message of a conversation; the model's template decides how each field is used.

    Clients send an answer back as they got it, with all that a server or a library added to it.
    """

    model_config = ConfigDict(json_schema_extra=_document_message)
    droppable = (
        *("annotations", "audio", "refusal", "parsed"),  # of OpenAI's own assistant
        *("reasoning", "reasoning_content", "thinking_blocks"),
        *("provider_specific_fields", "cache_control"),
    )
    not_yet: ClassVar[Mapping[str, tuple[Any, ...]]] = {"function_call": ()}

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None

    def ignored(self) -> list[str]:
        """Return the names of what was dropped, each once."""
        parts = self.content if isinstance(self.content, list) else []
        inside = dict.fromkeys(name for part in parts for name in part.ignored())
        return [*self._dropped, *(f"content.{name}" for name in inside)]

    def plain(self) -> dict[str, Any]:
        """Return what was set, for the template."""
        return self.model_dump(exclude_none=True)


class Rendering(_Strict):
    """How messages become a prompt."""

    messages: list[Message] = Field(min_length=1, max_length=_MAX_MESSAGES, fail_fast=True)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def ignored(self) -> list[str]:
        """Return the names of what was dropped, each once."""
        inside = dict.fromkeys(name for one in self.messages for name in one.ignored())
        return [*self._dropped, *(f"messages.{name}" for name in inside)]

    def template_options(self) -> dict[str, bool]:
        """Return the options for the chat template; a continued message needs no opening."""
        going_on = bool(self.continue_final_message)
        opening = not going_on if self.add_generation_prompt is None else self.add_generation_prompt
        if going_on and opening:
            raise _contradiction("add_generation_prompt", "continue_final_message excludes it")
        return {"add_generation_prompt": opening, "continue_final_message": going_on}


class Prediction(_Strict):
    """What the answer will be like: it comes sooner where that is right, and is the same."""

    type: Literal["content"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    @property
    def text(self) -> str:
        """All of it."""
        parts = self.content
        return parts if isinstance(parts, str) else "".join(part.text for part in parts)


class ChatRequest(Rendering, _Sampled):
    """POST /v1/chat/completions."""

    prediction: Prediction | None = None

    logprobs: bool | None = None
    max_completion_tokens: int | None = Field(None, ge=1, lt=_INT64)
    max_tokens: int | None = Field(None, ge=1, lt=_INT64)
    top_logprobs: int | None = Field(None, ge=0, le=20)

    @property
    def length_field(self) -> str:
        """Where the request says how long an answer may be."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    def params(self, default: Callable[..., SamplingParams], vocab_size: int) -> SamplingParams:
        """Return the parameters for the engine; raises ApiError."""
        longest = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(longest) > 1:
            raise _contradiction("max_tokens", "max_completion_tokens says something else")
        if self.top_logprobs is not None and not self.logprobs:
            raise _contradiction("top_logprobs", "it needs logprobs: true")
        return self.sampling(
            default,
            vocab_size,
            max_tokens=min(longest, default=None),  # type: ignore[type-var]
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


_Ids = Annotated[list[int], Field(fail_fast=True)]


def _kind_of_prompt(prompt: Any) -> str:
    """Return which kind a prompt is, by its first element, so that only that kind is validated."""
    if not isinstance(prompt, list):
        return "[text]"
    first = prompt[0] if prompt else ""
    if isinstance(first, str):
        return "[texts]"
    return "[lists of ids]" if isinstance(first, list) else "[ids]"


class CompletionRequest(_Sampled):
    """POST /v1/completions."""

    not_yet = _NOT_YET | {"best_of": (1,), "prediction": ()}

    prompt: Annotated[
        Annotated[str, Tag("[text]")]
        | Annotated[list[str], Field(fail_fast=True), Tag("[texts]")]
        | Annotated[_Ids, Tag("[ids]")]
        | Annotated[list[_Ids], Field(fail_fast=True), Tag("[lists of ids]")],
        Discriminator(_kind_of_prompt),
    ]
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=5)
    suffix: str | None = None  # empty: the answer just continues the prompt

    @model_validator(mode="after")
    def _echoes_no_middle(self) -> Self:
        if self.suffix and self.echo:
            raise _contradiction("echo", "an answer in front of a suffix cannot be echoed")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, also where one stands alone."""
        prompt: Any = self.prompt
        alone = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        return [prompt] if alone else prompt

    def params(self, default: Callable[..., SamplingParams], vocab_size: int) -> SamplingParams:
        """Return the parameters for the engine; raises ApiError.

        The engine cannot generate zero tokens: it generates one, which the answer drops.
        """
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        return self.sampling(
            default,
            vocab_size,
            max_tokens=max(1, max_tokens),
            logprobs=self.logprobs,
            prompt_logprobs=self.logprobs if self.echo else None,
        )


class ExtraFile(_Strict):
    """A file, or a piece of one, that helps to understand the open one."""

    droppable = ("time",)

    text: str
    filename: str = "tmp"


class TokenizeRequest(_Strict):
    """POST /tokenize of a text."""

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


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


class DetokenizeRequest(_Strict):
    """POST /detokenize."""

    tokens: list[int] = Field(fail_fast=True)
    model: str | None = None


def _same(value: object, other: object) -> bool:
    return type(value) is type(other) and value == other  # 0 is not False here


def _wrong(
    code: str,
    field: str,
    what: Literal[
        "is not a parameter here",
        "is not supported yet: leave it out",
        "is wrong: it must be a number from -100 to 100",
    ],
) -> PydanticCustomError:
    """Return an error about a field of the model, or the pair of the map, that is validated."""
    return PydanticCustomError(code, what, {"field": field})


def _contradiction(param: str, why: str) -> ApiError:
    return ApiError(400, f"{param} contradicts the rest: {why}", param=param, code="invalid_value")
