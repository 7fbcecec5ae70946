"""The commands that check what a server was told, has noted and has answered."""

from __future__ import annotations

import typer

from ridgeline.cli.commands.audit import audit_app
from ridgeline.cli.commands.rules import rules_app
from ridgeline.cli.commands.verify import verify


def add_to(app: typer.Typer) -> None:
    """Add these commands to ``app``."""
    app.add_typer(rules_app, name="rules")
    app.add_typer(audit_app, name="audit")
    app.command("verify")(verify)
