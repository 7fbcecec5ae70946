"""The chat templates of published models: however a client spells a conversation, the prompt is
what transformers makes of it in plain words.

The templates are others', so they are read where they lie: in the sources that ``make
test-parity-full`` fetches, and in the folder ``templates`` of Ridgeline's home.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ridgeline.engine.setup.home import default_home
from ridgeline.text.template.chat import ChatTemplate
from tests.model.files.vocabularies import byte_level, ours

rendered = pytest.importorskip("transformers.utils.chat_template_utils").render_jinja_template

FOLDERS = (Path(__file__).parents[2] / ".venv-parity" / "source", default_home() / "templates")
NAMES = ("name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "thinking")
NULLS = dict.fromkeys((*NAMES, "refusal", "audio", "annotations", "function_call"))

CALL = {"id": "call00001", "type": "function",
        "function": {"name": "weather", "arguments": {"city": "Rome", "at": None}}}  # fmt: skip
TOOL = {"type": "function", "function": {
    "name": "weather", "description": "Of a city", "parameters": {
        "type": "object", "properties": {"city": {"type": "string", "description": "Its name"}},
        "required": ["city"]}}}  # fmt: skip
USER, MORE = ({"role": "user", "content": one} for one in ("Hi", "More"))
SAID = {"role": "assistant", "content": "Hello"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "warm"}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "turns": [USER, SAID, MORE],
    "system": [{"role": "system", "content": "Be brief."}, USER, SAID, MORE],
    "ends with an answer": [USER, SAID],
    "thoughts": [USER, SAID | {"reasoning_content": "Hm"}, MORE],
    "thoughts at the end": [USER, SAID | {"reasoning_content": "Hm"}],
    "a call": [USER, CALLED, RESULT],
    "a call and words": [USER, CALLED | {"content": "Wait."}, RESULT],
    "a call done": [USER, CALLED, RESULT, SAID, MORE],
}


def templates() -> dict[str, str]:
    """All templates that are here, by name; each once."""
    found: dict[str, str] = {}
    for folder in FOLDERS:
        for file in sorted(folder.rglob("*.jinja")):
            found.setdefault(file.read_text(), file.stem)
        for file in sorted(folder.rglob("llm/models/*.json")):
            for name, source in _of_json(json.loads(file.read_text()), file.stem):
                found.setdefault(source, name)
    return {f"{name}-{i}": source for i, (source, name) in enumerate(found.items())}


def _of_json(value: Any, name: str) -> Iterator[tuple[str, str]]:
    for one in value if isinstance(value, list) else [value]:
        if isinstance(one, dict) and isinstance(source := one.get("chat_template"), str):
            yield one.get("model_name", name), source


def spellings(chat: list[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield a conversation as clients send it."""
    yield "plain", chat
    yield "nulls", [NULLS | one for one in chat]
    yield "no calls", [one | {"tool_calls": one.get("tool_calls", [])} for one in chat]
    yield "parts", [one | {"content": [{"type": "text", "text": one["content"]}]} for one in chat]
    yield "as OpenAI answers", [as_answered(one) for one in chat]


def as_answered(message: dict[str, Any]) -> dict[str, Any]:
    """A message as OpenAI's client has it: arguments are text, what there is not is null."""
    if message["role"] != "assistant":
        return message
    calls = [
        {**call, "index": None, "function": call["function"] | {
            "arguments": json.dumps(call["function"]["arguments"]), "parsed_arguments": None}}
        for call in message.get("tool_calls", ())
    ]  # fmt: skip
    return NULLS | message | {"content": message["content"] or None, "tool_calls": calls or None}


def theirs(source: str, chat: list[dict[str, Any]], tools: list[Any] | None) -> str | None:
    """What transformers makes of a conversation, None where it fails."""
    names = ("reasoning", "thinking", "thought")  # what the template calls thoughts
    chat = [
        one | dict.fromkeys(names, one["reasoning_content"]) if "reasoning_content" in one else one
        for one in chat
    ]
    try:
        prompts, _ = rendered(
            [copy.deepcopy(chat)], tools=tools, chat_template=source, add_generation_prompt=True,
            bos_token="<s>", eos_token="</s>",
        )  # fmt: skip
        return str(prompts[0])
    except Exception:  # a template may raise anything
        return None


def written(template: ChatTemplate, chat: list[dict[str, Any]], tools: list[Any] | None) -> str:
    """What ours makes of a conversation, its error where it is refused."""
    try:
        return template.render_text(chat, **({"tools": tools} if tools else {}))
    except ValueError as error:
        return f"refused: {error}"


@pytest.mark.parametrize("name", templates() or ["none"])
def test_any_spelling_is_the_prompt_of_the_plain_one(name: str) -> None:
    if name == "none":
        pytest.skip("no templates of published models are here: make test-parity-full has them")
    source = templates()[name]
    ours_is = ChatTemplate(source, ours(byte_level), bos_token="<s>", eos_token="</s>")
    try:
        for title, chat in CHATS.items():
            tools = [TOOL] if "call" in title else None
            expected = theirs(source, chat, tools)
            if tools and not ours_is.knows_tools:
                expected = None  # such a template has tools in words of ours
            for spelling, messages in spellings(chat):
                found = written(ours_is, messages, tools)
                if expected is None:  # then all spellings are alike, and nothing else is known
                    expected = found
                assert found == expected, (title, spelling)
    finally:
        ours_is.close()
