"""The shapes of answers, for the OpenAPI document. Tests hold real answers against them.

Answers themselves are plain dictionaries (``openai.response_builder``), because a step of 64
streams makes 64 of them.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Shaped(BaseModel):
    """No other fields, and no coercion."""

    model_config = ConfigDict(strict=True, extra="forbid")


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


class InfillTimings(Shaped):
    """Tokens, their times and both ratios, of prompt and answer, in llama.cpp's names."""

    cache_n: int | None = None
    prompt_n: int | None = None
    prompt_ms: float | None = None
    prompt_per_token_ms: float | None = None
    prompt_per_second: float | None = None
    predicted_n: int | None = None
    predicted_ms: float | None = None
    predicted_per_token_ms: float | None = None
    predicted_per_second: float | None = None


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


def _some_fields(schema: dict[str, Any]) -> None:
    """Leave out what holds only where a request has no ``response_fields``."""
    del schema["required"]
    schema["additionalProperties"] = {"description": "What stands at a path, as timings/prompt_n"}


class Infilled(Shaped):
    """What POST /infill returns, unless it streams; of this only ``response_fields``, if given."""

    model_config = ConfigDict(json_schema_extra=_some_fields)

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
    receipt: dict[str, Any] | None = None


class InputTokensDetails(Shaped):
    """Where the prompt's tokens came from."""

    cache_write_tokens: Literal[0]
    cached_tokens: int


class OutputTokensDetails(Shaped):
    """What the answer's tokens were for."""

    reasoning_tokens: int


class ResponseUsage(Shaped):
    """The count of tokens, in the Responses API's names."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputText(Shaped):
    """Text for the user."""

    type: Literal["output_text"]
    text: str
    annotations: list[str] = Field(max_length=0)
    logprobs: list[RankedTokenLogprob]


class ReasoningText(Shaped):
    """What the model thought."""

    type: Literal["reasoning_text"]
    text: str


class _OutputItem(Shaped):
    id: str
    status: Literal["completed", "incomplete"]


class OutputMessage(_OutputItem):
    """An item with text."""

    type: Literal["message"]
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(_OutputItem):
    """An item with reasoning, shown whole, so that nothing is summed up."""

    type: Literal["reasoning"]
    summary: list[str] = Field(max_length=0)
    content: list[ReasoningText]


class OutputCall(_OutputItem):
    """An item that calls a function: ``arguments`` is a JSON object, as text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResponseObject(Shaped):
    """What POST /v1/responses returns, unless it streams."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    background: Literal[False]
    error: None
    incomplete_details: dict[str, str] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any] | None
    model: str
    output: list[OutputMessage | OutputReasoning | OutputCall]
    parallel_tool_calls: bool
    previous_response_id: None
    reasoning: dict[str, str | None]
    store: Literal[False]
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int | None
    top_p: float | None
    truncation: Literal["disabled"]
    usage: ResponseUsage
    user: str | None
    receipt: dict[str, Any] | None = None


class MessageUsage(Shaped):
    """Anthropic's counts of tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class ContentBlock(Shaped):
    """A block of a message: text, thinking or a call."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class MessageObject(Shaped):
    """What POST /v1/messages returns, unless it streams."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal[
        "end_turn",
        "max_tokens",
        "model_context_window_exceeded",
        "refusal",
        "stop_sequence",
        "tool_use",
    ]
    stop_sequence: str | None
    usage: MessageUsage
    receipt: dict[str, Any] | None = None


_CHUNKS = "A chunk after each `data: `, with OpenAI's `delta` or `text`; the last is `[DONE]`."
INFILL_CHUNKS = "After each `data: ` a piece as `content`; the last has `stop: true`, and no text."
MESSAGE_EVENTS = "Anthropic's events, from `message_start` to `message_stop`."
RESPONSE_EVENTS = "Events named `response.*` with a `sequence_number`; the last has the response."


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
    415: "The body is not JSON",
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


TEXT, _TEXT_OR_NULL = {"type": "string"}, {"type": ["string", "null"]}
_ERROR = {"message": TEXT, "type": TEXT, "param": _TEXT_OR_NULL, "code": _TEXT_OR_NULL}
_ERROR_SCHEMA = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": list(_ERROR), "properties": _ERROR}},
}
ERRORS = errors_of(_ERROR_SCHEMA)  # in OpenAI's form
TEXT_ERRORS = errors_of({"type": "object", "required": ["error"], "properties": {"error": TEXT}})
_MESSAGE_ERROR_SCHEMA = {
    "type": "object",
    "required": ["type", "error", "request_id"],
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "required": ["type", "message"],
            "properties": {"type": TEXT, "message": TEXT},
        },
        "request_id": TEXT,
    },
}
MESSAGE_ERRORS = errors_of(_MESSAGE_ERROR_SCHEMA)  # in Anthropic's
