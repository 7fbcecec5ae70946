"""StructuredOutputsParams: what form an answer must have. One kind, checked whole, at the edge.

It knows nothing of grammar libraries: what a schema or a grammar means is decided in
``text.grammar.grammars``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsParams:
    """The form of an answer. Names are those of vLLM; exactly one of the first five is set.

    Attributes:
        json: a JSON schema, as text or as an object.
        json_object: any JSON object.
        regex: a regular expression that the whole answer matches.
        choice: the answer is one of these.
        grammar: a grammar in Lark's, GBNF's or EBNF's notation.
        disable_any_whitespace: no white space between the parts of JSON.
        whitespace_pattern: a regular expression for it instead; by default at most 20 characters.
    """

    json: str | Mapping[str, Any] | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        """Raise ValueError unless one kind is set, to a value of its type."""
        kinds = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if self.json is False:  # a schema that nothing fits is a schema
            kinds.insert(0, "json")
        if len(kinds) != 1:
            said = " and ".join(kinds) or "none of them"
            raise ValueError(
                f"structured_outputs sets {said}: it must set one of {', '.join(KINDS)}"
            )
        for name in ("regex", "grammar", "whitespace_pattern"):
            if not isinstance(getattr(self, name), str | None):
                raise ValueError(f"structured_outputs.{name} must be text")
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool | None):
                raise ValueError(f"structured_outputs.{name} must be true or false")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise ValueError(
                "structured_outputs sets disable_any_whitespace and whitespace_pattern: one of them"
            )
        self._check_choice()
        object.__setattr__(self, "json", _schema_text(self.json))

    def _check_choice(self) -> None:
        if self.choice is None:
            return
        if isinstance(self.choice, str) or not isinstance(self.choice, Sequence):
            raise ValueError("structured_outputs.choice must be a list of texts")
        if not self.choice or not all(isinstance(text, str) and text for text in self.choice):
            raise ValueError("structured_outputs.choice must have texts, none of them empty")
        object.__setattr__(self, "choice", tuple(self.choice))


def _schema_text(schema: object) -> str | None:
    """Return a schema as JSON text, whatever it came as."""
    if schema is None or isinstance(schema, str):
        return schema
    if isinstance(schema, bool | Mapping):
        return json.dumps(schema)
    raise ValueError("structured_outputs.json must be a JSON schema: an object, or its text")
