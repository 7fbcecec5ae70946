"""Flags of a load that say nothing beside others are refused, with the flag that would."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.planner import plan
from tests.planner.capacity.test_search import LLAMA

LOAD: dict[str, Any] = {"on": "l4", "prompt_tokens": "300", "new_tokens": "50"}
RATE: dict[str, Any] = {**LOAD, "request_rate": 1.0}


@pytest.mark.parametrize(
    ("wishes", "reason"),
    [
        (RATE | {"concurrency": 64}, "--concurrency 64 is about memory alone.* --max-num-seqs"),
        (LOAD | {"max_concurrency": 8, "concurrency": 64}, "give --max-concurrency for"),
        ({"on": "l4", "trace_file": "azure.csv", "concurrency": 64}, "about memory alone"),
        (LOAD | {"max_concurrency": 8, "burstiness": 3.0}, "--burstiness .* give --request-rate"),
        (RATE | {"notice": 30.0}, "--notice needs --spot"),
        (RATE | {"evictions_per_hour": 2.0}, "--evictions-per-hour needs --spot"),
        (RATE | {"years": 5.0}, "--years needs --buy"),
        (RATE | {"hours_per_day": 24.0}, "--hours-per-day needs --buy"),
        (RATE | {"usd_per_kwh": 0.1}, "--usd-per-kwh needs --buy"),
    ],
)
def test_what_would_be_ignored_is_refused(wishes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        plan(LLAMA, **wishes)


def test_requests_that_a_context_cuts_are_said() -> None:
    cut = "requests of more than 100 tokens end there, as the context does"
    assert cut in plan(LLAMA, **RATE, context=100).assumptions
    assert cut not in plan(LLAMA, **RATE).assumptions
