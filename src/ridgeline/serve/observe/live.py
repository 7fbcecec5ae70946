"""Live views of the engine: ids and numbers, never the text of a prompt.

Nothing here runs while no page is open. Views are taken in the engine's thread between two steps,
some time after a change: one of all, and one for each key that watches its own requests. Of others'
steps such a key is told nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator

from ridgeline.core.records import Record, StepRecord
from ridgeline.foresight.step_time.fit import PredictionMonitor
from ridgeline.serve.engine.interface import EngineClient

MOST_READERS = 32  # of one key: pages, in some tabs and on some machines
_PERIOD_S = 0.25  # from a change to the next view


class Live:
    """Views of one engine as server-sent events."""

    def __init__(self, engine: EngineClient, monitor: PredictionMonitor) -> None:
        self._engine, self._monitor = engine, monitor
        self._watchers: Counter[str | None] = Counter()  # by whose requests they see
        self._readers = Counter[str]()  # by who reads
        self._views: dict[str | None, bytes] = {}
        self._news = asyncio.Event()
        self._is_closed = self._is_due = False
        # Since the last view: milliseconds, prompt tokens computed, tokens generated, milliseconds
        # that were predicted; None if the step says nothing of time.
        self._steps: list[tuple[float, int, int, float | None]] = []

    def is_full(self, reader: str) -> bool:
        """Return whether a key reads as many views as it may."""
        return self._readers[reader] >= MOST_READERS

    async def events(self, reader: str, owner: str | None = None) -> AsyncIterator[bytes]:
        """Yield a view now, and the latest whenever there is a new one; nothing if it ``is_full``.

        It is of all requests, or of those with this owner.

        Args:
            reader: the label of the key that reads.
            owner: whose requests it sees; None for all.
        """
        if self.is_full(reader):  # others began since it was asked
            return
        self._readers[reader] += 1
        if not self._watchers:
            self._engine.listeners.append(self._on_record)
        self._watchers[owner] += 1
        self._engine.between_steps(self._take_view)
        sent = self._views.get(owner)  # an old one
        try:
            while not self._is_closed:
                view = self._views.get(owner)
                if view is None or view is sent:
                    await self._news.wait()
                    continue
                sent = view
                yield b"data: %b\n\n" % sent
        finally:
            self._readers[reader] -= 1
            self._watchers[owner] -= 1
            if not self._watchers[owner]:
                del self._watchers[owner]
                self._views.pop(owner, None)
            if not self._watchers:
                self._engine.listeners.remove(self._on_record)

    def close(self) -> None:
        """End all watching."""
        self._is_closed = True
        self._news.set()

    def _publish(self, views: dict[str | None, bytes]) -> None:
        self._views |= {owner: view for owner, view in views.items() if owner in self._watchers}
        self._news.set()
        self._news.clear()

    def _take_view_soon(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(_PERIOD_S, self._engine.between_steps, self._take_view)

    # --- in the engine's thread ----------------------------------------------------------------

    def _on_record(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            # A prompt's last token, if it comes alone, looks like one of an answer.
            prompt = record.num_prompt_tokens
            num_sampled = sum(map(len, record.sampled)) + len(record.ranked)
            foreseen_s = self._monitor.foreseen(record.number)
            foreseen = None if foreseen_s is None else round(1e3 * foreseen_s, 2)
            self._steps.append((round(1e3 * record.duration_s, 2), prompt, num_sampled, foreseen))
        if not self._is_due:
            self._is_due = True
            self._engine.call(self._take_view_soon)

    def _take_view(self) -> None:
        steps, self._steps, views = self._steps, [], dict[str | None, bytes]()
        for owner in tuple(self._watchers):
            snapshot = self._engine.view(owner)
            snapshot["steps"] = steps if owner is None else []
            snapshot["speed"] = round(self._monitor.speed, 3)
            snapshot["is_calibrated"] = self._monitor.is_calibrated
            views[owner] = json.dumps(snapshot, separators=(",", ":")).encode()
        self._is_due = False
        self._engine.call(self._publish, views)
