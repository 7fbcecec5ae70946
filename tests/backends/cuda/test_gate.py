"""The gate of ``--backend auto`` without torch; tests/gpu/test_gate.py passes through it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from ridgeline.backends.cuda.approval import FILE, read, remember
from ridgeline.backends.cuda.device import TWINS, has_driver

without_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is not None, reason="torch is here"
)


@pytest.mark.skipif(has_driver(), reason="this machine has a GPU, or twins")
def test_where_there_is_no_gpu_nothing_is_said(tmp_path: Path) -> None:
    assert read(tmp_path) is None


@without_torch
def test_a_gpu_that_passed_is_of_no_use_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TWINS, "1")
    found = read(tmp_path)
    assert found is not None
    assert found == (False, "the GPU has not passed ridgeline bench gpu yet")
    remember(tmp_path, "2026-11-28", is_right=True)
    found = read(tmp_path)
    assert found is not None
    assert not found.is_open
    assert found.why.startswith("torch is not installed: pip install")


@without_torch
def test_a_damaged_record_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TWINS, "1")
    for content in (b"", b"[1]", b'{"a": 1}', b"\xff", b'{"a":'):
        (tmp_path / FILE).write_bytes(content)
        assert read(tmp_path) == (False, "the GPU has not passed ridgeline bench gpu yet")
    remember(tmp_path, "2026-11-28", is_right=False)
    assert (tmp_path / FILE).read_bytes() == b"{}"
