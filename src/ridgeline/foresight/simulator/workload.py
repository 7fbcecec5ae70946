"""Which requests come, and when: for the load generator and for simulations. A seed repeats all.

It opens no file, and knows nothing of networks and tokenizers: a synthetic prompt is counted in
words that are one token each in most vocabularies. Arrivals are not rescaled to end at a round
time, which would take away the variance of a random process, and with it the queues.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from itertools import accumulate
from random import Random
from typing import Any, TypeVar

_Item = TypeVar("_Item")

# Short and common, so one token each, with the space before, in most vocabularies.
_WORDS = re.findall(
    r"\w+",
    "able above again air all also animal answer area ask back ball bank base best big bird black "
    "blue boat body book box boy bread build call car card care city class clear cold color corner "
    "cut dark day deep door down draw dry early earth east end eye face fact fall far farm father",
)


def _flag(default: Any, help: str, typed: str | None = None) -> Any:
    return field(default=default, metadata={"help": help, "typed": typed})


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Which requests come, and when; each field is a flag of the command line.

    Files are named here, and read by the caller of ``make_plan``.
    """

    request_rate: float | None = _flag(None, "Open loop: requests per second, or inf.")
    burstiness: float = _flag(
        1.0, "Burstiness of arrivals (gamma shape): 1 is a Poisson process, inf is even."
    )
    max_concurrency: int | None = _flag(None, "Closed loop: number of clients.")
    trace_file: str | None = _flag(
        None,
        "Open loop: times, lengths and shared prefixes of a trace (Azure, BurstGPT, Mooncake, or "
        "of serve --trace). --request-rate stretches its times; --prompt-words and --max-tokens "
        "bound its lengths.",
        typed="path",
    )
    lengths_from: str | None = _flag(
        None,
        "Trace to take only lengths (and Mooncake's shared prefixes) from, in random order.",
        typed="path",
    )
    num_prompts: int = _flag(100, "Number of requests to measure.")
    prompts: str | None = _flag(
        None,
        'Lines of text, or of JSON with "prompt" or "turns". Default: random words.',
        typed="path",
    )
    prompt_words: str | None = _flag(
        None,
        "Random words in a prompt: 128, or 128:0.5 for a lognormal with that coefficient of "
        "variation. Default: 128.",
    )
    prefix_share: float = _flag(0.0, "Part of each prompt that all share, from 0 to 1.")
    turns: int = _flag(1, "Turns of a session; each continues the conversation.")
    think_s: float = _flag(0.0, "Seconds between an answer and the session's next turn.")
    max_tokens: str | None = _flag(
        None,
        "Maximum tokens of an answer: 128, or 128:0.5 as above; exact with --ignore-eos. "
        "Default: 128.",
    )
    num_warmups: int = _flag(4, "Requests sent first, all at once.")
    seed: int | None = _flag(
        None, "Seed of arrivals and prompts. Default: new ones, which no cache has seen."
    )

    def __post_init__(self) -> None:
        """Raise ValueError for flags that contradict each other or make no sense."""
        is_open = self.request_rate is not None or self.trace_file is not None
        if is_open == (self.max_concurrency is not None):
            raise ValueError(
                "say how requests arrive: --request-rate or --trace-file (open loop), or "
                "--max-concurrency (closed loop); both at once would hide the waiting"
            )
        if self.burstiness != 1 and (self.request_rate is None or self.trace_file is not None):
            raise ValueError(
                "--burstiness is about requests at a rate: give --request-rate, and no trace"
            )
        for name in ("request_rate", "burstiness"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise ValueError(f"--{name.replace('_', '-')} is {value}; it must be above 0")
        least = {"max_concurrency": 1, "num_prompts": 1, "turns": 1, "num_warmups": 0}
        for name, low in (least | {"think_s": 0}).items():
            if (value := getattr(self, name)) is not None and not value >= low:
                raise ValueError(
                    f"--{name.replace('_', '-')} is {value}; it must be at least {low}"
                )
        if not 0 <= self.prefix_share <= 1:
            raise ValueError(f"--prefix-share is {self.prefix_share}; it must be from 0 to 1")
        self._check_lengths()

    def _check_lengths(self) -> None:
        """Raise ValueError if lengths come from two places, or are none."""
        if self.trace_file is not None and (self.lengths_from is not None or self.turns > 1):
            flag = "--turns" if self.turns > 1 else "--lengths-from"
            raise ValueError(
                f"--trace-file already has its sessions, so it cannot be used with {flag}"
            )
        if self.prompts is not None and (self.prompt_words is not None or self.prefix_share):
            flag = "--prompt-words" if self.prompt_words is not None else "--prefix-share"
            raise ValueError(f"--prompts says what is asked: {flag} is about random words")
        is_bound = self.trace_file is not None or self.lengths_from is not None
        for name in ("prompt_words", "max_tokens"):
            if parse_length(getattr(self, name) or "1", name)[1] and is_bound:
                raise ValueError(
                    f"--{name.replace('_', '-')} {getattr(self, name)} has a variation, but the "
                    "lengths come from a trace: give a bound, a plain number"
                )


def parse_length(text: str, name: str) -> tuple[int, float]:
    """Read ``128``, or ``128:0.5``: a mean, and its coefficient of variation.

    Raises ValueError, which names the flag, if the mean is below 1 or the variation below 0.
    """
    mean, _, variation = str(text).partition(":")
    try:
        length = int(mean), float(variation or 0)
        if length[0] < 1 or not 0 <= length[1] < math.inf:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--{name.replace('_', '-')} is {text}: write a whole number of at least 1, or "
            "MEAN:CV such as 128:0.5"
        ) from None
    return length


@dataclass(frozen=True, slots=True)
class Planned:
    """A request.

    Attributes:
        index: counts from 0; negative for a warm-up.
        prompt: text, or token ids where a trace has them; of a later turn, what is new in it.
        max_tokens: the answer's length, at most.
        arrival_s: counts from the start; None in a closed loop, and for later turns.
        turn: 0, or how many turns of the session came before: those of the indices just below.
        think_s: of a later turn: the seconds after the answer before it.
    """

    index: int
    prompt: str | tuple[int, ...]
    max_tokens: int
    arrival_s: float | None
    turn: int = 0
    think_s: float = 0.0


def gamma_arrivals(num: int, rate_per_s: float, burstiness: float, rng: Random) -> list[float]:
    """Return times whose gaps are gamma distributed with mean ``1 / rate_per_s``.

    ``burstiness`` is the shape: 1 is a Poisson process, less comes in bursts, ``inf`` is even. An
    infinite rate is everything at once.
    """
    if math.isinf(rate_per_s) or math.isinf(burstiness):
        return [i / rate_per_s for i in range(num)]
    scale_s = 1 / (rate_per_s * burstiness)
    return list(accumulate(rng.gammavariate(burstiness, scale_s) for _ in range(num)))


def lognormal_lengths(text: str, name: str, num: int, rng: Random) -> list[int]:
    """Return ``num`` lengths with the mean and variation of ``text``; see ``parse_length``."""
    mean, variation = parse_length(text, name)
    if not variation:
        return [mean] * num
    sigma = math.sqrt(math.log1p(variation**2))
    mu = math.log(mean) - sigma**2 / 2
    return [max(1, round(rng.lognormvariate(mu, sigma))) for _ in range(num)]


def parse_prompts(text: str, name: str) -> list[str]:
    """Return a prompt per line: plain, or of a JSON object ``prompt`` or the first of ``turns``.

    Raises ValueError if there is none, and names file and line where an object has neither.
    """
    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            row = json.loads(line) if line.startswith("{") else {"prompt": line.strip()}
            prompts.append(row["prompt"] if "prompt" in row else row["turns"][0])
            if not isinstance(prompts[-1], str):
                raise TypeError
        except (ValueError, LookupError, TypeError) as error:
            raise ValueError(f'{name}, line {number}: there is no "prompt" or "turns"') from error
    if not any(prompts):
        raise ValueError(f"{name}: the file of prompts is empty")
    return list(filter(None, prompts))


def draw(items: Sequence[_Item], num: int, rng: Random) -> list[_Item]:
    """Return ``num`` items in random order; none comes again before all have come."""
    order = rng.sample(items, len(items))
    return [order[i % len(order)] for i in range(num)]


def synthetic_prompts(
    num_words: Sequence[int], prefix_shares: Sequence[float], rng: Random
) -> list[str]:
    """Return prompts of random words; such a share of each, at its start, is that of the others."""
    prefix = rng.choices(_WORDS, k=max(num_words))
    shared = [round(share * num) for share, num in zip(prefix_shares, num_words, strict=True)]
    return [
        " ".join(prefix[:first] + rng.choices(_WORDS, k=num - first))
        for num, first in zip(num_words, shared, strict=True)
    ]


def hashed_prompts(requests: Sequence[Traced], num_words: Sequence[int], seed: object) -> list[str]:
    """Return prompts of random words, whose blocks are equal where their ids in the trace are."""

    @cache
    def block(hash_id: int) -> list[str]:
        return Random(f"{seed} block {hash_id}").choices(_WORDS, k=HASH_BLOCK_TOKENS)

    return [
        " ".join([word for hash_id in request.hash_ids for word in block(hash_id)][:num])
        for request, num in zip(requests, num_words, strict=True)
    ]


def make_plan(
    load: Workload, trace: LoadTrace | None = None, prompts: Sequence[str] | None = None
) -> list[Planned]:
    """Return the warm-up requests, which have negative indices, and those to measure.

    Args:
        load: what was asked for; its seed decides every draw.
        trace: what ``load.trace_file`` or ``load.lengths_from`` holds, where one is given.
        prompts: what ``load.prompts`` holds, where that is given.
    """
    traced = _traced(load, trace)
    num = len(traced) if traced and load.trace_file is not None else load.num_prompts
    arrivals = _arrivals(load, traced, num)
    # Warm-up requests are like the last ones that are measured.
    order = [i % num for i in range(-load.num_warmups, num)]
    if traced:
        bounds = [int(bound or sys.maxsize) for bound in (load.prompt_words, load.max_tokens)]
        traced = [traced[i] for i in order]
        num_words = [min(one.num_prompt_tokens, bounds[0]) for one in traced]
        max_tokens = [min(one.num_answer_tokens, bounds[1]) for one in traced]
    else:
        rng = Random(f"{load.seed} lengths")
        num_words, max_tokens = (
            lognormal_lengths(getattr(load, name) or "128", name, len(order), rng)
            for name in ("prompt_words", "max_tokens")
        )
    first = -load.num_warmups
    turns = [max(i, 0) % load.turns for i in range(first, num)]
    texts = _prompts(load, traced, prompts, num_words, turns)
    return [
        Planned(
            index=i,
            prompt=text,
            max_tokens=longest,
            arrival_s=arrivals[i] if i >= 0 and not turn else None,
            turn=turn,
            think_s=load.think_s if turn else 0.0,
        )
        for i, text, longest, turn in zip(range(first, num), texts, max_tokens, turns, strict=True)
    ]


def _traced(load: Workload, trace: LoadTrace | None) -> list[Traced] | None:
    """Return the trace's requests in the order in which they are planned."""
    if trace is None:
        return None
    if load.trace_file is not None:
        return list(trace.requests[: load.num_prompts])
    return draw(trace.requests, load.num_prompts, Random(f"{load.seed} lengths"))


def _arrivals(load: Workload, traced: list[Traced] | None, num: int) -> Sequence[float | None]:
    """Return when each request arrives; of a session, the first turn's time counts."""
    if traced and load.trace_file is not None:
        start_s, span_s = traced[0].arrival_s, traced[-1].arrival_s - traced[0].arrival_s
        stretch = (num - 1) / (span_s * load.request_rate) if span_s and load.request_rate else 1.0
        return [stretch * (one.arrival_s - start_s) for one in traced]
    if load.request_rate is None:
        return [None] * num
    num_sessions = -(-num // load.turns)
    rng = Random(f"{load.seed} arrivals")
    rate_per_s = load.request_rate / load.turns
    sessions_s = gamma_arrivals(num_sessions, rate_per_s, load.burstiness, rng)
    return [sessions_s[i // load.turns] for i in range(num)]


def _prompts(
    load: Workload,
    traced: list[Traced] | None,
    prompts: Sequence[str] | None,
    num_words: Sequence[int],
    turns: Sequence[int],
) -> Sequence[str | tuple[int, ...]]:
    """Return what is asked: what a file says, what the trace says, or random words."""
    rng = Random(f"{load.seed} prompts")
    if prompts is not None:
        return draw(prompts, len(num_words), rng)
    if traced and traced[0].token_ids and load.trace_file is not None:
        return [one.token_ids[:num] for one, num in zip(traced, num_words, strict=True)]
    if traced and traced[0].hash_ids:
        return hashed_prompts(traced, num_words, load.seed)
    shares = [0.0 if turn else load.prefix_share for turn in turns]
    return synthetic_prompts(num_words, shares, rng)


HASH_BLOCK_TOKENS = 512  # of Mooncake's traces
_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_BURST = ("Timestamp", "Request tokens", "Response tokens")
_MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(frozen=True, slots=True)
class Traced:
    """One request of a trace.

    Attributes:
        arrival_s: on the trace's own clock.
        num_prompt_tokens: at least 1.
        num_answer_tokens: at least 1.
        hash_ids: one for each block of 512 prompt tokens, where the trace has them; blocks with
            equal ids hold equal tokens.
        token_ids: the prompt itself, where the trace has it.
    """

    arrival_s: float
    num_prompt_tokens: int
    num_answer_tokens: int
    hash_ids: tuple[int, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadTrace:
    """The requests of a trace, in order of arrival, and how many had no answer and are not here."""

    requests: tuple[Traced, ...]
    num_left_out: int = 0


def parse_trace(text: str, name: str) -> LoadTrace:
    """Return the requests of a trace in any of the known formats.

    Args:
        text: the file's content.
        name: the file's name, for errors.

    Raises:
        ValueError: if the format is not known, a line has a hole or a wrong value, or there is no
            request; it names file, line and field, and what is expected.
    """
    lines = text.split("\n")
    rows = _json_rows if lines[0].lstrip().startswith("{") else _csv_rows
    requests, num_left_out = [], 0
    for row in rows(lines, name):
        if isinstance(row, Traced):
            requests.append(row)
        else:
            num_left_out += row
    if not requests:
        raise ValueError(f"{name}: the trace has no requests that were answered")
    requests.sort(key=lambda request: request.arrival_s)
    return LoadTrace(tuple(requests), num_left_out)


class _TraceLine:
    """A line's fields, each checked as it is taken."""

    def __init__(self, name: str, line: int, fields: Mapping[Any, Any]) -> None:
        self._where, self._fields = f"{name}, line {line}", fields

    def value(self, field: str, expected: str) -> Any:
        """Return a field; ValueError if it is not there."""
        value = self._fields.get(field)
        if value is None or value == "":
            raise ValueError(f"{self._where}: {field} is missing; expected {expected}")
        return value

    def wrong(self, field: str, expected: str) -> ValueError:
        """Return the error that a field has another value than expected."""
        shown = repr(self._fields.get(field))
        return ValueError(f"{self._where}: {field} is {shown[:60]}; expected {expected}")

    def count(self, field: str, least: int = 1) -> int:
        """Return a number of tokens."""
        expected = f"a whole number of at least {least}"
        value = self.value(field, expected)
        try:
            number = float(value)
        except (TypeError, ValueError):
            raise self.wrong(field, expected) from None
        if isinstance(value, bool) or not number.is_integer() or number < least:
            raise self.wrong(field, expected)
        return int(number)

    def seconds(self, field: str, scale: float = 1.0) -> float:
        """Return a time: a number times ``scale``, or a date-time in any zone."""
        expected = "seconds or a date-time" if scale == 1 else "milliseconds"
        value = self.value(field, expected)
        try:
            time_s = _time_s(value) if scale == 1 else float(value) * scale
        except (TypeError, ValueError):
            raise self.wrong(field, expected) from None
        if isinstance(value, bool) or not math.isfinite(time_s):
            raise self.wrong(field, expected)
        return time_s

    def ids(self, field: str, expected: str) -> tuple[int, ...]:
        """Return a list of whole numbers."""
        value = self.value(field, expected)
        if not isinstance(value, list) or any(type(one) is not int for one in value):
            raise self.wrong(field, expected)
        return tuple(value)


def _time_s(value: Any) -> float:
    try:
        return float(value)
    except ValueError:  # only differences count, so any zone will do
        return datetime.fromisoformat(value).replace(tzinfo=UTC).timestamp()


def _csv_rows(lines: list[str], name: str) -> Iterator[Traced | int]:
    """Yield the requests of a CSV, and 1 for each that was not answered."""
    reader = csv.DictReader(lines)
    columns = {column.strip() for column in reader.fieldnames or ()}
    formats = [names for names in (_AZURE, _BURST) if columns.issuperset(names)]
    if not formats:
        raise ValueError(
            f"{name}, line 1: not a known trace. Its first line should name the columns "
            f"{','.join(_AZURE)} (Azure) or {','.join(_BURST)} (BurstGPT), or be a JSON "
            f"object: with {', '.join(_MOONCAKE)} (Mooncake), or as ridgeline serve --trace "
            "writes it"
        )
    (when, prompt, answer), may_fail = formats[0], formats[0] is _BURST
    for fields in reader:
        row = _TraceLine(name, reader.line_num, {str(key).strip(): v for key, v in fields.items()})
        arrival_s, num_answer = row.seconds(when), row.count(answer, least=0 if may_fail else 1)
        if num_answer:
            yield Traced(arrival_s, row.count(prompt), num_answer)
        else:
            yield 1


def _json_rows(lines: list[str], name: str) -> Iterator[Traced | int]:
    """Yield the requests of JSON lines, and numbers of those that were not answered."""
    is_own, unfinished = False, dict[int, None]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            if not isinstance(fields, dict):
                raise ValueError("not an object")
        except ValueError as error:
            if is_own and number == len(lines):
                break  # the server was ended amid its last line
            raise ValueError(f"{name}, line {number}: not a JSON object: {error}") from None
        is_own |= number == 1 and "type" in fields
        row = _TraceLine(name, number, fields)
        if not is_own:
            yield _mooncake(row)
        elif fields.get("type") == "step":
            unfinished |= dict.fromkeys(row.ids("arrived", "the requests that came"))
        elif fields.get("type") == "request":
            unfinished.pop(row.count("request_id", least=0), None)
            yield from _own(row, failed=fields.get("error") is not None)
    if unfinished:
        yield len(unfinished)


def _mooncake(row: _TraceLine) -> Traced:
    arrival_s = row.seconds("timestamp", 1e-3)
    num_prompt, num_answer = row.count("input_length"), row.count("output_length")
    num_blocks = math.ceil(num_prompt / HASH_BLOCK_TOKENS)
    expected = (
        f"{num_blocks} whole numbers, one for each {HASH_BLOCK_TOKENS} of {num_prompt} tokens"
    )
    hash_ids = row.ids("hash_ids", expected)
    if len(hash_ids) != num_blocks:
        raise row.wrong("hash_ids", expected)
    return Traced(arrival_s, num_prompt, num_answer, hash_ids=hash_ids)


def _own(row: _TraceLine, *, failed: bool) -> Iterator[Traced | int]:
    """Yield a request for each answer of a recorded one: they shared its prompt."""
    tokens = row.ids("prompt_token_ids", "the token ids of the prompt")
    if not tokens:
        raise row.wrong("prompt_token_ids", "at least one token id")
    arrival_s = row.seconds("arrival_s")
    for num_answer in row.ids("num_generated", "the tokens of each answer"):
        if failed or num_answer < 1:
            yield 1
        else:
            yield Traced(arrival_s, len(tokens), num_answer, token_ids=tokens)
