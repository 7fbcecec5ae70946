"""A log says whose it is: no other log of the same key can take its place unnoticed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ridgeline.trust.audit.check import CheckedLog, check, compare, logs_in
from ridgeline.trust.audit.files import LogFiles
from ridgeline.trust.audit.record_format import (
    HEAD_FILE,
    START,
    ChainPosition,
    Head,
    digest_of,
    files_of,
    written,
    written_head,
)

KEY = b"k" * 32


def opened(folder: Path) -> LogFiles:
    return LogFiles(folder, KEY, rotate_bytes=900, keep_s=1e9)


def log_of(folder: Path, num: int = 6, name: str = "r") -> str:
    """Write some lines, and return the log's id."""
    files = opened(folder)
    for i in range(num):
        files.append({"event": "request", "id": f"{name}{i}"})
    files.sync()
    files.close()
    return files.id


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    """The logs of two servers, and of their router, which names them."""
    folder = tmp_path / "audit"
    ids = {name: log_of(folder / name, name=name) for name in ("m-1", "m-2")}
    router = opened(folder / "router")
    for name, log in ids.items():
        router.append({"event": "server", "server": name, "folder": name, "server_log": log})
    router.append({"event": "server", "server": "m-3", "folder": None, "server_log": "elsewhere"})
    for i in range(9):  # several files
        router.append({"event": "request", "id": f"router{i}"})
    router.sync()
    router.close()
    return folder


def checked(folder: Path, key: bytes | None = KEY) -> dict[str, CheckedLog]:
    found = {one: check(one, files, key) for one, files in logs_in([folder]).items()}
    compare([*found.values()], [folder])
    return {one.name: log for one, log in found.items()}


def faults(folder: Path) -> str:
    return "\n".join(fault for log in checked(folder).values() for fault in log.faults)


def test_logs_of_a_fleet_are_as_they_were_written(fleet: Path) -> None:
    found = checked(fleet)
    assert [log.faults for log in found.values()] == [[], [], []]
    assert len({log.log for log in found.values()}) == 3
    assert [found[one].notes for one in ("m-1", "m-2")] == [[], []]
    says = "the log elsewhere of the server m-3, of another machine, is not among these"
    assert found["router"].notes == [says]


def test_each_file_of_a_router_names_its_servers(fleet: Path) -> None:
    """So the logs are known as long as any file of the router's is kept."""
    files = files_of(fleet / "router")
    assert len(files) > 2
    for file in files[:-1]:
        file.unlink()
    log = check(fleet / "router", files[-1:], KEY)
    assert [one["folder"] for one in log.servers.values()] == ["m-1", "m-2", None]


def replaced(fleet: Path) -> None:
    shutil.rmtree(fleet / "m-2")
    shutil.copytree(fleet / "m-1", fleet / "m-2")


def replaced_by_a_younger_one(fleet: Path) -> None:
    shutil.rmtree(fleet / "m-2")
    log_of(fleet / "m-2")


def exchanged(fleet: Path) -> None:
    (fleet / "m-1").rename(fleet / "x")
    (fleet / "m-2").rename(fleet / "m-1")
    (fleet / "x").rename(fleet / "m-2")


def files_replaced(fleet: Path) -> None:
    """All but the head, which stays."""
    for file in files_of(fleet / "m-2"):
        file.unlink()
    for file in files_of(fleet / "m-1"):
        shutil.copy(file, fleet / "m-2")


def gone_on_with(fleet: Path) -> None:
    """A server has started in the folder of another log since."""
    replaced(fleet)
    opened(fleet / "m-2").close()


SWAPS: dict[str, tuple[Callable[[Path], object], str]] = {
    "a log replaced by another server's": (replaced, "one is a copy"),
    "a log removed": (lambda fleet: shutil.rmtree(fleet / "m-2"), "it was removed, or replaced"),
    "a log replaced by a new one": (replaced_by_a_younger_one, "it was removed, or replaced"),
    "two logs exchanged": (exchanged, "m-1, and was written in m-2"),
    "the files of a log replaced": (files_replaced, "head.json is of the log "),
    "a log replaced and gone on with": (gone_on_with, "one is a copy"),
    "the router's log replaced": (
        lambda fleet: (
            shutil.rmtree(fleet / "router"),
            shutil.copytree(fleet / "m-1", fleet / "router"),
        ),
        "one is a copy",
    ),
}


@pytest.mark.parametrize("name", SWAPS)
def test_a_log_in_the_place_of_another_is_found(fleet: Path, name: str) -> None:
    swap, says = SWAPS[name]
    swap(fleet)
    assert says in faults(fleet)
    assert any(log.faults for log in checked(fleet, None).values())  # also without the key


def test_a_log_gone_on_with_in_the_place_of_another_says_so(fleet: Path) -> None:
    """Without the other one at hand: the head was that of the right log."""
    files_replaced(fleet)
    opened(fleet / "m-2").close()
    log = check(fleet / "m-2", files_of(fleet / "m-2"), KEY)
    assert "when the server started, head.json was of the log " in "\n".join(log.faults)


def test_a_router_alone_is_checked_for_what_it_is(fleet: Path) -> None:
    """Whoever has only its folder cannot say that the others are gone."""
    found = check(fleet / "router", files_of(fleet / "router"), KEY)
    compare([found], [fleet / "router"])
    assert found.faults == []
    assert len(found.notes) == 3


# --- logs that an earlier version began -----------------------------------------------------------


def earlier(folder: Path, num: int = 5) -> None:
    """Write a log as versions did whose logs had no id."""
    folder.mkdir(parents=True)
    end, lines = START, []
    for i in range(num):
        lines.append(written({"event": "request", "id": f"old{i}"}, end, 1.79e9, KEY))
        end = ChainPosition(i, digest_of(lines[-1]))
    (folder / "audit-00000000.jsonl").write_bytes(b"".join(lines))
    (folder / HEAD_FILE).write_bytes(written_head(Head(end, ""), KEY))


def test_a_log_without_an_id_is_read_and_said_to_be_so(tmp_path: Path) -> None:
    earlier(tmp_path / "log")
    found = checked(tmp_path)["log"]
    assert (found.faults, found.log, found.num_lines) == ([], "", 5)
    assert ["an earlier version began it" in note for note in found.notes] == [True]


def test_a_log_that_goes_on_gets_an_id(tmp_path: Path) -> None:
    earlier(tmp_path / "log")
    ids = {log_of(tmp_path / "log", num) for num in (1, 9)}
    assert len(ids) == 1
    found = checked(tmp_path)["log"]
    assert (found.faults, {found.log}) == ([], ids)
    assert ["an earlier version began it" in note for note in found.notes] == [True]
    last = files_of(tmp_path / "log")[-1]
    assert {json.loads(last.read_text().splitlines()[0])["log"]} == ids
    last.rename(last.with_name("audit-00000077.jsonl"))
    assert "it was renamed" in faults(tmp_path)


# --- what is no file ------------------------------------------------------------------------------

VERIFY = [sys.executable, "-m", "ridgeline", "audit", "verify"]
STUCK_S = 600  # for a process that waits for ever
MAKES: dict[str, Callable[[Path], object]] = {
    "audit-00000077.jsonl": os.mkfifo,
    "audit-00000078.jsonl": lambda file: file.symlink_to("/dev/zero"),
    "audit-00000079.jsonl": Path.mkdir,
}


def test_nothing_waits_for_what_is_no_file(fleet: Path) -> None:
    spoilt = [fleet / "m-1" / name for name in MAKES]
    spoilt += [fleet / name / HEAD_FILE for name in ("m-2", "router")]
    for file, make in zip(spoilt, (*MAKES.values(), *MAKES.values()), strict=False):
        file.unlink(missing_ok=True)
        make(file)
    done = subprocess.run([*VERIFY, fleet], capture_output=True, text=True, timeout=STUCK_S)
    assert done.returncode == 1
    for file in spoilt:
        assert f"wrong: {file} cannot be read" in done.stdout
    whys = ("not a regular file", "a directory", "seek", "Invalid")  # of a file, and of a head
    for folder in ("m-1", "m-2", "router"):  # nor does a server that starts
        with pytest.raises(OSError, match="|".join(whys)):
            opened(fleet / folder)
