"""The log's writer: nobody waits for who reads it, and what is lost is counted."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from ridgeline.system.log_writer import LogWriter
from tests.engine.test_llm import model  # noqa: F401  (a fixture)
from tests.serve.test_main import process
from tests.waiting import PATIENCE_S


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    yield reader, writer
    os.close(writer)


def test_a_full_pipe_holds_up_nobody_and_what_is_lost_is_counted(pipe: tuple[int, int]) -> None:
    reader, descriptor = pipe
    log = LogWriter(descriptor)
    for i in range(12_000):  # whoever waited for a reader would wait for ever
        log.line(f"{i:0100d}")
    log.close()  # gives up: nobody reads
    numbers, num_dropped = [], 0
    with os.fdopen(reader) as lines:
        while len(numbers) + num_dropped < 12_000:
            line = next(lines)
            if line.startswith("warning"):
                num_dropped += int(line.split()[1])
            else:
                numbers.append(int(line))
    assert numbers[:10_000] == list(range(10_000))
    assert numbers == sorted(set(numbers))
    assert num_dropped > 0


def test_a_reader_that_went_takes_its_lines_with_it(pipe: tuple[int, int]) -> None:
    reader, descriptor = pipe
    os.close(reader)
    log = LogWriter(descriptor)
    log.line("lost")
    log.write("an exception\nof two lines\n")
    log.close()


def test_a_server_whose_log_nobody_reads_goes_on(model: Path) -> None:  # noqa: F811
    """A pipe holds 64 KiB; this is several times as much."""
    long = {"X-Request-Id": "r" * 128}
    with process(model) as (server, url):
        with OpenAI(
            base_url=f"{url}/v1",
            api_key="none",
            default_headers=long,
            max_retries=0,
        ) as client:
            for _ in range(1_000):
                assert client.models.list().data
        server.terminate()
        assert server.wait(PATIENCE_S) == 0
