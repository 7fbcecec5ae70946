"""A swapped pair of like values is another model without an error: such calls are by keyword."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import ridgeline

PACKAGE = Path(ridgeline.__file__).parent
MOST = 4  # positional arguments of one type
# Made here for each sequence of each step, or each step of a forecast, where keywords take time.
HOT = {
    ("ridgeline.core.scheduling.scheduler", "Work"),
    ("ridgeline.core.decoding.drafts.draft_model", "Work"),
    ("ridgeline.backends.cpu.pipeline.wire", "Work"),
    ("ridgeline.foresight.step_time.features", "Features"),
}

Classes = dict[tuple[str, str], ast.ClassDef]  # by module and name
Found = tuple[str, tuple[str, str]]  # where a call stands; its module, and the class that it makes


def test_no_constructor_gets_many_arguments_of_one_type_by_position() -> None:
    trees = {_module(path): ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}
    classes = {
        (module, node.name): node
        for module, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    found = [*_calls_by_position(trees, classes)]
    assert [where for where, place in found if place not in HOT] == []
    assert {place for _, place in found} == HOT, "excused, though it is called by keyword"


def test_a_call_by_position_is_found() -> None:
    text = "class Pair:\n    a: int\n    b: float\n    c: int\n    d: int\n    e: int | None\n"
    for call, num_found in (
        ("Pair(1, 2, 3, 4, 5)", 1),
        ("Pair(*(1, 2, 3), *(4, 5))", 1),
        ("Pair(*five)", 1),
        ("Pair(1, 2, 3, 4, e=5)", 0),
        ("Pair(*four, e=5)", 0),
    ):
        tree = ast.parse(text + call)
        classes = {("m", "Pair"): tree.body[0]}
        assert len([*_calls_by_position({"m": tree}, classes)]) == num_found, call


def _module(path: Path) -> str:
    return ".".join(("ridgeline", *path.relative_to(PACKAGE).with_suffix("").parts))


def _calls_by_position(trees: dict[str, ast.Module], classes: Classes) -> Iterator[Found]:
    for module, tree in trees.items():
        names = {name: (module, name) for at, name in classes if at == module}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                names |= {a.asname or a.name: (str(node.module), a.name) for a in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                made = classes.get(names.get(node.func.id, ("", "")))
                if made is not None and _num_alike(node, made) > MOST:
                    yield f"{module}:{node.lineno}: {made.name}", (module, made.name)


def _num_alike(call: ast.Call, made: ast.ClassDef) -> int:
    """Return how many positional arguments of one type there are; int and float are one."""
    types = [_plain(annotation) for annotation in _parameters(made)]
    num = 0
    for given in call.args:
        if isinstance(given, ast.Starred) and not isinstance(given.value, ast.Tuple):
            by_name = len(call.keywords)
            num = max(num, len(types) - by_name)  # as many as may be
        else:
            num += len(given.value.elts) if isinstance(given, ast.Starred) else 1
    return max(Counter(types[:num]).values(), default=0)


def _parameters(made: ast.ClassDef) -> Iterator[ast.expr | None]:
    for node in made.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            yield from (arg.annotation for arg in node.args.args[1:])
            return
    yield from (node.annotation for node in made.body if isinstance(node, ast.AnnAssign))


def _plain(annotation: ast.expr | None) -> str:
    text = "" if annotation is None else ast.unparse(annotation)
    return text.removesuffix(" | None").replace("float", "int")
