"""When an answer is needed: a field of OpenAI's requests, or else a header."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ridgeline.server.errors import ApiError
from ridgeline.server.strict import Strict, contradiction, wrong

HEADER = "x-deadline-ms"
_LONGEST_MS = 86_400_000.0  # a day

Milliseconds = Annotated[float, Field(gt=0, le=_LONGEST_MS)]


class Deadline(Strict):
    """From the arrival of a request until its first token, and until its last."""

    ttft_ms: Milliseconds | None = None
    total_ms: Milliseconds | None = None
    length: Literal["bound", "expected"] = "bound"

    @model_validator(mode="after")
    def _says_when(self) -> Self:
        if self.ttft_ms is None and self.total_ms is None:
            raise wrong("invalid_value", "ttft_ms", "is missing, and total_ms too: give one")
        return self


def deadline_of(field: Deadline | None, header: str | None) -> Deadline | None:
    """Return the deadline that a request has, if it has one; the header says when it must end.

    Raises ApiError if the header is no time, or says something else than the field.
    """
    if header is None:
        return field
    try:
        total_ms = float(header)
    except ValueError:
        total_ms = 0.0
    if not 0 < total_ms <= _LONGEST_MS:
        raise ApiError(
            400,
            f"{HEADER} is {header[:80]!r}: write milliseconds, above 0 and at most a day",
            param=HEADER,
            code="invalid_value",
        )
    if field is not None and field.total_ms != total_ms:
        raise contradiction("deadline", f"the header {HEADER} says something else")
    return field or Deadline(total_ms=total_ms)
