"""What the source of the package must not have: T33."""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

FORBIDDEN_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "torch", "diskcache"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "recv_pyobj"}
IN_SERVER = {"server", "fleet"}
CLOCK = "time.time()"
FORBIDDEN_OF = {("yaml", "load"), ("os", "system"), ("os", "popen"), ("numpy", "load")}


def findings(package: Path) -> list[str]:
    """Return what the source has that it must not have, with file and line.

    In the server and the router nothing hangs on an assert, which ``python -O`` leaves out, and no
    span of time is measured with the calendar, which jumps.
    """
    found: list[str] = []
    for path in sorted(package.rglob("*.py")):
        tree = ast.parse(path.read_text())
        found += _everywhere(path, tree)
        if IN_SERVER & {*path.relative_to(package).parts}:
            found += _of_server(path, tree)
    return found


def _everywhere(path: Path, tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        own = {"torch"} if "cuda" in path.parts else set()  # which loads no model's files
        if bad := {name.partition(".")[0] for name in names} & FORBIDDEN_MODULES - own:
            yield f"{where} imports {bad}"
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            owner = getattr(getattr(node.func, "value", None), "id", "")
            if name in FORBIDDEN_CALLS and owner not in ("re", "jinja2"):
                yield f"{where} calls {name}"
            if (owner, name) in FORBIDDEN_OF:
                yield f"{where} calls {owner}.{name}"


def _of_server(path: Path, tree: ast.AST) -> Iterator[str]:
    dates = set(_dates(tree))
    for node in ast.walk(tree):
        where = f"{path.name}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Assert) and not _narrows(node.test):
            yield f"{where} asserts {ast.unparse(node.test)}"
        if measured := _is_span(node, dates):
            yield f"{where} measures with the calendar: {measured}"


def _narrows(test: ast.expr) -> bool:
    """Whether an assert only tells the type checker what it cannot see: nothing hangs on it."""
    match test:
        case ast.Call(func=ast.Name(id="isinstance")):
            return True
        case ast.Compare(
            left=ast.Name() | ast.Attribute(), ops=[ast.IsNot()], comparators=[ast.Constant(None)]
        ):
            return True
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(map(_narrows, parts))
    return False


def _dates(tree: ast.AST) -> Iterator[str]:
    """Return the names that are given what the calendar says."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            pairs = [(target, node.value) for target in targets]
            for target, value in list(pairs):
                if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                    pairs += zip(target.elts, value.elts, strict=False)
            for target, value in pairs:
                if CLOCK in ast.unparse(value) and (name := _last_name(target)):
                    yield name


def _last_name(node: ast.AST) -> str:
    """Return a name, or that of an attribute behind a dot, whosever it is."""
    return f".{node.attr}" if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_span(node: ast.AST, dates: Collection[str]) -> str:
    """Return an expression that takes one date from another, or compares two: clocks jump."""
    match node:
        case ast.BinOp(op=ast.Sub(), left=left, right=right):
            sides = [left, right]
        case ast.Compare(left=left, comparators=others):
            sides = [left, *others]
        case _:
            return ""
    if any(CLOCK in ast.unparse(side) or _last_name(side) in dates for side in sides):
        return ast.unparse(node)
    return ""
