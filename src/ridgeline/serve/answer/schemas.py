"""The shapes of OpenAI's completions, which builders make and the OpenAPI document shows.

They cost nothing while a server runs. What an answer may lack may stand in a shape of its own, to
be unpacked into it. Below them is what the document says of each route's streams and errors.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from pydantic import with_config
from typing_extensions import TypedDict

_CHUNKS = "A chunk after each `data: `, with OpenAI's `delta` or `text`; the last is `[DONE]`."


@with_config(extra="forbid")
class ClosedDict(TypedDict):
    """A shape of JSON: the document says that it has no other fields."""


class StageFields(ClosedDict, total=False):
    """What stages say at the end of an answer, in every dialect."""

    receipt: dict[str, Any]


class EndedBy(ClosedDict, total=False):
    """Which bounds of calls ended an answer, in dialects without ``stop_reason``."""

    ended_by: str


class PromptTokensDetails(ClosedDict):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(ClosedDict, total=False):
    """Tokens of reasoning; of a request with a prediction, drafts that were right, or not."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(ClosedDict):
    """OpenAI's count of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class SpeculativeDecoding(ClosedDict):
    """How often tokens were guessed, how many, and how many of them were right."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


class Timings(ClosedDict, total=False):
    """What ``include_timings`` asks for, in vLLM's names; empty if no token came."""

    promise: dict[str, Any]
    queue_time_ms: float
    time_to_first_token_ms: float
    generation_time_ms: float
    mean_itl_ms: float | None
    tokens_per_second: float
    cached_tokens: int
    num_preemptions: int
    speculative_decoding: SpeculativeDecoding


class InfillTimings(ClosedDict, total=False):
    """Tokens, their times and both ratios, of prompt and answer, in llama.cpp's names."""

    cache_n: int
    prompt_n: int
    prompt_ms: float
    prompt_per_token_ms: float | None
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_token_ms: float | None
    predicted_per_second: float | None


class TokenLogprob(ClosedDict):
    """A token and its log-probability (natural)."""

    token: str
    logprob: float
    bytes: list[int]


class RankedTokenLogprob(TokenLogprob):
    """The same, and the likeliest tokens in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(ClosedDict):
    """Logprobs of a message."""

    content: list[RankedTokenLogprob]
    refusal: None


class FunctionCall(ClosedDict):
    """What is called: ``arguments`` is a JSON object, as text."""

    name: str
    arguments: str


class ToolCall(ClosedDict):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(ClosedDict):
    """The answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class PromptLogprob(ClosedDict):
    """A token of the prompt, or one that might have stood there."""

    logprob: float
    rank: int | None
    decoded_token: str


class PromptFields(ClosedDict, total=False):
    """What a request wants to know of its prompt."""

    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[str, PromptLogprob] | None]


class _Choice(ClosedDict):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter"]
    stop_reason: NotRequired[str | int]
    token_ids: NotRequired[list[int] | None]


class ChatChoice(_Choice):
    """One answer to a conversation."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class CompletionLogprobs(ClosedDict):
    """Four parallel lists, an entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Choice, PromptFields):
    """One continuation of a prompt."""

    text: str
    logprobs: CompletionLogprobs | None


_Verbose = TypedDict("_Verbose", {"__verbose": NotRequired[dict[str, str]]})


class _Answer(StageFields, _Verbose):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    metrics: NotRequired[Timings]
    timings: NotRequired[InfillTimings]


class ChatCompletion(_Answer, PromptFields):
    """What POST /v1/chat/completions returns, unless it streams."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Completion(_Answer):
    """What POST /v1/completions returns, unless it streams."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


def documented(
    answer: Any, stream: str = _CHUNKS, media: str = "text/event-stream"
) -> dict[int | str, dict[str, Any]]:
    """Return the entry of a route's successful response, a type, and what it streams."""
    content = {media: {"schema": {"description": stream}}}
    return {200: {"model": answer, "description": "The answer", "content": content}}


_STATUSES = {
    400: "The request is wrong",
    401: "A key is needed",
    404: "No such model",
    413: "The body is too long",
    415: "The body is compressed, or a page's that does not say it is JSON",
    422: "Never sent: what is invalid has status 400",
    429: "Too much at once",
    500: "The model failed",
    503: "The server is stopping",
}


def errors_of(schema: dict[str, Any]) -> dict[int | str, dict[str, Any]]:
    """Return the entries of a route's errors, whose bodies have this JSON schema."""
    return {
        status: {"description": text, "content": {"application/json": {"schema": schema}}}
        for status, text in _STATUSES.items()
    }


def object_of(**fields: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of an object that has all of these fields."""
    return {"type": "object", "required": list(fields), "properties": fields}


TEXT = {"type": "string"}
TEXT_ERRORS = errors_of(object_of(error=TEXT))
_TEXT_OR_NULL = {"type": ["string", "null"]}
_ERROR = object_of(message=TEXT, type=TEXT, param=_TEXT_OR_NULL, code=_TEXT_OR_NULL)
ERRORS = errors_of(object_of(error=_ERROR))  # in OpenAI's form
