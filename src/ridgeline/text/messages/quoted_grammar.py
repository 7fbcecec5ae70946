"""Arguments of a call in Gemma 4's notation, as rules of a grammar in Lark's notation.

It is JSON whose keys have no quotes, and whose texts stand between two markers, as in
``{city:<|"|>Oslo<|"|>,days:3}``. What a schema says of texts, lists and objects beyond their parts
has no rules here: arguments of such schemas are written as JSON, which readers take as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_SAID = {"type", "title", "description", "default", "examples"}
_OF_TYPE = {
    "string": {"enum"},
    "array": {"items"},
    "object": {"properties", "required", "additionalProperties"},
}
_NUMBERS = ("integer", "number", "boolean", "null")


class Quote(NamedTuple):
    """The marker around texts.

    Attributes:
        spelling: of the marker.
        mark: the marker in a grammar.
        ending: returns rules for a text and the marker after it, by the name of the first.
        add: returns how a rule calls what fits a schema of numbers, true, false or null.
    """

    spelling: str
    mark: str
    ending: Callable[[str], list[str]]
    add: Callable[[Any], str]


def can_be_quoted(schema: object, spelling: str, *, is_whole: bool = True) -> bool:
    """Return whether rules here say all that a schema does; ``is_whole``: of all arguments."""
    if not isinstance(schema, Mapping):
        return False
    kind = schema.get("type", "object" if is_whole else None)
    if is_whole and kind != "object":
        return False
    if kind in _NUMBERS:
        return True
    known = _SAID | _OF_TYPE[kind] if isinstance(kind, str) and kind in _OF_TYPE else set()
    if any(key not in known for key in schema) or not known:
        return False
    if kind == "string":
        options = schema.get("enum", [""])
        return bool(options) and _are_texts(options) and not any(spelling in one for one in options)
    if kind == "array":
        return can_be_quoted(schema.get("items"), spelling, is_whole=False)
    parts, required = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(parts, Mapping) or not _are_texts(required):
        return False
    if any(name not in parts for name in required):
        return False
    if not parts and schema.get("additionalProperties", True) is not False:
        return False  # any object
    return all(
        _KEY.fullmatch(key) and can_be_quoted(part, spelling, is_whole=False)
        for key, part in parts.items()
    )


def _are_texts(values: object) -> bool:
    return isinstance(values, list | tuple) and all(isinstance(one, str) for one in values)


def quoted_object(rule: str, schema: Mapping[str, Any], quote: Quote) -> Iterator[str]:
    """Yield the rules of an object; its keys come in the order in which templates write them."""
    parts, required = schema.get("properties", {}), schema.get("required", [])
    names = sorted(parts, key=str.lower)
    yield f'{rule}: "{{" {rule}_first_0 "}}"'
    for j, name in enumerate(names):  # members from the j-th on, as the first of all or behind one
        here, rest, is_needed = f"{rule}_member_{j}", f"{rule}_more_{j + 1}", name in required
        yield f"{here}: {json.dumps(name + ':')} {rule}_value_{j}"
        yield from _value(f"{rule}_value_{j}", parts[name], quote)
        yield f"{rule}_first_{j}: {here} {rest}" + ("" if is_needed else f" | {rule}_first_{j + 1}")
        yield f'{rule}_more_{j}: "," {here} {rest}' + ("" if is_needed else f" | {rest}")
    yield f'{rule}_first_{len(names)}: ""'
    yield f'{rule}_more_{len(names)}: ""'


def _value(rule: str, schema: Mapping[str, Any], quote: Quote) -> Iterator[str]:
    kind = schema["type"]
    if kind == "object":
        yield from quoted_object(rule, schema, quote)
    elif kind == "array":
        yield f'{rule}: "[" ({rule}_item ("," {rule}_item)*)? "]"'
        yield from _value(f"{rule}_item", schema["items"], quote)
    elif kind == "string" and "enum" in schema:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in schema["enum"])
        yield f"{rule}: {quote.mark} ({texts}) {quote.mark}"
    elif kind == "string":
        yield f"{rule}: {quote.mark} {rule}_text"
        yield from quote.ending(f"{rule}_text")
    else:
        yield f"{rule}: {quote.add(dict(schema))}"
