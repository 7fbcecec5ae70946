"""Where flags get their values: command line, environment, ``--config FILE.toml``, default.

The first of these that says something counts. A flag ``--max-model-len`` is the variable
``RIDGELINE_MAX_MODEL_LEN`` and the key ``max-model-len`` or ``max_model_len``. A key at the top of
the file is for every command that has the flag; in a table such as ``[serve]`` for that command.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer

from ridgeline.cli.flags import reason_of
from ridgeline.system.report import Table
from ridgeline.system.terminal import console, drawn

_TYPED = ("with_models",)  # clean --models: what removes things is said each time
_VARIABLE = "RIDGELINE_CONFIG"
_SECRET = ("api_key", "admin_api_key", "ssl_keyfile_password")
_EMPTY = typer.Typer(callback=lambda: None, add_completion=False)


def name_variables(root: Any) -> None:
    """Give each flag of the commands its environment variable."""
    for _, command in _leaves(root):
        for name, flag in _flags(command).items():
            flag.envvar = flag.envvar or f"RIDGELINE_{name.upper()}"


def take_config(arguments: list[str], environ: Mapping[str, str]) -> tuple[list[str], Path | None]:
    """Return the arguments without ``--config FILE``, which may stand anywhere, and the file.

    Raises ValueError if no file follows.
    """
    left, file = list[str](), environ.get(_VARIABLE)
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--config":
            file = next(remaining, None)
            if file is None:
                raise ValueError("--config needs a file: --config FILE.toml")
        elif argument.startswith("--config="):
            file = argument.partition("=")[2]
        else:
            left.append(argument)
    return left, Path(file) if file else None


def read_config(file: Path, root: Any) -> dict[str, Any]:
    """Return the values in a file as click's ``default_map`` for the commands below ``root``.

    Raises ValueError that names the file, the key and what would be right.
    """
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{file} cannot be read as TOML: {why}") from error
    defaults: dict[str, Any] = {}
    top = {key: value for key, value in content.items() if not isinstance(value, dict)}
    leaves = dict(_leaves(root))
    flags_by_name: dict[str, list[Any]] = {}
    for command in leaves.values():
        for name, flag in _flags(command).items():
            flags_by_name.setdefault(name, []).append(flag)
    for key, value in top.items():
        _check(file, key, value, flags_by_name)
    _check_tables(file, content, leaves)
    for path, command in leaves.items():
        table: Any = content
        for name in path:
            table = table.get(name, {})
        names = _flags(command)
        own = {key: value for key, value in table.items() if not isinstance(value, dict)}
        for key, value in own.items():
            kinds = {name: [flag] for name, flag in names.items()}
            _check(file, key, value, kinds, where=f"[{'.'.join(path)}] ")
        place = defaults
        for name in path[:-1]:
            place = place.setdefault(name, {})
        merged = {_plain(key): value for key, value in (top | own).items()}
        place[path[-1]] = {
            names[name].name: [value] if _is_alone(names[name], value) else value
            for name, value in merged.items()
            if name in names
        }
    return defaults


def _check_tables(
    file: Path, content: dict[str, Any], leaves: Mapping[tuple[str, ...], Any]
) -> None:
    """Raise ValueError for a table that is not a command."""
    groups = {path[:1] for path in leaves if len(path) > 1}
    tables = [(name,) for name, value in content.items() if isinstance(value, dict)]
    inner = [
        (*group, name)
        for group in tables
        if group in groups
        for name, value in content[group[0]].items()
        if isinstance(value, dict)
    ]
    for path in (*tables, *inner):
        if path not in leaves and path not in groups:
            names, name = [".".join(one) for one in leaves], ".".join(path)
            raise ValueError(f"{file}: there is no command [{name}]{_hint(name, names, '[{}]')}")


def _hint(name: str, names: Sequence[str], form: str) -> str:
    """Return what a name that is none of ``names`` may mean, or these."""
    if near := _nearest(name, names):
        return f": did you mean {form.format(near)}?"
    return f"; there are {', '.join(map(form.format, names))}"


def _nearest(name: str, names: Iterable[str]) -> str:
    """Return the one of ``names`` most like a name, "" if none is like it.

    Of several it is the one with the same letters in another order, if there is one.
    """
    near = difflib.get_close_matches(name, list(names), n=5)
    return min(near, key=lambda one: sorted(one) != sorted(name), default="")


def _check(
    file: Path, key: str, value: Any, flags_by_name: Mapping[str, Sequence[Any]], where: str = ""
) -> None:
    """Raise ValueError unless a key names a flag, and its value is one for it.

    Commands may have several flags of one name: then one of them has to take it.
    """
    flags = flags_by_name.get(_plain(key))
    if flags is None:
        near = _nearest(_plain(key), flags_by_name).replace("_", "-")
        hint = f": did you mean {near!r}?" if near else ""
        raise ValueError(f"{file}: {where}there is no flag {key!r}{hint}")
    problems = [problem for flag in flags if (problem := _problem(flag, value)) is not None]
    if len(problems) == len(flags):
        reason = reason_of(problems[0])
        raise ValueError(f"{file}: {where}{key} is {value!r}: {reason}") from problems[0]


def _problem(flag: Any, value: Any) -> Exception | None:
    """Return why a flag does not take a value."""
    try:
        if isinstance(value, list) and not flag.multiple:
            raise ValueError("this flag takes one value")
        flag.process_value(_context(), [value] if _is_alone(flag, value) else value)
    except Exception as error:  # click's own kinds, wherever they live in this version
        return error
    return None


def _is_alone(flag: Any, value: Any) -> bool:
    """Whether a value is one of several that a flag could have."""
    return flag.multiple and not isinstance(value, list)


@cache
def _context() -> Any:
    """Return a context to convert values in; converting needs one, and does not look into it."""
    return typer.main.get_command(_EMPTY).make_context("config", [], resilient_parsing=True)


def _plain(key: str) -> str:
    return key.replace("-", "_")


def _leaves(root: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the commands whose flags may be set, by their paths."""
    for name, command in root.commands.items():
        if hasattr(command, "commands"):
            for inner, leaf in command.commands.items():
                yield (name, inner), leaf
        elif name != "config" and not command.hidden:
            yield (name,), command


def _flags(command: Any) -> dict[str, Any]:
    """Return a command's flags by their names, without its arguments and ``--help``."""
    return {
        _plain(flag.opts[0].lstrip("-")): flag
        for flag in command.params
        if flag.param_type_name == "option" and flag.name not in ("help", *_TYPED)
    }


def config(
    context: typer.Context,
    words: Annotated[
        list[str] | None, typer.Argument(metavar="COMMAND", help="serve, run, bench offline ...")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the settings in force for a command, and where each value comes from."""
    path = tuple(words or ("serve",))
    assert context.parent is not None
    leaves = dict(_leaves(context.parent.command))
    if path not in leaves:
        names, name = [" ".join(one) for one in leaves], " ".join(path)
        raise ValueError(f"there is no command {name!r} with flags{_hint(name, names, '{}')}")
    parent = context.parent
    for name in path[:-1]:
        group = parent.command.commands[name]  # type: ignore[attr-defined]
        parent = group.make_context(name, [], parent=parent, resilient_parsing=True)
    command = leaves[path]
    inner = command.make_context(path[-1], [], parent=parent, resilient_parsing=True)
    rows = [(name, *_in_force(flag, inner)) for name, flag in _flags(command).items()]
    if as_json:
        values = {name: {"value": _json(value), "from": origin} for name, value, origin in rows}
        print(json.dumps(values))
        return
    cells = [(f"--{name.replace('_', '-')}", _shown(value), origin) for name, value, origin in rows]
    console().print(drawn(Table(("flag", "value", "from"), cells, "lll")))


def _in_force(flag: Any, context: Any) -> tuple[Any, str]:
    """Return a flag's value, and where it comes from."""
    value, source = context.params.get(flag.name), context.get_parameter_source(flag.name)
    origin = {"ENVIRONMENT": flag.envvar, "DEFAULT_MAP": "config file"}
    if flag.name in _SECRET and value:
        value = "***"
    return value, origin.get(getattr(source, "name", ""), "default")


def _json(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [str(one) for one in value]
    return value if isinstance(value, int | float | str | bool | None) else str(value)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    return "-" if value in (None, "") else str(value)
