"""Grammars of random schemas against an independent validator: none accepts what that refuses."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal, localcontext
from typing import Any

import jsonschema
import pytest

from ridgeline.text.grammar.grammars import Grammars, Source
from ridgeline.text.json_schema import SchemaError, written
from tests.text.grammar.test_grammars import EOS, Bytes, allowed
from tests.text.schema_pairs import Maker, as_json

FORMATS = jsonschema.FormatChecker(["date", "ipv4", "ipv6", "email", "uuid"])
NUM_SHARDS = 20  # of 500 pairs each
# What a schema is refused with, in our own words.
WORDS = "fits|begin with|no grammar|refers|draft|cannot be (written|told|negated)|floating point"


@pytest.fixture(scope="module")
def of_bytes() -> Iterator[Grammars]:
    found = Grammars(Bytes(), [EOS], max_bytes=1 << 20, timeout_s=20)  # type: ignore[arg-type]
    yield found
    found.close()


def accepts(of_bytes: Grammars, source: Source, text: str) -> bool:
    """Whether an answer may be this text, token by token, and end there."""
    state = of_bytes.constraint(source)()
    for token in text.encode():
        if not state.num_valid((token,)):
            return False
        state.accept(token)
    return state.is_over or EOS in allowed(state.masks(())[0])


def exactly(text: str) -> int | Decimal:
    """A number as it is spelled; the validator knows no Decimal for a whole number."""
    value = Decimal(text)
    return int(value) if value == value.to_integral_value() else value


def is_valid(schema: Any, text: str, kind: Any) -> bool:
    """What the validator says, with numbers read as ``kind``."""
    try:
        value = json.loads(text, parse_float=kind)
    except ValueError:
        return False
    document = json.loads(as_json(schema), parse_float=kind)
    with localcontext(prec=5_000):
        return jsonschema.Draft202012Validator(document, format_checker=FORMATS).is_valid(value)


def reads(schema: Any) -> list[Any]:
    """How numbers are read: exactly, and as programs do, whose multiples are not exact."""
    return [exactly] if "multipleOf" in json.dumps(schema) else [exactly, float]


def refusal(of_bytes: Grammars, source: Source) -> str:
    """Why a schema is refused, nothing if it is not."""
    try:
        of_bytes.constraint(source)
    except ValueError as error:
        return str(error)
    return ""


def judged(of_bytes: Grammars, seed: int, num_pairs: int) -> Counter[str]:
    maker, found = Maker(seed), Counter[str]()
    while found["pairs"] < num_pairs:
        schema = maker.document()
        source = Source("json", as_json(schema))
        found["schemas"] += 1
        if why := refusal(of_bytes, source):
            assert re.search(WORDS, why), (schema, why)
            found["refused"] += 1
            continue
        for _ in range(6):
            text = maker.text(maker.near(schema, schema))
            fits = all(is_valid(schema, text, kind) for kind in reads(schema))
            is_taken = accepts(of_bytes, source, text)
            assert fits or not is_taken, (schema, text)
            found["pairs"] += 1
            found["valid"] += fits
            found["taken"] += is_taken
    return found


@pytest.mark.parametrize(
    "shard",
    [pytest.param(i, marks=[pytest.mark.full] if i >= 3 else []) for i in range(NUM_SHARDS)],
)
def test_nothing_is_taken_that_does_not_fit(of_bytes: Grammars, shard: int) -> None:
    """And much of what fits is taken: refusing everything would be easy."""
    found = judged(of_bytes, shard, 500)
    assert found["refused"] < 0.3 * found["schemas"], found
    assert found["valid"] > 0.25 * found["pairs"], found
    assert found["taken"] > 0.5 * found["valid"], found


def without(schema: Any, path: str) -> Any:
    """A schema without the keyword at a path; None if the path is not plain enough to follow."""
    keys: list[Any] = [
        int(i) if i else key for i, key in re.findall(r"\[(\d+)\]|([^.\[\]]+)", path)
    ]
    found = inner = json.loads(json.dumps(schema))
    for key in keys[:-1]:
        try:
            inner = inner[key]
        except (KeyError, IndexError, TypeError):
            return None
    return found if isinstance(inner, dict) and inner.pop(keys[-1], None) is not None else None


def test_what_is_left_out_costs_nothing_else(of_bytes: Grammars) -> None:
    """What the validator refuses without the keywords that were named is not taken either."""
    maker, num_pairs = Maker(7), 0
    while num_pairs < 300:
        schema = maker.document()
        try:
            found = written(schema, is_strict=False)
        except SchemaError:
            continue
        rest = schema
        for path in found.ignored:
            rest = None if rest is None else without(rest, path)
        if not found.ignored or rest is None:
            continue
        for _ in range(6):
            text = maker.text(maker.near(schema, schema))
            fits = all(is_valid(rest, text, kind) for kind in reads(rest))
            assert fits or not accepts(of_bytes, Source("lark", found.text), text), (schema, text)
            num_pairs += 1
