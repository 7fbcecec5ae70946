"""What a file says is taken as its types declare it, or named by its place."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from ridgeline.core.records import EngineRecord, Record, RequestRecord, StepRecord
from ridgeline.foresight.structure import parse, to_json, typed
from tests.foresight.runs import recorded


class Pair(NamedTuple):
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Whole:
    name: str
    pairs: tuple[Pair, ...]
    rates: Mapping[str, float]
    window: int | None = None


GOOD: dict[str, Any] = {"name": "a", "pairs": [[1, 0.5], [2, 3]], "rates": {"x": 1}, "more": "y"}


def test_what_fits_becomes_a_value() -> None:
    assert typed(GOOD, Whole) == Whole("a", (Pair(1, 0.5), Pair(2, 3)), {"x": 1})
    assert typed(GOOD | {"window": 7}, Whole).window == 7


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": 3}, "name is 3; expected text"),
        ({"name": None}, "name is null; expected text"),
        ({"pairs": {}}, "pairs is an object; expected a list"),
        ({"pairs": [[1, 2], [1]]}, r"pairs.1 is a list; expected a list of 2"),
        ({"pairs": [[True, 2]]}, r"pairs.0.count is True; expected a whole number"),
        ({"pairs": [[1.0, 2]]}, r"pairs.0.count is 1.0; expected a whole number"),
        ({"pairs": [[10**30, 2]]}, r"pairs.0.count is 10{30}; expected a whole number"),
        ({"pairs": [[1, float("nan")]]}, r"pairs.0.seconds is nan; expected a number"),
        ({"pairs": [[1, float("-inf")]]}, r"pairs.0.seconds is -inf; expected a number"),
        ({"pairs": [[1, "2"]]}, r"pairs.0.seconds is '2'; expected a number"),
        ({"rates": {"x": []}}, r"rates.x is a list; expected a number"),
        ({"window": "7"}, "window is '7'; expected a whole number"),
        ({"name": ["a" * 90_000]}, "^.{,80}$"),
        ({"window": "a" * 90_000}, "^.{,120}$"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        typed(GOOD | change, Whole)


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match="it is an object; expected an object with 'rates'"):
        typed({"name": "a", "pairs": []}, Whole)
    with pytest.raises(ValueError, match="it is a list; expected an object"):
        typed([], Whole)


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "1" * 5000, b"\xff"])
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  (json's own words)
        parse(text)


@pytest.mark.parametrize("seed", range(3))
def test_records_are_read_as_they_were_written(seed: int) -> None:
    kinds: dict[str, type[Record]] = {
        "engine": EngineRecord,
        "request": RequestRecord,
        "step": StepRecord,
    }
    for value in recorded(seed):
        again = to_json(typed(value, kinds[value["type"]]))
        assert parse(json.dumps(again)) == value
