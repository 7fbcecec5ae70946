"""The shapes of OpenAI's answers, for the OpenAPI document.

Answers themselves are plain dictionaries (``answer.response_builder``), because a step of 64
streams makes 64 of them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ridgeline.serve.dialects.documented import TEXT, InfillTimings, Shaped, errors_of


class PromptTokensDetails(Shaped):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(Shaped):
    """Tokens of reasoning; of a request with a prediction, drafts that were right, or not."""

    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Usage(Shaped):
    """OpenAI's count of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class InputUsage(Shaped):
    """The count of tokens where none are generated."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Embedding(Shaped):
    """The vector of a text; in base64 it is little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(Shaped):
    """The vectors of all texts, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: InputUsage


class RankedDocument(Shaped):
    """A document as it was sent."""

    text: str


class Rank(Shaped):
    """A document's place among those sent, and how relevant it is."""

    index: int
    relevance_score: float
    document: RankedDocument | None = None


class Reranked(Shaped):
    """Documents, the most relevant first."""

    id: str
    model: str
    usage: InputUsage
    results: list[Rank]


class DocumentScore(Shaped):
    """How near two texts are to each other."""

    index: int
    object: Literal["score"]
    score: float


class Scored(Shaped):
    """The scores of all pairs."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[DocumentScore]
    usage: InputUsage


class SpeculativeDecoding(Shaped):
    """How often tokens were guessed, how many, and how many of them were right."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


class Timings(Shaped):
    """What ``include_timings`` asks for, in vLLM's names; empty if no token came."""

    queue_time_ms: float | None = None
    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None
    cached_tokens: int | None = None
    num_preemptions: int | None = None
    speculative_decoding: SpeculativeDecoding | None = None


class TokenLogprob(Shaped):
    """A token and its log-probability (natural)."""

    token: str
    logprob: float
    bytes: list[int]


class RankedTokenLogprob(TokenLogprob):
    """The same, and the likeliest tokens in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Shaped):
    """Logprobs of a message."""

    content: list[RankedTokenLogprob]
    refusal: None


class FunctionCall(Shaped):
    """What is called: ``arguments`` is a JSON object, as text."""

    name: str
    arguments: str


class ToolCall(Shaped):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(Shaped):
    """The answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class _Choice(Shaped):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls", "content_filter"]
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None


class PromptLogprob(Shaped):
    """A token of the prompt, or one that might have stood there."""

    logprob: float
    rank: int | None
    decoded_token: str


_PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatChoice(_Choice):
    """One answer to a conversation."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class CompletionLogprobs(Shaped):
    """Four parallel lists, an entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Choice):
    """One continuation of a prompt."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: _PromptLogprobs | None = None


class _AnswerSchema(Shaped):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    metrics: Timings | None = None
    timings: InfillTimings | None = None
    receipt: dict[str, Any] | None = None
    verbose: dict[str, str] | None = Field(None, alias="__verbose")


class ChatCompletion(_AnswerSchema):
    """What POST /v1/chat/completions returns, unless it streams."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: _PromptLogprobs | None = None


class Completion(_AnswerSchema):
    """What POST /v1/completions returns, unless it streams."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


_TEXT_OR_NULL = {"type": ["string", "null"]}
_ERROR = {"message": TEXT, "type": TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": list(_ERROR), "properties": _ERROR}},
}
ERRORS = errors_of(_ERROR_SCHEMA)  # in OpenAI's form
