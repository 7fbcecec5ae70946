"""Where a search begins, if the server is one of ours: at the load that it foresees to hold.

``POST /v1/plan`` says of this machine, by the server's own model of time, what a load would see.
Rates are narrowed by a few such questions; none of them is a request for an answer.
"""

from __future__ import annotations

import json
import math
import urllib.request
from collections.abc import Sequence
from statistics import mean
from typing import Any

from ridgeline.bench.load.client_flags import ClientFlags
from ridgeline.bench.load.stats import Outcome
from ridgeline.bench.search.slo import RequestSlo

_TIMEOUT_S = 30.0
_NUM_QUESTIONS = 5
_PERCENTILES = (50, 90, 95, 99)  # of which a plan speaks


def foreseen_rate(
    client_flags: ClientFlags, slos: Sequence[RequestSlo], first: Sequence[Outcome]
) -> float | None:
    """Return the highest rate, requests per second, that a server foresees to hold.

    None if it foresees nothing: it has no such route, model or bound.

    Args:
        client_flags: whom, and which model.
        slos: what must hold.
        first: some answers of the load, which say how long prompts and answers are.
    """
    lengths = [(one.prompt_tokens, one.usage_tokens) for one in first]
    known = [(prompt, new) for prompt, new in lengths if prompt and new]
    if not known:
        return None
    body = {
        "model": client_flags.model,
        "on": "here",
        "replicas": 1,
        "prompt_tokens": max(1, round(mean(prompt for prompt, _ in known))),
        "new_tokens": max(1, round(mean(new for _, new in known))),
        "slo": [f"{slo.metric}:{_nearest(slo)}:{slo.limit_ms:g}" for slo in slos],
    }
    try:
        knee_per_s = _knee_per_s(client_flags, body)
        low, high = knee_per_s / 16, knee_per_s
        for _ in range(_NUM_QUESTIONS):
            middle = math.sqrt(low * high)
            if _choice(client_flags, body, middle)["meets_slo"]:
                low = middle
            else:
                high = middle
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return low if low > knee_per_s / 16 else None


def _nearest(slo: RequestSlo) -> str:
    if slo.percent is None:
        return "mean"
    percent = slo.percent
    return f"p{min(_PERCENTILES, key=lambda one: abs(one - percent))}"


def _knee_per_s(client_flags: ClientFlags, body: dict[str, Any]) -> float:
    """Return the most requests per second that the server can answer at all."""
    rate_per_s = 1e-2  # any: its share of the knee says where that is
    return float(rate_per_s / _choice(client_flags, body, rate_per_s)["utilisation"])


def _choice(client_flags: ClientFlags, body: dict[str, Any], rate_per_s: float) -> dict[str, Any]:
    url = client_flags.base_url.rstrip("/").removesuffix("/v1") + "/v1/plan"
    headers = {"Content-Type": "application/json"}
    if client_flags.api_key:
        headers["Authorization"] = f"Bearer {client_flags.api_key}"
    data = json.dumps(body | {"request_rate": rate_per_s}).encode()
    request = urllib.request.Request(url, data, headers)
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
        (choice,) = json.load(response)["choices"]
    answer: dict[str, Any] = choice
    return answer
