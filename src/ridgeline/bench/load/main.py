"""The serving benchmark: the load of many users on any OpenAI-compatible server.

It knows a server only by its URL. Results go to standard output, vLLM's block first and one JSON
document last; warnings and failures also to standard error.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Annotated, Any, Literal

from rich.console import Console
from typer import Option

from ridgeline.bench.load.plan import (
    Planned,
    draw_prompts,
    gamma_arrivals,
    parse_prompts,
    parse_trace,
    synthetic_prompts,
)
from ridgeline.bench.load.stats import DEFINITIONS, parse_limits, summarise, warnings
from ridgeline.engine_setup.progress import count_bar

# The labels of vLLM's block.
_COUNTS = {
    "Successful requests": "num_successful",
    "Failed requests": "num_failed",
    "Benchmark duration (s)": "duration_s",
    "Total input tokens": "total_input_tokens",
    "Total generated tokens": "total_output_tokens",
    "Request throughput (req/s)": "request_throughput_per_s",
    "Output token throughput (tok/s)": "output_tokens_per_s",
    "Total token throughput (tok/s)": "total_tokens_per_s",
}
_SECTIONS = {
    "ttft_from_send": ("Time to First Token", "TTFT"),
    "ttft_from_scheduled_arrival": ("Time to First Token from arrival", "TTFT"),
    "tpot_excl_first": ("Time per Output Token (excl. 1st token)", "TPOT"),
    "itl_chunk_pooled": ("Inter-token Latency", "ITL"),
    "e2e": ("End-to-end Latency", "E2EL"),
}


@dataclass(frozen=True, kw_only=True)
class Load:
    """Which requests to send where; each field is a flag of the command line."""

    base_url: Annotated[str, Option(help="Like http://127.0.0.1:8000, with or without /v1.")]
    model: Annotated[str, Option(help="The model's name in requests.")]
    api_key: Annotated[str | None, Option(envvar="OPENAI_API_KEY", help="Bearer token.")] = None
    endpoint: Annotated[Literal["chat", "completions"], Option(help="What to call.")] = "chat"
    request_rate: Annotated[float | None, Option(help="Open loop: requests/s, inf.")] = None
    burstiness: Annotated[float, Option(help="Gamma shape: 1 Poisson, inf even.")] = 1.0
    trace_file: Annotated[
        Path | None,
        Option(
            help="Open loop: times and lengths of a CSV with TIMESTAMP,ContextTokens,"
            "GeneratedTokens. --request-rate stretches its times; --prompt-words and --max-tokens "
            "bound its lengths."
        ),
    ] = None
    max_concurrency: Annotated[int | None, Option(min=1, help="Closed loop: clients.")] = None
    num_prompts: Annotated[int, Option(min=1, help="Requests to measure.")] = 100
    prompts: Annotated[
        Path | None,
        Option(help='Lines of text, or of JSON with "prompt" or "turns". Default: random words.'),
    ] = None
    prompt_words: Annotated[int | None, Option(min=1, help="Random words. Default: 128.")] = None
    prefix_share: Annotated[float, Option(min=0, max=1, help="Shared part of prompts.")] = 0.0
    max_tokens: Annotated[int | None, Option(min=1, help="Longest answer. Default: 128.")] = None
    temperature: Annotated[float, Option(min=0, help="0 is greedy.")] = 0.0
    top_k: Annotated[int | None, Option(help="Keep the k likeliest tokens.")] = None
    top_p: Annotated[float | None, Option(help="Keep this much probability.")] = None
    min_p: Annotated[float | None, Option(help="Drop tokens rarer than this.")] = None
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Go on past an end of text.")] = False
    extra_body: Annotated[str, Option(help="JSON fields to add; null removes one.")] = "{}"
    num_warmups: Annotated[int, Option(min=0, help="Requests sent first, all at once.")] = 4
    timeout_s: Annotated[float, Option(help="Longer requests count as failed.")] = 600.0
    goodput: Annotated[list[str] | None, Option(help="ttft:MS, tpot:MS, e2el:MS; repeat.")] = None
    seed: Annotated[
        int | None,
        Option(help="Repeats arrivals and prompts. Default: new ones, which no cache has seen."),
    ] = None

    def __post_init__(self) -> None:
        """Raise ValueError for flags that are wrong with any server."""
        is_open = self.request_rate is not None or self.trace_file is not None
        if is_open == (self.max_concurrency is not None):
            raise ValueError(
                "say how requests arrive: --request-rate or --trace-file (open loop), or "
                "--max-concurrency (closed loop); both at once would hide the waiting"
            )
        if not re.match("https?://[^/]", self.base_url):
            raise ValueError(f"--base-url {self.base_url} is not like http://127.0.0.1:8000")
        for name in ("request_rate", "burstiness", "timeout_s"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be above 0")
        try:
            json.loads(self.extra_body).items()
        except (ValueError, AttributeError) as error:
            raise ValueError(f"--extra-body {self.extra_body} is not a JSON object") from error
        parse_limits(self.goodput or ())


def serve(load: Load) -> bool:
    """Measure; print the result block and the JSON document. False if no request succeeded.

    Raises ValueError if a file is not what it should be, or no warm-up request succeeds.
    """
    # Not imported above: it takes 80 ms, which no other command should pay.
    from ridgeline.bench.load.client import Target, drive

    load = replace(load, seed=secrets.randbits(32) if load.seed is None else load.seed)
    planned, is_chat = make_plan(load), load.endpoint == "chat"
    target = Target(
        url=load.base_url.rstrip("/").removesuffix("/v1")
        + ("/v1/chat/completions" if is_chat else "/v1/completions"),
        is_chat=is_chat,
        headers={"Content-Type": "application/json", "Accept-Encoding": "identity"}
        | ({"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}),
        fields={"model": load.model, "stream": True, "stream_options": {"include_usage": True}}
        | {name: getattr(load, name) for name in ("temperature", "top_k", "top_p", "min_p")}
        | {"ignore_eos": load.ignore_eos or None}
        | json.loads(load.extra_body),
        timeout_s=load.timeout_s,
    )
    warmups, measured = planned[: load.num_warmups], planned[load.num_warmups :]
    with count_bar("Asking", note="requests") as report:
        outcomes, client = asyncio.run(
            drive(target, warmups, measured, load.max_concurrency, report)
        )
    found = summarise(outcomes, parse_limits(load.goodput or ()))
    asked = {
        "num_warmups": load.num_warmups,
        "num_repeated_prompts": len(planned) - len({request.prompt for request in planned}),
        "prompt_length_unit": "lines of the file" if load.prompts else "words",
        "prefix_share": 0.0 if load.prompts else load.prefix_share,
        "total_max_tokens": sum(request.max_tokens for request in measured),
    }
    said = warnings(found, client, asked)
    _print(found, said)
    flags = {
        name: str(v) if isinstance(v, Path) or v == math.inf else v
        for name, v in asdict(load).items()
        if name != "api_key"
    }
    notes = {"client": client, "warnings": said, "definitions": DEFINITIONS}
    print(json.dumps({"flags": flags, "asked": asked} | found | notes, allow_nan=False))
    return bool(found["num_successful"])


def make_plan(load: Load) -> list[Planned]:
    """Return the warm-up requests, which have negative indices, and those to measure."""
    arrivals: Sequence[float | None] = [None] * load.num_prompts
    lengths = [(load.prompt_words or 128, load.max_tokens or 128)] * load.num_prompts
    if load.trace_file:
        trace = parse_trace(_read(load.trace_file), load.num_prompts, load.request_rate)
        arrivals = [row[0] for row in trace]
        most = (load.prompt_words or sys.maxsize, load.max_tokens or sys.maxsize)
        lengths = [(min(row[1], most[0]), min(row[2], most[1])) for row in trace]
    elif load.request_rate is not None:
        rng = Random(f"{load.seed} arrivals")
        arrivals = gamma_arrivals(load.num_prompts, load.request_rate, load.burstiness, rng)
    first = -load.num_warmups
    lengths = [lengths[i % len(arrivals)] for i in range(first, len(arrivals))]
    rng = Random(f"{load.seed} prompts")
    if load.prompts:
        prompts = draw_prompts(parse_prompts(_read(load.prompts)), len(lengths), rng)
    else:
        prompts = synthetic_prompts([words for words, _ in lengths], load.prefix_share, rng)
    return [
        Planned(i, prompt, max_tokens, arrivals[i] if i >= 0 else None)
        for i, (prompt, (_, max_tokens)) in enumerate(zip(prompts, lengths, strict=True), first)
    ]


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text") from error


def _print(found: Mapping[str, Any], said: Sequence[str]) -> None:
    out, err = (Console(stderr=b, highlight=False, soft_wrap=True) for b in (False, True))
    out.print(f"{' Serving Benchmark Result ':=^50}", style="bold")
    for label, key in _COUNTS.items():
        _print_row(out, label, found[key])
    if found["goodput"]:
        _print_row(out, "Request goodput (req/s)", found["goodput"]["requests_per_s"])
    for key, (title, short) in _SECTIONS.items():
        if found[key]:
            out.print(f"{title:-^50}", style="bold")
            for label, column in {"Mean": "mean", "Median": "p50", "P99": "p99"}.items():
                _print_row(out, f"{label} {short} (ms)", found[key][f"{column}_ms"])
    out.print("=" * 50, style="bold")
    for failure in found["failures"]:
        err.print(f"failed: {failure['num']} x {failure['error']}", style="red", markup=False)
    for line in said:
        err.print(f"warning: {line}", style="yellow", markup=False)


def _print_row(out: Console, label: str, value: float | None) -> None:
    text = "unknown" if value is None else f"{value:.2f}" if isinstance(value, float) else value
    out.print(f"{label + ':':<40} {text:<10}")
