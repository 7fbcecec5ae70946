"""When an answer is needed: a field of OpenAI's requests, or else a header; how it is refused."""

from __future__ import annotations

from math import ceil, inf
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ridgeline.foresight.simulator.forecast import PredictedTimes
from ridgeline.foresight.step_time.fit import FIRST_STEPS
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.request_body import RequestModel, wrong

HEADER = "x-deadline-ms"
PROMISE = "x-ridgeline-promise"  # of a reply: "promised", or "unpromised"
LONGEST_MS = 86_400_000.0  # a day

Milliseconds = Annotated[float, Field(gt=0, le=LONGEST_MS)]


class Deadline(RequestModel):
    """From the arrival of a request until its first token, and until its last."""

    ttft_ms: Milliseconds | None = None
    total_ms: Milliseconds | None = None
    length: Literal["bound", "expected"] = "bound"

    @model_validator(mode="after")
    def _says_when(self) -> Self:
        if self.ttft_ms is None and self.total_ms is None:
            raise wrong("invalid_value", "ttft_ms", "is missing, and total_ms too: give one")
        return self


def refusal(deadline: Deadline, foreseen: PredictedTimes) -> ApiError:
    """Say what was asked, what is predicted from the arrival on, and when to ask again."""
    parts, headers, late_s = [], {}, 0.0
    for name, moment, seconds in zip(
        ("ttft_ms", "total_ms"), ("first token", "end"), foreseen, strict=True
    ):
        asked_ms = getattr(deadline, name)
        if asked_ms is None:
            continue
        if seconds < inf:
            headers[f"x-foreseen-{name.replace('_', '-')}"] = f"{1e3 * seconds:.0f}"
            parts.append(
                f"the {moment} is foreseen after {1e3 * seconds:.0f} ms ({name}: {asked_ms:g})"
            )
            late_s = max(late_s, seconds - asked_ms / 1e3)
        else:
            parts.append(f"the {moment} is not foreseen in time ({name}: {asked_ms:g})")
            late_s = max(late_s, asked_ms / 1e3)
    headers["retry-after"] = str(max(1, ceil(late_s)))
    return ApiError(
        503,
        f"the deadline cannot be kept: {', and '.join(parts)}",
        param="deadline",
        code="deadline_cannot_be_kept",
        headers=headers,
    )


def too_early(num_seen: int) -> ApiError:
    """Return the refusal of a server that has seen too few steps to know how fast it is."""
    return ApiError(
        503,
        f"this server does not know yet how fast it is: it has seen {num_seen} steps of the "
        f"{FIRST_STEPS} that a promise needs, and measures itself now; try again soon, or run "
        f"ridgeline calibrate before it starts",
        param="deadline",
        code="deadline_not_foreseeable",
        headers={"retry-after": "2"},
    )
