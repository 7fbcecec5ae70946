"""Blocks that began with another model, as the blocks that are read here.

Tools that a provider runs leave calls and results in one message of the assistant. They become a
call, its result in a message of the user, and what the assistant said then. What cannot be told so
is left out, and named; in what the user said it stays, and is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ridgeline.text.template.messages import is_text, readable

READ = ("text", "tool_use", "tool_result", "thinking", "redacted_thinking")
_NOTES = (  # no words of either side: about tools, containers and models
    *("compaction", "container_upload", "fallback", "mcp_tool_listing"),
    *("tool_addition", "tool_removal"),
)

Block = Mapping[str, Any]


def read_messages(messages: Sequence[Any], *, may_lose: bool) -> tuple[list[Any], list[str]]:
    """Return messages with blocks that a body here has, and the names of what is left out.

    Unless they ``may_lose`` anything, messages that would lose something stay as they are.
    """
    output: list[Any] = []
    lost: list[str] = []
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list) or all(map(_is_read, content)):
            output.append(message)
            continue
        left_out: list[str] = []
        if message.get("role") == "assistant":
            parts = _assistant(message, content, left_out)
        else:
            parts = [{**message, "content": _user(content, left_out)}]
        if left_out and not may_lose:
            output.append(message)
        else:
            output += parts
            lost += [f"messages.content ({name})" for name in left_out]
    return output, list(dict.fromkeys(lost))


def _is_read(block: Any) -> bool:
    """Whether a block needs no other words."""
    if not isinstance(block, Mapping):
        return True
    kind = block.get("type")
    if kind == "tool_result" and isinstance(parts := block.get("content"), list):
        return all(isinstance(one, Mapping) and one.get("type") == "text" for one in parts)
    return kind in READ


def _assistant(message: Block, content: list[Any], left_out: list[str]) -> list[dict[str, Any]]:
    """Return the messages that one of the assistant becomes."""
    results = {one["tool_use_id"]: one for one in content if _is_result(one)}
    calls = {one["id"]: one for one in content if _is_call(one)}
    messages: list[dict[str, Any]] = []
    said: list[Any] = []
    for block in content:
        kind = block.get("type") if isinstance(block, Mapping) else None
        if _is_read(block):
            said.append(block)
        elif is_text(block):
            said.append(_text(readable(block).text))
        elif kind == "compaction" and isinstance(block.get("content"), str):
            said.append(_text(block["content"]))  # what was said before, in short
        elif _is_call(block) and block["id"] in results:
            call = {"id": block["id"], "name": block.get("name"), "input": block.get("input") or {}}
            said.append({"type": "tool_use", **call})
            answer = _result({"tool_use_id": block["id"]}, results[block["id"]], left_out)
            messages += [{**message, "content": said}, {"role": "user", "content": [answer]}]
            said = []
        elif not (_is_result(block) and block["tool_use_id"] in calls):
            left_out.append(str(kind))
    return messages if messages and not said else [*messages, {**message, "content": said}]


def _user(content: list[Any], left_out: list[str]) -> list[Any]:
    """Return the blocks of a message that is not the assistant's."""
    blocks = []
    for block in content:
        if _is_read(block):
            blocks.append(block)
        elif block.get("type") == "tool_result":
            blocks.append(_result(block, block, left_out))
        elif is_text(block):
            blocks.append(_text(readable(block).text))
        elif block.get("type") in _NOTES:
            left_out.append(block["type"])
        else:
            blocks.append(block)
    return blocks


def _is_call(block: Any) -> bool:
    return _foreign_kind(block).endswith("_tool_use") and isinstance(block.get("id"), str)


def _is_result(block: Any) -> bool:
    is_result = _foreign_kind(block).endswith("_tool_result")
    return is_result and isinstance(block.get("tool_use_id"), str)


def _foreign_kind(block: Any) -> str:
    """Return the type of a block that no body here has, else nothing."""
    kind = block.get("type") if isinstance(block, Mapping) else None
    return kind if isinstance(kind, str) and kind not in READ else ""


def _result(fields: Block, block: Block, left_out: list[str]) -> dict[str, Any]:
    """Return the result of a tool with these fields, and what a block has as text."""
    content = block.get("content")
    parts = []
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, Mapping) and part.get("type") == "text":
            parts.append(part)
            continue
        piece = readable(part)
        left_out += piece.left_out
        parts.append(_text(piece.text))
    return {**fields, "type": "tool_result", "content": parts}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
