"""Further names of models, each with what a request by that name does not say itself.

``/api/create`` and ``/api/copy`` make them. Each is a small file below the program's own folder, so
all servers of a machine have it, also after a restart. It loads nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ridgeline.serve.answer.conversation import Message, Rendering
from ridgeline.serve.answer.protocol import ChatRequest, CompletionRequest

NAME = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
_SAMPLING = (
    *("seed", "temperature", "top_k", "top_p", "min_p", "typical_p"),
    *("presence_penalty", "frequency_penalty", "stop", "repeat_last_n"),
)
_SYSTEM = ("system", "developer")  # roles


@dataclass(frozen=True, slots=True)
class Alias:
    """A name, and what it adds.

    Attributes:
        name: as requests give it.
        model: the name of the model, or of an adapter, that answers.
        system: the first message of a conversation that has none of this kind.
        template: a chat template (Jinja) in place of the model's.
        parameters: Ollama's options, checked, for what a request leaves out.
        messages: OpenAI's, which stand before a request's.
        created_s: when it was made, in seconds since 1970.
    """

    name: str
    model: str
    system: str = ""
    template: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    created_s: int = 0

    def fill(self, request: Rendering | CompletionRequest) -> None:
        """Give a request what it does not say itself."""
        if isinstance(request, ChatRequest | CompletionRequest):
            self._fill_sampling(request)
        if isinstance(request, Rendering):
            said = request.messages
            num_own = next((i for i, one in enumerate(said) if one.role not in _SYSTEM), len(said))
            own = said[:num_own]
            if self.system and not own:
                own = [Message.model_validate({"role": "system", "content": self.system})]
            examples = [Message.model_validate(dict(one)) for one in self.messages]
            request.messages = [*own, *examples, *said[num_own:]]
            request.chat_template = request.chat_template or self.template or None

    def _fill_sampling(self, request: ChatRequest | CompletionRequest) -> None:
        said = self.parameters
        for name in _SAMPLING:
            if getattr(request, name) is None:
                setattr(request, name, said.get(name))
        if request.repeat_penalty is None and request.repetition_penalty is None:
            request.repeat_penalty = said.get("repeat_penalty")
        if request.longest is None and (said.get("num_predict") or -1) > 0:
            request.max_tokens = said["num_predict"]


class Aliases:
    """The aliases that are kept in a folder."""

    def __init__(self, home: Path | None) -> None:
        """Keep them below the program's folder; without one there are none."""
        self._folder = home and home / "aliases"

    def find(self, name: str) -> Alias | None:
        """Return the alias of a name; ``:latest``, which Ollama's clients add, says nothing."""
        for one in (name, name.removesuffix(":latest")):
            if self._folder and NAME.fullmatch(one) and (alias := _read(self._path(one))):
                return alias
        return None

    def all(self) -> Iterator[Alias]:
        """Yield them by their names."""
        for path in sorted(self._folder.glob("*.json")) if self._folder else ():
            if alias := _read(path):
                yield alias

    def keep(self, alias: Alias) -> None:
        """Have an alias, in place of another of the same name. Raises OSError if it cannot be kept,
        and ValueError where nothing is.
        """
        if self._folder is None:
            raise ValueError("this server keeps no files, and so no further names of models")
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._path(alias.name)
        part = path.with_suffix(".writing")
        part.write_text(json.dumps(asdict(alias)))
        part.replace(path)

    def forget(self, alias: Alias) -> None:
        """Have it no more."""
        self._path(alias.name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{quote(name, safe='')}.json"


def _read(path: Path) -> Alias | None:
    """Return the alias of a file; None if it is not there, or of another version."""
    try:
        return Alias(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
