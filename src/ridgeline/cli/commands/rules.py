"""``ridgeline rules``: whether a file of rules can be used, and what it does to a text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ridgeline.cli.flags import UsageError
from ridgeline.cli.stdin import as_text

_KEPT = {"none": "no texts", "hash": "hashes of texts", "text": "texts"}

rules_app = typer.Typer(help="Check rules for what is read and written.", no_args_is_help=True)


@rules_app.callback()
def _group() -> None:
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

    found = read_rules(file)
    if text is not None and not text:
        raise UsageError("--try is empty: give it a text")
    for name, key in found.keys.items():
        num_rules = [len(one.forbidding) + len(one.noting) for one in (key.input, key.output)]
        print(
            f"[keys.{name}]  {num_rules[0]} patterns for input, {num_rules[1]} for output; "
            f"audit keeps {_KEPT[key.audit]}"
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
    print(f"version {found.version}: the file can be used")
