"""What the load generator's measurements mean: latencies, throughput, goodput, warnings. Pure.

Names say what is measured, because the same word means different things in different tools.
A failed request has no latency, but it stays in every count and in goodput's denominator.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

LATENCIES = {
    "ttft_from_send": "first chunk with text (or reasoning, or tool calls; not with the role only) "
    "- send, which is before a connection is opened",
    "ttft_from_scheduled_arrival": "first chunk with text - scheduled arrival, so with the "
    "client's own delay; null in a closed loop, which has no schedule",
    "tpot_excl_first": "per request: (e2e - ttft_from_send) / (output tokens - 1)",
    "tpot_incl_first": "per request: e2e / output tokens",
    "itl_chunk_pooled": "time between chunks with text, all requests in one pool: long answers "
    "weigh more, and a chunk may carry several tokens",
    "e2e": "last chunk of the answer - send",
}
DEFINITIONS = LATENCIES | {
    "population": "latencies, tokens, throughput: successful requests; throughput is over "
    "duration_s, from the start until the last request ended; std_ms divides by num - 1",
    "goodput": "successful requests within every limit; the share is of all requests, failed ones "
    "too; an answer of one token has no tpot and is within its limit",
}
LIMIT_NAMES = {"ttft": "ttft_from_send", "tpot": "tpot_excl_first", "e2el": "e2e"}  # as in vLLM
LIMIT_NAMES |= {name: name for name in LATENCIES if name != "itl_chunk_pooled"}
_MAX_LATE_MS = 20  # 99th percentile of the client's delays: more would show in the latencies
_MAX_CPU_SHARE = 0.8  # of one core, which is all that an event loop has


@dataclass(slots=True)
class Outcome:
    """The outcome of a request; seconds from the start of the run.

    ``chunk_s`` has the chunks with text, ``end_s`` the end of the answer or of the attempt; token
    counts are the server's, None where it gives none; ``error`` is None for a complete answer,
    ``text`` the part of it that a next turn repeats.
    """

    index: int
    arrival_s: float | None
    sent_s: float
    end_s: float
    chunk_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    usage_tokens: int | None = None
    error: str | None = None
    text: str = ""

    @property
    def num_tokens(self) -> int:
        """Output tokens by the server's usage, else the chunks with text."""
        return len(self.chunk_s) if self.usage_tokens is None else self.usage_tokens

    def latencies_s(self) -> dict[str, float]:
        """Return the known ones of ``LATENCIES``, without the pooled one."""
        latencies = {"e2e": self.end_s - self.sent_s}
        if self.num_tokens:
            latencies["tpot_incl_first"] = latencies["e2e"] / self.num_tokens
        if self.chunk_s:
            latencies["ttft_from_send"] = self.chunk_s[0] - self.sent_s
            if self.arrival_s is not None:
                latencies["ttft_from_scheduled_arrival"] = self.chunk_s[0] - self.arrival_s
            if self.num_tokens > 1:
                decode_s = self.end_s - self.chunk_s[0]
                latencies["tpot_excl_first"] = decode_s / (self.num_tokens - 1)
        return latencies


def summary_ms(values_s: Sequence[float]) -> dict[str, float] | None:
    """Return number, mean, deviation and percentiles in milliseconds; None of nothing."""
    if not values_s:
        return None
    ms = np.array(values_s) * 1e3
    statistics = {"mean_ms": ms.mean(), "std_ms": ms.std(ddof=1) if len(ms) > 1 else 0.0}
    for name, percent in {"min": 0, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}.items():
        statistics[f"{name}_ms"] = np.percentile(ms, percent)
    return {"num": len(ms)} | {name: round(float(value), 3) for name, value in statistics.items()}


def summarise(outcomes: Sequence[Outcome], limits_ms: Mapping[str, float]) -> dict[str, Any]:
    """Return counts, throughput, latencies and goodput, as plain values for JSON."""
    duration_s = max(outcome.end_s for outcome in outcomes)
    good = [outcome for outcome in outcomes if outcome.error is None]
    rows = [outcome.latencies_s() for outcome in good]
    pools = {name: [row[name] for row in rows if name in row] for name in LATENCIES}
    pools["itl_chunk_pooled"] = [gap for o in good for gap in np.diff(o.chunk_s).tolist()]
    num_input = _sum(outcome.prompt_tokens for outcome in good)
    num_output = sum(outcome.num_tokens for outcome in good)
    sources = {"counted_chunks" if o.usage_tokens is None else "server_usage" for o in good}
    # Without a second token nothing was late; without any text everything was.
    num_within = sum(
        all(
            1e3 * ({"tpot_excl_first": 0} | row).get(k, np.inf) <= ms for k, ms in limits_ms.items()
        )
        for row in rows
    )
    goodput = {
        "limits_ms": dict(limits_ms),
        "num_within_all_limits": num_within,
        "share_of_all_requests": round(num_within / len(outcomes), 4),
        "requests_per_s": round(num_within / duration_s, 4),
    }
    return {
        "num_requests": len(outcomes),
        "num_successful": len(good),
        "num_failed": len(outcomes) - len(good),
        "failures": failures(outcomes),
        "duration_s": round(duration_s, 3),
        "total_input_tokens": num_input,
        "total_cached_input_tokens": _sum(outcome.cached_tokens for outcome in good),
        "total_output_tokens": num_output,
        "total_output_chunks": sum(len(outcome.chunk_s) for outcome in good),
        "token_source": " and ".join(sorted(sources)),
        "request_throughput_per_s": round(len(good) / duration_s, 4),
        "output_tokens_per_s": round(num_output / duration_s, 3),
        "total_tokens_per_s": num_input and round((num_input + num_output) / duration_s, 3),
        **{name: summary_ms(pool) for name, pool in pools.items()},
        "goodput": goodput if limits_ms else None,
    }


def failures(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Return each error with the requests that had it, the most frequent first."""
    by_error: defaultdict[str, list[int]] = defaultdict(list)
    for outcome in outcomes:
        if outcome.error is not None:
            by_error[outcome.error].append(outcome.index)
    return [
        {"error": error, "num": len(which), "request_indices": which}
        for error, which in sorted(by_error.items(), key=lambda item: -len(item[1]))
    ]


def _sum(counts: Iterable[int | None]) -> int | None:
    present = [count for count in counts if count is not None]
    return sum(present) if present else None


def parse_limits(texts: Sequence[str]) -> dict[str, float]:
    """Read limits like ``ttft:500``, in milliseconds; ValueError says what there is."""
    try:
        return {LIMIT_NAMES[text.split(":")[0]]: float(text.split(":")[1]) for text in texts}
    except (LookupError, ValueError) as error:
        raise ValueError(
            f"--goodput {' '.join(texts)} is not NAME:MILLISECONDS with one of "
            f"{', '.join(LIMIT_NAMES)}"
        ) from error


def client_warnings(client: Mapping[str, Any]) -> list[str]:
    """Return a warning if the client could not keep up; ``client`` has its own delays."""
    cpu_share = client["cpu_share_of_one_core"]
    delays = (client["event_loop_lag"], client["send_lateness"])
    lag_ms, late_ms = (delay["p99_ms"] if delay else 0.0 for delay in delays)
    if cpu_share <= _MAX_CPU_SHARE and max(lag_ms, late_ms) <= _MAX_LATE_MS:
        return []
    how = "saturated" if cpu_share > _MAX_CPU_SHARE else "late"
    return [
        f"the client was {how} ({cpu_share:.0%} of a core; p99 of event loop lag {lag_ms:.0f} "
        f"ms, of send lateness {late_ms:.0f} ms), which is in the latencies: ask for less, or run "
        "it elsewhere"
    ]


def warnings(
    summary: Mapping[str, Any], client: Mapping[str, Any], load: Mapping[str, Any]
) -> list[str]:
    """Return warnings about what makes the numbers mean less than they seem to.

    ``summary`` is a summary, ``client`` has the client's own delays, ``load`` what was sent.
    """
    num, num_good = summary["num_requests"], summary["num_successful"]
    num_input, num_cached = summary["total_input_tokens"], summary["total_cached_input_tokens"] or 0
    num_output, num_chunks = summary["total_output_tokens"], summary["total_output_chunks"]
    share = 1.0 if load["prefix_share"] is None else load["prefix_share"]
    num_left_out = load.get("num_left_out_of_trace", 0)
    texts = {
        f"{num - num_good} of {num} requests failed; the latencies are those of the others, which "
        "flatters the server": num_good < num,
        f"{load['num_repeated_prompts']} prompts came before: a prefix cache makes them cheap": (
            load["num_repeated_prompts"]
        ),
        f"the server had {num_cached} of {num_input} prompt tokens in its cache, but the prompts "
        f"share {share:.0%}: were they sent before?": num_cached * 2
        > (num_input or 0) * (1 + share),
        f"{num_left_out} requests of the trace had no answer there, and are left out": num_left_out,
        "there was no warm-up: the first requests pay for what later ones find ready": (
            not load["num_warmups"]
        ),
        "not all answers came with usage: chunks are counted there, not tokens": (
            "counted_chunks" in summary["token_source"]
        ),
        f"{num_output} tokens came in {num_chunks} chunks: itl_chunk_pooled is not per token": (
            num_output > 1.1 * num_chunks
        ),
        f"the p99 of {num_good} requests is little but their maximum": num_good < 100,
    }
    return client_warnings(client) + [text for text, applies in texts.items() if applies]
