"""The gate of ``--backend auto`` without torch; tests/gpu/test_gate.py passes through it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ridgeline.backends.cuda.approval import FILE, read, remember
from ridgeline.backends.cuda.device import has_driver
from tests.gpu.on_cpu import say_there_is_a_gpu


@pytest.mark.skipif(has_driver(), reason="this machine has a GPU")
def test_where_there_is_no_gpu_nothing_is_said(tmp_path: Path) -> None:
    assert read(tmp_path) is None


def test_a_gpu_that_passed_is_of_no_use_without_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    say_there_is_a_gpu(monkeypatch, has_torch=False)
    found = read(tmp_path)
    assert found is not None
    assert found == (False, "the GPU has not passed ridgeline bench gpu yet")
    remember(tmp_path, "2026-11-28", is_right=True)
    found = read(tmp_path)
    assert found is not None
    assert not found.is_open
    assert found.why.startswith("torch is not installed: pip install")


def test_a_damaged_record_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    say_there_is_a_gpu(monkeypatch, has_torch=False)
    for content in (b"", b"[1]", b'{"a": 1}', b"\xff", b'{"a":'):
        (tmp_path / FILE).write_bytes(content)
        assert read(tmp_path) == (False, "the GPU has not passed ridgeline bench gpu yet")
    remember(tmp_path, "2026-11-28", is_right=False)
    assert (tmp_path / FILE).read_bytes() == b"{}"
