"""The commands that check what a server was told, has noted and has answered."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ridgeline.cli.commands.verify import verify
from ridgeline.cli.flags import UsageError, as_text
from ridgeline.cli.help import App
from ridgeline.engine.setup.home import default_home
from ridgeline.engine.setup.progress import say
from ridgeline.system.report import counted

if TYPE_CHECKING:
    from ridgeline.trust.audit.check import CheckedLog

_MOST_SHOWN = 20  # faults, and notes, of a log
_AUDIT_TEXTS = {"none": "no texts", "hash": "hashes of texts", "text": "texts"}

rules_app = typer.Typer(help="Check rules for what is read and written.", no_args_is_help=True)


@rules_app.callback()
def _rules_group() -> None:
    """Check rules for what is read and written."""


@rules_app.command("check")
def check_command(
    file: Annotated[Path, typer.Argument(help="File of rules, as for serve --rules.")],
    text: Annotated[
        str | None,
        typer.Option("--try", metavar="TEXT", help="Show what each key's rules do to this text."),
    ] = None,
) -> None:
    """Say whether a file of rules can be used, and what it does to a text."""
    from ridgeline.trust.rules.file import read_rules  # these would slow every other command
    from ridgeline.trust.text_rules.answer import TextRule, TextRules, screened

    rule_file = read_rules(file)
    if text is not None and not text:
        raise UsageError("--try is empty: give it a text")
    for name, key in rule_file.keys.items():
        num_rules = [len(one.forbidding) + len(one.noting) for one in (key.input, key.output)]
        print(
            f"[keys.{name}]  {num_rules[0]} patterns for input, {num_rules[1]} for output; "
            f"audit keeps {_AUDIT_TEXTS[key.audit]}"
        )
        for judge in dict.fromkeys((*key.input_judges, *key.output_judges)):
            print(f"  {judge.name}: {judge.action} from {judge.at} on; a server asks {judge.model}")
        tried: tuple[tuple[str, TextRules], ...] = (("input", key.input), ("output", key.output))
        for where, rules in tried if text is not None else ():
            hits: list[TextRule] = []
            shown, blocked = screened(as_text(text or ""), rules, hits.append)
            does = [f"{one.name}: {one.action}" for one in hits] or ["no rule matches"]
            says = f", and says {blocked.says!r}" if blocked and blocked.says else ""
            ends = f" (ends here{says})" if blocked else ""
            print(f"  {where:<6}  {shown}{ends}")
            print(f"          {', '.join(dict.fromkeys(does))}")
    print(f"version {rule_file.version}: the file can be used")


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
    # This would slow other commands.
    from ridgeline.trust.audit.check import check, compare, logs_in
    from ridgeline.trust.audit.log import KEY_FILE
    from ridgeline.trust.audit.record_format import read_key

    logs = logs_in(files)
    if head is not None and len(logs) > 1:
        raise UsageError(f"--head is for one log, but there are {len(logs)}: name one of them")
    key_file = key or default_home() / KEY_FILE
    signs = read_key(key_file) if key or key_file.exists() else None
    checked = [check(folder, of_log, signs, head) for folder, of_log in logs.items()]
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
        f"{log.folder}: {counted(log.num_lines, 'line')} in {counted(log.num_files, 'file')}, "
        f"{counted(log.num_requests, 'request')}{span}"
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


def add_to(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.add_typer(rules_app, name="rules")
    app.add_typer(audit_app, name="audit")
    app.command("verify")(verify)
