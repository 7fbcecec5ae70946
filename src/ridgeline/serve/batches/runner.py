"""Batches that a server has been given: run one after another for each owner, while nobody waits.

They go on after a restart. What clients see is said in ``batches.routes``.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp

from ridgeline.serve.answer.stages import Observer
from ridgeline.serve.batch_files.lines import RequestFile, usage_of
from ridgeline.serve.batch_files.run import BatchProgress, BatchRun, Stopped
from ridgeline.serve.batch_files.store import OwnerFiles, Store, StoredBatch, new_id
from ridgeline.serve.batches.asgi_client import LocalClient
from ridgeline.serve.http.fair_pool import in_thread
from ridgeline.serve.http.keys import Keys
from ridgeline.system.machine import folder_name

_log = logging.getLogger("ridgeline.serve")


def store_of(home: Path | None, model: str) -> Store | str:
    """Return where a server of this model keeps files, or why it keeps none."""
    if home is None:
        return "this server keeps no files"
    try:
        return Store(home / "batches" / folder_name(model))
    except (OSError, ValueError) as error:
        return f"this server keeps no files: {error}"


class Batches:
    """The batches of each owner, and the running one."""

    def __init__(
        self,
        store: Store,
        app: ASGIApp,
        keys: Keys,
        fingerprint: str,
        most_at_once: int,
        observer: Observer | None = None,
    ) -> None:
        """Run the batches of ``store``, asking ``app``.

        ``fingerprint`` names all that equal answers hang on; of each owner at most
        ``most_at_once`` requests are asked at a time. ``observer`` is told of each.
        """
        self.store = store
        self._app, self._keys, self._observer = app, keys, observer
        self._fingerprint, self._most_at_once = fingerprint, most_at_once
        self._workers: dict[str, asyncio.Task[None]] = {}
        self._running: dict[str, asyncio.Task[None]] = {}  # by the batch
        self._is_closing = False

    def start(self) -> None:
        """Go on with what is not over; to be called on the loop."""
        for owner in list(self.store.owners):
            self.wake(owner)

    def wake(self, owner: str) -> None:
        """Work on an owner's batches until all are over."""
        if owner not in self._workers and not self._is_closing:
            self._workers[owner] = asyncio.create_task(self._work(owner))

    def new(self, owner: str, endpoint: str, input_file_id: str, **options: Any) -> StoredBatch:
        """Take a batch, which will run in its turn; ``options`` are further fields of it.

        Raises OSError.
        """
        now_s, seed = int(time.time()), secrets.randbits(63)
        batch = StoredBatch(new_id("batch_"), now_s, endpoint, input_file_id, seed=seed, **options)
        self.store.of(owner).keep(batch)
        self.wake(owner)
        return batch

    def cancel(self, owner: str, batch_id: str) -> StoredBatch:
        """Ask no more of a batch's requests; what is answered becomes its output. Raises OSError.

        Where that is not possible any more, nothing changes.
        """
        owned = self.store.of(owner)
        if owned.batches[batch_id].status not in ("validating", "in_progress"):
            return owned.batches[batch_id]
        owned.moved(batch_id, "cancelling")
        if task := self._running.get(batch_id):
            task.cancel()
        elif not owned.progress_path(batch_id).exists():  # it has not begun
            owned.moved(batch_id, "cancelled")
        return owned.batches[batch_id]

    async def close(self) -> None:
        """Stop; what is not over goes on at the next start."""
        self._is_closing = True
        tasks = [*self._workers.values(), *self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.store.close()

    async def _work(self, owner: str) -> None:
        owned = self.store.of(owner)
        try:
            while (batch := next((b for b in owned.batches.values() if not b.is_over), None)) and (
                label := self._keys.owners.get(owner)
            ) is not None:
                task = asyncio.create_task(self._run(owned, batch, label))
                self._running[batch.id] = task
                try:
                    await asyncio.wait([task])
                finally:
                    self._running.pop(batch.id)
                left = owned.batches[batch.id]
                if not left.is_over and left.status != "cancelling":
                    return  # the server stops, or the engine has: the next start goes on
        finally:
            del self._workers[owner]

    async def _run(self, owned: OwnerFiles, batch: StoredBatch, label: str) -> None:
        """Bring a batch to its end. Whatever fails is its own problem."""
        try:
            await self._answer(owned, batch, label)
        except Stopped:
            _log.warning("batch %s rests: the engine takes no requests", batch.id)
        except (OSError, ValueError) as error:  # a full disk, a file that cannot be read
            _log.warning("batch %s failed: %s", batch.id, error)
            # Where the server keeps its files is nobody's matter.
            why = error.strerror if isinstance(error, OSError) else None
            owned.moved(batch.id, "failed", problem=why or str(error))
        except Exception:
            _log.exception("batch %s failed", batch.id)
            owned.moved(batch.id, "failed", problem="it failed; the server's log says more")

    async def _answer(self, owned: OwnerFiles, batch: StoredBatch, label: str) -> None:
        source = RequestFile(owned.content(batch.input_file_id), url=batch.endpoint)
        digest = await in_thread(source.digest)
        same = {"input": digest, "model": self._fingerprint, "seed": batch.seed}
        progress = BatchProgress(owned.progress_path(batch.id), same)
        try:
            if batch.status in ("validating", "in_progress"):
                await self._ask(owned, batch, source, progress, label)
            await self._finish(owned, batch.id, progress)
            progress.remove()
        finally:
            progress.close()

    async def _ask(
        self,
        owned: OwnerFiles,
        batch: StoredBatch,
        source: RequestFile,
        progress: BatchProgress,
        label: str,
    ) -> None:
        total = await in_thread(lambda: sum(1 for _ in source.lines()))
        if not total:
            raise ValueError("the file has no requests")
        owned.moved(batch.id, "in_progress", num_total=total)
        run = BatchRun(
            progress,
            LocalClient(self._app, label, is_background=True, observer=self._observer),
            name=batch.id,
            seed=batch.seed,
            most_at_once=self._most_at_once,
        )
        await run.run(source.lines(), lambda: _note_counts(owned, batch.id, progress))

    async def _finish(self, owned: OwnerFiles, batch_id: str, progress: BatchProgress) -> None:
        """Make files of what was answered. Begun again after a kill, it makes the same ones."""
        _note_counts(owned, batch_id, progress)
        batch = owned.batches[batch_id]
        output = batch.output_file_id or new_id("file-")
        errors = batch.error_file_id or new_id("file-")
        has_output, has_errors = progress.num_completed > 0, progress.num_failed > 0
        ids = {"output_file_id": output if has_output else None}
        ids["error_file_id"] = errors if has_errors else None
        is_cancelled = batch.status == "cancelling"
        owned.moved(batch_id, batch.status if is_cancelled else "finalizing", **ids)
        path = owned.content(output) if has_output else None
        await in_thread(progress.finish, path, owned.content(errors), in_order=True)
        answers = progress.lines(is_completed=True, in_order=True)
        usage = await in_thread(usage_of, answers)
        if has_output:
            owned.note_file(output, f"{batch_id}_output.jsonl", "batch_output")
        if has_errors:
            owned.note_file(errors, f"{batch_id}_error.jsonl", "batch_output")
        owned.moved(batch_id, "cancelled" if is_cancelled else "completed", usage=usage)


def _note_counts(owned: OwnerFiles, batch_id: str, progress: BatchProgress) -> None:
    """Show how far a batch is; its progress file says so after a restart."""
    batch = owned.batches[batch_id]
    owned.batches[batch_id] = replace(
        batch, num_completed=progress.num_completed, num_failed=progress.num_failed
    )
