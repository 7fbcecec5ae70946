"""What the engine does now, for whoever watches: ids and numbers, never what a prompt says.

Nothing here runs while nobody watches. A view is taken in the engine's thread between two steps,
some time after something has changed; all watchers get the same.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from typing import Any

from ridgeline.core.request import Sequence
from ridgeline.records import Record, StepRecord
from ridgeline.server.bridge import Bridge

_PERIOD_S = 0.25  # from a change to the next view
_MAX_SHOWN = 128  # sequences in a view


class Live:
    """Views of one engine as server-sent events."""

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        self._num_watchers = 0
        self._view, self._news = b"", asyncio.Event()
        self._is_closed = self._is_asked = False
        self._steps: list[tuple[float, int, int]] = []  # since the last view

    async def events(self) -> AsyncIterator[bytes]:
        """Yield a view now, and the latest whenever there is another."""
        if not self._num_watchers:
            self._bridge.listeners.append(self._on_record)
        self._num_watchers += 1
        self._bridge.between_steps(self._look)
        sent = self._view  # an old one
        try:
            while not self._is_closed:
                if self._view is sent:
                    await self._news.wait()
                    continue
                sent = self._view
                yield b"data: %b\n\n" % sent
        finally:
            self._num_watchers -= 1
            if not self._num_watchers:
                self._bridge.listeners.remove(self._on_record)

    def close(self) -> None:
        """End all watching."""
        self._is_closed = True
        self._news.set()

    def _publish(self, view: bytes) -> None:
        self._view = view
        self._news.set()
        self._news.clear()

    def _look_soon(self) -> None:
        loop = asyncio.get_running_loop()
        loop.call_later(_PERIOD_S, self._bridge.between_steps, self._look)

    # --- in the engine's thread ----------------------------------------------------------------

    def _on_record(self, record: Record) -> None:
        if isinstance(record, StepRecord):
            took_s = record.schedule_s + record.execute_s + record.commit_s
            prompt = sum(count for _, _, count in record.work if count > 1)  # not quite: see view
            self._steps.append((round(1e3 * took_s, 2), prompt, sum(map(len, record.sampled))))
        if not self._is_asked:
            self._is_asked = True
            self._bridge.call(self._look_soon)

    def _look(self) -> None:
        """Take a view.

        ``steps`` are those since the view before: milliseconds, prompt tokens computed (a single
        one is not told from an answer's) and tokens generated. ``blocks`` is a map as runs of
        blocks that are free, cached (and free), used by one sequence or shared: ``s2u1f9``.
        """
        scheduler = self._bridge.engine.scheduler
        pool = scheduler.kv.pool
        blocks = bytearray(b"f") * len(pool.refs)
        for block in pool.index.values():
            blocks[block] = ord("c")
        for block in (block for seq in scheduler.running for block in seq.table):
            blocks[block] = ord("s" if pool.refs[block] > 1 else "u")
        view = {
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting) + self._bridge.num_queued,
            "steps": self._steps,
            "block_size": scheduler.kv.block_size,
            "blocks": re.sub(r"(.)\1*", lambda run: f"{run[1]}{len(run[0])}", blocks.decode()),
            "sequences": [*map(_shown, [*scheduler.running, *scheduler.waiting][:_MAX_SHOWN])],
        }
        self._steps, self._is_asked = [], False
        self._bridge.call(self._publish, json.dumps(view, separators=(",", ":")).encode())


def _shown(seq: Sequence) -> dict[str, Any]:
    prompt_len = len(seq.request.prompt)
    return {
        "id": seq.id,
        "status": seq.status.name.lower(),
        "prompt_tokens": prompt_len,
        "computed_tokens": min(seq.num_computed, prompt_len),
        "cached_tokens": seq.request.num_cached_tokens,
        "generated_tokens": seq.num_generated,
        "max_tokens": seq.request.max_len - prompt_len,
        "num_blocks": len(seq.table),
    }
