"""A folder of records, and whatever may have become of its files."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from ridgeline.engine.kv_disk.segments import KeptBlock, RecordForm, Segments

NAME, OTHER = "ab" * 16, "cd" * 16
FORM = RecordForm(4, 1000)
OF_STATES = RecordForm(4, 3000)
SIZE = 64 * FORM.record_bytes  # of eight segments


def record(number: int) -> KeptBlock:
    return KeptBlock(
        number.to_bytes(16, "big"),
        (number - 1).to_bytes(16, "big") if number else b"a root",
        tuple(range(number, number + 4)),
        bytes([number % 251]) * FORM.data_bytes,
    )


def opened(folder: Path, said: list[str] | None = None, name: str = NAME) -> Segments:
    forms = [FORM, OF_STATES]
    return Segments(folder, SIZE, name, forms, [].append if said is None else said.append)


def filled(folder: Path, count: int, name: str = NAME) -> Path:
    """Write so many records; return the first of the files."""
    segments = opened(folder, name=name)
    for number in range(count):
        segments.append(record(number))
    segments.close()
    return folder / name / "00000001.kv"


def read(segments: Segments, number: int) -> KeptBlock | None:
    (room,) = segments.room(1, FORM)
    return segments.read(record(number).key, room)


def found(segments: Segments, count: int) -> list[int]:
    """Which of the first records can be read, each as it was written."""
    numbers = []
    for number in range(count):
        if (one := read(segments, number)) is not None:
            assert one == record(number)
            numbers.append(number)
    return numbers


def test_what_was_written_is_read_by_the_next_process(tmp_path: Path) -> None:
    file = filled(tmp_path, 5)
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    segments = opened(tmp_path)
    assert found(segments, 8) == [0, 1, 2, 3, 4]
    segments.append(record(5))
    segments.append(record(5))
    assert found(segments, 8) == [0, 1, 2, 3, 4, 5]
    assert segments.num_bytes == sum(one.stat().st_size for one in file.parent.glob("*.kv"))
    segments.close()
    assert found(opened(tmp_path), 8) == [0, 1, 2, 3, 4, 5]


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


START = 8 + 16 + 8
STRIDE = FORM.record_bytes
SECOND = START + 2 * STRIDE
DAMAGES: dict[str, tuple[Callable[[bytes], bytes], list[int]]] = {
    "whole": (lambda data: data, [0, 1, 2, 3, 4]),
    "a bit of a key": (flipped(SECOND + 3), [0, 1, 3, 4]),
    "a bit of a parent": (flipped(SECOND + 25), [0, 1, 3, 4]),
    "a bit of the tokens": (flipped(SECOND + 16 + 4 + 64 + 2), [0, 1, 3, 4]),
    "a bit of the checksum": (flipped(SECOND + FORM.head.size - 2), [0, 1, 3, 4]),
    "a bit of the data": (flipped(SECOND + STRIDE - 500), [0, 1, 3, 4]),
    "torn": (lambda data: data[: SECOND + 77], [0, 1]),
    "torn in a head": (lambda data: data[: SECOND + 7], [0, 1]),
    "empty": (lambda data: b"", []),
    "a part of the header": (lambda data: data[:9], []),
    "another name": (flipped(12), []),
    "a newer version": (flipped(7), []),
    "another form": (flipped(START - 1), []),
    "no file of ours": (lambda data: b"hello" + data[5:], []),
    "two records swapped": (
        lambda data: (
            data[:SECOND]
            + data[SECOND + STRIDE : SECOND + 2 * STRIDE]
            + data[SECOND : SECOND + STRIDE]
            + data[SECOND + 2 * STRIDE :]
        ),
        [0, 1, 2, 3, 4],
    ),
    "twice the same": (lambda data: data + data[START:], [0, 1, 2, 3, 4]),
    "data of another record": (
        lambda data: (
            data[: SECOND + STRIDE - 1000]
            + data[START + STRIDE - 1000 : START + STRIDE]
            + data[SECOND + STRIDE :]
        ),
        [0, 1, 3, 4],
    ),
    "zeros": (lambda data: data[:SECOND] + bytes(len(data) - SECOND), [0, 1]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_passed_over(tmp_path: Path, damage: str) -> None:
    change, left = DAMAGES[damage]
    file = filled(tmp_path, 5)
    file.write_bytes(change(file.read_bytes()))
    segments = opened(tmp_path)
    assert found(segments, 5) == left
    for number in range(5, 9):  # and it goes on
        segments.append(record(number))
    segments.close()
    assert found(opened(tmp_path), 9) == [*left, 5, 6, 7, 8]


def test_a_file_that_goes_while_it_is_in_use(tmp_path: Path) -> None:
    file = filled(tmp_path, 5)
    segments = opened(tmp_path)
    os.truncate(file, START + STRIDE + 10)
    assert found(segments, 5) == [0]
    file.unlink()
    assert found(segments, 5) == [0]
    segments.close()
    assert found(opened(tmp_path), 5) == []


def test_what_was_used_least_lately_makes_room(tmp_path: Path) -> None:
    segments, folder = opened(tmp_path), tmp_path / NAME
    for number in range(200):
        segments.append(record(number))
        assert read(segments, 0) == record(0), "it is used all the time"
        assert sum(one.stat().st_size for one in folder.glob("*.kv")) <= SIZE
    kept = found(segments, 200)
    assert kept[0] == 0
    assert kept[-1] == 199
    assert 40 < len(kept) <= 64
    segments.close()
    assert found(opened(tmp_path), 200) == kept


def state(number: int) -> KeptBlock:
    block = record(number)
    data = bytes([number % 249]) * OF_STATES.data_bytes
    return KeptBlock(b"s" + block.key[1:], block.key, block.tokens, data)


def test_blocks_and_states_share_the_room(tmp_path: Path) -> None:
    segments, folder = opened(tmp_path), tmp_path / NAME
    for number in range(200):
        segments.append(record(number))
        if number % 4 == 3:
            segments.append(state(number))
        assert sum(one.stat().st_size for one in folder.glob("*.kv")) <= SIZE
    segments.close()
    segments = opened(tmp_path)
    (room,) = segments.room(1, OF_STATES)
    kept = [n for n in range(3, 200, 4) if segments.read(state(n).key, room) == state(n)]
    assert kept
    assert kept[-1] == 199
    assert found(segments, 200)[-1] == 199
    assert segments.num_bad == 0


def test_other_names_make_room_first(tmp_path: Path) -> None:
    filled(tmp_path, 50, OTHER)
    filled(tmp_path, 50)
    assert not (tmp_path / OTHER).exists()
    assert found(opened(tmp_path), 50) == [*range(50)]


def test_a_name_that_is_in_use_stays(tmp_path: Path) -> None:
    filled(tmp_path, 50, OTHER)
    other = opened(tmp_path, name=OTHER)
    filled(tmp_path, 50)
    assert found(other, 50) == [*range(50)]


def test_of_two_that_write_the_second_only_reads(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    first, said = opened(tmp_path), list[str]()
    second = opened(tmp_path, said)
    assert len(said) == 1
    assert "another process writes" in said[0]
    assert (first.can_write, second.can_write) == (True, False)
    second.append(record(7))
    assert found(second, 9) == [0, 1, 2]
    first.close()
    assert opened(tmp_path).can_write


def test_a_full_disk_costs_no_record_that_was_there(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    segments = opened(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (START + 4 * STRIDE + 100, hard))
    try:
        segments.append(record(3))
        with pytest.raises(OSError, match=r"."):
            segments.append(record(4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    segments.append(record(5))
    assert found(segments, 6) == [0, 1, 2, 3], "it takes no more"
    segments.close()
    assert found(opened(tmp_path), 6) == [0, 1, 2, 3]


def test_a_folder_that_can_only_be_read(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    lock = tmp_path / NAME / "lock"
    lock.unlink()
    lock.mkdir()  # as root may write anywhere
    said: list[str] = []
    segments = opened(tmp_path, said)
    assert found(segments, 3) == [0, 1, 2]
    assert not segments.can_write
    assert len(said) == 1
    assert "is only read" in said[0]


@pytest.mark.parametrize("below", ["", "inside"])
def test_a_path_that_is_a_file(tmp_path: Path, below: str) -> None:
    path = tmp_path / "file"
    path.write_text("x")
    with pytest.raises(ValueError, match=r"--kv-disk: .*file"):
        opened(path / below if below else path)


def test_too_small_a_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give at least"):
        Segments(tmp_path, 16 * FORM.record_bytes, NAME, [FORM, OF_STATES], print)
