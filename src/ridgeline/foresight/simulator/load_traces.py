"""Traces of requests: when each came, how long it was, what it shared with others.

Four formats are known, and told apart by their first line:

- Azure's LLM inference traces of 2023 and 2024: CSV, a date-time or seconds, and two lengths.
- BurstGPT (Wang et al., 2024): CSV; a row without answer tokens is a request that failed there.
- Mooncake (Qin et al., 2025): JSON lines; ``hash_ids`` name blocks of 512 prompt tokens.
- What ``ridgeline serve --trace`` writes: JSON lines, with the prompts' token ids.

It opens no file. Its caller gives a file's name, for errors: they name file, line and field.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

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
    known = [names for names in (_AZURE, _BURST) if columns.issuperset(names)]
    if not known:
        raise ValueError(
            f"{name}, line 1: not a known trace. Its first line should name the columns "
            f"{','.join(_AZURE)} (Azure) or {','.join(_BURST)} (BurstGPT), or be a JSON "
            f"object: with {', '.join(_MOONCAKE)} (Mooncake), or as ridgeline serve --trace "
            "writes it"
        )
    (when, prompt, answer), may_fail = known[0], known[0] is _BURST
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
