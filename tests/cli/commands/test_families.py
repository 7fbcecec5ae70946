"""The table of families: the command and docs/models.md say the same, and what the tables hold."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from ridgeline.cli.main import app
from ridgeline.model.files.families import GGUF_FAMILIES, HF_FAMILIES

DOCS = Path(__file__).parents[3] / "docs" / "models.md"


def test_the_documentation_has_what_the_command_prints() -> None:
    printed = CliRunner().invoke(app, ["models", "--families"]).stdout.strip()
    assert printed in DOCS.read_text(), "put the output of ridgeline models --families there"
    rows = printed.splitlines()[2:]
    assert len(rows) == len(HF_FAMILIES) + len(GGUF_FAMILIES)
    assert not any(sign in printed for sign in ("('", "',", "None", "True"))  # in words
    assert "| `OlmoeForCausalLM` | safetensors |" in printed
