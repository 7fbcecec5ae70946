"""What the load generator sends and when. Pure; a seed repeats all of it.

It knows no network and no tokenizer: a synthetic prompt is counted in words that are one token each
in most vocabularies. Arrivals are not rescaled to end at a round time, which would take away the
variance of a random process, and with it the queues.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import accumulate
from random import Random

# Short and common, so one token each, with the space before, in most vocabularies.
_WORDS = re.findall(
    r"\w+",
    "able above again air all also animal answer area ask back ball bank base best big bird black "
    "blue boat body book box boy bread build call car card care city class clear cold color corner "
    "cut dark day deep door down draw dry early earth east end eye face fact fall far farm father",
)
_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


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
