"""``ridgeline audit``: whether a server's audit log is as it was written."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli.flags import UsageError
from ridgeline.cli.help import App
from ridgeline.engine.setup.home import default_home
from ridgeline.engine.setup.progress import say

if TYPE_CHECKING:
    from ridgeline.trust.audit.check import CheckedLog

_MOST_SHOWN = 20

audit_app = App(help="Check a server's audit log.", no_args_is_help=True)


@audit_app.callback()
def _group() -> None:
    """Check a server's audit log."""


@audit_app.command("verify")
def verify_command(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE", help="Files of a log, or folders of logs (serve --audit)."),
    ],
    key: Annotated[
        Path | None,
        typer.Option(help="File with its key. Default: audit.key in RIDGELINE_HOME."),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(
            metavar="HASH", help="Hash of a line, kept elsewhere, that the log must contain."
        ),
    ] = None,
) -> None:
    """Say whether a log is as it was written, or where it is not; exit with 1 if it is not."""
    from ridgeline.trust.audit.check import (
        check,
        compare,
        logs_in,
    )  # this would slow other commands
    from ridgeline.trust.audit.lines import read_key
    from ridgeline.trust.audit.opened import KEY_FILE

    found = logs_in(files)
    if head is not None and len(found) > 1:
        raise UsageError(f"--head is for one log, but there are {len(found)}: name one of them")
    key_file = key or default_home() / KEY_FILE
    signs = read_key(key_file) if key or key_file.exists() else None
    checked = [check(folder, of_log, signs, head) for folder, of_log in found.items()]
    compare(checked, [path for path in files if path.is_dir()])
    for log in checked:
        _report(log)
    if signs is None:
        say(
            f"{key_file} does not exist: without the key, a log that was rewritten completely "
            "cannot be detected; give --key"
        )
    if any(log.faults for log in checked):
        raise typer.Exit(1)


def _report(log: CheckedLog) -> None:
    span = f", from {log.since} to {log.until}" if log.num_lines else ""
    span += f", log {log.log}" if log.log else ""
    print(
        f"{log.folder}: {_count(log.num_lines, 'line')} in {_count(log.num_files, 'file')}, "
        f"{_count(log.num_requests, 'request')}{span}"
    )
    for fault in log.faults[:_MOST_SHOWN]:
        print(f"  wrong: {fault}")
    if (num := len(log.faults) - _MOST_SHOWN) > 0:
        print(f"  wrong: {num} more")
    for note in log.notes[:_MOST_SHOWN]:
        print(f"  note: {note}")
    if log.faults:
        print("  it is NOT as it was written")
    else:
        print(f"  it is as it was written, up to line {log.head.seq}, {log.head.digest}")


def _count(num: int, what: str) -> str:
    return f"{num:,} {what}" if num == 1 else f"{num:,} {what}s"
