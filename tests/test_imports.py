"""Who imports whom: pure rooms import nothing else, contracts name folders, no circle stands."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

import ridgeline

PACKAGE = Path(ridgeline.__file__).parent
ROOT = Path(__file__).parents[1]
IMPURE = {"asyncio", "datetime", "io", "os", "pathlib", "random", "secrets", "socket", "subprocess"}
IMPURE |= {"sys", "tempfile", "threading", "time", "urllib", "uuid"}
ROOMS = ("core", "model/cost", "model/shape", "text/messages", "trust/text_rules")
OURS = (
    *(f"ridgeline.{room.replace('/', '.')}" for room in ROOMS),
    "ridgeline.system.report",
)
FILES = sorted(path for room in ROOMS for path in (PACKAGE / room).rglob("*.py"))


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


CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"][
    "contracts"
]


def test_contracts_name_folders_so_that_a_new_file_is_in_them() -> None:
    for contract in CONTRACTS:
        named = {
            *contract.get("source_modules", ()),
            *contract.get("containers", ()),
            *contract.get("ancestors", ()),
        }
        for module in named:
            parts = module.rstrip(".*").split(".")[1:]
            assert PACKAGE.joinpath(*parts).is_dir(), f"{module} in {contract['name']!r} is a file"


def test_every_room_that_could_knows_the_face_of_a_backend_alone() -> None:
    [contract] = [one for one in CONTRACTS if one["name"].startswith("of a backend")]
    [floors] = [one["layers"] for one in CONTRACTS if one.get("exhaustive")]
    rooms = [room for floor in floors for room in floor.split(" | ") if room != "__main__"]
    below = rooms[rooms.index("core") :]  # they may not import a backend in any way
    others = {f"ridgeline.{room}" for room in rooms if room not in (*below, "backends")}
    assert others <= set(contract["source_modules"])


def test_no_room_below_foresight_is_missing_in_its_contract() -> None:
    [contract] = [one for one in CONTRACTS if one["name"].startswith("foresight knows of")]
    [floors] = [one["layers"] for one in CONTRACTS if one.get("exhaustive")]
    [own] = [i for i, floor in enumerate(floors) if "foresight" in floor.split(" | ")]
    below = {f"ridgeline.{room}" for floor in floors[own + 1 :] for room in floor.split(" | ")}
    known = {f"ridgeline.{room}" for room in ("core", "model", "version")}
    assert below - known == set(contract["forbidden_modules"])


def test_the_server_reads_values_of_its_engine_and_none_of_its_parts() -> None:
    """What a contract of imports cannot see: a way through attributes, such as engine.scheduler."""
    for path in sorted((PACKAGE / "serve").rglob("*.py")):
        if path.parent.name == "engine":
            continue
        nodes = ast.walk(ast.parse(path.read_text()))
        read = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
        assert read.isdisjoint({"scheduler", "queues", "kv"}), path


def test_no_circle_of_files_stands_in_the_house() -> None:
    """Imports inside of functions and for types alone count too (Tarjan, 1972)."""
    graph = grimp.build_graph("ridgeline", cache_dir=None)
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        stack.append(module)
        for other in graph.find_modules_directly_imported_by(module) - {"ridgeline"}:
            if other not in number:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in stack:
                lowest[module] = min(lowest[module], number[other])
        if lowest[module] == number[module]:
            at = stack.index(module)
            circles.append(sorted(stack[at:]))
            del stack[at:]

    for module in sorted(graph.modules - {"ridgeline"}):
        if module not in number:
            visit(module)
    assert [circle for circle in circles if len(circle) > 1] == []


def test_a_start_waits_for_no_library_that_it_does_not_use() -> None:
    """Downloads, bars and the decoding of foreign weights: a third of the time, were they there."""
    late = {"gguf", "yaml", "rich", "http.client", "ssl", "jinja2", "huggingface_hub"}
    late |= {"tokenizers", "threadpoolctl"}  # of text, and of the reference backend
    late |= {"llguidance", "logging"}
    code = "import ridgeline, sys; ridgeline.LLM; print(*sys.modules)"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert late.isdisjoint(seen.stdout.split())


def test_garbage_is_collected_once_the_program_is_imported_which_is_passed_over() -> None:
    main = "import gc, sys; from ridgeline.__main__ import main; sys.argv[1:] = ['--version']\n"
    seen = "print(gc.isenabled(), gc.get_freeze_count() > 50_000)"
    code = f"{main}try: main()\nexcept SystemExit: {seen}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True True"


def test_a_backend_is_imported_when_it_is_named() -> None:
    code = (
        "import sys; from ridgeline.backends import BACKENDS\n"
        "of = lambda: [name for name in BACKENDS if f'ridgeline.backends.{name}' in sys.modules]\n"
        "before, _ = of(), BACKENDS['reference']; print(before, of(), len(BACKENDS))\n"
        "print('gpu' in BACKENDS, BACKENDS['cuda'].__name__, 'torch' in sys.modules)"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.split("\n")[:2] == [
        "[] ['reference'] 3",
        "False ridgeline.backends.cuda False",
    ]


def test_a_lane_has_the_room_and_all_that_imports_it() -> None:
    command = [sys.executable, str(ROOT / "tools" / "lane.py")]
    done = subprocess.run([*command, "planner"], capture_output=True, text=True, check=True)
    files = set(done.stdout.split())
    folders = {file.split("/")[1] for file in files}
    assert {"planner", "bench", "serve", "cli"} <= folders
    assert {"core", "parity"}.isdisjoint(folders)
    assert "tests/model/hub/test_remote_metadata.py" in files  # it stands elsewhere, and plans
    refused = subprocess.run([*command, "panner"], capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "no room is called 'panner': there are" in refused.stderr
