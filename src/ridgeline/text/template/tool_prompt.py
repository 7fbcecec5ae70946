"""Tools for models whose chat template knows none: they are told in words how to call.

The form is that of the ``hermes`` format, which most such models have seen. Calls and results of
earlier turns become plain text, since these templates would drop them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = dict[str, Any]
_HOW = """\
You can call these functions, one JSON object each:
{functions}

To call one, write its name and its arguments in this form, and wait for the result:
<tool_call>
{{"name": "function_name", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def taught(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> list[Message]:
    """Return messages that any template can write, with ``tools`` explained at the beginning."""
    plain = [_plain(message) for message in messages]
    if not tools:
        return plain
    lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = _HOW.format(functions=lines)
    if plain[0]["role"] != "system":
        return [{"role": "system", "content": text}, *plain]
    return [{**plain[0], "content": f"{plain[0]['content']}\n\n{text}"}, *plain[1:]]


def _plain(message: Message) -> Message:
    """Return a message without calls or results, which are in its content instead."""
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = message.get("tool_calls") or []
    written = [f"<tool_call>\n{_object(call)}\n</tool_call>" for call in calls]
    content = "\n".join(filter(None, [message["content"], *written]))
    return {**{k: v for k, v in message.items() if k != "tool_calls"}, "content": content}


def _object(call: Mapping[str, Any]) -> str:
    function = call.get("function", call)
    values = {"name": function.get("name"), "arguments": function.get("arguments")}
    return json.dumps(values, ensure_ascii=False)
