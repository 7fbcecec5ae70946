"""The edge of a server: what clients wait for besides the engine.

Parsing, the chat template, tokenising and the way there and back are in what ``bench serve``
measures, and not in a simulation. Both are known of a run whose server wrote a trace: the
difference is a constant, and so much for each token of the prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from ridgeline.bench.load.stats import Outcome
from ridgeline.foresight.trace import read_trace

# Of --edge, which names what ``read_client_overhead`` reads.
EDGE_HELP = (
    "A bench serve result and that server's trace: adds the time outside the engine; repeatable."
)


@dataclass(frozen=True, slots=True)
class ClientOverhead:
    """Seconds from sending to the engine and back: of each request, and of each prompt token."""

    base_s: float
    per_token_s: float

    def seconds(self, num_prompt_tokens: float) -> float:
        """Return by how much later a client sees all of an answer."""
        return self.base_s + self.per_token_s * num_prompt_tokens

    def add_to(self, outcome: Outcome) -> Outcome:
        """Return what a client sees of what the engine did; it is changed in place."""
        later_s = self.seconds(outcome.prompt_tokens or 0)
        outcome.chunk_s = [at_s + later_s for at_s in outcome.chunk_s]
        outcome.end_s += later_s
        return outcome

    def as_dict(self) -> dict[str, float]:
        """Return it in milliseconds, and microseconds a token."""
        per_token_us = round(1e6 * self.per_token_s, 3)
        return {"base_ms": round(1e3 * self.base_s, 3), "per_prompt_token_us": per_token_us}


def read_client_overhead(pairs: Sequence[str]) -> ClientOverhead:
    """Fit the edge to runs, each named as ``RESULT,TRACE``.

    Runs with prompts of one length say nothing of what a token costs: then it is all of each
    request. Raises ValueError if a pair is not of one run, and OSError if a file cannot be read.
    """
    points = [_point(pair) for pair in pairs]
    mean_tokens, mean_s = (fmean(column) for column in zip(*points, strict=True))
    spread = sum((tokens - mean_tokens) ** 2 for tokens, _ in points)
    slope = sum((tokens - mean_tokens) * (s - mean_s) for tokens, s in points)
    per_token_s = max(0.0, slope / spread) if spread else 0.0
    if per_token_s * mean_tokens > mean_s:  # nothing is left of each request
        squares = sum(tokens * tokens for tokens, _ in points)
        per_token_s = max(0.0, sum(tokens * s for tokens, s in points) / squares)
    return ClientOverhead(max(0.0, mean_s - per_token_s * mean_tokens), per_token_s)


def _point(pair: str) -> tuple[float, float]:
    """Return the tokens of a run's prompts, and by how much later clients saw first tokens."""
    first, comma, second = pair.rpartition(",")
    if not comma or not first or not second:
        raise ValueError(f"--edge {pair!r} is not RESULT,TRACE: a result of bench serve, and what "
                         "serve --trace wrote meanwhile")  # fmt: skip
    result = _read_result(Path(first))
    num = result["num_requests"]
    with read_trace(Path(second)) as recorded:
        requests = sorted(recorded.requests, key=lambda one: float(one["arrival_s"]))[-num:]
    num_tokens = sum(one["num_prompt_tokens"] for one in requests)
    total = result["total_input_tokens"]
    if len(requests) < num or num_tokens != (num_tokens if total is None else total):
        raise ValueError(
            f"--edge {pair}: the last {num} requests of the trace are not those of the result: "
            f"{len(requests)} with {num_tokens:,} prompt tokens, and it says {total or 0:,}"
        )
    firsts_s = [one["first_token_s"] - one["arrival_s"] for one in requests]
    return num_tokens / num, result["ttft_from_send"]["mean_ms"] / 1e3 - fmean(firsts_s)


def _read_result(path: Path) -> Mapping[str, Any]:
    """Return the document of a run without failures."""
    try:
        result = json.loads(path.read_text("utf-8").splitlines()[-1])
        num_failed = result["num_failed"]
        has_firsts = result["ttft_from_send"]["num"] == result["num_requests"] > 0
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is not a result of bench serve: {error!r}") from None
    if num_failed or not has_firsts:
        raise ValueError(f"{path}: an edge is fitted to runs in which no request failed")
    document: Mapping[str, Any] = result
    return document
