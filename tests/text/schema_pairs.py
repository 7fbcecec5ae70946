"""Random schemas, and texts beside them that fit or just miss: the same for the same seed.

Their numbers are of every size: JSON sets none, programs read doubles.
"""

from __future__ import annotations

import json
import math
import random
from decimal import Decimal, localcontext
from typing import Any

NAMES = ("a", "b", "c", "ab", "x_a", "x_1", "é", 'q"', "t\t", "n\n", "\\", "1", "", "日本")
TEXTS = (
    "", "a", "b", "ab", "abc", "x", "red", "1", "1.5", "-", "aé", "日本語", 'say "x"', "l\nm",
    "a b", "2024-02-29", "2023-02-29", "12:00:00Z", "1.2.3.4", "256.1.1.1", "::1", "a@b.co", "P1D",
    "x_1", "123e4567-e89b-12d3-a456-426614174000", "\u00b2", "\u0663",
)  # fmt: skip
NUMBERS: tuple[int | float, ...] = (
    0, 1, -1, 2, 5, 6, 7, 10, 99, 100, -10, 0.5, -0.5, 0.1, 0.01, 1.5, 2.25, 9.99, 1e-3, 1e-7,
    2**31, 2**53 - 1, 2**53, 2**53 + 1, -(2**53) - 1, 2**63 - 1, 2**63, 2**64, 10**19, 10**20,
    1e16, 1e21, 123456.789,
)  # fmt: skip
_BEYOND = 1e999  # what ``as_json`` spells 1E400, which no double holds
EXTREMES: tuple[int | float, ...] = (
    -0.0, 5e-324, 1e-320, -1e-320, 1e-300, 1e-100, -1e-30, 1e-18, 1e22, 1e30, 1e100, 1e300, -1e308,
    1e308, 1.7976931348623157e308, 2**1023, 2**1024, 2**1024 - 2**970, 10**30, 10**399,
    10**400 - 1, -(10**400) + 1, 10**400, _BEYOND, -_BEYOND,
)  # fmt: skip
SPELLINGS = ("-0", "-0.0", "0e0", "1E400", "-1E400", "1e-400", "1e308", "9e308", "1E+27", "1e279",
             "1e280", "1" + "0" * 399, "9" * 400, "0." + "0" * 320 + "1")  # fmt: skip
PATTERNS = (
    "^a", "b$", "^[a-c]{1,3}$", "x|^y", "^x_", "^\\d+$", "\\w", "^\\S+$", "[^a]", "^(a|b)+$", "^$",
    ".", "^(?!ab)[ab]*$", "^[-+.]?\\d*\\.?\\d+$", "a{2}", "^x_[1a]$", "é", "\\W", "\\D",
)  # fmt: skip
FORMATS = ("date", "time", "ipv4", "ipv6", "email", "uuid", "password", "int32", "uri-reference")
STEPS = (1, 2, 3, 5, 7, 10, 0.5, 0.25, 0.1, 0.01, 100)
EXTREME_STEPS = (1e-320, 1e-100, 1e-20, 1e-9, 2**53 + 1, 10**30, 1e100, 1e308, 10**399, _BEYOND)
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")


def as_json(value: Any) -> str:
    """A schema as its text, whose numbers may be ones that Python's floats do not hold."""
    return json.dumps(value).replace("Infinity", "1E400")


class Maker:
    """Makes schemas and values with its own dice."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    def maybe(self, share: float) -> bool:
        return self.dice.random() < share

    def pick(self, values: Any) -> Any:
        return self.dice.choice(values)

    # --- schemas -------------------------------------------------------------------------------

    def document(self) -> dict[str, Any]:
        """A schema, some with definitions that refer to each other."""
        found = self.schema(3)
        if not isinstance(found, dict):
            found = {"allOf": [found]}
        if self.maybe(0.25):
            inner = {
                "type": "object",
                "properties": {"a": {"$ref": "#/$defs/t"}, "b": self.schema(1)},
            }
            found = {**found, "$defs": {"t": inner, "u": self.schema(1)}}
            refs: Any = {"$ref": self.pick(("#/$defs/t", "#/$defs/u"))}
            if "properties" in found:
                found["properties"] = {**found["properties"], "r": refs}
            else:
                found = {"anyOf": [refs, found], "$defs": found["$defs"]}
        return found

    def schema(self, depth: int) -> Any:
        if self.maybe(0.04):
            return self.pick((True, {}, False))
        found: dict[str, Any] = {}
        if self.maybe(0.1):
            values = [self.value(1) for _ in range(self.pick((1, 2, 4)))]
            found = self.pick(({"enum": values}, {"const": values[0]}))
            if self.maybe(0.7):
                return found
        if self.maybe(0.9):
            found["type"] = self.pick(TYPES) if self.maybe(0.85) else self.dice.sample(TYPES, 2)
        for kind in TYPES:
            if found.get("type") == kind or self.maybe(0.04):
                found |= self.of_type(kind, depth)
        if depth and self.maybe(0.25):
            found |= self.joined(depth - 1)
        return found

    def of_type(self, kind: str, depth: int) -> dict[str, Any]:
        if kind in ("integer", "number"):
            return self.of_numbers()
        if kind == "string":
            return self.of_strings()
        if kind == "array":
            return self.of_lists(depth - 1)
        return self.of_objects(depth - 1) if kind == "object" else {}

    def number(self) -> int | float:
        found: int | float = self.pick(EXTREMES if self.maybe(0.15) else NUMBERS)
        return found

    def of_numbers(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for word in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"):
            if self.maybe(0.25):
                found[word] = self.number()
        if self.maybe(0.2):
            found["multipleOf"] = self.pick(EXTREME_STEPS if self.maybe(0.1) else STEPS)
        return found

    def of_strings(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.maybe(0.25):
            found["minLength"] = self.pick((0, 1, 2, 3))
        if self.maybe(0.25):
            found["maxLength"] = self.pick((0, 1, 2, 3, 5))
        if self.maybe(0.3):
            found["pattern"] = self.pick(PATTERNS)
        if self.maybe(0.15):
            found["format"] = self.pick(FORMATS)
        return found

    def of_lists(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        inner = max(depth, 0)
        if self.maybe(0.3):
            found["prefixItems"] = [self.schema(inner) for _ in range(self.pick((1, 2, 3)))]
        if self.maybe(0.7):
            found["items"] = (
                self.schema(inner) if depth > 0 else self.pick((False, {"type": "integer"}))
            )
        for word in ("minItems", "maxItems"):
            if self.maybe(0.25):
                found[word] = self.pick((0, 1, 2, 3))
        if self.maybe(0.08):
            found["uniqueItems"] = True
        if self.maybe(0.08):
            found["contains"] = self.schema(0)
        return found

    def of_objects(self, depth: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        inner = max(depth, 0)
        names = self.dice.sample(NAMES, self.pick((0, 1, 2, 3)))
        if names or self.maybe(0.3):
            found["properties"] = {name: self.schema(inner) for name in names}
        if self.maybe(0.6):
            pool = names or list(NAMES)
            found["required"] = self.dice.sample(pool, min(len(pool), self.pick((0, 1, 2))))
        if self.maybe(0.4):
            found["additionalProperties"] = self.pick((True, False, {"type": "integer"}))
        if self.maybe(0.2):
            sources = self.dice.sample(PATTERNS, self.pick((1, 2)))
            found["patternProperties"] = {source: self.schema(inner) for source in sources}
        for word in ("minProperties", "maxProperties"):
            if self.maybe(0.1):
                found[word] = self.pick((0, 1, 2, 3))
        if self.maybe(0.08):
            found["propertyNames"] = self.pick(({"maxLength": 2}, {"pattern": "^[a-x]"},
                                                {"enum": ["a", "b", "zz"]}))  # fmt: skip
        if self.maybe(0.08):
            found["dependentRequired"] = {self.pick(NAMES): [self.pick(NAMES)]}
        if self.maybe(0.06):
            found["unevaluatedProperties"] = self.pick((False, {"type": "string"}))
        return found

    def joined(self, depth: int) -> dict[str, Any]:
        word = self.pick(("anyOf", "oneOf", "allOf", "not", "if"))
        if word == "not":
            return {"not": self.schema(0)}
        if word == "if":
            return {"if": self.schema(0), "then": self.schema(depth), "else": self.schema(depth)}
        return {word: [self.schema(depth) for _ in range(self.pick((1, 2, 2, 3)))]}

    # --- values --------------------------------------------------------------------------------

    def value(self, depth: int) -> Any:
        kind = self.pick(TYPES if depth else TYPES[:5])
        if kind == "array":
            return [self.value(depth - 1) for _ in range(self.pick((0, 1, 2)))]
        if kind == "object":
            return {self.pick(NAMES): self.value(depth - 1) for _ in range(self.pick((0, 1, 2)))}
        if kind in ("integer", "number"):
            return self.number()
        return {"null": None, "boolean": self.maybe(0.5)}.get(kind, self.pick(TEXTS))

    def near(self, schema: Any, root: Any, depth: int = 4) -> Any:
        """A value that may fit, made of what the schema says."""
        if not isinstance(schema, dict) or not depth or self.maybe(0.03):
            return self.value(1)
        if "$ref" in schema:
            return self.near(root["$defs"][schema["$ref"].rpartition("/")[2]], root, depth - 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self.pick(schema["enum"])
        for word in ("anyOf", "oneOf", "allOf"):
            if word in schema and self.maybe(0.6):
                plain = {key: value for key, value in schema.items() if key != word}
                chosen = self.pick(schema[word])
                if isinstance(chosen, dict):
                    return self.near({**plain, **chosen}, root, depth)
        for word in ("then", "else"):
            if isinstance(schema.get(word), dict) and self.maybe(0.5):
                plain = {k: v for k, v in schema.items() if k not in ("if", "then", "else")}
                return self.near({**plain, **schema[word]}, root, depth)
        kind = schema.get("type") or self.pick(TYPES)
        kind = self.pick(kind) if isinstance(kind, list) else kind
        if kind in ("integer", "number"):
            return self.near_number(schema, kind)
        if kind == "array":
            return self.near_list(schema, root, depth)
        if kind == "object":
            return self.near_object(schema, root, depth)
        if kind == "string":
            least, most = schema.get("minLength", 0), schema.get("maxLength", 99)
            fitting = [text for text in TEXTS if least <= len(text) <= most]
            return self.pick(fitting or TEXTS)
        return None if kind == "null" else self.maybe(0.5)

    def near_number(self, schema: dict[str, Any], kind: str) -> Any:
        words = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        said = [schema[word] for word in words if word in schema and abs(schema[word]) < math.inf]
        base = Decimal(repr(self.pick(said) if said else self.pick(NUMBERS)))
        with localcontext(prec=2_000):
            base += self.pick((0, 0, 1, -1, Decimal("0.1"), Decimal("1e-9"), 10))
            if schema.get("multipleOf", math.inf) < math.inf:
                step = Decimal(repr(schema["multipleOf"]))
                base = (base // step) * step
            if kind == "integer" or base == base.to_integral_value():
                return int(base)
        return float(base)

    def near_list(self, schema: dict[str, Any], root: Any, depth: int) -> list[Any]:
        first = [self.near(one, root, depth - 1) for one in schema.get("prefixItems", ())]
        first = first[: self.pick((len(first), len(first), self.dice.randint(0, len(first))))]
        least, most = schema.get("minItems", 0), schema.get("maxItems", 3)
        count = self.dice.randint(least, max(least, most)) - len(first)
        items = schema.get("items", True)
        rest = [self.near(items, root, depth - 1) for _ in range(max(0, count))]
        return first + ([] if items is False else rest)

    def near_object(self, schema: dict[str, Any], root: Any, depth: int) -> dict[str, Any]:
        parts, required = schema.get("properties", {}), schema.get("required", ())
        found = {}
        for name in dict.fromkeys([*parts, *required]):
            if name in required or self.maybe(0.5):
                found[name] = self.near(parts.get(name, True), root, depth - 1)
        others = schema.get("additionalProperties", False)
        if (others is not False or "patternProperties" in schema) and self.maybe(0.5):
            name = self.pick(NAMES)
            if name not in parts:
                found[name] = self.near(others, root, depth - 1)
        return found

    # --- texts ---------------------------------------------------------------------------------

    def text(self, value: Any) -> str:
        """A value as JSON, mostly as it is usual."""
        if self.maybe(0.6):
            separators = self.pick(((", ", ": "), (",", ":")))
            text = json.dumps(value, ensure_ascii=False, separators=separators)
            return text.replace("Infinity", "1E400")
        return self.odd(value)

    def odd(self, value: Any) -> str:
        if isinstance(value, dict):
            pairs = [(self.odd_text(name), self.odd(one)) for name, one in value.items()]
            if pairs and self.maybe(0.15):
                pairs.append((pairs[0][0], self.odd(self.value(0))))  # a name that comes twice
            return "{" + ",".join(f"{name}:{one}" for name, one in pairs) + "}"
        if isinstance(value, list):
            return "[ " + " ,".join(map(self.odd, value)) + "]"
        if isinstance(value, str):
            return self.odd_text(value)
        if isinstance(value, bool) or value is None:
            return json.dumps(value)
        text = self.pick(SPELLINGS) if self.maybe(0.1) else as_json(value)
        if self.maybe(0.3):
            text += self.pick((".0", "e0", ".5", "0", "e2", "E-1", ".00000000000000001"))
        return self.pick(("-", "")) + text if self.maybe(0.1) else text

    def odd_text(self, text: str) -> str:
        if not self.maybe(0.3):
            return json.dumps(text, ensure_ascii=False)
        return '"' + "".join(
            f"\\u{ord(char):04x}" if self.maybe(0.5) else json.dumps(char, ensure_ascii=False)[1:-1]
            for char in text
        ) + '"'  # fmt: skip
