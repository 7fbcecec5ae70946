"""Which requests come, and when: for the load generator and for simulations. A seed repeats all.

It opens no file, and knows no network and no tokenizer: a synthetic prompt is counted in words that
are one token each in most vocabularies. Arrivals are not rescaled to end at a round time, which
would take away the variance of a random process, and with it the queues.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate
from random import Random
from typing import Any

# Short and common, so one token each, with the space before, in most vocabularies.
_WORDS = re.findall(
    r"\w+",
    "able above again air all also animal answer area ask back ball bank base best big bird black "
    "blue boat body book box boy bread build call car card care city class clear cold color corner "
    "cut dark day deep door down draw dry early earth east end eye face fact fall far farm father",
)
_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def _flag(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Which requests come, and when; each field is a flag of the command line.

    Files are named here, and read by whoever calls ``make_plan``.
    """

    request_rate: float | None = _flag(None, "Open loop: requests/s, inf.")
    burstiness: float = _flag(1.0, "Gamma shape: 1 Poisson, inf even.")
    trace_file: str | None = _flag(
        None,
        "Open loop: times and lengths of a CSV with TIMESTAMP,ContextTokens,GeneratedTokens. "
        "--request-rate stretches its times; --prompt-words and --max-tokens bound its lengths.",
    )
    max_concurrency: int | None = _flag(None, "Closed loop: clients.")
    num_prompts: int = _flag(100, "Requests to measure.")
    prompts: str | None = _flag(
        None, 'Lines of text, or of JSON with "prompt" or "turns". Default: random words.'
    )
    prompt_words: int | None = _flag(None, "Random words. Default: 128.")
    prefix_share: float = _flag(0.0, "Shared part of prompts.")
    max_tokens: int | None = _flag(None, "Longest answer. Default: 128.")
    num_warmups: int = _flag(4, "Requests sent first, all at once.")
    seed: int | None = _flag(
        None, "Repeats arrivals and prompts. Default: new ones, which no cache has seen."
    )

    def __post_init__(self) -> None:
        """Raise ValueError for flags that contradict each other or make no sense."""
        is_open = self.request_rate is not None or self.trace_file is not None
        if is_open == (self.max_concurrency is not None):
            raise ValueError(
                "say how requests arrive: --request-rate or --trace-file (open loop), or "
                "--max-concurrency (closed loop); both at once would hide the waiting"
            )
        for name in ("request_rate", "burstiness"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be above 0")
        least = {"max_concurrency": 1, "num_prompts": 1, "prompt_words": 1, "max_tokens": 1}
        for name, low in (least | {"num_warmups": 0}).items():
            if (value := getattr(self, name)) is not None and value < low:
                raise ValueError(f"--{name.replace('_', '-')} is {value}; at least {low}, please")
        if not 0 <= self.prefix_share <= 1:
            raise ValueError(f"--prefix-share is {self.prefix_share}; it is a part, from 0 to 1")


@dataclass(frozen=True, slots=True)
class Planned:
    """A request; ``arrival_s`` counts from the start, and is None in a closed loop."""

    index: int
    prompt: str
    max_tokens: int
    arrival_s: float | None


def gamma_arrivals(num: int, rate_per_s: float, burstiness: float, rng: Random) -> list[float]:
    """Return times whose gaps are gamma distributed with mean ``1 / rate_per_s``.

    ``burstiness`` is the shape: 1 is a Poisson process, less comes in bursts, ``inf`` is even. An
    infinite rate is everything at once.
    """
    if math.isinf(rate_per_s) or math.isinf(burstiness):
        return [i / rate_per_s for i in range(num)]
    scale_s = 1 / (rate_per_s * burstiness)
    return list(accumulate(rng.gammavariate(burstiness, scale_s) for _ in range(num)))


def parse_trace(
    text: str, num: int, rate_per_s: float | None = None
) -> list[tuple[float, int, int]]:
    """Return arrival, prompt tokens and output tokens of the first ``num`` requests of a trace.

    It is a CSV in the columns of Azure's LLM traces; a TIMESTAMP is a date-time or seconds.
    Arrivals count from the first, stretched to a mean rate if one is given. ValueError names a bad
    line.
    """
    reader, rows = csv.DictReader(text.splitlines()), []
    for line in reader:
        try:
            when, prompt, output = (line[name] for name in _COLUMNS)
            rows.append((_seconds(when), int(prompt), int(output)))
            if not math.isfinite(rows[-1][0]) or min(rows[-1][1:]) < 1:
                raise ValueError
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f"line {reader.line_num} of the trace does not fill {','.join(_COLUMNS)}"
            ) from error
    if not rows:
        raise ValueError("the trace has no requests")
    rows = sorted(rows)[:num]
    start_s, span_s = rows[0][0], rows[-1][0] - rows[0][0]
    stretch = (len(rows) - 1) / (span_s * rate_per_s) if span_s and rate_per_s else 1.0
    return [(stretch * (row[0] - start_s), *row[1:]) for row in rows]


def _seconds(when: str) -> float:
    try:
        return float(when)
    except ValueError:  # only differences count, so any zone will do
        return datetime.fromisoformat(when).replace(tzinfo=UTC).timestamp()


def parse_prompts(text: str) -> list[str]:
    """Return a prompt per line: plain, or of a JSON object ``prompt`` or the first of ``turns``.

    Raises ValueError if there is none, and names the line where an object has neither.
    """
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            row = json.loads(line) if line.startswith("{") else {"prompt": line.strip()}
            prompts.append(row["prompt"] if "prompt" in row else row["turns"][0])
            if not isinstance(prompts[-1], str):
                raise TypeError
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f'line {number} of the prompts has no "prompt" or "turns"') from error
    if not any(prompts):
        raise ValueError("the file of prompts is empty")
    return list(filter(None, prompts))


def draw_prompts(prompts: Sequence[str], num: int, rng: Random) -> list[str]:
    """Return ``num`` prompts in random order; none comes again before all have come."""
    order = rng.sample(prompts, len(prompts))
    return [order[i % len(order)] for i in range(num)]


def synthetic_prompts(num_words: Sequence[int], prefix_share: float, rng: Random) -> list[str]:
    """Return prompts of random words; this share of each, at its start, is the same in all."""
    prefix = rng.choices(_WORDS, k=max(num_words))
    shared = [round(prefix_share * num) for num in num_words]
    return [
        " ".join(prefix[:first] + rng.choices(_WORDS, k=num - first))
        for num, first in zip(num_words, shared, strict=True)
    ]


def make_plan(
    load: Workload, trace: str | None = None, prompts: str | None = None
) -> list[Planned]:
    """Return the warm-up requests, which have negative indices, and those to measure.

    Args:
        load: what was asked for; its seed decides every draw.
        trace: the content of ``load.trace_file``, where that is given.
        prompts: the content of ``load.prompts``, where that is given.

    Raises:
        ValueError: if a file is not what it should be; it names the line.
    """
    arrivals: Sequence[float | None] = [None] * load.num_prompts
    lengths = [(load.prompt_words or 128, load.max_tokens or 128)] * load.num_prompts
    if trace is not None:
        rows = parse_trace(trace, load.num_prompts, load.request_rate)
        arrivals = [row[0] for row in rows]
        most = (load.prompt_words or sys.maxsize, load.max_tokens or sys.maxsize)
        lengths = [(min(row[1], most[0]), min(row[2], most[1])) for row in rows]
    elif load.request_rate is not None:
        rng = Random(f"{load.seed} arrivals")
        arrivals = gamma_arrivals(load.num_prompts, load.request_rate, load.burstiness, rng)
    first = -load.num_warmups
    lengths = [lengths[i % len(arrivals)] for i in range(first, len(arrivals))]
    rng = Random(f"{load.seed} prompts")
    if prompts is not None:
        texts = draw_prompts(parse_prompts(prompts), len(lengths), rng)
    else:
        texts = synthetic_prompts([words for words, _ in lengths], load.prefix_share, rng)
    return [
        Planned(i, text, max_tokens, arrivals[i] if i >= 0 else None)
        for i, (text, (_, max_tokens)) in enumerate(zip(texts, lengths, strict=True), first)
    ]
