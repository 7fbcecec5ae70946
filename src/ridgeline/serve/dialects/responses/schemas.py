"""The shapes of the Responses API's answers, and what is documented of its streams."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ridgeline.serve.answer.schemas import ClosedDict, EndedBy, RankedTokenLogprob, StageFields

RESPONSE_EVENTS = "Events named `response.*` with a `sequence_number`; the last has the response."

_Empty = Annotated[list[str], Field(max_length=0)]


class InputTokensDetails(ClosedDict):
    """Where the prompt's tokens came from."""

    cache_write_tokens: Literal[0]
    cached_tokens: int


class OutputTokensDetails(ClosedDict):
    """What the answer's tokens were for."""

    reasoning_tokens: int


class ResponseUsage(ClosedDict):
    """The count of tokens, in the Responses API's names."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class OutputText(ClosedDict):
    """Text for the user."""

    type: Literal["output_text"]
    text: str
    annotations: _Empty
    logprobs: list[RankedTokenLogprob]


class ReasoningText(ClosedDict):
    """What the model thought."""

    type: Literal["reasoning_text"]
    text: str


class _OutputItem(ClosedDict):
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
    summary: _Empty
    content: list[ReasoningText]


class OutputCall(_OutputItem):
    """An item that calls a function: ``arguments`` is a JSON object, as text."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class ResponseObject(EndedBy, StageFields):
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
