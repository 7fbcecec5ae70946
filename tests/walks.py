"""How many files a reader visits to follow one thing: the walks of docs/architecture.md, counted.

A walk takes the calls in their order and each function once; each change of file is a visit, and so
is the way back to a file whose function goes on. ``python -m tests.walks`` prints the table's rows.
"""

from __future__ import annotations

import ast
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from safetensors.numpy import save_file

import ridgeline
from ridgeline.backends.cpu.layout import model_weights
from ridgeline.backends.cpu.layout.model_sizes import model_sizes
from ridgeline.engine.setup.home import stores
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.identity.digests import FileDigests
from ridgeline.planner.memory.model_spec import read_model_spec
from tests.model.files.tiny import CONFIG as TINY
from tests.model.files.tiny import hf_weights
from tests.tiny import PLAIN, checkpoint

PACKAGE = Path(ridgeline.__file__).parent
CONFIG = Path(__file__).parents[1] / "docs" / "learn" / "llama-3.1-8b.json"
# What others pass on and ask: a reader knows it before the walk.
VALUES = ("model/shape", "model/files/config", "model/files/tensors", "model/files/families/family",
          "model/files/families/fields", "backends/cpu/layout/shapes",
          "backends/cpu/layout/feed_forward")  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


def walk(call: Callable[[], object]) -> list[str]:
    """Return the files that are visited, without ``.py``, by what runs when this is called."""
    seen: set[CodeType] = set()
    files: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code not in seen and _file(frame) and not _imports(frame):
            seen.add(frame.f_code)
            caller = next((one for one in _callers(frame) if _file(one)), frame)
            files.extend((_file(caller), _file(frame)))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [file for file, _ in groupby(one for one in files if not one.startswith(VALUES))]


def _file(frame: FrameType) -> str:
    """Return a frame's file within the package, empty if it stands elsewhere."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return ""
    return str(path.relative_to(PACKAGE).with_suffix("")).removesuffix("/__init__")


def _callers(frame: FrameType) -> Iterator[FrameType]:
    caller = frame.f_back
    while caller is not None:
        yield caller
        caller = caller.f_back


def _imports(frame: FrameType) -> bool:
    return any("importlib" in one.f_code.co_filename for one in _callers(frame))


def _plan() -> list[str]:
    config, here = json.loads(CONFIG.read_text()), stores()
    return walk(lambda: read_model_spec(config, here))


def _directory(folder: Path) -> list[str]:
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    save_file(hf_weights(TINY), folder / "model.safetensors")
    return walk(lambda: load_checkpoint(folder))


def _weights(cache: Path | None) -> list[str]:
    model, sizes = checkpoint(PLAIN), model_sizes(PLAIN, "int8", "int8")
    if cache is not None:
        file = cache / "model.gguf"
        file.write_bytes(b"as good as any")
        model = replace(model, path=file, contents=FileDigests({file.name: file}))
        model_weights._WORTH_KEEPING_BYTES = 1
    load = model_weights.load_weights
    return walk(lambda: load(model, sizes, "int8", 64, cache, lambda done, total: None))


def rows() -> Iterator[str]:
    """Yield the table's rows, counted now. It should be asked once in a process: some remember."""
    with tempfile.TemporaryDirectory() as folder:
        for name, files in (
            ("a config to a plan's shape, from `read_model_spec`", _plan()),
            ("a directory to tensors, from `load_checkpoint`", _directory(Path(folder))),
            ("weights to kernels, from `load_weights`", _weights(None)),
            ("the same by way of a file of packed weights", _weights(Path(folder))),
        ):
            visits = Counter("/".join(file.split("/")[-2:]) for file in files)
            through = ", ".join(f"`{name}` {count}" for name, count in visits.items())
            yield f"| {name} | {len(files)} | {through} |"


def modules_named(path: Path, class_name: str, method: str) -> set[str]:
    """Return the modules of the package that a method names, and all that it calls in its file.

    A name is one that the file imports, also in types of arguments and results, or an attribute of
    ``self`` that the constructor makes by such a name, or takes as one.
    """
    tree = ast.parse(path.read_text())
    imported = dict(_imported(tree))
    [owner] = [one for one in tree.body if getattr(one, "name", "") == class_name]
    assert isinstance(owner, ast.ClassDef)
    own = {one.name: one for one in (*owner.body, *tree.body) if isinstance(one, Function)}
    made_of = _attributes(own["__init__"])
    to_read, read, names = [method], set[str](), set[str]()
    while to_read:
        name = to_read.pop()
        if name in own and name not in read:
            read.add(name)
            mentioned = {*_names(own[name])}
            of_self = {one for one in mentioned if one.startswith("self.")}
            names |= mentioned.union(*(made_of.get(one, set()) for one in of_self))
            to_read += [one.removeprefix("self.") for one in mentioned]
    return {imported[name] for name in names & imported.keys()}


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names that a file imports of the package, and from which module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("ridgeline."):
            module = str(node.module).removeprefix("ridgeline.").replace(".", "/")
            for alias in node.names:
                inner = f"{module}/{alias.name}"
                is_module = PACKAGE.joinpath(f"{inner}.py").exists()
                yield alias.asname or alias.name, inner if is_module else module


def _names(node: ast.AST) -> Iterator[str]:
    """Yield what is named in some code: names alone, and attributes of ``self``."""
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            yield one.id
        elif isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self":
            yield f"self.{one.attr}"


def _attributes(constructor: Function) -> dict[str, set[str]]:
    """Return what the attributes are made of: the names in calls, and in types of arguments."""
    arguments = (*constructor.args.args, *constructor.args.kwonlyargs)
    types = {one.arg: {*_names(one.annotation)} for one in arguments if one.annotation}
    made_of: dict[str, set[str]] = {}
    for node in ast.walk(constructor):
        if isinstance(node, ast.Assign):
            [target], value = node.targets, node.value
            of_many = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=True) if of_many else [(target, value)]
            for to, of in pairs:
                by = {*_names(of.func)} if isinstance(of, ast.Call) else types.get(ast.unparse(of))
                made_of[ast.unparse(to)] = by or set()
    return made_of


if __name__ == "__main__":
    print(*rows(), sep="\n")
