"""Files of saved sequences: there are never more of an owner than the limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ridgeline.engine.kv_disk import cache_tier as tier
from ridgeline.engine.kv_disk.cache_tier import SavedSequences


def test_the_file_that_was_saved_first_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "_MOST_FILES", 2)
    files = SavedSequences(tmp_path, "00", {})
    for number, name in enumerate("cab"):
        files.write("key", name, "tiny", b"root", [number])
        (path,) = tmp_path.glob(f"*/{name}")
        os.utime(path, (number, number))
    files.write("another", "x", "tiny", b"", [9])
    assert sorted(path.name for path in tmp_path.glob("*/*")) == ["a", "b", "x"]
    root, tokens, _ = files.read("key", "a")
    assert (root, tokens) == (b"root", (1,))
    with pytest.raises(ValueError, match="nothing was saved as 'c'"):
        files.read("key", "c")


def test_what_differs_is_named(tmp_path: Path) -> None:
    digest = "d" * 64
    earlier = SavedSequences(tmp_path, "00", {})
    earlier.write("key", "old", "tiny", b"root", [1])
    saved = SavedSequences(tmp_path, "01", {"formats": "cpu int8", "template": digest, "code": "a"})
    saved.write("key", "new", "tiny", b"root", [1])
    here = {"formats": "cpu f32", "template": "e" * 64, "code": "a", "block size": "16"}
    now = SavedSequences(tmp_path, "02", here)
    words = r"'new' was saved by tiny with formats cpu int8 \(here cpu f32\), another template, "
    with pytest.raises(ValueError, match=words + "another block size: "):
        now.read("key", "new")
    with pytest.raises(ValueError, match="by tiny with other settings, which it does not name: "):
        now.read("key", "old")
