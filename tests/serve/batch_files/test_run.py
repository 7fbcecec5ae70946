"""A batch asks so many at once, each request once, and keeps what came when it is stopped."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from ridgeline.serve.batch_files.lines import RequestFile
from ridgeline.serve.batch_files.run import (
    Ask,
    BatchProgress,
    BatchRun,
    ItemRequest,
    ItemResponse,
    Stopped,
)

NUM = 20


@pytest.fixture
def source(tmp_path: Path) -> RequestFile:
    path = tmp_path / "in.txt"
    path.write_text("".join(f"prompt {i}\n" for i in range(NUM)))
    return RequestFile(path, url="/v1/completions")


def run(source: RequestFile, ask: Ask, most_at_once: int = 4) -> list[int]:
    """Run a batch; return how many answers the journal had at each report."""
    progress = BatchProgress(source.path.with_name("part"), {"input": source.digest()})
    seen: list[int] = []
    batch = BatchRun(progress, ask, name="one", seed=7, most_at_once=most_at_once)
    try:
        asyncio.run(batch.run(source.lines(), lambda: seen.append(len(progress))))
        progress.finish(source.path.with_name("out"), source.path.with_name("no"), in_order=True)
    finally:
        progress.close()
    return seen


def test_requests_run_side_by_side_and_no_more_than_so_many(source: RequestFile) -> None:
    running = most = 0
    four = asyncio.Barrier(4)

    async def ask(asked: ItemRequest) -> ItemResponse:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await four.wait()  # nobody gets past it alone
        running -= 1
        return ItemResponse(200, json.dumps(asked.body).encode())

    assert run(source, ask) == list(range(1, NUM + 1))
    assert most == 4
    lines = [json.loads(line) for line in source.path.with_name("out").read_text().splitlines()]
    assert [line["custom_id"] for line in lines] == [f"line-{i}" for i in range(1, NUM + 1)]
    assert lines[3]["response"]["body"] == {"prompt": "prompt 3"}
    assert lines[3]["error"] is None


def test_who_goes_on_asks_what_has_no_answer_with_the_same_seeds(source: RequestFile) -> None:
    asked_at_all: list[ItemRequest] = []

    async def stop_after_five(asked: ItemRequest) -> ItemResponse:
        asked_at_all.append(asked)
        if len(asked_at_all) > 5:
            raise Stopped("no more")
        return ItemResponse(200, b"{}")

    with pytest.raises(Stopped):
        run(source, stop_after_five, most_at_once=1)
    first = list(asked_at_all)

    async def note(asked: ItemRequest) -> ItemResponse:
        asked_at_all.append(asked)
        return ItemResponse(200, b"{}")

    run(source, note)
    later = asked_at_all[len(first) :]
    assert len(later) == NUM - 5
    assert later[0] == first[5]  # the one that had no answer, alike in all
    everyone = first[:5] + later
    assert len({one.seed for one in everyone}) == NUM
    assert len({one.request_id for one in everyone}) == NUM
    assert [one.body["prompt"] for one in everyone] == [f"prompt {i}" for i in range(NUM)]


def test_what_is_not_answered_well_goes_elsewhere_and_dropped_fields_are_named(
    source: RequestFile,
) -> None:
    async def ask(asked: ItemRequest) -> ItemResponse:
        status = 400 if asked.body["prompt"] == "prompt 2" else 200
        return ItemResponse(status, b"{}", {"ignored": "user"})

    run(source, ask)
    assert len(source.path.with_name("out").read_text().splitlines()) == NUM - 1
    (line,) = source.path.with_name("no").read_text().splitlines()
    response = json.loads(line)["response"]
    assert (response["status_code"], response["ignored"]) == (400, "user")
