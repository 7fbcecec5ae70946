"""The shapes of answers, for the OpenAPI document. Tests hold real answers against them.

Answers themselves are plain dictionaries (``server.choices``): a step of 64 streams makes 64.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class _Shape(BaseModel):
    """No other fields, and no coercion."""

    model_config = ConfigDict(strict=True, extra="forbid")


class PromptTokensDetails(_Shape):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class CompletionTokensDetails(_Shape):
    """Tokens of reasoning; of a request with a prediction, drafts that were right, or not."""

    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Usage(_Shape):
    """OpenAI's count of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class SpeculativeDecoding(_Shape):
    """How often tokens were guessed, how many, and how many of them were right."""

    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int


class Timings(_Shape):
    """What ``include_timings`` asks for, in vLLM's names; empty if no token came."""

    queue_time_ms: float | None = None
    time_to_first_token_ms: float | None = None
    generation_time_ms: float | None = None
    mean_itl_ms: float | None = None
    tokens_per_second: float | None = None
    cached_tokens: int | None = None
    num_preemptions: int | None = None
    speculative_decoding: SpeculativeDecoding | None = None


class TokenLogprob(_Shape):
    """A token and its log-probability (natural)."""

    token: str
    logprob: float
    bytes: list[int]


class RankedTokenLogprob(TokenLogprob):
    """The same, and the likeliest tokens in its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(_Shape):
    """Logprobs of a message."""

    content: list[RankedTokenLogprob]
    refusal: None


class Function(_Shape):
    """What is called: ``arguments`` is a JSON object, as text."""

    name: str
    arguments: str


class ToolCall(_Shape):
    """A call that the model asks for."""

    id: str
    type: Literal["function"]
    function: Function


class AssistantMessage(_Shape):
    """The answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class _Choice(_Shape):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = None


class ChatChoice(_Choice):
    """One answer to a conversation."""

    message: AssistantMessage
    logprobs: ChatLogprobs | None


class CompletionLogprobs(_Shape):
    """Four parallel lists, an entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(_Choice):
    """One continuation of a prompt."""

    text: str
    logprobs: CompletionLogprobs | None


class _Answer(_Shape):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    metrics: Timings | None = None


class ChatCompletion(_Answer):
    """What POST /v1/chat/completions returns, unless it streams."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class Completion(_Answer):
    """What POST /v1/completions returns, unless it streams."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class InfillTimings(_Shape):
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


class Infilled(_Shape):
    """What POST /infill returns, unless it streams."""

    index: Literal[0]
    content: str
    stop: Literal[True]
    model: str
    tokens_predicted: int
    tokens_evaluated: int
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    truncated: bool
    timings: InfillTimings


class InputTokensDetails(_Shape):
    """Where the prompt's tokens came from."""

    cached_tokens: int


class OutputTokensDetails(_Shape):
    """What the answer's tokens were for."""

    reasoning_tokens: int


class ResponseUsage(_Shape):
    """The count of tokens, in the Responses API's names."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputText(_Shape):
    """Text for the user."""

    type: Literal["output_text"]
    text: str
    annotations: list[str] = Field(max_length=0)
    logprobs: list[RankedTokenLogprob]


class ReasoningText(_Shape):
    """What the model thought."""

    type: Literal["reasoning_text"]
    text: str


class _OutputItem(_Shape):
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


class ResponseObject(_Shape):
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


class MessageUsage(_Shape):
    """Anthropic's counts of tokens."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class ContentBlock(_Shape):
    """A block of a message: text, thinking or a call."""

    type: Literal["text", "thinking", "tool_use"]
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None


class MessageObject(_Shape):
    """What POST /v1/messages returns, unless it streams."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


_CHUNKS = "A chunk after each `data: `, with OpenAI's `delta` or `text`; the last is `[DONE]`."
INFILL_CHUNKS = "After each `data: ` a piece as `content`; the last has `stop: true`, and no text."
MESSAGE_EVENTS = "Anthropic's events, from `message_start` to `message_stop`."
RESPONSE_EVENTS = "Events named `response.*` with a `sequence_number`; the last has the response."


def documented(answer: type[_Shape], stream: str = _CHUNKS) -> dict[int | str, dict[str, Any]]:
    """Return the entry of a route's successful response, and what it streams."""
    content = {"text/event-stream": {"schema": {"description": stream}}}
    return {200: {"model": answer, "description": "The answer", "content": content}}
