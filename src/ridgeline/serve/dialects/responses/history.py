"""Items that began with another model, as the items that are read here.

A tool that a provider runs has items of its own. A call with its result becomes a call of a
function and its output. What cannot be told so is left out, and named; in what the user said it
stays, and is refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ridgeline.text.template.messages import is_text, readable

READ = ("message", "function_call", "function_call_output", "reasoning")
_ARGUMENTS = ("arguments", "input", "action", "actions", "operation", "code", "queries")
_RETURNED = ("output", "result", "tools", "status")  # of an item for results alone
_ITS_OWN = ("output", "outputs", "results", "error")  # of a call that has its result in it

Item = Mapping[str, Any]


def read_items(items: Sequence[Any], *, may_lose: bool) -> tuple[list[Any], list[str]]:
    """Return items that a body here has, and the names of what is left out, each once.

    Unless they ``may_lose`` anything, items that would lose something stay as they are.
    """
    results = {_own_id(item): item for item in items if _is_result(item)}
    calls = {one: item for item in items if _is_call(item) for one in _ids(item)}
    output: list[Any] = []
    lost: list[str] = []
    for i, item in enumerate(items):
        kind = _kind(item)
        left_out: list[str] = []
        if kind in READ:
            parts = [_read_parts(item, left_out) if isinstance(item, Mapping) else item]
        elif not isinstance(kind, str) or ("role" in item and kind != "additional_tools"):
            parts = [item]  # no item that anybody has
        elif _is_result(item):
            parts = [] if _own_id(item) in calls else _none_of(kind, left_out)
        else:
            parts = list(_call(item, i, results, left_out)) or _none_of(kind, left_out)
        if left_out and not may_lose:
            parts, left_out = [item], []
        output += parts
        lost += [f"input ({name})" for name in left_out]
    if items and not output:  # nothing would be asked: the error names what stands there
        return list(items), []
    return output, list(dict.fromkeys(lost))


def _kind(item: Any) -> Any:
    """Return the type of an item, which messages and references may leave out."""
    if not isinstance(item, Mapping):
        return "message"
    is_reference = "id" in item and not item.keys() & {"role", "content"}
    return item.get("type") or ("item_reference" if is_reference else "message")


def _none_of(kind: str, left_out: list[str]) -> list[Any]:
    left_out.append(kind)
    return []


def _is_call(item: Any) -> bool:
    kind = item.get("type") if isinstance(item, Mapping) else None
    return (
        isinstance(kind, str) and (kind == "program" or kind.endswith("_call")) and kind not in READ
    )


def _is_result(item: Any) -> bool:
    return _foreign_kind(item).endswith("_output")


def _foreign_kind(item: Any) -> str:
    """Return the type of an item that no body here has, else nothing."""
    kind = item.get("type") if isinstance(item, Mapping) else None
    return kind if isinstance(kind, str) and kind not in READ else ""


def _own_id(item: Item) -> Any:
    own_id = item.get("call_id") or item.get("id")
    return own_id if isinstance(own_id, str) else None


def _ids(item: Item) -> list[Any]:
    return [item[name] for name in ("call_id", "id") if isinstance(item.get(name), str)]


def _call(
    item: Item, i: int, results: Mapping[Any, Item], left_out: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield a call of a function and its output, or nothing if there is no result."""
    if not _is_call(item):
        return
    result = next((results[one] for one in _ids(item) if one in results), None)
    names, source = (_ITS_OWN, item) if result is None else (_RETURNED, result)
    output = next((source[name] for name in names if source.get(name)), None)
    if output is None:
        return
    field = next((name for name in _ARGUMENTS if item.get(name) is not None), "")
    own_id, piece = _own_id(item) or f"call_{i}", readable(output)
    left_out += piece.left_out
    name = item.get("name")
    yield {
        "type": "function_call",
        "call_id": own_id,
        "name": name if isinstance(name, str) else item["type"].removesuffix("_call"),
        "arguments": _arguments(field, item.get(field)),
    }
    yield {"type": "function_call_output", "call_id": own_id, "output": piece.text}


def _arguments(name: str, value: Any) -> str:
    """Return arguments as JSON: an object as it is, anything else under its name."""
    if isinstance(value, str):
        try:
            if isinstance(json.loads(value), dict):
                return value
        except (ValueError, RecursionError):
            pass
    arguments = value if isinstance(value, dict) else {name: value} if name else {}
    return json.dumps(arguments, ensure_ascii=False)


def _read_parts(item: Item, left_out: list[str]) -> Item:
    """Return an item whose parts are text, where it is not the user's own to say them again."""
    is_result = item.get("type") == "function_call_output"
    name = "output" if is_result else "content"
    parts = item.get(name)
    if not isinstance(parts, list):
        return item
    role = "tool" if is_result else item.get("role", "assistant")
    read: list[Any] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in ("input_text", "output_text", "reasoning_text") or not isinstance(kind, str):
            read.append(part)
        elif is_text(part):
            read.append({"type": "input_text", "text": readable(part).text})
        elif role in ("assistant", "tool"):
            piece = readable(part)
            left_out += piece.left_out or (kind,)
            read += [{"type": "input_text", "text": piece.text}] * is_result
        else:
            read.append(part)
    return {**item, name: read}
