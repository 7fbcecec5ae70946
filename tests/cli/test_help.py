"""The help of commands: each flag once, in its section, with kinds in plain words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from ridgeline.cli.help import SECTIONS
from ridgeline.cli.main import app


def commands(group: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, *names, name)
        else:
            yield (*names, name), command


COMMANDS = dict(commands(typer.main.get_command(app)))


def help_of(*names: str) -> str:
    return CliRunner().invoke(app, [*names, "--help"], env={"COLUMNS": "100"}).output


def test_every_flag_of_a_section_is_a_flag_of_some_command() -> None:
    known = {param.name for command in COMMANDS.values() for param in command.params}
    assert [name for names in SECTIONS.values() for name in names if name not in known] == []


@pytest.mark.parametrize("names", COMMANDS, ids=" ".join)
def test_each_flag_stands_once_in_the_help(names: tuple[str, ...]) -> None:
    _, *sections = re.split(r"^\w.*:$", help_of(*names), flags=re.MULTILINE)
    lines = "".join(sections).splitlines()
    shown = [found[1] for line in lines if (found := re.match(r"  (?:-[ho], )?(--[\w-]+)", line))]
    flags = [p.opts[0] for p in COMMANDS[names].params if p.param_type_name == "option"]
    assert sorted(shown) == sorted([*flags, "--help"])
    assert not [line for line in lines if "<str>" in line or "list[" in line or " range>" in line]


def test_flags_stand_in_their_sections() -> None:
    sections: dict[str, list[str]] = {}
    for line in help_of("serve").splitlines():
        if found := re.fullmatch(r"(\w.*):", line):
            here = sections.setdefault(found[1], [])
        elif found := re.match(r"  --([\w-]+)", line):
            here.append(found[1].replace("-", "_"))
    assert {"Model", "Address", "Access", "Limits", "Logs"} < sections.keys()
    assert sections["Address"] == list(SECTIONS["Address"])
    assert "api_key" in sections["Access"]
