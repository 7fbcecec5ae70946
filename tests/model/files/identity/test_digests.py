"""The digest of a model's files: of what they hold, read once."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.identity import digests as module
from ridgeline.model.files.identity.digests import FileDigests
from tests.engine.test_llm import write_model


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the files that are read through; all are worth keeping."""
    found, read = list[str](), module.sha256_of

    def noted(path: Path) -> str:
        found.append(path.name)
        return read(path)

    monkeypatch.setattr(module, "sha256_of", noted)
    monkeypatch.setattr(module, "_WORTH_KEEPING_BYTES", 0)
    return found


def test_it_is_what_sha256sum_says(tmp_path: Path) -> None:
    one, other = tmp_path / "a.gguf", tmp_path / "b.gguf"
    one.write_bytes(b"one" * 1000)
    other.write_bytes(b"two")
    digest = hashlib.sha256(b"one" * 1000).hexdigest()
    assert FileDigests({"a.gguf": one}).digest(tmp_path / "kept") == digest
    both = FileDigests({"b.gguf": other, "a.gguf": one}).digest(tmp_path / "kept")
    command = ["sha256sum", "a.gguf", "b.gguf"]
    listed = subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout
    assert both == hashlib.sha256(b"".join(sorted(listed.splitlines(keepends=True)))).hexdigest()


def test_files_are_read_once_and_again_when_they_change(tmp_path: Path, reads: list[str]) -> None:
    path, kept = tmp_path / "m.gguf", tmp_path / "kept"
    path.write_bytes(b"old")
    written = path.stat()
    first = FileDigests({"m": path}).digest(kept)
    cached = FileDigests({"m": path}).cached_digest(kept)
    assert cached == FileDigests({"m": path}).digest(kept) == first
    assert reads == ["m.gguf"]
    while path.stat().st_ctime_ns == written.st_ctime_ns:  # the file system's clock ticks
        with path.open("r+b") as file:  # in place, as rsync --inplace does
            file.write(b"new")
        os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    after = path.stat()
    assert (after.st_size, after.st_mtime_ns, after.st_ino) == (
        (written.st_size, written.st_mtime_ns, written.st_ino)
    )
    assert FileDigests({"m": path}).cached_digest(kept) is None
    assert FileDigests({"m": path}).digest(kept) == hashlib.sha256(b"new").hexdigest() != first
    assert reads == ["m.gguf"] * 2


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b"{}", b'{"sha256": "x"}', b"\xff"])
def test_a_damaged_record_is_none(tmp_path: Path, reads: list[str], damage: bytes) -> None:
    path, kept = tmp_path / "m.gguf", tmp_path / "kept"
    path.write_bytes(b"content")
    wanted = FileDigests({"m": path}).digest(kept)
    (record,) = kept.iterdir()
    record.write_bytes(damage)
    assert FileDigests({"m": path}).digest(kept) == wanted
    assert FileDigests({"m": path}).cached_digest(kept) == wanted  # it was made anew
    assert len(reads) == 2


def test_a_digest_that_was_damaged_in_its_record_is_none(tmp_path: Path, reads: list[str]) -> None:
    """It would be in the names of what was packed, and in receipts."""
    path, kept = tmp_path / "m.gguf", tmp_path / "kept"
    path.write_bytes(b"content")
    wanted = FileDigests({"m": path}).digest(kept)
    (record,) = kept.iterdir()
    content, place = record.read_bytes(), record.read_bytes().index(wanted.encode())
    for at in (place, place + 63):
        other = content[:at] + (b"0" if content[at : at + 1] != b"0" else b"1") + content[at + 1 :]
        record.write_bytes(other)
        assert FileDigests({"m": path}).cached_digest(kept) is None
        assert FileDigests({"m": path}).digest(kept) == wanted
    assert len(reads) == 3


def test_where_nothing_can_be_kept_it_is_read_each_time(tmp_path: Path, reads: list[str]) -> None:
    (tmp_path / "kept").write_text("in the way")
    path = tmp_path / "m.gguf"
    path.write_bytes(b"content")
    for _ in range(2):
        found = FileDigests({"m": path}).digest(tmp_path / "kept")
        assert found == hashlib.sha256(b"content").hexdigest()
    assert len(reads) == 2
    with pytest.raises(FileNotFoundError):
        FileDigests({"m": tmp_path / "absent"}).digest(tmp_path / "kept")


def test_many_who_ask_at_once_have_it_read_once(tmp_path: Path, reads: list[str]) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"content" * 100_000)
    contents, found = FileDigests({"m": path}), list[str]()
    contents.start(tmp_path / "kept")
    threads = [
        threading.Thread(target=lambda: found.append(contents.digest(tmp_path / "kept")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert len(reads) == 1


def test_a_directory_has_the_files_that_were_asked_for_and_no_others(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    (folder / "README.md").write_text("words")
    (folder / "pytorch_model.bin").write_bytes(b"never read")
    names = {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert set(load_checkpoint(folder).contents.files) == names
    before = load_checkpoint(folder).contents.digest(tmp_path)
    (folder / "README.md").write_text("other words")
    assert load_checkpoint(folder).contents.digest(tmp_path) == before
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert load_checkpoint(folder).contents.digest(tmp_path) != before


def test_the_system_that_keeps_no_folder_says_nothing(tmp_path: Path) -> None:
    """A thread that takes a digest beside a start must not write into its terminal."""
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from ridgeline.model.files.identity.digests import FileDigests\n"
        "FileDigests({'m': Path(sys.argv[1])}).start(Path('/proc/nowhere'))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "absent")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == done.stdout == ""
