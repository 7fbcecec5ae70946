"""What does not fit a schema, as a schema: for ``not``, ``if`` and ``oneOf``.

What has no such schema may be left out where others remain: then less is allowed, never more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from enum import Enum, auto
from typing import Any

from ridgeline.text.json_schema.errors import Unheld


class Made(Enum):
    """Keywords of schemas that are made here, and that no document can have."""

    NOT_ENUM = auto()
    NOT_PATTERN = auto()
    UNSAID = auto()  # such a schema does not say which names an object has


_TYPES = ("null", "boolean", "number", "string", "array", "object")
_OPPOSITES = {
    "minimum": ("number", "exclusiveMaximum", 0), "maximum": ("number", "exclusiveMinimum", 0),
    "exclusiveMinimum": ("number", "maximum", 0), "exclusiveMaximum": ("number", "minimum", 0),
    "minLength": ("string", "maxLength", -1), "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1), "maxItems": ("array", "minItems", 1),
    "minProperties": ("object", "maxProperties", -1),
    "maxProperties": ("object", "minProperties", 1),
}  # fmt: skip
_LOST = (  # keywords whose opposite no schema says
    "multipleOf", "format", "items", "prefixItems", "additionalItems", "contains", "uniqueItems",
    "patternProperties", "additionalProperties", "propertyNames", "unevaluatedProperties",
    "unevaluatedItems", "oneOf", "if", "dependentRequired", "dependentSchemas", "dependencies",
    "$dynamicRef", "$recursiveRef",
)  # fmt: skip
_MOST_NESTED = 20
Resolve = Callable[[object], Any]


def negated(schema: Any, resolve: Resolve, path: str, depth: int = 0) -> Any:
    """Return a schema of values that do not fit ``schema``: of all such, or of some.

    ``resolve`` returns what a reference stands for. Raises Unheld if there is no such schema.
    """
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, Mapping):
        raise Unheld(path, "a schema must be an object, true or false")
    if depth > _MOST_NESTED:
        raise Unheld(path, "it is nested too deeply")
    options, lost = list[Any](), ""
    for keyword, value in schema.items():
        try:
            options += _opposites(keyword, value, resolve, f"{path}.{keyword}", depth + 1)
        except Unheld as error:
            lost = error.path
    if lost and not options:
        raise Unheld(lost, "no schema says what does not fit it")
    return {Made.UNSAID: True, "anyOf": options} if options else False


def _opposites(
    keyword: Any, value: Any, resolve: Resolve, path: str, depth: int
) -> Iterator[dict[Any, Any]]:
    """Yield schemas of what does not fit one keyword."""
    if keyword in _OPPOSITES and type(value) in (int, float):
        kind, opposite, change = _OPPOSITES[keyword]
        if value + change >= 0 or not change:
            yield {"type": kind, opposite: value + change}
    elif keyword == "type":
        types = [value] if isinstance(value, str) else value
        others = [one for one in _TYPES if one not in types]
        if "integer" in types and "number" in others:
            others.remove("number")
        if others:
            yield {"type": others}
    elif keyword in ("enum", "const"):
        yield _others(value if keyword == "enum" else [value])
    elif keyword == Made.NOT_ENUM:
        yield {"enum": value}
    elif keyword == "pattern":
        yield {"type": "string", Made.NOT_PATTERN: value}
    elif keyword == Made.NOT_PATTERN:
        yield {"type": "string", "pattern": value}
    elif keyword == "required":
        for name in value:
            yield {Made.UNSAID: True, "type": "object", "properties": {name: False}}
    elif keyword == "not":
        yield {Made.UNSAID: True, "allOf": [value]}
    elif keyword in ("properties", "allOf", "anyOf", "$ref"):
        yield from _of_parts(keyword, value, resolve, path, depth)
    elif keyword in _LOST or keyword in _OPPOSITES:
        raise Unheld(path, "no schema says what does not fit it")


def _of_parts(
    keyword: str, value: Any, resolve: Resolve, path: str, depth: int
) -> Iterator[dict[Any, Any]]:
    if keyword == "$ref":
        yield {Made.UNSAID: True, "allOf": [negated(resolve(value), resolve, path, depth)]}
    elif keyword == "anyOf":
        yield {Made.UNSAID: True, "allOf": [negated(one, resolve, path, depth) for one in value]}
    else:
        pairs = value.items() if keyword == "properties" else [(None, one) for one in value]
        found, lost = list[dict[Any, Any]](), ""
        for name, one in pairs:
            try:
                away = negated(one, resolve, path if name is None else f"{path}.{name}", depth)
            except Unheld as error:
                lost = error.path
                continue
            if name is None:
                found.append({Made.UNSAID: True, "allOf": [away]})
            else:
                of_name = {"required": [name], "properties": {name: away}}
                found.append({Made.UNSAID: True, "type": "object", **of_name})
        if lost and not found:
            raise Unheld(lost, "no schema says what does not fit it")
        yield from found


def _others(values: list[Any]) -> dict[Any, Any]:
    """Return a schema of other values than these; lists and objects have no others."""
    scalars = [one for one in values if not isinstance(one, list | Mapping)]
    lost = {"array" for one in values if isinstance(one, list)}
    lost |= {"object" for one in values if isinstance(one, Mapping)}
    return {"type": [one for one in _TYPES if one not in lost], Made.NOT_ENUM: scalars}
