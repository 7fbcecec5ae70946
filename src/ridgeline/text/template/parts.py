"""Contents of messages as text, whatever model, tool or API they came from.

What is text becomes text: parts of all APIs, refusals, documents, search results, what hosted tools
returned. What is none (images, audio, ciphers) becomes a line that says so, and is named.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

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
    told = _told(value, left_out)
    text = told if isinstance(told, str) else json.dumps(told, ensure_ascii=False)
    return Readable(text, tuple(left_out))


def is_text(part: Any) -> bool:
    """Whether a part of a message is text, and nothing else."""
    if not isinstance(part, Mapping) or part.get("type") not in _TEXTUAL:
        return False
    word = _WORDS.get(part["type"])
    return isinstance(part.get(word), str) if word else not readable(part).left_out


def _told(value: Any, left_out: list[str]) -> Any:
    """Return a JSON value with parts of messages as their texts; add to what is left out."""
    if isinstance(value, list):
        return [_told(one, left_out) for one in value]
    if not isinstance(value, Mapping):
        return value
    kind = value.get("type")
    if isinstance(kind, str):
        found = _part(kind, value)
        if found is not None:
            left_out += found.left_out
            return found.text
    left_out += [name for name in _SEALED if value.get(name)]
    return {
        name: _told(one, left_out)
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


def _joined(found: list[Readable]) -> Readable:
    return Readable(
        "\n".join(one.text for one in found if one.text),
        tuple(name for one in found for name in one.left_out),
    )
