"""Files are rotated, and removed once lines show that they are old, whatever a clock says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.trust.audit.record_format import files_of, written_time
from tests.trust.audit.test_files import DAY_S, Clock, checked, lines_of, opened


def test_each_day_has_a_file_and_old_ones_are_removed(tmp_path: Path) -> None:
    clock = Clock()
    files = opened(tmp_path, keep_s=3 * DAY_S, now_s=clock)
    for _ in range(10):
        files.keyed_hash("a")
        files.append({"event": "request"})
        files.append({"event": "request"})
        clock.now_s += DAY_S
    files.sync()
    files.close()
    # Of day 9 only a clock speaks; what days 7 and 8 show is that day 4 is three days old.
    assert [file.name[6:14] for file in files_of(tmp_path)] == [f"{i:08}" for i in range(4, 10)]
    assert len(list(tmp_path.glob("*.key"))) == 6  # hashes of older days cannot be linked any more
    found = checked(tmp_path)
    assert found.faults == found.notes == []
    files_of(tmp_path)[0].unlink()  # by somebody else
    (fault,) = checked(tmp_path).faults
    assert "lines are missing before" in fault


def written_at(folder: Path, now_s: float, keep_s: float = 180 * DAY_S) -> None:
    """Start, write a line and stop, all at one time."""
    clock = Clock()
    clock.now_s = now_s
    files = opened(folder, now_s=clock, keep_s=keep_s)
    files.append({"event": "request"})
    files.sync()
    files.close()


def test_what_is_old_is_removed_once_days_of_lines_show_it(tmp_path: Path) -> None:
    """Also at a start; a server that was off for long is not told from a clock that is wrong."""
    begin_s, nums = Clock().now_s, []
    for day in (0, 1, 400, 401, 402, 403):
        written_at(tmp_path, begin_s + day * DAY_S)
        nums.append(len(files_of(tmp_path)))
        assert checked(tmp_path).faults == []
    assert nums == [1, 2, 3, 4, 3, 4]


@pytest.mark.parametrize("jump_s", [10 * 365 * DAY_S, -10 * 365 * DAY_S, 200 * DAY_S, 5 * DAY_S])
@pytest.mark.parametrize("rotate_bytes", [600, 1 << 20])
def test_a_clock_that_jumps_for_a_while_removes_nothing(
    tmp_path: Path, jump_s: float, rotate_bytes: int
) -> None:
    """While it is wrong, over a midnight and a restart, and after it was set right."""
    clock, keep_s, num, days = Clock(), 3 * DAY_S, 0, set[str]()
    clock.now_s = clock.now_s // DAY_S * DAY_S + DAY_S / 2

    def write(since_s: float, until_s: float, *, is_wrong: bool) -> None:
        nonlocal num
        files = opened(tmp_path, rotate_bytes=rotate_bytes, keep_s=keep_s, now_s=clock)
        start_s = clock.now_s
        for at_s in range(int(since_s), int(until_s), 6 * 3600):
            clock.now_s = start_s + at_s + (jump_s if is_wrong else 0.0)
            files.keyed_hash("a")
            files.append({"event": "request"})
            days.add(written_time(clock.now_s)[:10])
            num += 1
        files.sync()
        files.close()
        clock.now_s = start_s + until_s
        found = checked(tmp_path)
        assert (found.faults, found.num_requests) == ([], num)

    write(0, 2 * DAY_S, is_wrong=False)
    for _ in range(2):
        write(0, DAY_S / 3, is_wrong=True)
    write(0, DAY_S / 3, is_wrong=False)
    assert {path.stem for path in tmp_path.glob("*.key")} == days


def test_what_was_written_while_the_clock_was_wrong_goes_with_its_neighbours(
    tmp_path: Path,
) -> None:
    begin_s = Clock().now_s
    for day in (*range(4), 3650, *range(4, 12)):
        written_at(tmp_path, begin_s + day * DAY_S, keep_s=3 * DAY_S)
    left = [json.loads(lines_of(file)[0])["time"] for file in files_of(tmp_path)]
    assert len(left) == 6
    assert left == sorted(left)
