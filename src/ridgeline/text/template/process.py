"""The program that renders a chat template, in a process of its own: ``template.chat`` runs it.

A template is code from a model file. jinja2's immutable sandbox limits what it can reach. Only a
process can limit its time and memory, since one expression may ask for hours or terabytes. Reads
lines of JSON, writes one for each. A template tells the time that comes with the question: there is
no clock here, so a prompt can be written again.
Of Ridgeline it imports what sets those limits.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ridgeline.text import process_limits as limits

_MAX_PROCESS_BYTES = 1 << 30
_MAX_RENDERED_CHARS = 1 << 24


def main() -> None:
    """Take the template's source, say that all is ready, and render once for each further line."""
    limits.begin(_MAX_PROCESS_BYTES)
    questions = limits.lines()
    source = json.loads(next(questions))
    compiled: jinja2.Template | None = None
    limits.answer({})
    for line in questions:
        question = json.loads(line)
        limits.bound_cpu(question["limit_s"])
        try:
            compiled = compiled or _environment().from_string(source)
            now = datetime.fromisoformat(question["now"]).replace(tzinfo=None)
            variables = question["variables"] | {"strftime_now": now.strftime}
            answer = {"text": _render(compiled, variables)}
        except Exception as error:  # foreign code may raise anything
            lines = (str(error) or type(error).__name__).splitlines()
            answer = {"error": lines[0]}
        limits.answer(answer)


def _render(template: jinja2.Template, context: dict[str, Any]) -> str:
    parts, length = [], 0
    for part in template.generate(context):
        parts.append(part)
        length += len(part)
        if length > _MAX_RENDERED_CHARS:
            raise OverflowError(f"its output exceeds {_MAX_RENDERED_CHARS} characters")
    return "".join(parts)


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``, a mark for training: here, its inside."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the sandbox that Hugging Face's templates are written for."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    main()
