"""A full disk: what can be foreseen is said before work begins, and nothing else is hurt.

The disk is a file system of a megabyte in memory, which root alone can mount.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ridgeline.backends.cpu.layout import model_weights
from ridgeline.backends.cpu.layout.model_sizes import model_sizes
from ridgeline.bench.out_file import check_out
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.system.machine import DiskFull, free_bytes
from tests.cli.test_main import ridgeline
from tests.engine.test_llm import write_model
from tests.serve.serving import serving

NO_SPACE = "No space left on device"


class Disk:
    """A small one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def leave(self, num_bytes: int) -> None:
        """Leave this much room, in whole pages."""
        filler = self.folder / "filler"
        filler.unlink(missing_ok=True)
        filler.write_bytes(bytes(free_bytes(self.folder) - num_bytes))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "random")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount here")
    if done.returncode:
        pytest.skip(f"a disk of one's own cannot be mounted: {done.stderr.strip()}")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def is_foreseen(stderr: str, what: str, folder: Path) -> bool:
    """Whether the last line names the folder, what is needed and free, and the way out."""
    line = rf"ridgeline: {re.escape(what)}.* needs \S+ [kM]B, but \S+ [kM]B are free in "
    line += rf"{re.escape(str(folder))}: make room, or .*"
    return re.fullmatch(line, stderr.splitlines()[-1]) is not None


def requests(path: Path, model: Path, num: int) -> Path:
    body = {"model": str(model), "prompt": [5, 6, 7], "max_tokens": 16, "ignore_eos": True}
    lines = (
        {"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body}
        for i in range(num)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_picture_and_a_tokenizer_do_not_begin(disk: Disk, model: Path) -> None:
    disk.leave(0)
    drawn = ridgeline("plan", str(model), "--out", str(disk.folder / "a.svg"))
    assert drawn.returncode == 1
    assert is_foreseen(drawn.stderr, "a.svg", disk.folder)
    assert "fits on this machine" in drawn.stdout, "the answer was there before"
    exported = ridgeline("export", "tokenizer", str(model), str(disk.folder / "t"))
    assert exported.returncode == 1
    assert is_foreseen(exported.stderr, "the tokenizer", disk.folder / "t")
    assert [one.name for one in disk.folder.rglob("*") if one.is_file()] == ["filler"]


def test_results_of_a_bench_have_room_before_it_begins(disk: Disk) -> None:
    check_out(disk.folder / "a.csv")
    disk.leave(8192)
    with pytest.raises(DiskFull, match=rf"^a.csv needs 1 MB, but 8 kB are free in {disk.folder}: "):
        check_out(disk.folder / "a.csv")


def test_a_batch_does_not_begin_if_no_answers_fit(
    disk: Disk,
    model: Path,
    tmp_path: Path,
) -> None:
    source = requests(tmp_path / "in.jsonl", model, 10_000)
    done = ridgeline("batch", str(source), "-o", str(disk.folder / "out.jsonl"))
    assert done.returncode == 2
    assert is_foreseen(done.stderr, "the shortest possible out.jsonl", disk.folder)
    assert list(disk.folder.iterdir()) == []


def test_a_batch_whose_disk_fills_up_goes_on_later(
    disk: Disk,
    model: Path,
    tmp_path: Path,
) -> None:
    source, output = requests(tmp_path / "in.jsonl", model, 24), disk.folder / "out.jsonl"
    disk.leave(8192)
    done = ridgeline("batch", str(source), "-o", str(output))
    assert done.returncode == 1
    said = done.stderr.splitlines()[-1]
    num_done = re.fullmatch(
        rf"ridgeline: {output}.part: {NO_SPACE}; (\d+) of 24 lines are done: the same command .*",
        said,
    )
    assert num_done, said
    assert 0 < int(num_done[1]) < 24
    disk.leave(65536)
    again = ridgeline("batch", str(source), "-o", str(output))
    assert again.returncode == 0, again.stderr
    assert f"resuming: {num_done[1]} of 24 lines are done" in again.stderr
    assert len(output.read_text().splitlines()) == 24


def test_a_trace_ends_and_the_answer_does_not(disk: Disk, model: Path) -> None:
    asked = "run", str(model), "Hello", "--temperature", "0", "--max-tokens", "40", "--raw"
    usual = ridgeline(*asked)
    disk.leave(8192)
    traced = ridgeline(*asked, "--trace", str(disk.folder / "t.jsonl"))
    assert (traced.returncode, traced.stdout) == (0, usual.stdout)
    said = f"cannot write the trace {disk.folder / 't.jsonl'}: {NO_SPACE}; it ends here, "
    assert traced.stderr.count(said) == 1
    assert "Traceback" not in traced.stderr


def test_an_audit_log_ends_and_the_answers_do_not(
    disk: Disk,
    model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked = {"prompt": [5, 6, 7], "max_tokens": 4, "seed": 1}
    with serving(model, audit=disk.folder / "log", audit_key=tmp_path / "key") as served:
        first = served.call("/v1/completions", asked)[1]["choices"]
        disk.leave(0)
        for _ in range(12):  # a page has room for some lines
            status, answer, _ = served.call("/v1/completions", asked)
            assert (status, answer["choices"]) == (200, first)
    lines = [one for one in caplog.messages if NO_SPACE in one]
    assert lines == [f"the audit log in {disk.folder / 'log'} cannot be written: {NO_SPACE}"]


def test_files_of_a_cache_are_as_many_as_fit(
    disk: Disk,
    model: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    disk.leave(512 << 10)
    options = {"kv_disk": f"{disk.folder / 'kv'}:1GiB", "kv_disk_min": 16, "enable_lora": False}
    prompt = [5 + i % 300 for i in range(48)]
    with serving(model, options) as served:
        first = served.call("/v1/completions", {"prompt": prompt, "max_tokens": 4, "seed": 1})[1]
    said = capfd.readouterr().err
    kept = rf"--kv-disk needs 1.07 GB, but 5\d\d kB are free in {disk.folder / 'kv'}: at most 5\d\d"
    assert re.search(kept, said), said
    with serving(model, options) as served:
        again = served.call("/v1/completions", {"prompt": prompt, "max_tokens": 4, "seed": 1})[1]
    assert again["choices"] == first["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_an_upload_that_does_not_fit_leaves_nothing(disk: Disk, model: Path) -> None:
    with serving(model, home=disk.folder) as served:
        disk.leave(16384)
        form = b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--x\r\n'
        form += b'content-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        form += bytes(1 << 16) + b"\r\n--x--\r\n"
        header = {"content-type": "multipart/form-data; boundary=x"}
        status, answer, _ = served.call("/v1/files", form, **header)
        assert (status, answer["error"]["message"]) == (503, f"the file cannot be kept: {NO_SPACE}")
        assert not list(disk.folder.rglob("*.writing"))
        assert served.call("/v1/files")[1]["data"] == []


def test_packed_weights_that_do_not_fit_are_not_begun(
    disk: Disk,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_weights, "_WORTH_KEEPING_BYTES", 1)
    checkpoint, said = load_checkpoint(model), list[str]()
    sizes = model_sizes(checkpoint.arch, "int8", "int8")
    disk.leave(4096)
    load = model_weights.load_weights
    load(checkpoint, sizes, "int8", 64, disk.folder, lambda done, total: None, said.append)
    (line,) = said
    assert line.startswith("each start packs the weights anew: packed-weights needs ")
    assert f" 4 kB are free in {disk.folder}: make room, or set RIDGELINE_HOME" in line
    assert [one.name for one in disk.folder.iterdir()] == ["filler"]
