"""How many doors the house has: its rooms, and what crosses them, counted from imports.

A door is a file that another room imports. It stands at a top if it is directly in a room, or in a
wing of one; below that folders are private. ``python -m tests.house`` prints the figures.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp

import ridgeline

PACKAGE = Path(ridgeline.__file__).parent
# Folders of a room that are subjects of their own, each with a top as a room has one.
WINGS = {
    *("bench.load", "bench.simulate", "core.cache", "core.decoding", "core.decoding.drafts"),
    *("core.scheduling", "engine.kv_disk", "engine.quantise", "engine.setup"),
    *("foresight.routing", "foresight.simulator", "foresight.step_time"),
    *("model.cost", "model.files", "model.files.gguf", "model.hub", "model.shape"),
    *("planner.capacity", "planner.memory", "serve.answer", "serve.batch_files"),
    *("serve.batches", "serve.engine", "serve.http", "serve.observe", "serve.routes"),
    *("serve.tunnel", "serve.dialects", "serve.dialects.llamacpp", "serve.dialects.ollama"),
    *("serve.dialects.openai", "serve.dialects.triton"),
    *("text.grammar", "text.messages", "text.template", "text.tokenizers"),
    *("trust.audit", "trust.guards", "trust.receipts", "trust.rules", "trust.text_rules"),
}
# As words, also of names with underscores; but neither ``token_rules`` nor ``NO_RULES``.
_IDEAS = re.compile(
    r"(?<![a-z])(?<!token[_ ])(?<!no_)(rules?|guards?|receipts?|audit(?:s|ed)?|journals?)(?![a-z])",
    re.IGNORECASE,
)
# A parameter, a field or a function is called by the noun for what it is.
_PARTICIPLES = {"asked", "told", "made", "seen", "found", "held", "kept", "known"}


@cache
def graph() -> grimp.ImportGraph:
    """Return who imports whom, imports for types included."""
    return grimp.build_graph("ridgeline", cache_dir=None)


@cache
def modules() -> list[str]:
    """Return all modules but the package itself, without its name: ``core.engine``."""
    names = graph().modules - {"ridgeline"}
    return sorted(name.removeprefix("ridgeline.") for name in names)


@cache
def importers(module: str) -> set[str]:
    """Return what imports a module, named as in ``modules``; the package itself is ''."""
    found = graph().find_modules_that_directly_import(f"ridgeline.{module}")
    return {name.removeprefix("ridgeline").removeprefix(".") for name in found}


def room(module: str) -> str:
    """Return the room of a module."""
    return module.partition(".")[0]


@cache
def rooms() -> list[str]:
    """Return the rooms: folders, so neither the version nor ``__main__``."""
    return sorted({room(name) for name in modules() if (PACKAGE / room(name)).is_dir()})


@cache
def doors() -> list[str]:
    """Return what is imported from another room."""
    return [
        name
        for name in modules()
        if room(name) in rooms() and any(room(one) != room(name) for one in importers(name))
    ]


def deep_doors() -> list[str]:
    """Return those doors that are below a top."""
    return [name for name in doors() if not _is_at_a_top(name)]


def _is_at_a_top(name: str) -> bool:
    folder, _, _ = name.rpartition(".")
    return folder in WINGS or name in WINGS or folder in ("", room(name)) or not folder


def fullest_top() -> tuple[int, str]:
    """Return how many doors there are in the folder that has most of them, and the folder."""
    counts = Counter(name.rpartition(".")[0] for name in doors())
    return max((count, folder) for folder, count in counts.items())


def arrows() -> set[tuple[str, str]]:
    """Return pairs of rooms, of which the first imports the second."""
    return {(room(one), room(name)) for name in doors() for one in importers(name) if one} - {
        (name, name) for name in rooms()
    }


def files() -> dict[str, int]:
    """Return the lines of each file of the package."""
    return {
        str(p.relative_to(PACKAGE)): len(p.read_bytes().splitlines()) for p in PACKAGE.rglob("*.py")
    }


def with_one_importer() -> list[str]:
    """Return the files that one other file imports, and no more."""
    return [
        name
        for name in modules()
        if (PACKAGE / f"{name.replace('.', '/')}.py").is_file() and len(importers(name)) == 1
    ]


def mentions() -> list[str]:
    """Return the lines of the server that name an idea of trust, or the log of a stream.

    Not read are the room of that log, and of batches; flags, with
    what they are for; and rules for tokens, which are no rules for keys.
    """
    found = []
    for path in sorted(PACKAGE.joinpath("serve").rglob("*.py")):
        name = str(path.relative_to(PACKAGE / "serve"))
        if not name.startswith(("tunnel/", "batch", "http/options.py")):
            lines = enumerate(path.read_text().splitlines(), 1)
            found += [f"{name}:{i} {line.strip()}" for i, line in lines if _IDEAS.search(line)]
    return found


def constructors() -> Iterator[tuple[int, str]]:
    """Yield the number of parameters of each constructor, with its file and line."""
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
                yield len(arguments) - 1, f"{path.relative_to(PACKAGE)}:{node.lineno}"


def participles() -> list[str]:
    """Return the parameters, fields, attributes and functions that a participle names."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = _named(node)
            if name.strip("_") in _PARTICIPLES:
                found.append(f"{path.relative_to(PACKAGE)}:{node.lineno} {name}")  # type: ignore[attr-defined]
    return found


def _named(node: ast.AST) -> str:
    """Return the name that a node gives to something of an interface, if it does."""
    match node:
        case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name
        case ast.Attribute(attr=name, ctx=ast.Store()):
            return name
        case ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return ""


def figures() -> dict[str, int]:
    """Return all figures by name."""
    return {
        "rooms": len(rooms()),
        "doors": len(doors()),
        "doors below a top": len(deep_doors()),
        "doors at the fullest top": fullest_top()[0],
        "arrows between rooms": len(arrows()),
        "files": len(files()),
        "files with one importer": len(with_one_importer()),
        "lines in the package": sum(files().values()),
        "parameters of the largest constructor": max(constructors())[0],
        "mentions of trust in the server": len(mentions()),
        "participles as names": len(participles()),
    }


if __name__ == "__main__":
    for name, count in figures().items():
        print(f"{name:40} {count:7,}")
    print("below a top:", *deep_doors(), sep="\n  ")
