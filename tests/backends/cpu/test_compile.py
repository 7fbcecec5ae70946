"""Compiled kernels on disk: used again when nothing changed, and never trusted when damaged."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

import ridgeline
from ridgeline.backends.arrays import address
from ridgeline.backends.cpu.kernels import compile as module
from ridgeline.backends.cpu.kernels.compile import Kernels, Target, load_kernels
from ridgeline.backends.cpu.layout.model_sizes import model_sizes
from ridgeline.backends.cpu.layout.shapes import KernelConfig
from tests.tiny import PLAIN
from tests.waiting import PATIENCE_S, started

SIZES = model_sizes(PLAIN, "f32", "f32")
KINDS, EPS = ("f32",), 1e-5


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of kernels that were compiled once."""
    folder = tmp_path_factory.mktemp("kept")
    load(folder)
    return next(folder.iterdir())


@pytest.fixture
def compiled(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A cache with one object; to compile it again takes no time."""
    shutil.copy(kept, tmp_path)
    code = kept.read_bytes()[32:]
    monkeypatch.setattr(module, "compile_object", lambda source, target: code)
    return code


def load(cache: Path, sizes: KernelConfig = SIZES, eps: float = EPS) -> tuple[Kernels, int]:
    """Return kernels, and how often a compilation was announced."""
    announced: list[None] = []
    kernels = load_kernels(sizes, KINDS, eps, cache, lambda: announced.append(None))
    return kernels, len(announced)


def works(kernels: Kernels) -> bool:
    x, y = np.arange(32, dtype=np.float32), np.ones(32, np.float32)
    kernels.function("add", 3)(address(x), address(y), 32)
    return x.tolist() == list(range(1, 33))


def objects(cache: Path) -> list[Path]:
    return sorted(cache.iterdir())


def test_the_second_time_nothing_is_compiled(tmp_path: Path) -> None:
    kernels, times = load(tmp_path / "new" / "folder")
    assert (works(kernels), times) == (True, 1)
    (kept,) = objects(tmp_path / "new" / "folder")
    before = kept.stat()
    kernels, times = load(tmp_path / "new" / "folder")
    assert (works(kernels), times) == (True, 0)
    assert kept.stat().st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize(
    "damage",
    [
        lambda code: b"",
        lambda code: code[: len(code) // 2],
        lambda code: code[:-1],
        lambda code: code + b"!",
        lambda code: code[:5000] + bytes([code[5000] ^ 1]) + code[5001:],
        lambda code: bytes(len(code)),
        lambda code: b"not an object file at all",
    ],
    ids=["empty", "half", "short", "long", "flipped", "zeros", "text"],
)
def test_a_damaged_file_is_compiled_again(
    tmp_path: Path, damage: Callable[[bytes], bytes], compiled: bytes
) -> None:
    (path,) = objects(tmp_path)
    path.write_bytes(damage(path.read_bytes()))
    kernels, times = load(tmp_path)
    assert (works(kernels), times) == (True, 1)
    assert objects(tmp_path) == [path]
    assert load(tmp_path)[1] == 0


def test_a_cache_that_cannot_be_written(tmp_path: Path, compiled: bytes) -> None:
    """Below a file there can be no directory, whoever asks."""
    (path,) = objects(tmp_path)
    for _ in range(2):
        kernels, times = load(path / "cache")
        assert (works(kernels), times) == (True, 1)


@pytest.mark.parametrize("function", ["mkdir", "mkstemp", "replace"])
def test_a_cache_that_is_read_only_or_full(
    tmp_path: Path, compiled: bytes, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """The kernels work; what is there is used, and nothing half-written is left."""
    owner = {"mkdir": Path, "mkstemp": tempfile}.get(function, os)
    refusal = OSError(30, "Read-only file system")
    with monkeypatch.context() as patch:
        patch.setattr(owner, function, Mock(side_effect=refusal))
        assert load(tmp_path)[1] == 0
        (path,) = objects(tmp_path)
        path.unlink()
        for _ in range(2):
            kernels, times = load(tmp_path)
            assert (works(kernels), times) == (True, 1)
    assert objects(tmp_path) == []


def test_a_file_that_cannot_be_read_or_replaced(tmp_path: Path, compiled: bytes) -> None:
    (path,) = objects(tmp_path)
    path.unlink()
    path.mkdir()
    (path / "in the way").touch()
    kernels, times = load(tmp_path)
    assert (works(kernels), times) == (True, 1)
    assert objects(tmp_path) == [path]  # and nothing half-written stays behind


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": replace(SIZES, hidden=SIZES.hidden + 32)},
        {"sizes": replace(SIZES, kind_of=(0, 0, 0))},
        {"sizes": model_sizes(PLAIN, "f32", "f16")},
        {"eps": 1e-6},
    ],
    ids=["hidden size", "layers", "cache", "epsilon"],
)
def test_other_shapes_are_other_kernels(
    tmp_path: Path, change: dict[str, object], compiled: bytes
) -> None:
    assert load(tmp_path, **change)[1] == 1
    assert len(objects(tmp_path)) == 2
    assert load(tmp_path, **change)[1] == 0


def test_other_processors_are_other_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bytes
) -> None:
    host = module.host_target()
    flag = next(name for name, on in host.features.items() if on)
    others = [
        Target(host.triple, "generic", host.features),
        Target(host.triple, host.cpu, dict(host.features) | {flag: False}),
    ]
    for number, other in enumerate(others, start=2):
        monkeypatch.setattr(module, "host_target", lambda other=other: other)
        assert load(tmp_path)[1] == 1
        assert load(tmp_path)[1] == 0
        assert len(objects(tmp_path)) == number


def test_other_versions_are_other_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bytes
) -> None:
    monkeypatch.setattr(module.llvmlite, "__version__", "0.0.0")
    assert load(tmp_path)[1] == 1
    sources = module.kernel_sources()[:-1]
    monkeypatch.setattr(module, "kernel_sources", lambda: sources)
    assert load(tmp_path)[1] == 1
    assert len(objects(tmp_path)) == 3


def test_the_code_does_not_depend_on_the_run() -> None:
    """Otherwise two processes could disagree about what a key stands for."""
    texts = {module.assembly(SIZES, KINDS, EPS, module.host_target()) for _ in range(2)}
    assert len(texts) == 1


def test_two_processes_compile_at_once(tmp_path: Path) -> None:
    script = f"""
        from pathlib import Path
        from tests.backends.cpu.test_compile import load, works
        input()
        for _ in range(3):
            assert works(load(Path({str(tmp_path)!r}))[0])
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    root = Path(__file__).parents[3]
    with ExitStack() as stack:
        both = [stack.enter_context(started(command, cwd=root, **pipes)) for _ in range(2)]
        ends = [process.communicate("go\n", timeout=PATIENCE_S) for process in both]
        assert [process.returncode for process in both] == [0, 0], ends
    assert len(objects(tmp_path)) == 1
    assert load(tmp_path)[1] == 0


def test_kernels_are_kept_under_all_that_they_are_made_of() -> None:
    """Whatever a module that emits kernels imports is part of the key, wherever it stands."""
    sources = module.kernel_sources()
    package = Path(ridgeline.__file__).parent
    emitters = [path for path in sources if re.search(r"^def emit_", path.read_text(), re.M)]
    assert len(emitters) > 5
    for path in emitters:
        for name, what in re.findall(
            r"^from ridgeline\.(\S+) import (\w*)", path.read_text(), re.M
        ):
            place = package / name.replace(".", "/")
            file = place / what if place.is_dir() else place
            assert file.with_suffix(".py") in sources, f"{path.name}: {name}"
