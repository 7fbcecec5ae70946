"""What the OpenAPI document says of answers, whatever the dialect: their streams and their errors.

The shapes of a dialect alone are its own (``documented`` in each). Tests hold real answers
against them.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

_CHUNKS = "A chunk after each `data: `, with OpenAI's `delta` or `text`; the last is `[DONE]`."


class Shaped(BaseModel):
    """No other fields, and no coercion."""

    model_config = ConfigDict(strict=True, extra="forbid")


class InfillTimings(Shaped):  # of OpenAI's answers too
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


TEXT = {"type": "string"}
TEXT_ERRORS = errors_of({"type": "object", "required": ["error"], "properties": {"error": TEXT}})
