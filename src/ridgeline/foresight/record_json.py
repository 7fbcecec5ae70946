"""The engine's records as plain JSON values, as traces have them."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ridgeline.core.records import EngineRecord, Record, RequestRecord, StepRecord


def to_json(record: Record) -> dict[str, Any]:
    """Return a record as plain JSON values, with its kind under ``type``."""
    kinds = {EngineRecord: "engine", RequestRecord: "request", StepRecord: "step"}
    return {"type": kinds[type(record)], **asdict(record)}
