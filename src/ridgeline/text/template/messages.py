"""Messages of any client, as chat templates are written for them.

Each conversation passes here, from the server's APIs, ``LLM.chat``, the terminal or a file of
requests. A null is absence: many templates ask whether a field is there, and then use it. So no
field reaches a template that the message does not have, except ``content``, which is always a text:
nearly all templates add it to others. What other models and hosted tools wrote becomes text and
calls of functions. It knows nothing of any one template.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

_ROLES = ("system", "developer", "user", "assistant", "tool")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # clients' names of what was thought


def plain_message(message: Any, where: str) -> dict[str, Any]:
    """Return a message with what it has: its content a text, its thoughts ``reasoning_content``.

    Raises ValueError, which says ``where``, for what is no message or has parts of other kinds.
    """
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} must be an object with role and content")
    said, _ = familiar(message)
    said = _without_nulls(said)
    role = said.get("role")
    if role not in _ROLES:
        raise ValueError(f"{where}.role is {role!r}; use one of {', '.join(_ROLES)}")
    content = said.get("content", "" if role in ("assistant", "tool") else None)
    if isinstance(content, list):
        content = "\n".join(_text(p, f"{where}.content[{i}]") for i, p in enumerate(content))
    if not isinstance(content, str):
        raise ValueError(f"{where}.content must be a string or a list of text parts")
    said["content"] = content
    thoughts = next((said[name] for name in _THOUGHTS if said.get(name)), None)
    said = {name: value for name, value in said.items() if name not in _THOUGHTS}
    if thoughts:
        said["reasoning_content"] = thoughts
    if calls := said.get("tool_calls"):
        if not isinstance(calls, list | tuple):
            raise ValueError(f"{where}.tool_calls must be a list of calls")
        said["tool_calls"] = [_call(call) for call in calls]
        return said
    return {name: value for name, value in said.items() if name != "tool_calls"}


def plain_tool(tool: Any) -> Any:
    """Return a tool without nulls; those in the schema of its parameters mean something."""
    if isinstance(tool, Mapping):
        tool = _without_nulls(tool)
        if isinstance(tool.get("function"), Mapping):
            tool["function"] = _without_nulls(tool["function"])
    return tool


def familiar(
    message: Mapping[str, Any], *, may_lose: bool = True
) -> tuple[dict[str, Any], list[str]]:
    """Return a message of OpenAI's kind without what only some models and servers write.

    Older calls and results, calls of custom tools, refusals and other parts become what every
    message may have. What cannot be read becomes a line in the result of a tool, and is left out of
    what an assistant said; in what a user said it stays.

    Args:
        message: with any fields.
        may_lose: whether what cannot be read may be left out.

    Returns:
        the message, and names of what it lost.
    """
    said, lost = dict(message), list[str]()
    if said.get("role") == "function":
        said["role"] = "tool"
        said.setdefault("tool_call_id", f"call_{said.get('name')}")
    if said.get("role") == "assistant":
        _read_calls(said)
        refusal = said.get("refusal")
        if isinstance(refusal, str) and not said.get("content"):
            said["content"] = said.pop("refusal")
    if isinstance(said.get("content"), list):
        _read_parts(said, lost, may_lose=may_lose)
    return said, lost


def _read_calls(said: dict[str, Any]) -> None:
    """Let older calls and calls of custom tools be calls of functions."""
    old, calls = said.get("function_call"), said.get("tool_calls")
    if isinstance(old, Mapping) and not calls:
        del said["function_call"]
        calls = [{"id": f"call_{old.get('name')}", "type": "function", "function": old}]
        said["tool_calls"] = calls
    if isinstance(calls, list) and any(map(_is_custom, calls)):
        said["tool_calls"] = [_of_custom(call) if _is_custom(call) else call for call in calls]


def _is_custom(call: Any) -> bool:
    return isinstance(call, Mapping) and isinstance(call.get("custom"), Mapping)


def _of_custom(call: Mapping[str, Any]) -> dict[str, Any]:
    custom = call["custom"]
    arguments = json.dumps({"input": custom.get("input")}, ensure_ascii=False)
    function = {"name": custom.get("name"), "arguments": arguments}
    rest = {name: value for name, value in call.items() if name != "custom"}
    return {**rest, "type": "function", "function": function}


def _read_parts(said: dict[str, Any], lost: list[str], *, may_lose: bool) -> None:
    role, parts, thoughts = said.get("role"), list[Any](), list[str]()
    for part in said["content"]:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "text" or not isinstance(kind, str):
            parts.append(part)  # as it should be, or no part at all
        elif is_text(part):
            parts.append({"type": "text", "text": readable(part).text})
        elif role == "assistant" and kind == "thinking":
            thoughts.append(readable(part.get("thinking")).text)
        elif not may_lose or role not in ("assistant", "tool"):
            parts.append(part)
        else:
            content = readable(part)
            lost += [f"content ({one})" for one in content.left_out or (kind,)]
            parts += [{"type": "text", "text": content.text}] * (role == "tool")
    said["content"] = parts
    if thoughts and not any(said.get(name) for name in _THOUGHTS):
        said["reasoning_content"] = "\n".join(thoughts)


def _call(call: Any) -> Any:
    """Return a call without nulls; its arguments are an object, as templates expect, not its text.

    Nulls among the arguments are the model's own.
    """
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = _without_nulls(call["function"])
    with suppress(TypeError, ValueError, RecursionError):  # an object already, or cut in the middle
        function["arguments"] = json.loads(function.get("arguments") or "{}")
    return {**_without_nulls(call), "function": function}


def _text(part: Any, where: str) -> str:
    if not isinstance(part, Mapping) or part.get("type") != "text":
        raise ValueError(f"{where} is not of type 'text'; this engine reads text only")
    if not isinstance(part.get("text"), str):
        raise ValueError(f"{where}.text must be a string")
    return str(part["text"])


def _without_nulls(value: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one for name, one in value.items() if one is not None}


_WORDS = {  # types of parts that are text, and where it stands
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    **dict.fromkeys(("reasoning_text", "summary_text"), "text"),
    "refusal": "refusal",
}
_TEXTUAL = (*_WORDS, "document", "file", "input_file", "search_result")
_MEDIA = (
    *("audio", "audio_url", "computer_screenshot", "document", "file", "image", "image_url"),
    *("input_audio", "input_file", "input_image", "video", "video_url"),
)
_SEALED = ("encrypted_content", "encrypted_index", "encrypted_stdout")  # for its maker's eyes
_UNSPOKEN = ("cache_control", "citations", "signature")
_DATA_URL = re.compile(r"data:(text/[^;,]+|application/(?:json|xml))[^,]*;base64,")


class Readable(NamedTuple):
    """What can be read of a value.

    Attributes:
        text: the text.
        left_out: types of parts, or names of fields, that are not in it.
    """

    text: str
    left_out: tuple[str, ...] = ()


def readable(value: Any) -> Readable:
    """Return a JSON value as text; what no part of a message is stays JSON."""
    if isinstance(value, str):
        return Readable(value)
    if isinstance(value, list):
        return _joined([readable(one) for one in value])
    if not isinstance(value, Mapping):
        return Readable("" if value is None else json.dumps(value))
    left_out: list[str] = []
    content = _with_texts(value, left_out)
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return Readable(text, tuple(left_out))


def is_text(part: Any) -> bool:
    """Whether a part of a message is text, and nothing else."""
    if not isinstance(part, Mapping) or part.get("type") not in _TEXTUAL:
        return False
    word = _WORDS.get(part["type"])
    return isinstance(part.get(word), str) if word else not readable(part).left_out


def _with_texts(value: Any, left_out: list[str]) -> Any:
    """Return a JSON value with parts of messages as their texts; add to what is left out."""
    if isinstance(value, list):
        return [_with_texts(one, left_out) for one in value]
    if not isinstance(value, Mapping):
        return value
    kind = value.get("type")
    if isinstance(kind, str):
        part = _part(kind, value)
        if part is not None:
            left_out += part.left_out
            return part.text
    left_out += [name for name in _SEALED if value.get(name)]
    return {
        name: _with_texts(one, left_out)
        for name, one in value.items()
        if name not in (*_SEALED, *_UNSPOKEN) and one is not None
    }


def _part(kind: str, part: Mapping[str, Any]) -> Readable | None:
    """Return what can be read of a part of a message, None if the value is no such part."""
    if word := _WORDS.get(kind):
        return Readable(part[word]) if isinstance(part.get(word), str) else None
    inside: Readable | None = None
    if kind == "search_result":
        inside = readable([part.get("source"), part.get("content")])
    elif kind == "document":
        inside = _source(part.get("source"))
    elif kind in ("file", "input_file"):
        of_chat = part.get("file")
        part = of_chat if isinstance(of_chat, Mapping) else part
        inside = _decoded(part.get("file_data"))
    title = [part.get(name) for name in ("title", "filename", "context")]
    if inside is not None:
        return _joined([readable([one for one in title if isinstance(one, str)]), inside])
    if kind not in _MEDIA and part.get("file_type") not in ("image", "pdf"):
        return None
    name = next((f" {one}" for one in title if isinstance(one, str)), "")
    return Readable(f"[{kind}{name}: not shown, since this model reads only text]", (kind,))


def _source(source: Any) -> Readable | None:
    """Return what can be read of the source of Anthropic's documents, None for nothing."""
    match source:
        case {"type": "text", "data": str(data)}:
            return Readable(data)
        case {"type": "content", "content": content}:
            return readable(content)
    return None


def _decoded(data: Any) -> Readable | None:
    """Return the text that a URL of data has, None if there is none in it."""
    match = _DATA_URL.match(data) if isinstance(data, str) else None
    if match is None:
        return None
    try:
        return Readable(base64.b64decode(data[match.end() :], validate=True).decode())
    except ValueError:
        return None


def _joined(parts: list[Readable]) -> Readable:
    return Readable(
        "\n".join(one.text for one in parts if one.text),
        tuple(name for one in parts for name in one.left_out),
    )
