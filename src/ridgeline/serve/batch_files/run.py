"""A batch from its first request to its last: some at a time, each answer kept as it comes.

It does not know who answers: ``ask`` does.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ridgeline.serve.batch_files.journal import Journal
from ridgeline.serve.batch_files.lines import RequestLine

_ENTRY = (
    b'{"id": "batch_req_%b", "custom_id": %b, "response": '
    b'{"status_code": %d, "request_id": "batch-%b"%b, "body": %b}, "error": null}'
)


class ItemRequest(NamedTuple):
    """A request of a batch, as it is to be answered.

    Attributes:
        url: the route.
        body: its JSON.
        request_id: what the answer is called.
        seed: what its chance depends on if the body has no seed.
    """

    url: str
    body: dict[str, Any]
    request_id: str
    seed: int


class ItemResponse(NamedTuple):
    """The answer: a status of HTTP, JSON, and what is to be told beside it, by name."""

    status: int
    body: bytes
    told: Mapping[str, str] = {}


class Stopped(Exception):
    """Nothing is answered any more; what was answered is kept."""


Ask = Callable[[ItemRequest], Awaitable[ItemResponse]]


class BatchRun:
    """The requests of a batch, asked side by side."""

    def __init__(
        self, journal: Journal, ask: Ask, *, name: str, seed: int, most_at_once: int
    ) -> None:
        """Have ``ask`` answer what ``journal`` has no answer of.

        The ids of answers depend on ``name`` and the requests' places; the chance in them on
        ``seed`` and the places. So it does not matter in which order they are asked, nor when.
        """
        self._journal, self._ask = journal, ask
        self._name, self._seed, self._most_at_once = name, seed, most_at_once

    async def run(self, lines: Iterator[RequestLine], report: Callable[[], object]) -> None:
        """Ask until all is answered; ``report`` is called whenever the journal has more.

        Raises Stopped, OSError if an answer cannot be kept, and what reading ``lines`` raises.
        """
        running: set[asyncio.Task[None]] = set()
        try:
            while (line := await asyncio.to_thread(next, lines, None)) is not None:
                if line.index in self._journal:
                    continue
                if line.problem:
                    self._journal.write(line.index, self._wrong(line), is_completed=False)
                    report()
                    continue
                running.add(asyncio.create_task(self._answer(line, report)))
                while len(running) >= self._most_at_once:
                    running = await _some(running)
            while running:
                running = await _some(running)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _answer(self, line: RequestLine, report: Callable[[], object]) -> None:
        name = self._digest(line.index).hex()
        answer = await self._ask(
            ItemRequest(line.url, line.body, f"batch-{name}", self._seed_of(line))
        )
        custom_id = json.dumps(line.custom_id).encode()
        told = b", " + json.dumps(answer.told).encode()[1:-1] if answer.told else b""
        of_answer = answer.status, name.encode(), told, answer.body
        data = _ENTRY % (name.encode(), custom_id, *of_answer)
        self._journal.write(line.index, data, is_completed=answer.status == 200)
        report()

    def _wrong(self, line: RequestLine) -> bytes:
        error = {"code": "invalid_line", "message": line.problem, "line": line.number}
        entry = {"id": f"batch_req_{self._digest(line.index).hex()}", "custom_id": line.custom_id}
        return json.dumps(entry | {"response": None, "error": error}).encode()

    def _digest(self, index: int) -> bytes:
        return hashlib.blake2b(f"{self._name}:{index}".encode(), digest_size=12).digest()

    def _seed_of(self, line: RequestLine) -> int:
        digest = hashlib.blake2b(f"{self._seed}:{line.index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest)


async def _some(running: set[asyncio.Task[None]]) -> set[asyncio.Task[None]]:
    """Wait until some tasks have ended, and return the others. Raises what a task raised."""
    ended, others = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()
    return others
