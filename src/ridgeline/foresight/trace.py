"""A trace: the file behind ``--trace`` is written as JSON lines, and read again.

Lines to read come from such a file or from what a server remembers. They are found by request and
by time, and parsed only where needed. Of prompts it keeps how long they are.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import re
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from itertools import accumulate, takewhile
from math import inf
from pathlib import Path
from typing import Any, TextIO

from ridgeline.core.records import EngineRecord, Record, RequestRecord, StepRecord
from ridgeline.core.scheduling.policies import POLICIES
from ridgeline.core.step import Wait
from ridgeline.foresight.simulator.replay import params_of
from ridgeline.foresight.structure import parse, to_json, typed

Json = dict[str, Any]

_STEP = re.compile(rb'\{"type":"step","number":\d+,"start_s":([-+.\deE]+),')
_PROMPT = re.compile(rb'"prompt_token_ids":\s*\[([\d,\s]*)\]')
_KINDS = {"engine": EngineRecord, "request": RequestRecord, "step": StepRecord}
_TEXT: Json = {"prompt_token_ids": (), "params": {}}  # not needed to tell where time went
# What an engine may be set up with; much more than any has, and little enough to do again.
_MOST = {
    "block_size": 1 << 20,
    "num_blocks": 1 << 24,
    "max_num_batched_tokens": 1 << 24,
    "max_num_seqs": 1 << 20,
    "max_model_len": 1 << 31,
    "least_prompt_tokens": 1 << 24,
}
_REASONS = frozenset(Wait)
# What says how prompts waited before the engine; without it they enter as they did.
_NEW = frozenset(
    ("is_background", "pushed", "num_pushed", "num_permitted", "gives_way", "num_since")
)
_LEAST_STEPS = 200  # some of which say how long a step takes
_LEAST_TOKENS = 16  # as which a request counts, a text to embed too: it costs a simulation as much
_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")  # before a request's name in an answer's id
_MODE = 0o600  # of a new file: it has the token ids of prompts


class Recorded:
    """The records of one run of an engine.

    Attributes:
        engine: the first record.
        requests: those that have ended, in order of their end, with ``num_prompt_tokens``; of lines
            that ``glance`` knows, what it saw of them.
    """

    def __init__(
        self,
        source: str,
        lines: Iterable[tuple[int, bytes]],
        fetch: Callable[[int], bytes],
        *,
        glance: Callable[[bytes], Json | None] | None = None,
    ) -> None:
        """Read ``lines``, each with the place where ``fetch`` finds it again.

        With ``glance`` they were written by this very process, and are not checked: it takes eight
        times as long as to parse them. It returns what finds a request (number, name, arrival, end,
        tokens) from its line, and None for any other line. Raises ValueError, with ``source`` and
        the line, if they are not a trace.
        """
        self._source, self._fetch, self._glance = source, fetch, glance
        self.engine: Json = {}
        self.requests: list[Json] = []
        self._starts_s = array("d")  # of steps, and their lines
        self._numbers, self._places = array("q"), array("q")
        self._of_requests: list[int] = []  # their places
        for number, (place, line) in enumerate(lines, start=1):
            start_s = _start_s(line)
            if start_s is not None:
                self._note_step(number, place, start_s)
            elif glance and (request := glance(line)):
                self._note_request(place, request)
            else:
                self._note(number, place, line)
        if not self.engine:
            raise ValueError(f"{source} is not a trace: it is empty")

    def _note(self, number: int, place: int, line: bytes) -> None:
        if b'"request"' in line[:30]:
            line = _PROMPT.sub(_count, line, count=1)
        record = self._parsed(number, line)
        if record is None:
            return
        kind = record.get("type")
        if kind == "simulated" and number == 1:  # what a simulation says of itself
            return
        if not self.engine:
            if kind != "engine":
                raise ValueError(
                    f"{self._source} is not a trace: its first line does not describe an engine"
                )
            self.engine = record
        elif kind == "request":
            ids = record.pop("prompt_token_ids", ())  # still there if its type stands elsewhere
            record.setdefault("num_prompt_tokens", len(ids))
            self._note_request(place, record)
        elif kind == "step":
            self._note_step(number, place, record["start_s"])

    def _parsed(self, number: int, line: bytes) -> Json | None:
        """Return a line's record, as ``_parse``."""
        return parse(line.decode()) if self._glance else _parse(self._source, number, line)

    def _note_request(self, place: int, request: Json) -> None:
        self.requests.append(request)
        self._of_requests.append(place)

    def _note_step(self, number: int, place: int, start_s: float) -> None:
        if not self.engine:
            raise ValueError(
                f"{self._source} is not a trace: its first line does not describe an engine"
            )
        if self._starts_s and start_s < self._starts_s[-1]:
            raise ValueError(
                f"{self._source}, line {number}: this step begins before the one before it"
            )
        self._starts_s.append(start_s)
        self._numbers.append(number)
        self._places.append(place)

    # --- finding -------------------------------------------------------------------------------

    @property
    def start_s(self) -> float | None:
        """When the first step began; None without a step."""
        return self._starts_s[0] if self._starts_s else None

    def during(self, start_s: float, end_s: float) -> list[Json]:
        """Return the steps that overlap a time, with one before and one behind them."""
        first = max(bisect_left(self._starts_s, start_s) - 1, 0)
        last = bisect_right(self._starts_s, end_s) + 1
        return [*self._steps(first, last)]

    def of(self, request: Json) -> list[Json]:
        """Return the steps of a request's life, with one before and one behind them."""
        return self.during(request["arrival_s"], request["finish_s"])

    def around(self, request: Json, most_tokens: int) -> list[Json]:
        """Return a trace, prompts included, of a request and of those that it shared time with.

        These came while it was there, or before, since nothing was left to do: what came earlier
        could not matter. Those before have at most that many tokens of answers together, and so
        have those behind; each counts as at least ``_LEAST_TOKENS``. Steps reach back further if
        too few would say how long a step takes.
        """
        number = request["request_id"]
        pairs = zip(self.requests, self._of_requests, strict=True)
        order = sorted(pairs, key=lambda p: (p[0]["arrival_s"], p[0]["request_id"] != number))
        here = next(i for i, (one, _) in enumerate(order) if one["request_id"] == number)
        nearest = here - _fitting(reversed(order[:here]), most_tokens)
        before = order[max(nearest, _last_idle(order[: here + 1])) : here]
        behind = [pair for pair in order[here + 1 :] if pair[0]["arrival_s"] <= request["finish_s"]]
        chosen = [*before, order[here], *behind[: _fitting(behind, most_tokens)]]
        records = [self._parsed(0, self._fetch(place)) for _, place in chosen]
        first = bisect_left(self._starts_s, chosen[0][0]["arrival_s"]) - 1
        last = bisect_right(self._starts_s, request["finish_s"]) + 1
        steps = self._steps(max(0, min(first, last - _LEAST_STEPS)), last)
        return [self.engine, *steps, *(one for one in records if one)]

    def some(self, most: int) -> list[Json]:
        """Return at most ``most`` steps, spread over the run."""
        stride = -(-len(self._starts_s) // most) or 1
        places = range(0, len(self._starts_s), stride)
        return [step for i in places for step in self._steps(i, i + 1)]

    def _steps(self, first: int, last: int) -> Iterator[Json]:
        pairs = zip(self._numbers[first:last], self._places[first:last], strict=True)
        for number, place in pairs:
            if record := self._parsed(number, self._fetch(place)):
                yield record

    def find(self, wanted: str, is_allowed: Callable[[Json], bool] = lambda _: True) -> Json | None:
        """Return a request by its number, its name or the id of its answer, None if unknown.

        Of several with one name (prompts of one HTTP request) it is the last to end.
        """
        bare = next((wanted.removeprefix(p) for p in _PREFIXES if wanted.startswith(p)), wanted)
        allowed = [request for request in reversed(self.requests) if is_allowed(request)]
        for name in (wanted, bare):
            if match := next((one for one in allowed if one["name"] == name != ""), None):
                return self._whole(match)
        match = next((one for one in allowed if str(one["request_id"]) == wanted), None)
        return match and self._whole(match)

    def _whole(self, request: Json) -> Json:
        """Return the record of a request of which perhaps only a glance was taken."""
        if not self._glance:
            return request
        pairs = zip(self.requests, self._of_requests, strict=True)
        place = next(place for one, place in pairs if one is request)
        return self._parsed(0, self._fetch(place)) or request

    def get(self, wanted: str) -> Json:
        """Return a request as ``find`` does. Raises ValueError if it is unknown."""
        if request := self.find(wanted):
            return request
        ids = [one["request_id"] for one in self.requests]
        if not ids:
            raise ValueError(f"{self._source} has no finished request")
        names = difflib.get_close_matches(wanted, [one["name"] for one in self.requests], n=1)
        hint = f"did you mean {names[0]}?" if names else f"they are {min(ids)} to {max(ids)}"
        raise ValueError(
            f"{self._source} has no request {wanted!r} among the {len(ids)} that ended: {hint}"
        )


def step_of(record: Mapping[str, Any]) -> StepRecord:
    """Return the record of a step from its JSON value."""
    step: StepRecord = typed(record, StepRecord)
    return step


def request_of(record: Mapping[str, Any]) -> RequestRecord:
    """Return the record of a request, prompt included, from its JSON value."""
    request: RequestRecord = typed(record, RequestRecord)
    return request


def _start_s(line: bytes) -> float | None:
    """Return when a step began, from its line, which is not parsed; None of any other line."""
    match = _STEP.match(line)
    try:
        return float(match[1]) if match else None
    except ValueError:
        return None


def _parse(source: str, number: int, line: bytes) -> Json | None:
    """Return a line's record; None for the last one if the writer was stopped amid it.

    Raises ValueError, with source, line and field, if it is no record, or not of this version.
    """
    try:
        record = parse(line)
    except ValueError as error:
        if not line.endswith(b"\n"):
            return None
        raise ValueError(f"{source}, line {number}, is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{source} is not a trace: line {number} is not a JSON object")
    kind = record.get("type")
    if kind == "simulated":
        return record
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"{source}, line {number}, is not a record of a trace: {kind!r:.60}")
    is_short = kind == "request" and "num_prompt_tokens" in record
    for name in (field.name for field in fields(_KINDS[kind]) if not _may_lack(kind, field)):
        if name not in record and not (is_short and name in _TEXT):
            raise ValueError(f"{source}, line {number}, has no {name!r}: is it of another version?")
    try:
        if is_short:
            typed(record["num_prompt_tokens"], int)
        value = typed(_TEXT | record if is_short else record, _KINDS[kind])
        if isinstance(value, EngineRecord):
            _check_engine(value)
        if isinstance(value, RequestRecord):
            params_of(value.params)
        if isinstance(value, StepRecord):
            _check_waits(value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{source}, line {number}: {str(error)[:300]}") from None
    return record


def _may_lack(kind: str, field: Field[Any]) -> bool:
    """Return whether lines may lack a field: older engines went without it."""
    return field.name in _NEW or (kind == "engine" and field.default is not MISSING)


def _check_engine(engine: EngineRecord) -> None:
    """Raise ValueError for a set-up that no engine has."""
    if engine.policy not in POLICIES:
        raise ValueError(f"policy is {engine.policy!r:.60}; expected one of {', '.join(POLICIES)}")
    for name, most in _MOST.items():
        if not 1 <= getattr(engine, name) <= most:
            raise ValueError(f"{name} is {getattr(engine, name)}; expected 1 to {most:,}")


def _check_waits(step: StepRecord) -> None:
    """Raise ValueError for a reason to wait that no engine has."""
    for seq_id, reason in step.waits:
        if reason not in _REASONS:
            raise ValueError(f"sequence {seq_id} waits for {reason!r:.60}: there is no such reason")


def _count(match: re.Match[bytes]) -> bytes:
    num_tokens = match[1].count(b",") + 1 if match[1].strip() else 0
    return b'"num_prompt_tokens":%d' % num_tokens


@contextmanager
def read_trace(path: Path) -> Iterator[Recorded]:
    """Lend the records of a file that ``--trace`` wrote.

    Raises OSError if it cannot be read, ValueError if it is not a trace.
    """
    with path.open("rb") as file:

        def lines() -> Iterator[tuple[int, bytes]]:
            place = 0
            for line in file:
                yield place, line
                place += len(line)

        def fetch(place: int) -> bytes:
            file.seek(place)
            return file.readline()

        yield Recorded(str(path), lines(), fetch)


def read_whole(path: Path) -> list[Json]:
    """Return all records of a trace, prompts included.

    Raises OSError if it cannot be read, ValueError, with the line, if one is not JSON.
    """
    with path.open("rb") as lines:
        parsed = (_parse(str(path), number, line) for number, line in enumerate(lines, start=1))
        return [record for record in parsed if record is not None]


def _fitting(pairs: Iterable[tuple[Json, int]], most_tokens: int) -> int:
    """Return how many of the first requests have at most that many tokens of answers."""
    totals = accumulate(max(sum(one["num_generated"]), _LEAST_TOKENS) for one, _ in pairs)
    return sum(1 for _ in takewhile(lambda total: total <= most_tokens, totals))


def _last_idle(pairs: Iterable[tuple[Json, int]]) -> int:
    """Return which request, in order of arrival, was the last to find nothing left to do."""
    last, end_s = 0, -inf
    for number, (one, _) in enumerate(pairs):
        if one["arrival_s"] >= end_s:
            last = number
        end_s = max(end_s, one["finish_s"])
    return last


class TraceWriter:
    """Writes records to a file. If that fails it gives the file up, and the engine goes on.

    Attributes:
        num_lost: records that are not in the file.
    """

    def __init__(self, path: Path) -> None:
        """Begin a new file. Raises OSError, which names it, if that cannot be."""
        self.path = path
        self.num_lost = 0
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _MODE)
            self._file: TextIO | None = open(descriptor, "w", buffering=1, encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise self._said(error) from None

    def __call__(self, record: Record) -> None:
        """Write a record. Raises OSError only for the first, before the engine has begun."""
        if self._file is None:
            self.num_lost += 1
            return
        try:
            print(json.dumps(to_json(record), separators=(",", ":")), file=self._file)
        except OSError as error:
            self.num_lost += 1
            self.close()
            if isinstance(record, EngineRecord):
                raise self._said(error) from None
            import logging  # here: a start without trouble needs none

            log = logging.getLogger("ridgeline.trace")
            log.error("%s; it ends here, and the engine goes on", self._said(error))

    def close(self) -> None:
        """Close the file; what could not be written is lost."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None

    def _said(self, error: OSError) -> OSError:
        return OSError(f"cannot write the trace {self.path}: {error.strerror}")
