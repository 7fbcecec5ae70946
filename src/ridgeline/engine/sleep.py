"""An engine that gives its memory back while it has nothing to do, until the next request.

At level 1 it forgets its prefix cache and gives back what the cache, states and scratch memory
take. At level 2 weights go too, as far as they are mapped from a file: the system keeps that in its
own cache while it has room, and reads it again when a weight is needed. Nothing has to be woken:
the first step finds zeros where nothing is to be known, and weights where they were.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ridgeline.backends.interface import BackendRunner
from ridgeline.core.cache.kvcache import KVCache
from ridgeline.core.engine import Engine
from ridgeline.core.records import Record
from ridgeline.system.machine import give_back, memory_of

LEVELS = (1, 2)


class Sleep:
    """Whether an engine sleeps, and how deep.

    Attributes:
        level: 0 while it is awake.
    """

    def __init__(
        self, engine: Engine, runners: Sequence[BackendRunner], caches: Sequence[KVCache]
    ) -> None:
        """Let ``engine`` sleep, whose memory ``runners`` have, that of a draft model's among them.

        ``caches`` say what is in it.
        """
        self._engine, self._runners, self._caches = engine, runners, caches
        self.level = 0

    def begin(self, level: int = 1) -> int:
        """Give memory back, between two steps; return how many bytes the process has less.

        Raises RuntimeError while requests run, and ValueError if there is no such level or the
        backend cannot.
        """
        if level not in LEVELS:
            raise ValueError(f"level is {level!r}: 1 gives the cache back, 2 weights too")
        self._check_idle()
        before_bytes = memory_of(os.getpid()).resident_bytes
        for runner in self._runners:  # one that cannot says so before anything is forgotten
            runner.give_back(weights=level > 1)
        self.forget()
        if level > 1:
            give_back()
        if not self.level:
            self._engine.listeners.append(self._on_record)
        self.level = level
        return max(0, before_bytes - memory_of(os.getpid()).resident_bytes)

    def forget(self) -> None:
        """Forget all prefixes that are in memory. Raises RuntimeError while requests run."""
        self._check_idle()
        for cache in self._caches:
            cache.forget()

    def _check_idle(self) -> None:
        if num := len(self._engine.requests):  # also paused ones, of which a draft model has blocks
            raise RuntimeError(f"{num} requests run: what they need cannot be forgotten now")

    def end(self) -> None:
        """Be awake; memory is taken again as it is needed."""
        if self.level:
            self.level = 0
            self._engine.listeners.remove(self._on_record)

    def _on_record(self, record: Record) -> None:
        """Be awake: there was a request."""
        self.end()
