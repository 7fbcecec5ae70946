"""The shapes of llama.cpp's answers, for the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict

from ridgeline.serve.dialects.documented import InfillTimings, Shaped

INFILL_CHUNKS = "After each `data: ` a piece as `content`; the last has `stop: true`, and no text."


def _some_fields(schema: dict[str, Any]) -> None:
    """Leave out what holds only where a request has no ``response_fields``."""
    del schema["required"]
    schema["additionalProperties"] = {"description": "What stands at a path, as timings/prompt_n"}


class Infilled(Shaped):
    """What POST /infill returns, unless it streams; of this only ``response_fields``, if given."""

    model_config = ConfigDict(json_schema_extra=_some_fields)

    index: int
    content: str
    tokens: list[int]
    stop: Literal[True]
    id_slot: int
    model: str
    generation_settings: dict[str, Any]
    prompt: str
    has_new_line: bool
    tokens_predicted: int
    tokens_evaluated: int
    tokens_cached: int
    stop_type: Literal["eos", "limit", "word"]
    stopping_word: str
    truncated: bool
    timings: InfillTimings
    receipt: dict[str, Any] | None = None
