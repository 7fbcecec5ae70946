"""The adapters of a router's model: those that it was started with, and those loaded since. Each of
its servers has them, including one that starts or joins later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import httpx2

from ridgeline.fleet.servers.worker import Loaded, Worker, json_of

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class NotLoaded(Exception):
    """A server has not done what an operator asked for: its answer, or None if it has ended."""

    def __init__(self, why: str = "it has ended", answer: httpx2.Response | None = None) -> None:
        super().__init__(why)
        self.answer = answer


class SharedAdapters:
    """The adapters that all servers of a model have."""

    def __init__(self, at_start: Iterable[str]) -> None:
        """Begin with those of the flags, which servers have as soon as they run."""
        self._at_start = dict.fromkeys(at_start, ("", 0))
        self._loaded = dict(self._at_start)
        self._num_loads = 0
        self._changing = asyncio.Lock()

    @property
    def names(self) -> Collection[str]:
        """Names that requests may give for the model's."""
        return self._loaded.keys()

    async def change(self, path: str, fields: Mapping[str, Any], workers: list[Worker]) -> None:
        """Load or unload an adapter on all servers. Raises NotLoaded if one does not load it.

        Then it is on none. ``path`` and ``fields`` are as an operator sent them; the first server
        judges them.
        """
        async with self._changing:
            await _order(workers[0], path, fields)
            name = fields["lora_name"]
            if path == LOAD:
                self._num_loads += 1
                self._loaded[name] = fields["lora_path"], self._num_loads
            else:
                del self._loaded[name]
            self._note(workers[0], self._loaded)
            try:
                await self._match_all(workers)
            except NotLoaded:
                self._loaded.pop(name, None)
                await self._match_all(workers)
                raise

    async def _match_all(self, workers: list[Worker]) -> None:
        for worker in workers:
            if worker.is_there:  # its successor gets them when it starts
                await self.match(worker)

    async def match(self, worker: Worker) -> None:
        """Let a server have what all of them have. Raises NotLoaded if it lacks one at the end."""
        has = dict(self._at_start if worker.adapters is None else worker.adapters)
        failed: dict[str, NotLoaded] = {}
        while differ := [
            name
            for name in {**has, **self._loaded}
            if has.get(name) != self._loaded.get(name) and name not in failed
        ]:
            name = differ[0]
            try:
                if name not in self._loaded:
                    await _order(worker, UNLOAD, {"lora_name": name})
                    del has[name]
                else:
                    fields = {"lora_name": name, "lora_path": self._loaded[name][0]}
                    await _order(worker, LOAD, fields | {"load_inplace": name in has})
                    has[name] = self._loaded[name]
            except NotLoaded as error:
                failed[name] = error
            self._note(worker, has)
        for first in failed.values():
            raise first

    def _note(self, worker: Worker, loaded: Mapping[str, Loaded]) -> None:
        worker.adapters = dict(loaded)
        worker.facts.clear()


async def _order(worker: Worker, path: str, fields: Mapping[str, Any]) -> None:
    try:
        answer = await worker.order(path, fields)
        why = "" if answer.is_success else json_of(answer)["error"]["message"]
    except httpx2.HTTPError:
        raise NotLoaded from None
    if why:
        raise NotLoaded(why, answer)
