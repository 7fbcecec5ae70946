"""What a command is given: dataclasses as flags, and text whatever the locale and the terminal.

There is one flag for each field, with the help that the field brings.
"""

from __future__ import annotations

import inspect
import os
import select
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

_TYPED: dict[str | None, Any] = {"text": str | None, "texts": list[str] | None, "path": Path | None}

# What a value is not, by pydantic's name for the error.
_NOT_OF_A_TYPE = {
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "bool_parsing": "yes or no",
}
_STDIN_WAIT_S = 10.0  # for the first of what another program may still have to compute
_MAX_STDIN_CHARS = 8 << 20


class UsageError(Exception):
    """Flags that contradict each other or the model; ends with status 2."""


def reason_of(error: Exception) -> str:
    """Return why click refuses a value, naming the value and without pydantic's words."""
    for problem in getattr(error.__cause__, "errors", list)():
        if kind := _NOT_OF_A_TYPE.get(problem["type"]):
            return f"{problem['input']!r} is not {kind}"
    return str(getattr(error, "message", None) or error).removeprefix("Value error, ")


def flags(
    parameter: str,
    kind: type[Any],
    *,
    fixed: Mapping[str, Any] | None = None,
    only: Collection[str] | None = None,
    helps: Mapping[str, str] | None = None,
    unless: tuple[str, ...] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Replace a command's ``parameter``, a dataclass, by one flag for each of its fields.

    Fields in ``fixed`` have that value, and no flag; fields that are not in ``only`` have none
    either. ``helps`` are said of a field instead of the help that it brings. If one of the flags
    ``unless`` is given, the parameter is None, and none of its own flags may be given.
    """
    set_before = fixed or {}

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        kinds = get_type_hints(kind)
        added = [
            inspect.Parameter(
                field.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if field.default is MISSING else field.default,
                annotation=Annotated[
                    _TYPED.get(field.metadata.get("typed"), kinds[field.name]),
                    _flag(field, (helps or {}).get(field.name)),
                ],
            )
            for field in fields(kind)
            if field.name not in set_before and (only is None or field.name in only)
        ]

        @wraps(command)
        def wrapper(**arguments: Any) -> None:
            flag_values = {flag.name: arguments.pop(flag.name) for flag in added}
            if any(arguments[name] is not None for name in unless):
                for flag in added:
                    if flag_values[flag.name] != flag.default:
                        name = flag.name.replace("_", "-")
                        raise UsageError(
                            f"--{name} cannot be given: the file with the load already sets it"
                        )
                command(**arguments, **{parameter: None})
                return
            try:
                value = kind(**set_before, **flag_values)
            except ValueError as error:
                raise UsageError(error) from error
            command(**arguments, **{parameter: value})

        signature = inspect.signature(command, eval_str=True)
        own = [p for p in signature.parameters.values() if p.name != parameter]
        wrapper.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        wrapper.__annotations__ = {p.name: p.annotation for p in (*own, *added)}
        return wrapper

    return decorate


def _flag(field: Field[Any], help: str | None) -> Any:
    said = help or field.metadata["help"]
    return typer.Option(help=said, envvar=field.metadata.get("envvar"))


def as_text(argument: str, name: str = "") -> str:
    """Return an argument as the text it was, if the locale could not spell it.

    Raises UsageError, which calls it by its ``name`` or quotes it, for bytes that are not UTF-8.
    """
    if not any("\ud800" <= char <= "\udfff" for char in argument):
        return argument
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeDecodeError as error:
        where = f"{name or repr(argument)} is not UTF-8 at byte {error.start}"
        raise UsageError(f"{where}: {error.reason}") from error


def with_stdin(prompt: str | None) -> str | None:
    """Return PROMPT and after it what is piped in; None where a chat is meant."""
    if sys.stdin is not None and sys.stdin.isatty():
        return prompt
    piped = _piped(None if prompt is None else _STDIN_WAIT_S)
    if prompt is None and not piped.strip():
        raise UsageError("standard input is empty: give a PROMPT, or start a chat in a terminal")
    if not prompt or not piped.strip():
        return prompt or piped
    return f"{prompt}\n\n{piped}"


def _piped(wait_s: float | None) -> str:
    """Return standard input, "" where it is closed or stays silent for so long."""
    if sys.stdin is None:
        return ""
    if not select.select([sys.stdin], [], [], wait_s)[0]:
        print("note: nothing came on standard input; only PROMPT is answered", file=sys.stderr)
        return ""
    try:
        text = sys.stdin.read(_MAX_STDIN_CHARS + 1)
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not text: {error}") from error
    if len(text) > _MAX_STDIN_CHARS:
        raise UsageError(f"standard input has more than {_MAX_STDIN_CHARS:,} characters")
    return as_text(text, "standard input")
