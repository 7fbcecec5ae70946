"""What a server remembers of its last minutes: the engine's records, without prompts.

They lie in memory as the lines of a trace, up to a number of bytes; the oldest go first. A line is
made in the engine's thread, and read by clients that ask why a request was slow.
"""

from __future__ import annotations

import json
import re
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from ridgeline.core.records import Record, RequestRecord, StepRecord
from ridgeline.foresight.explain import (
    Explanation,
    Predict,
    explain,
    overtakers_of,
    predictor,
    usual_steps,
)
from ridgeline.foresight.explain_report import timeline
from ridgeline.foresight.step_time.fit import PredictionMonitor
from ridgeline.foresight.structure import to_json
from ridgeline.foresight.suggestions import MOST_TOKENS
from ridgeline.foresight.trace import Json, Recorded
from ridgeline.serve.engine.interface import EngineClient

_MAX_BYTES = 16 << 20
_NO_TOKEN = 1 << 40
_OVERHEAD_BYTES = 64  # of a line in memory, about
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode  # made once: faster
_STEP = tuple(field.name for field in fields(StepRecord))
_LEFT_OUT = ("prompt_token_ids", "params")  # of requests: what they say, and what ends them
# Of what ends them, that which says how much work they are.
_PARAMS = ("max_tokens", "n", "best_of", "use_beam_search", "penalty_alpha")
_REQUEST = tuple(field.name for field in fields(RequestRecord) if field.name not in _LEFT_OUT)
# What finds a request, from the line that ``_on_record`` writes: a tenth of the time of parsing it.
_VALUES = {
    "request_id": r"(?P<request_id>\d+)",
    "name": r'"(?P<name>[^"\\]*)"',
    "arrival_s": r"(?P<arrival_s>[^,]+)",
    "finish_s": r"(?P<finish_s>[^,]+)",
    "num_generated": r"\[(?P<num_generated>[\d,]*)\]",
}
_FIRST = _REQUEST[: max(map(_REQUEST.index, _VALUES)) + 1]  # no value among the others has a comma
_REQUEST_LINE = re.compile(
    r'\{"type":"request",'
    + ",".join(f'"{name}":{_VALUES.get(name, "[^,]*")}' for name in _FIRST)
    + r',.*"num_prompt_tokens":(?P<num_prompt_tokens>\d+),"params":.*'
    r'"tenant":"(?P<tenant>[^"\\]*)"\}'
)


class Forgotten(LookupError):
    """A request is not among those remembered; says how far back these reach."""


class TraceBuffer:
    """The last records of one engine."""

    def __init__(
        self, engine: EngineClient, monitor: PredictionMonitor, max_bytes: int = _MAX_BYTES
    ) -> None:
        """Remember what ``engine`` reports from now on, in about ``max_bytes``.

        ``monitor`` knows how long steps take; until it does, they are compared with one another.
        """
        self._engine, self._monitor, self._max_bytes = engine, monitor, max_bytes
        self._lock = threading.Lock()
        self._lines: deque[bytes] = deque()
        self._num_bytes = 0
        self._has_forgotten = False
        self._engine_line = json.dumps(to_json(engine.settings)).encode()
        engine.listeners.append(self._on_record)

    def _on_record(self, record: Record) -> None:
        if isinstance(record, StepRecord):  # shallow: a deep copy would cost more than the rest
            shown: Json = {"type": "step", **{name: getattr(record, name) for name in _STEP}}
        elif isinstance(record, RequestRecord):
            shown = {"type": "request", **{name: getattr(record, name) for name in _REQUEST}}
            shown["num_prompt_tokens"] = len(record.prompt_token_ids)
            shown["params"] = {n: v for n, v in record.params.items() if n in _PARAMS}
            shown["tenant"] = self._engine.tenant_of(record.request_id)
        else:
            return
        line = _encode(shown).encode()
        with self._lock:
            self._lines.append(line)
            self._num_bytes += len(line) + _OVERHEAD_BYTES
            while self._num_bytes > self._max_bytes and len(self._lines) > 1:
                self._num_bytes -= len(self._lines.popleft()) + _OVERHEAD_BYTES
                self._has_forgotten = True

    def explain(self, wanted: str, tenant: str) -> tuple[Explanation, list[Json]]:
        """Return where the time of a request went, and a trace of it and of those beside it.

        Prompts in the trace are stand-ins, as long as what was computed of the real ones.

        Args:
            wanted: its name, its number, or the id of its answer.
            tenant: the label of the key that asks; it sees its own requests only.

        Raises Forgotten if no such request is remembered.
        """
        recorded, request = self._find(wanted, tenant)
        steps = recorded.of(request)
        explanation = explain(
            recorded.engine,
            request,
            steps,
            self._usual(recorded),
            overtakers=overtakers_of(request, recorded.requests),
        )
        return explanation, [*map(_stood_in, recorded.around(request, MOST_TOKENS))]

    def timeline(self, wanted: str, tenant: str) -> Sequence[Mapping[str, Any]]:
        """Return the events of a request's life (``explain.timeline``); arguments as above.

        Requests of other keys have no slots in it.

        Raises Forgotten if no such request is remembered.
        """
        recorded, request = self._find(wanted, tenant)
        own = {one["request_id"] for one in recorded.requests if one["tenant"] == tenant}
        return timeline(
            recorded.engine,
            recorded.of(request),
            recorded.requests,
            predict=self._usual(recorded),
            is_shown=own.__contains__,
        )

    def _find(self, wanted: str, tenant: str) -> tuple[Recorded, Json]:
        """Return what is remembered, and a request of a key in it; raises Forgotten."""
        with self._lock:
            lines, has_forgotten = [self._engine_line, *self._lines], self._has_forgotten
        recorded = Recorded("the history", enumerate(lines), lines.__getitem__, glance=_glance)
        begin_s = recorded.start_s if has_forgotten else None

        def is_allowed(one: Json) -> bool:
            return one["tenant"] == tenant and (begin_s is None or one["arrival_s"] >= begin_s)

        request = recorded.find(wanted, is_allowed)
        if request is None:
            num_known = sum(map(is_allowed, recorded.requests))
            raise Forgotten(_reach(wanted, recorded, num_known))
        return recorded, request

    def _usual(self, recorded: Recorded) -> Predict | None:
        """Return how long steps should take: as calibrated, else as those that are remembered."""
        if self._monitor.is_calibrated:
            return predictor(self._monitor.calibration.times)
        return usual_steps(recorded)


def _glance(line: bytes) -> Json | None:
    """Return what finds a request, from its line; None if it is another, or has odd letters."""
    match = _REQUEST_LINE.fullmatch(line.decode())
    if match is None:
        return None
    return {
        "request_id": int(match["request_id"]),
        "name": match["name"],
        "arrival_s": float(match["arrival_s"]),
        "finish_s": float(match["finish_s"]),
        "num_generated": [int(count) for count in match["num_generated"].split(",") if count],
        "num_prompt_tokens": int(match["num_prompt_tokens"]),
        "tenant": match["tenant"],
    }


def _stood_in(record: Json) -> Json:
    """Give a request a prompt in place of its own, of which nothing is cached."""
    if record["type"] != "request":
        return record
    num_tokens = max(1, record["num_prompt_tokens"] - record["num_cached_tokens"])
    return record | {"prompt_token_ids": (_NO_TOKEN + record["request_id"],) * num_tokens}


def _reach(wanted: str, recorded: Recorded, num_known: int) -> str:
    text = f"none of your finished requests is known as {wanted[:80]!r}"
    if recorded.start_s is None or not recorded.requests:
        return f"{text}: none has ended yet"
    back_s = recorded.requests[-1]["finish_s"] - recorded.start_s
    return f"{text}: the history goes back {back_s:,.1f} s and has {num_known:,} of your requests"
