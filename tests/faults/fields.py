"""The fields of a server's routes, those inside of others too, as its OpenAPI document has them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

HOLE = "\N{WHITE SQUARE}"  # stands in a body where a value will
Schema = dict[str, Any]
# What the document leaves open: sizes of schemas, and parameters by the names of other fields.
_SIZES = (
    *("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    *("pattern", "enum", "const", "type", "items", "properties", "required", "anyOf", "format"),
)
_SCHEMAS: dict[str, Callable[[Schema], dict[str, Any]]] = {  # how a route takes one
    "/v1/chat/completions": lambda schema: {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    },
    "/v1/completions": lambda schema: {"guided_json": schema},
    "/v1/responses": lambda schema: {
        "text": {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    },
    "/v1/messages": lambda schema: {
        "output_config": {"format": {"type": "json_schema", "schema": schema}}
    },
    "/api/chat": lambda schema: {"format": schema},
    "/api/generate": lambda schema: {"format": schema},
    "/completion": lambda schema: {"json_schema": schema},
}
INFER = "/v2/models/{model}/infer"
GENERATE = "/v2/models/{model}/generate"


class Fields:
    """What the document says of bodies."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._known: dict[str, Schema] = document["components"]["schemas"]
        self._paths: dict[str, Any] = document["paths"]

    def bodies(self) -> dict[str, Schema]:
        """Return the schema of the body of each route that takes JSON."""
        return {
            path: contents["application/json"]["schema"]
            for path, methods in self._paths.items()
            if "application/json"
            in (contents := methods.get("post", {}).get("requestBody", {}).get("content", {}))
        }

    def of(self, path: str, schema: Schema) -> dict[str, dict[str, Any]]:
        """Return for each field, named as ``a.0.b``, what a body has with a hole in that place."""
        found = dict(self._holes(schema, frozenset()))
        if path in _SCHEMAS:
            found |= {f"schema.{size}": _SCHEMAS[path](_with_hole(size)) for size in _SIZES}
        if path in (INFER, GENERATE):
            names = [
                name for name in self.of("", self.bodies()["/v1/completions"]) if "." not in name
            ]
            found |= {f"parameters.{name}": {"parameters": {name: HOLE}} for name in names}
        return {name: inside for name, inside in found.items() if isinstance(inside, dict)}

    def _holes(self, schema: Schema, seen: frozenset[str]) -> Iterator[tuple[str, Any]]:
        """Yield the names of fields, and a value with a hole there and what is required beside."""
        if "$ref" in schema:
            name = schema["$ref"].rpartition("/")[2]
            if name not in seen:
                yield from self._holes(self._known[name], seen | {name})
            return
        for part in _alternatives(schema):
            yield from self._holes(part, seen)
        beside = self._example(schema) if "properties" in schema else {}
        further = schema.get("additionalProperties")
        named = schema.get("properties", {}) | ({"x": further} if isinstance(further, dict) else {})
        for key, inner in named.items():
            yield key, beside | {key: HOLE}
            for name, value in self._holes(inner, seen):
                yield f"{key}.{name}", beside | {key: value}
        if isinstance(inner := schema.get("items"), dict):
            yield "0", [HOLE]
            for name, value in self._holes(inner, seen):
                yield f"0.{name}", [value]

    def _example(self, schema: Schema) -> Any:
        """Return a value that fits, as short as may be."""
        if "$ref" in schema:
            return self._example(self._known[schema["$ref"].rpartition("/")[2]])
        if parts := _alternatives(schema):
            return self._example(parts[0])
        if "const" in schema or "enum" in schema:
            return schema.get("const", schema.get("enum", [None])[0])
        kind = schema.get("type", "object")
        kind = kind[0] if isinstance(kind, list) else kind
        if kind == "object":
            known = schema.get("properties", {})
            return {key: self._example(known.get(key, {})) for key in schema.get("required", ())}
        if kind == "array":
            return [self._example(schema.get("items", {}))]
        few = max(1, schema.get("minimum", 1))
        return {"string": "a", "integer": few, "number": few, "boolean": True}.get(kind)


def _alternatives(schema: Schema) -> list[Schema]:
    return [part for word in ("anyOf", "oneOf", "allOf") for part in schema.get(word, ())]


def _with_hole(size: str) -> Schema:
    """Return a schema of a thing with one member, of which something is said."""
    kind = "string" if "Length" in size or size in ("pattern", "format") else "integer"
    kind = "array" if "tems" in size else "object" if "ropert" in size else kind
    member: Schema = {"type": kind, size: HOLE}
    return {"type": "object", "properties": {"a": member}, "required": ["a"]}
