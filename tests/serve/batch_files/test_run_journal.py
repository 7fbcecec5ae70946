"""The file of a batch keeps each answer once, whatever is cut off, for one batch and process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ridgeline.serve.batch_files.run import BatchProgress

BATCH = {"input": "abc", "seed": 0}


def filled(path: Path, num_answers: int = 6) -> None:
    progress = BatchProgress(path, BATCH)
    for index in reversed(range(num_answers)):
        line = json.dumps({"answer": index}, indent=1).encode()  # with line breaks
        progress.write(index, line, is_completed=index % 3 != 0)
    progress.close()


def finished(
    progress: BatchProgress, folder: Path, *, in_order: bool = True
) -> tuple[list[int], ...]:
    output, errors = folder / "out", folder / "errors"
    progress.finish(output, errors, in_order=in_order)
    texts = (path.read_text().splitlines() for path in (output, errors))
    return tuple([json.loads(text)["answer"] for text in lines] for lines in texts)


def test_answers_come_in_order_or_as_they_ended(tmp_path: Path) -> None:
    filled(tmp_path / "part")
    progress = BatchProgress(tmp_path / "part", BATCH)
    assert (len(progress), progress.num_completed, progress.num_failed) == (6, 4, 2)
    assert finished(progress, tmp_path) == ([1, 2, 4, 5], [0, 3])
    assert finished(progress, tmp_path, in_order=False) == ([5, 4, 2, 1], [3, 0])
    progress.remove()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["errors", "out"]


def test_a_batch_without_failures_leaves_no_file_of_them(tmp_path: Path) -> None:
    progress = BatchProgress(tmp_path / "part", BATCH)
    progress.write(0, b"{}", is_completed=True)
    progress.finish(tmp_path / "out", tmp_path / "errors", in_order=True)
    assert not (tmp_path / "errors").exists()
    progress.close()


def test_wherever_a_journal_was_cut_it_goes_on_without_a_lost_or_doubled_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "part"
    filled(path)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    near = {end + i for end in ends for i in (-2, -1, 0, 1, 5)}
    for length in sorted(near | {0, 1}):
        path.write_bytes(whole[:length])
        progress = BatchProgress(path, BATCH)
        assert len(progress) == max(0, sum(end <= length for end in ends) - 1), length
        for index in range(6):
            if index not in progress:
                line = json.dumps({"answer": index}).encode()
                progress.write(index, line, is_completed=index % 3 != 0)
        assert finished(progress, tmp_path) == ([1, 2, 4, 5], [0, 3])
        progress.close()


def test_zeros_that_a_lost_power_left_are_no_answers(tmp_path: Path) -> None:
    path = tmp_path / "part"
    filled(path)
    whole = path.read_bytes()
    path.write_bytes(whole + b"\0" * 100 + b"\n")
    progress = BatchProgress(path, BATCH)
    assert len(progress) == 6
    progress.close()
    assert path.read_bytes() == whole


def test_a_journal_of_another_batch_is_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "part"
    filled(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="started with another seed: remove it"):
        BatchProgress(path, BATCH | {"seed": 1})
    assert path.read_bytes() == before
    path.write_text("my notes\n")
    with pytest.raises(ValueError, match="not the journal of a batch"):
        BatchProgress(path, BATCH)
    assert path.read_text() == "my notes\n"


def test_one_process_at_a_time_writes_a_journal(tmp_path: Path) -> None:
    progress = BatchProgress(tmp_path / "part", BATCH)
    with pytest.raises(ValueError, match="another process is working on it"):
        BatchProgress(tmp_path / "part", BATCH)
    progress.close()
    BatchProgress(tmp_path / "part", BATCH).close()
