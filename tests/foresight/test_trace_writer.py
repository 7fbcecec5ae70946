"""A trace that cannot be written costs its records, and nothing else."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.foresight.simulator.replay import replay
from ridgeline.foresight.trace import TraceWriter
from tests.engine.test_llm import write_model
from tests.serve.engine.test_async_engine import GOOD, answer_of, texts
from tests.serve.serving import serving
from tests.waiting import PATIENCE_S

FULL = Path("/dev/full")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "random")


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none" / "trace.jsonl"
    with pytest.raises(OSError, match=f"cannot write the trace {missing}: No such file"):
        TraceWriter(missing)


def test_a_disk_that_is_full_at_the_start_is_named(model: Path) -> None:
    with pytest.raises(OSError, match=f"cannot write the trace {FULL}: No space left"):
        LLM(model, trace=FULL)


def test_a_disk_that_fills_up_ends_the_trace_and_no_answer(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A pipe whose reader leaves after ten lines stands for the disk."""
    pipe, kept = tmp_path / "trace", list[str]()
    os.mkfifo(pipe)

    def read() -> None:
        with pipe.open() as lines:
            kept.extend(lines.readline() for _ in range(10))

    reader = threading.Thread(target=read)
    reader.start()
    with serving(model, {"trace": pipe}) as served:
        first = [answer_of(found) for found in texts(served, GOOD)]
        reader.join(PATIENCE_S)
        assert [answer_of(found) for found in texts(served, GOOD)] == first
        assert served.call("/health")[0] == 200
        lines = served.running.model_server.metrics.text().decode().splitlines()
        name = "ridgeline:trace_records_lost_total{"
        (lost,) = (float(line.split()[-1]) for line in lines if line.startswith(name))
    assert lost > len(GOOD)
    said = [record.getMessage() for record in caplog.records if record.name == "ridgeline.trace"]
    assert said == [
        f"cannot write the trace {pipe}: Broken pipe; it ends here, and the engine goes on"
    ]
    assert len(kept) == 10


def test_what_was_written_before_can_be_replayed(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with LLM(model, trace=path) as llm:
        llm.generate("hello", SamplingParams(max_tokens=3), progress=False)
        assert llm.trace is not None
        llm.trace.close()
        llm.generate("hello", SamplingParams(max_tokens=3), progress=False)
        assert llm.trace.num_lost == 4
    found = replay([json.loads(line) for line in path.read_text().splitlines()])
    assert (found.num_steps, found.difference, found.unfinished) == (3, None, None)


def test_a_trace_is_for_its_owner_alone(tmp_path: Path) -> None:
    """It has the token ids of prompts."""
    TraceWriter(tmp_path / "trace").close()
    assert (tmp_path / "trace").stat().st_mode & 0o777 == 0o600
