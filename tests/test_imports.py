"""The pure core imports the pure part of the standard library and itself: nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ridgeline

PACKAGE = Path(ridgeline.__file__).parent
IMPURE = {"asyncio", "datetime", "io", "os", "pathlib", "random", "secrets", "socket", "subprocess"}
IMPURE |= {"sys", "tempfile", "threading", "time", "urllib", "uuid"}
OURS = ("ridgeline.core", "ridgeline.decoding", "ridgeline.physics")
ROOMS = ("core", "decoding", "physics")
FILES = sorted(path for room in ROOMS for path in PACKAGE.glob(f"{room}/*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_imports_only_pure_modules(path: Path) -> None:
    for name in imported(ast.parse(path.read_text())):
        top = name.partition(".")[0]
        allowed = name.startswith(OURS) if top == "ridgeline" else top not in IMPURE
        assert allowed, f"{path.name} imports {name}"
        assert top == "ridgeline" or top in sys.stdlib_module_names, f"{path.name} imports {name}"


def imported(tree: ast.Module) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return names


def test_a_start_waits_for_no_library_that_it_does_not_use() -> None:
    """Downloads, bars and the decoding of foreign weights: a third of the time, were they there."""
    late = {"gguf", "yaml", "rich", "http.client", "ssl", "jinja2", "huggingface_hub"}
    late |= {"tokenizers", "threadpoolctl"}  # of text, and of the reference backend
    late |= {"llguidance", "logging"}
    code = "import ridgeline, sys; ridgeline.LLM; print(*sys.modules)"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert late.isdisjoint(seen.stdout.split())
