"""What grammars of schemas allow: the standard, or less; names and digits have bounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, Literal

import pytest
from pydantic import BaseModel, Field

from ridgeline.text.grammar.grammars import Grammars, Source
from ridgeline.text.json_schema import SchemaError, written
from tests.text.grammar.test_grammars import EOS, Bytes
from tests.text.schema_pairs import Maker
from tests.text.test_json_schema_pairs import accepts


@pytest.fixture(scope="module")
def of_bytes() -> Iterator[Grammars]:
    found = Grammars(Bytes(), [EOS], timeout_s=20)  # type: ignore[arg-type]
    yield found
    found.close()


def taken(of_bytes: Grammars, schema: Any, *texts: str) -> list[str]:
    source = Source("json", json.dumps(schema))
    return [text for text in texts if accepts(of_bytes, source, text)]


A = {"type": "object", "properties": {"a": {"type": "integer"}}}
OVERLAPPING = A | {"required": ["a"], "additionalProperties": False,
                   "patternProperties": {"^a$": {"maximum": 9}, "^.b": {}}}  # fmt: skip
CASES: list[tuple[Any, str, str]] = [  # a schema, texts that it takes and texts that it does not
    # objects are closed, unless they are opened in words
    (A, '{} {"a":1}', '{"b":1} {"a":1,"b":2}'),
    (A | {"additionalProperties": True}, '{"a":1,"b":2} {"b":"x"}', '{"a":"x"}'),
    (A | {"unevaluatedProperties": {"type": "null"}}, '{"a":1,"b":null}', '{"b":1}'),
    (A | {"patternProperties": {"^x": {}}}, '{"x1":[]} {"a":1,"x":2}', '{"b":1}'),
    ({"type": "object"}, '{} {"any":{"thing":[1]}}', "[] 1"),
    ({"type": "object", "properties": {}}, "{}", '{"a":1}'),
    ({"type": "object", "required": ["b"]}, '{"b":null}', '{} {"c":1}'),
    (A | {"minProperties": 2}, '{"a":1,"b":2}', '{} {"a":1}'),
    ({"allOf": [A, {"properties": {"b": {"const": 1}}}]}, '{"a":1,"b":1} {"b":1}', '{"c":1}'),
    (A | {"additionalProperties": True, "maxProperties": 1}, '{"a":1} {"b":1}', '{"a":1,"b":1}'),
    # numbers of any size
    ({"type": "integer", "maximum": -0.0}, "0 -1", "-0 1"),
    ({"exclusiveMaximum": -1e30}, f"-1{'1' * 30}", f"-1{'0' * 30} 1"),
    ({"minimum": -(10**40) + 1}, f"-{'9' * 40} 0", f"-1{'0' * 40}"),
    ({"minimum": 1e30}, f"1{'0' * 15}1{'0' * 14}", f"1{'0' * 30}"),
    # one name, one spelling
    (A | {"additionalProperties": True}, '{"a":1}', '{"\\u0061":"x"} {"\\u0061":1}'),
    (OVERLAPPING, '{"a":1} {"a":1,"bb":2}', '{"a":10} {"a":1,"a":2} {"a":1,'),
    # exactly one
    ({"minimum": 6, "maximum": 6, "type": "integer", "oneOf": [{"minimum": 3}, {"maximum": 2}]},
     "6", "5 7"),
    ({"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 5}]},
     "-1 6", "0 5 3"),
    ({"properties": {"a": {"const": 1}, "b": {"const": 2}}, "type": "object",
      "oneOf": [{"required": ["a"]}, {"required": ["b"]}]}, '{"a":1} {"b":2}', '{"a":1,"b":2} {}'),
    # numbers of every size
    ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 3},
     "9007199254740993 9007199254740995", "9007199254740992 9007199254740996"),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**64 - 1},
     "-9223372036854775808 18446744073709551615", "-9223372036854775809 18446744073709551616"),
    ({"type": "number", "exclusiveMinimum": 0.1}, "0.11 1.5", "0.1 0.10000000000000001"),
    ({"type": "number", "minimum": 1e-20, "maximum": 1e-19},
     "0.00000000000000000002", "0.00000000000000000001e1 0.1 0"),
    ({"type": "integer", "multipleOf": 7}, "0 -14 700", "8 -1"),
    ({"type": "number", "multipleOf": 0.01}, "0.07 -1.1 3", "0.075"),
    ({"type": "number", "multipleOf": 0.25, "minimum": 0}, "0.25 1.50 2", "0.3 -0.25"),
    ({"enum": [1.0, 1e2, 2**70]}, "1.0 100.0 1180591620717411303424", "2 1180591620717411303425"),
    # what the library knows otherwise or not at all
    ({"type": "object", "propertyNames": {"pattern": "^[a-z]$"}}, '{"b":1}', '{"bb":1}'),
    ({"type": "object", "propertyNames": {"enum": ["x", "y"]},
      "additionalProperties": {"type": "integer"}}, '{} {"x":1,"y":2}', '{"z":1} {"x":1,"x":2}'),
    ({"type": "string", "not": {"enum": ["a", "b"]}}, '"c" ""', '"a" "b"'),
    ({"type": "array", "contains": {"const": 1}}, "[1] [1,2]", "[] [2]"),
    ({"type": "array", "items": {"enum": ["a", "b"]}, "uniqueItems": True},
     '[] ["a","b"]', '["a","a"]'),
    (A | {"additionalProperties": True, "dependentRequired": {"a": ["b"]}},
     '{} {"a":1,"b":2}', '{"a":1}'),
    ({"if": {"type": "integer"}, "then": {"minimum": 5}, "else": {"type": "null"}},
     "5 null", '4 "x"'),
    ({"type": "string", "pattern": r"^(?!0+$)\d{2}$"}, '"01"', '"00" "1"'),
    ({"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}, '"-1.50" "0"', '"-" "."'),
    ({"type": "string", "pattern": "^.$"}, '"é" "日"', '"ab" "\\n"'),
    ({"type": "string", "format": "password"}, '"anything"', "1"),
    ({"type": "string", "format": "date"}, '"2024-02-29"', '"2023-02-29" "2024-13-01"'),
    ({"type": "string", "minLength": 2, "maxLength": 2}, '"日本" "\\\\n"', '"a" "abc"'),
    # drafts before
    ({"type": "array", "items": [{"const": 1}], "additionalItems": {"const": 2}},
     "[] [1,2,2]", "[2] [1,1]"),
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, "4", "3"),
    ({"definitions": {"n": {"$anchor": "here", "const": 1}}, "$ref": "#here"}, "1", "2"),
    ({"$defs": {"t": {"type": "object", "properties": {"k": {"$ref": "#/$defs/t"}}}},
      "$ref": "#/$defs/t"}, '{} {"k":{"k":{}}}', '{"k":1}'),
    ({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"const": 1}}}, "1", "2"),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=lambda value: str(value)[:50])
def test_what_fits_is_taken_and_nothing_else(
    of_bytes: Grammars, schema: Any, good: str, bad: str
) -> None:
    assert taken(of_bytes, schema, *good.split(" ")) == good.split(" ")
    assert taken(of_bytes, schema, *bad.split(" ")) == []


DIGITS = "1" * 20
UNBOUNDED = ["1" * 21, "0." + "1" * 18, "1e1000", "1e300"]


@pytest.mark.parametrize("schema", [True, {"type": "number"}, {"type": ["number", "null"]}])
def test_digits_have_bounds(of_bytes: Grammars, schema: Any) -> None:
    usual = [DIGITS, f"-{DIGITS}.{DIGITS[:17]}", "6.02e23", "1E-300", "0.1", "-0", "1e+279"]
    assert taken(of_bytes, schema, *usual) == usual
    assert taken(of_bytes, schema, *UNBOUNDED) == []


def test_digits_have_bounds_wherever_a_schema_sets_none(of_bytes: Grammars) -> None:
    assert taken(of_bytes, {"type": "integer"}, DIGITS, DIGITS + "0") == [DIGITS]
    assert taken(of_bytes, {"type": "integer", "minimum": 0}, DIGITS, DIGITS + "0") == [DIGITS]
    share = {"type": "number", "minimum": 0, "maximum": 1}
    assert taken(of_bytes, share, "0." + "1" * 17, "0." + "1" * 18) == ["0." + "1" * 17]
    at = {"type": "string", "format": "time"}
    assert taken(of_bytes, at, '"10:00:00.123456789Z"', '"10:00:00.1234567891Z"') == [
        '"10:00:00.123456789Z"'
    ]
    lasting = {"type": "string", "format": "duration"}
    assert taken(of_bytes, lasting, '"P100000D"', f'"P{DIGITS}D"') == ['"P100000D"']
    any_object = {"type": "object"}
    assert taken(of_bytes, any_object, f'{{"a":{DIGITS}}}', f'{{"a":{DIGITS}0}}') == [
        f'{{"a":{DIGITS}}}'
    ]


class Order(BaseModel):
    price: Decimal = Field(gt=0)
    tags: set[Literal["new", "old"]]
    amounts: dict[Literal["a", "b"], int]
    note: str | None = None


def test_models_of_pydantic_are_held_to_whole(of_bytes: Grammars) -> None:
    schema = Order.model_json_schema()
    good = '{"price": "12.50", "tags": ["new"], "amounts": {"a": 1}, "note": null}'
    assert taken(of_bytes, schema, good) == [good]
    Order.model_validate_json(good)
    for old, new in (
        ('"12.50"', "-1"),
        ('["new"]', '["new", "new"]'),
        ('"a"', '"c"'),
        ("null", "1"),
    ):
        assert taken(of_bytes, schema, good.replace(old, new)) == []


SIBLINGS = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 5}}}
NOT_HELD: list[tuple[Any, str]] = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "string", "pattern": "(a)\\1"}, "pattern"),
    ({"type": "string", "pattern": "a\\b"}, "pattern"),
    ({"type": "string", "pattern": "a(?=b)"}, "pattern"),
    ({"type": "array", "contains": {}, "maxContains": 2}, "maxContains"),
    ({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}, "oneOf"),
    ({"not": {"items": {"type": "integer"}}}, "not"),
    ({"type": "number", "multipleOf": 0.3}, "multipleOf"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"$dynamicRef": "#x"}, "$dynamicRef"),
]


@pytest.mark.parametrize(("odd", "keyword"), NOT_HELD, ids=lambda value: str(value)[:40])
def test_what_cannot_be_held_to_is_refused_or_left_out_alone(
    of_bytes: Grammars, odd: Any, keyword: str
) -> None:
    schema = {**SIBLINGS, "properties": {**SIBLINGS["properties"], "b": odd}}  # type: ignore[dict-item]
    with pytest.raises(SchemaError) as refused:
        written(schema, is_strict=True)
    assert refused.value.path == f"properties.b.{keyword}"
    found = written(schema, is_strict=False, at="parameters")
    assert found.ignored == (f"parameters.properties.b.{keyword}",)
    source = Source("lark", found.text)
    assert accepts(of_bytes, source, '{"a":5}')
    assert not accepts(of_bytes, source, '{"a":6}')


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/$defs/no"}, {"$ref": "other.json"}, {"type": 5}, {"type": "text"},
        {"properties": []}, {"required": "a"}, {"anyOf": {}}, {"minLength": -1}, {"enum": [1e400]},
        {"minimum": "1"}, {"multipleOf": 0}, {"pattern": 5}, {"items": 5}, {"prefixItems": {}},
        {"not": {"anyOf": 5}}, {"allOf": [5]}, {"$defs": {"a": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a"}, {"minimum": 1e400}, {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "object", "properties": {"a": False}, "required": ["a"]}, {"enum": []},
        {"minItems": 2, "maxItems": 1, "type": "array"},
        {"type": "object", "properties": {"c": {"$ref": "#"}}, "required": ["c"]},
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_schema_is_refused(schema: Any) -> None:
    for is_strict in (True, False):
        with pytest.raises(SchemaError):
            written(schema, is_strict=is_strict)


def test_a_schema_too_large_is_refused() -> None:
    names = [f"n{i}" for i in range(12)]
    either = [{"anyOf": [{"required": [name]}, {"minProperties": 1}]} for name in names]
    with pytest.raises(SchemaError, match="too many"):
        written({"type": "object", "allOf": either}, is_strict=True)
    deep: Any = {"type": "string"}
    for _ in range(2_000):
        deep = {"not": deep}
    with pytest.raises(SchemaError, match="nested too deeply"):
        written(deep, is_strict=True)


def test_the_same_schema_gives_the_same_grammar() -> None:
    schema = Order.model_json_schema()
    assert written(schema, is_strict=True) == written(schema, is_strict=True)


def test_many_names_that_may_be_left_out(of_bytes: Grammars) -> None:
    part = {"type": ["string", "null"]}
    schema = {"type": "object", "properties": {f"name_{i}": part for i in range(500)}}
    good = ['{"name_3":"x","name_499":null}', "{}", '{"name_498":""}']
    assert taken(of_bytes, schema, *good, '{"name_4":null,"name_3":null}') == good


JUNK: list[Any] = [
    None, True, False, 0, -1, 1.5, 1e308, 10**400, "x", "", [], {}, [[]], [None], {"a": None}, "#",
    "^(", "\ud800", [1, "a"], {"type": "object"}, float("nan"), float("inf"),
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    keys = value if isinstance(value, dict) else range(len(value) if isinstance(value, list) else 0)
    for key in keys:
        yield from places(value[key], (*path, key))


def test_whatever_stands_in_a_schema_is_read_or_refused() -> None:
    maker, num_refused = Maker(3), 0
    for _ in range(500):
        schema = json.loads(json.dumps(maker.document()))
        *path, last = maker.pick(list(places(schema))[1:] or [("type",)])
        inner = schema
        for key in path:
            inner = inner[key]
        inner[last] = maker.pick(JUNK)
        for is_strict in (True, False):
            try:
                written(schema, is_strict=is_strict)
            except SchemaError:
                num_refused += 1
    assert 100 < num_refused < 900
