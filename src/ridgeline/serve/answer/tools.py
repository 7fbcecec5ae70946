"""The tools of a request: what OpenAI's fields allow to be called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ridgeline.serve.http.request_body import bad_value
from ridgeline.text.messages.tools import Tool, ToolUse

_MODES = ("none", "auto", "required")


def wanted_tools(
    tools: Sequence[Tool], choice: str | dict[str, Any] | None, is_parallel: bool | None
) -> ToolUse | None:
    """Return what may be called, None for nothing.

    Args:
        tools: all that the request has.
        choice: its ``tool_choice``: none, auto, required, a named function, or allowed_tools.
        is_parallel: whether there may be several calls; None where it is not said: there may be
            if none has to come, since who forces a call wants it and no other.

    Raises ApiError, which names the field.
    """
    names = [tool.name for tool in tools]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise bad_value(f"tools[{i}].function.name", f"{name!r} is there twice")
    if choice is None:
        choice = "auto" if tools else "none"
    allowed, mode = list(tools), choice
    if isinstance(choice, dict):
        allowed, mode = _chosen(choice, tools)
        is_parallel = False if choice.get("type") == "function" else is_parallel
    if mode not in _MODES:
        raise bad_value("tool_choice", f"it must be one of {', '.join(_MODES)}, or an object")
    if mode == "none" or (mode == "auto" and not tools):
        return None
    if not allowed:
        raise bad_value("tool_choice", "it requires a call, but there are no tools")
    is_required = mode == "required"
    return ToolUse(
        tuple(allowed), is_required, not is_required if is_parallel is None else is_parallel
    )


def is_named(choice: object) -> bool:
    """Return whether a ``tool_choice`` names the one function to call."""
    return isinstance(choice, dict) and choice.get("type") == "function"


def _chosen(choice: dict[str, Any], tools: Sequence[Tool]) -> tuple[list[Tool], Any]:
    """Return the tools that an object allows, and its mode."""
    match choice:
        case {"type": "function", "function": {"name": str(name)}}:
            return [_named(name, tools, "tool_choice.function.name")], "required"
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*some]}}:
            where = "tool_choice.allowed_tools"
            if mode not in ("auto", "required"):
                raise bad_value(f"{where}.mode", "it must be auto or required")
            return [_named(_name(one), tools, f"{where}.tools") for one in some], mode
    raise bad_value(
        "tool_choice",
        'an object must be {"type": "function", "function": {"name": ...}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}',
    )


def _name(one: Any) -> Any:
    match one:
        case {"type": "function", "function": {"name": name}}:
            return name
    return one


def _named(name: Any, tools: Sequence[Tool], where: str) -> Tool:
    for tool in tools:
        if tool.name == name:
            return tool
    raise bad_value(where, f"there is no tool {name!r:.80}")
