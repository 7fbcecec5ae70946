"""A chat on the terminal: its messages, its system prompt, its sampling, and the commands to them.

It prints and computes nothing: a command returns what to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ridgeline.core.params import SamplingParams
from ridgeline.system.machine import write_text

HELP = """\
\"\"\"          begins and ends a message of several lines
/clear       forget the conversation
/set NAME VALUE     a sampling parameter, such as /set temperature 0.7
/set system TEXT    the system prompt
/show        the model, the system prompt and the parameters
/save FILE   keep the conversation
/load FILE   go on with one that was kept
/help        this
/exit        leave (so does Ctrl-D); Ctrl-C stops an answer"""

# What is a command: "/etc/hosts has a line that" is a message.
COMMAND = re.compile(r"/[a-z?]+(?=\s|$)", re.IGNORECASE)
_NAMES = (
    "temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty",
    "presence_penalty", "frequency_penalty", "seed", "max_tokens", "stop",
)  # fmt: skip
_OF_OLLAMA = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty"}
_ROLES = ("user", "assistant")


class ChatState:
    """What a chat has said, and how it goes on.

    Attributes:
        messages: of user and assistant, in turn.
        system: the system prompt; empty for none.
        params: how the next answer is sampled.
    """

    def __init__(self, model: str, params: SamplingParams) -> None:
        self.messages: list[dict[str, str]] = []
        self.system = ""
        self.params = params
        self._model = model
        self._usual = params

    @property
    def prompt(self) -> list[dict[str, str]]:
        """All messages, the system prompt first."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        return [*first, *self.messages]

    def do(self, text: str) -> str:
        """Do a command; return what to say. Raises ValueError and OSError, in words."""
        name, _, rest = text.partition(" ")
        commands: Mapping[str, Callable[[str], str]] = {
            "/clear": self._clear,
            "/set": self._set,
            "/show": self._show,
            "/save": self._save,
            "/load": self._load,
        }
        if name.lower() not in commands:
            raise ValueError(f"there is no command {name}; /help lists all")
        return commands[name.lower()](rest.strip())

    def _clear(self, rest: str) -> str:
        self.messages.clear()
        return "forgotten"

    def _set(self, rest: str) -> str:
        name, _, value = rest.removeprefix("parameter ").strip().partition(" ")
        name, value = _OF_OLLAMA.get(name, name), value.strip()
        if name == "system":
            self.system = _unquoted(value)
            return "system prompt set" if value else "no system prompt"
        if name not in _NAMES or not value:
            names = ", ".join(("system", *_NAMES))
            raise ValueError(f"/set NAME VALUE, where NAME is one of {names}")
        self.params = replace(self.params, **{name: _value(name, value)})
        return f"{name} is {getattr(self.params, name)!r}"

    def _show(self, rest: str) -> str:
        num_turns = len(self.messages) // 2
        lines = [
            f"model       {self._model}",
            f"system      {self.system or 'none'}",
            f"answers     {num_turns} so far",
        ]
        return "\n".join(lines + [f"{name:<20}{value}" for name, value in self._set_values()])

    def _set_values(self) -> list[tuple[str, str]]:
        values = ((name, getattr(self.params, name)) for name in _NAMES)
        return [(name, json.dumps(value)) for name, value in values if value not in (None, ())]

    def _save(self, rest: str) -> str:
        path = _file(rest)
        usual = {field.name: getattr(self._usual, field.name) for field in fields(self._usual)}
        changed = {
            name: value for name in _NAMES if (value := getattr(self.params, name)) != usual[name]
        }
        document = {
            "model": self._model,
            "system": self.system,
            "parameters": changed,
            "messages": self.messages,
        }
        write_text(path, json.dumps(document, indent=1, ensure_ascii=False) + "\n")
        return f"kept in {path}"

    def _load(self, rest: str) -> str:
        path = _file(rest)
        try:
            document = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} is not a conversation written by /save ({error})") from error
        messages, system, parameters = _checked(path, document)
        self.params = replace(self._usual, **parameters)
        self.messages, self.system = messages, system
        model = document.get("model")
        other = f", of {model}" if model and model != self._model else ""
        return f"{len(messages) // 2} answers from {path}{other}"


def _checked(path: Path, document: Any) -> tuple[list[dict[str, str]], str, dict[str, Any]]:
    """Return messages, system prompt and parameters of a file. Raises ValueError for any other."""
    wrong = ValueError(f"{path} is not a conversation written by /save")
    if not isinstance(document, dict):
        raise wrong
    messages, system = document.get("messages"), document.get("system", "")
    parameters = document.get("parameters", {})
    if not (
        isinstance(messages, list) and isinstance(system, str) and isinstance(parameters, dict)
    ):
        raise wrong
    for i, message in enumerate(messages):
        is_turn = isinstance(message, dict) and message.get("role") == _ROLES[i % 2]
        if not is_turn or not isinstance(message.get("content"), str):
            raise wrong
    if len(messages) % 2 or any(name not in _NAMES for name in parameters):
        raise wrong
    history = [{"role": one["role"], "content": one["content"]} for one in messages]
    return history, system, parameters


def _file(text: str) -> Path:
    if not text:
        raise ValueError("/save and /load need the name of a file")
    path = Path(_unquoted(text)).expanduser()
    return path if path.suffix else path.with_suffix(".json")


def _unquoted(text: str) -> str:
    is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "\"'"
    return text[1:-1] if is_quoted else text


def _value(name: str, text: str) -> Any:
    """Return a value as its parameter wants it. Raises ValueError for what is no number."""
    if name == "stop":
        return tuple(_unquoted(part) for part in text.split())
    if text.lower() in ("none", "default") and name in ("seed", "max_tokens"):
        return None
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            raise ValueError(f"{name} is a number, not {text!r}") from None
