"""The pure core imports the pure part of the standard library and itself: nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
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


# Contracts that bind everybody but those named, below each folder of the package.
BUT_FOR = {
    "grammars alone know their library": {"text.grammars", "text.grammar_process"},
    "in the cpu backend: layout compiles nothing, emit alone imports llvmlite": {
        "backends.cpu.emit"
    },
    "of a backend others import its face alone": {"backends"},
}


@pytest.mark.parametrize("name", BUT_FOR)
def test_no_module_is_forgotten_in_a_contract(name: str) -> None:
    settings = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    [contract] = [contract for contract in contracts if contract["name"] == name]
    known = {module.removeprefix("ridgeline.") for module in contract["source_modules"]}
    known |= BUT_FOR[name]
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if parts[-1] in ("__init__", "__main__"):
            continue
        above = {".".join(parts[:size]) for size in range(1, len(parts) + 1)}
        assert above & known, f"{'.'.join(parts)} is not in the contract"


def test_a_start_waits_for_no_library_that_it_does_not_use() -> None:
    """Downloads, bars and the decoding of foreign weights: a third of the time, were they there."""
    late = {"gguf", "yaml", "rich", "http.client", "ssl", "jinja2", "huggingface_hub"}
    late |= {"tokenizers", "threadpoolctl"}  # of text, and of the reference backend
    late |= {"llguidance", "logging"}
    code = "import ridgeline, sys; ridgeline.LLM; print(*sys.modules)"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert late.isdisjoint(seen.stdout.split())
