"""Which statements of a folder no process has executed, by the function that they stand in."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

# Of each process that finds it on its path: its lines in the folder, written down as it ends.
_TRACER = """
import atexit, os, sys, threading
lines = set()

def line(frame, event, argument):
    lines.add((frame.f_code.co_filename, frame.f_lineno))
    return line

def call(frame, event, argument):
    is_there = frame.f_code.co_filename.startswith(os.environ["TRACED_FOLDER"])
    return line(frame, event, argument) if is_there else None

def save():
    with open(f"{os.environ['TRACED_LINES']}/{os.getpid()}", "w") as file:
        file.writelines(f"{name}:{number}\\n" for name, number in list(lines))  # threads still run

threading.settrace(call)
sys.settrace(call)
atexit.register(save)
"""


def traced(folder: Path, place: Path) -> dict[str, str]:
    """Return an environment whose Python processes note their lines of ``folder`` in ``place``."""
    (place / "lines").mkdir()
    (place / "sitecustomize.py").write_text(_TRACER)
    paths = [str(place), *filter(None, [os.environ.get("PYTHONPATH")])]
    more = {"TRACED_FOLDER": f"{folder}{os.sep}", "TRACED_LINES": str(place / "lines")}
    return os.environ | more | {"PYTHONPATH": os.pathsep.join(paths)}


def never_executed(folder: Path, place: Path) -> dict[str, list[str]]:
    """Return the statements that none of these processes executed: their text, by function."""
    known = {line for file in (place / "lines").iterdir() for line in file.read_text().split("\n")}
    found: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.py")):
        text, module = path.read_text(), path.relative_to(folder).with_suffix("").as_posix()
        for function, first, last in _statements(ast.parse(text), module):
            if not any(f"{path}:{number}" in known for number in range(first, last + 1)):
                found.setdefault(function, []).append(text.splitlines()[first - 1].strip())
    return found


def _statements(node: ast.AST, name: str) -> Iterator[tuple[str, int, int]]:
    """Yield the function, first and last line of each statement that has code of its own.

    Of one with a body it is the head.
    """
    for child in ast.iter_child_nodes(node):
        is_definition = isinstance(child, ast.FunctionDef | ast.ClassDef)
        if isinstance(child, ast.stmt) and not _has_no_code(child):
            body = getattr(child, "body", None)
            last = body[0].lineno - 1 if body else child.end_lineno or child.lineno
            yield name, child.lineno, max(last, child.lineno)
        yield from _statements(child, f"{name}.{child.name}" if is_definition else name)


def _has_no_code(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)
    is_declared = isinstance(node, ast.AnnAssign) and node.value is None
    return is_declared or isinstance(node, ast.Try | ast.Pass)
