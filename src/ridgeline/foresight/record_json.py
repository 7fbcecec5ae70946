"""The engine's records as plain JSON values, as traces have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ridgeline.core.params import SamplingParams
from ridgeline.core.records import EngineRecord, Record, RequestRecord, StepRecord


def to_json(record: Record) -> dict[str, Any]:
    """Return a record as plain JSON values, with its kind under ``type``."""
    kinds = {EngineRecord: "engine", RequestRecord: "request", StepRecord: "step"}
    return {"type": kinds[type(record)], **asdict(record)}


def params_from(recorded: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling that a record has, which are those parameters that are not as by default.

    Raises ValueError or TypeError if it has something else.
    """
    params = dict(recorded)
    if isinstance(biases := params.get("logit_bias"), Mapping):  # JSON has text for keys
        params["logit_bias"] = {int(token): bias for token, bias in biases.items()}
    return SamplingParams(**params)
