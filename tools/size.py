"""The sizes: print lines of code per directory, with the change against git HEAD.

Run as ``python tools/size.py`` anywhere in the repository. Exit status 1 when a file, a function or
the core is too long, a file is too short to be one, a room has too many files, too many classes
share a name, or a line of a document is too wide. Physical lines are counted, comments and blank
ones too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

TOPS = ("src", "tests", "tools", "peers", "docs/learn")
MAX_FILE_LINES = 800
MIN_FILE_LINES = 60  # of a file of src that is no face, no table and no program
MAX_FUNCTION_LINES = 80
MAX_DOCUMENT_WIDTH = 120
MAX_ROOM_FILES = 8  # at the top of a room, src/ridgeline/X; not below (docs/adr/0009)
# Names that several classes of src have, with or without an underscore: most are what both compiled
# backends have (a batch, its tables, its weights), a protocol and what implements it, or the public
# form of a value and the core's own.
MAX_SHARED_NAMES = 11
# What cannot be broken: rows of tables, and the targets of links.
UNBREAKABLE = re.compile(r"\s*\||\[[^]]+\]: ")
# Files below the least, and why each has no home.
SMALL = {
    "backends/cuda/kernels/copy_blocks.py": "a kernel is a file",
    "backends/cuda/kernels/draws/ranks.py": "a kernel is a file",
    "backends/cuda/kernels/launching.py": "five files of kernels share it",
    "backends/cuda/measure/parts/correct.py": "a program of its own process, by its name",
    "backends/lookahead.py": "two backends share it, and know nothing of each other",
    "bench/out_file.py": "all benches share it, and it writes files",
    "cli/commands/stage.py": "a command is a file",
    "cli/model_process.py": "a program of its own process",
    "serve/routes/explain.py": "it is a route",
    "system/shared_secret.py": "a secret is no fact about this machine",
    "system/terminal.py": "it imports rich, and an engine starts without",
    "text/checkpoint_tokenizer.py": "infilling and tokenizers would know each other",
    "text/tokenizers/process.py": "a program of its own process",
}
# The most lines that all .py files of the core may have together, without what reads and drafts a
# sequence's tokens (docs/adr/0009).
CORE, NOT_COUNTED, MAX_CORE_LINES = "src/ridgeline/core", "src/ridgeline/core/decoding", 3_400


def lines_now(root: Path) -> dict[str, int]:
    """Count the lines of each .py file of ours in the working tree."""
    return {
        path.relative_to(root).as_posix(): len(path.read_bytes().splitlines())
        for top in TOPS
        for path in sorted((root / top).rglob("*.py"))
    }


def lines_at_head(root: Path) -> dict[str, int]:
    """Count the same in git HEAD; nothing where there is no commit, or no git."""
    # Empty files have no matching line and so do not appear, which is as good as 0.
    command = ["git", "grep", "-c", "", "HEAD", "--", *(f"{top}/*.py" for top in TOPS)]
    try:
        listing = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return {}
    rows = (line.removeprefix("HEAD:").rpartition(":") for line in listing.stdout.splitlines())
    return {path: int(count) for path, _, count in rows}


def by_directory(lines: dict[str, int]) -> Counter[str]:
    """Add up the lines of each directory with everything below it."""
    totals: Counter[str] = Counter()
    for path, count in lines.items():
        for parent in PurePosixPath(path).parents:
            totals[str(parent)] += count
    return totals


def functions(root: Path, paths: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield each function, as file:line name, with the lines from its ``def`` to its end."""
    for path in paths:
        for node in ast.walk(ast.parse((root / path).read_bytes())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno:
                yield f"{path}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


def too_long(root: Path, lines: dict[str, int]) -> list[str]:
    """Say what is too long, one line each."""
    totals = by_directory(lines)
    limits = [(path, count, MAX_FILE_LINES) for path, count in lines.items()]
    limits += [(name, count, MAX_FUNCTION_LINES) for name, count in functions(root, lines)]
    limits += [(CORE, totals[CORE] - totals[NOT_COUNTED], MAX_CORE_LINES)]
    return [
        f"{name} has {count:,} lines, {count - limit:,} over its {limit:,}"
        for name, count, limit in limits
        if count > limit
    ]


def too_short(root: Path, lines: dict[str, int]) -> list[str]:
    """Say which files of src are too short, and which of ``SMALL`` are not, one line each."""
    short = {
        path.removeprefix("src/ridgeline/")
        for path, count in lines.items()
        if path.startswith("src/")
        and count < MIN_FILE_LINES
        and PurePosixPath(path).stem not in ("__init__", "__main__")
        and _does_something(ast.parse((root / path).read_bytes()))
    }
    found = [
        f"{path} has under {MIN_FILE_LINES} lines: it belongs to what uses it" for path in short
    ]
    found += [f"{path} is not small: SMALL need not name it" for path in SMALL]
    return sorted(
        line for line in found if (line.split()[0] in short) != (line.split()[0] in SMALL)
    )


def _does_something(tree: ast.Module) -> bool:
    """Whether some function has a body beside its docstring: it is no table and no protocol."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    return any(
        not isinstance(function.body[-1], ast.Expr) or len(function.body) > 1
        for function in functions
    )


def too_full(lines: Iterable[str]) -> list[str]:
    """Say which rooms have too many files at their top, one line each."""
    paths = [PurePosixPath(line) for line in lines if line.startswith("src/")]
    rooms = Counter(str(p.parent) for p in paths if len(p.parts) == 4 and p.stem != "__init__")
    return [
        f"{room} has {count} files at its top, {count - MAX_ROOM_FILES} over its {MAX_ROOM_FILES}"
        for room, count in rooms.items()
        if count > MAX_ROOM_FILES
    ]


def too_ambiguous(root: Path, lines: Iterable[str]) -> list[str]:
    """Say which names stand for two classes or more, in one line, if too many do."""
    names = Counter(
        node.name.removeprefix("_")
        for path in lines
        if path.startswith("src/")
        for node in ast.walk(ast.parse((root / path).read_bytes()))
        if isinstance(node, ast.ClassDef)
    )
    shared = sorted(name for name, count in names.items() if count > 1)
    if len(shared) <= MAX_SHARED_NAMES:
        return []
    excess = len(shared) - MAX_SHARED_NAMES
    return [f"{len(shared)} names are of several classes, {excess} too many: {', '.join(shared)}"]


def too_wide(root: Path) -> list[str]:
    """Say which lines of documents are too wide, one line each."""
    return [
        f"{path.relative_to(root)}:{i} is {len(line)} wide, over its {MAX_DOCUMENT_WIDTH}"
        for path in sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")])
        for i, line in enumerate(path.read_text().splitlines(), start=1)
        if len(line) > MAX_DOCUMENT_WIDTH and not UNBREAKABLE.match(line)
    ]


def table(now: dict[str, int], before: dict[str, int]) -> str:
    """Return a row per directory and per changed file: lines, change, budget."""
    totals, old_totals = by_directory(now), by_directory(before)
    budgets = {CORE: MAX_CORE_LINES}
    rows = [(d, totals[d], totals[d] - old_totals[d], budgets.get(d)) for d in totals | old_totals]
    rows += [
        (path, now.get(path, 0), now.get(path, 0) - before.get(path, 0), MAX_FILE_LINES)
        for path in now | before
        if now.get(path, 0) != before.get(path, 0)
    ]
    lines = [f"{'':44} {'lines':>7} {'change':>7} {'budget':>7}"]
    for name, count, change, limit in sorted(rows):
        if name != ".":
            lines.append(f"{name:44} {count:7,} {change or 0:+7,} {limit or '':>7}")
    return "\n".join(lines)


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    now = lines_now(root)
    print(table(now, lines_at_head(root)))
    complaints = [*too_long(root, now), *too_full(now), *too_ambiguous(root, now)]
    complaints += [*too_short(root, now), *too_wide(root)]
    for complaint in complaints:
        print(f"size: {complaint}", file=sys.stderr)
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
