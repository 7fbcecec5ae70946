"""Which models are loaded: started when asked for, ended when idle or when memory is needed.

A model has one server or several, all alike. A model that is answering, or that a request waits
for, is never ended to make room. A server that hangs is ended. Like one that has crashed, it is
started again: at once if it is missed, else by the next request.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from functools import partial
from typing import Any

from ridgeline.engine.setup.options import Options
from ridgeline.fleet.servers.adapters import NotLoaded, SharedAdapters
from ridgeline.fleet.servers.joined import JoinedServer
from ridgeline.fleet.servers.same import take_same
from ridgeline.fleet.servers.slot import ServersPlan, Slot, plan_servers
from ridgeline.fleet.servers.variables import ServerFlags
from ridgeline.fleet.servers.worker import StartError, Worker, spare_process
from ridgeline.foresight.routing.where import PromptKeys
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.limits import Limits
from ridgeline.serve.http.listening import SocketFolder
from ridgeline.serve.http.turns import in_thread
from ridgeline.serve.main import TUNNEL_KEY
from ridgeline.system.machine import memory_of

_LOOK_S = 1.0  # between two looks at a model that is in use
_REST_S = 0.1  # while no server takes a request
_LONGEST_REST_S = 30.0  # between two starts that fail


class Pool:
    """The models that are loaded."""

    def __init__(
        self,
        options: Options,
        flags: ServerFlags,
        limits: Limits,
        *,
        num_servers: int,
        guards: Collection[str],
        keep_alive_s: float,
        memory_bytes: int | None,
        step_timeout_s: float,
        silence_timeout_s: float,
        shutdown_timeout_s: float,
        write: Callable[[str], object],
        on_ready: Callable[[Slot, Worker], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """Begin with none.

        Args:
            options: those of every engine.
            flags: the same and all others, as every model gets them.
            limits: what each key may use of all models.
            num_servers: of each model while it is loaded; each server has ``guards`` beside it.
            keep_alive_s: how long an unused model stays; below 0 for ever.
            memory_bytes: what all may take together; None is what is free.
            step_timeout_s: how long a model may be silent before it is ended.
            silence_timeout_s: the same, before its requests go to another server.
            shutdown_timeout_s: what running requests get at the end.
            write: takes the lines of the log, the models' own too.
            on_ready: runs beside each server, from when it may have requests.
        """
        self.slots: dict[str, Slot] = {}
        self._options, self._flags, self._write = options, flags, write
        self._on_ready = on_ready
        self.limits = limits
        self.adapters = SharedAdapters(options.adapters)
        self._keep_alive_s, self._shutdown_timeout_s = keep_alive_s, shutdown_timeout_s
        self._memory_bytes, self.num_servers, self._guards = memory_bytes, num_servers, guards
        self._step_timeout_s, self._silence_timeout_s = step_timeout_s, silence_timeout_s
        self._folder = SocketFolder()
        self.key = secrets.token_hex(32)  # by which its models know us
        self._spare: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._num_started = self.num_waiting = 0  # of servers; of models, until others are idle
        self._loading = asyncio.Lock()  # one at a time: each is planned with what the others left
        self._freed = asyncio.Event()  # a model became idle, or ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def use(
        self, name: str, model: str, keep_alive_s: float | None = None
    ) -> AsyncIterator[Slot]:
        """Keep a model loaded for as long as the block lasts, once ``server`` has been asked for.

        ``keep_alive_s`` is how long it stays after its last request from now on.
        """
        slot = self._slot(name, model)
        if slot.state == "unloaded":
            slot.model = model  # another file may have the name now
        if keep_alive_s is not None:
            slot.keep_alive_s = keep_alive_s
        slot.num_users += 1
        if slot.timer is not None:
            slot.timer.cancel()
        try:
            yield slot
        finally:
            slot.num_users -= 1
            slot.used_s = asyncio.get_running_loop().time()
            if not slot.num_users:
                self._begin_idle(slot)

    def _slot(self, name: str, model: str) -> Slot:
        return self.slots.setdefault(name, Slot(name, model, self._keep_alive_s, self.num_servers))

    async def server(
        self,
        slot: Slot,
        prompt: PromptKeys,
        avoided: Collection[Worker] = (),
        *,
        is_patient: bool = False,
    ) -> Worker:
        """Return the server that should get a request, when there is one.

        One of those ``avoided`` is taken only where there is no other. Raises ApiError if the model
        cannot be loaded or, unless the caller ``is_patient``, if all of its servers hang and no
        other is about to be there.
        """
        while True:
            if slot.is_asleep:
                await self._woken(slot)
            found = slot.choose(prompt, avoided) or slot.choose(prompt)
            if found is not None:
                return found
            hangs = any(one.trouble for one in slot.workers.values())
            if hangs and not is_patient and not slot.expects_more:
                raise self.refusal(slot)
            if not slot.workers:
                self._tend(slot)
            starting = list(slot.starting.values())
            if starting:  # a client that leaves does not stop what others wait for
                await asyncio.wait(starting, timeout=_REST_S, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(_REST_S)
            failed = [one for one in starting if one.done() and not _is_well(one)]
            if failed and not slot.workers and not slot.starting:
                raise _failure(slot, failed[0])

    async def _woken(self, slot: Slot) -> None:
        """Wait until there is room for a model that sleeps; its servers wake by a request."""
        if slot.waking is None:
            slot.waking = asyncio.create_task(self._wake(slot))
        try:  # a client that leaves does not stop what others wait for
            await asyncio.shield(slot.waking)
        except (ValueError, OSError) as error:
            message = f"{slot.name} cannot be loaded: {error}"
            raise ApiError(503, message, code="model_not_loaded") from None

    async def _wake(self, slot: Slot) -> None:
        try:
            async with self._loading:
                if slot.is_asleep:
                    await self._make_room(slot)
                    slot.is_asleep = False
                    self._write(f"{slot.name} wakes")
        finally:
            slot.waking = None

    async def look(self) -> dict[str, str]:
        """Return what is wrong with which loaded models; it takes about a second at most."""
        slots = list(self.slots.values())
        workers = [worker for slot in slots for worker in slot.workers.values()]
        await asyncio.gather(*(worker.look() for worker in workers))
        return {slot.name: slot.trouble for slot in slots if slot.trouble}

    def refusal(self, slot: Slot) -> ApiError:
        """Return the error of a request for a model that hangs."""
        message = f"{slot.name} {slot.trouble or 'has ended'}; it is stopped after "
        message += f"{self._step_timeout_s:g} s, and loaded again on the next request"
        return ApiError(503, message, code="model_hung", headers={"retry-after": "5"})

    async def forget_dead(self, slot: Slot, worker: Worker) -> None:
        """Forget a server that has ended, or is about to, so that no request goes there any more.

        One that still listens is only asked how it is, however busy it is.
        """
        if worker.is_there and worker.is_listening:
            await worker.look()
        else:
            await self._forget(slot, worker)
            await worker.wait()

    async def load(self, name: str, model: str) -> Slot:
        """Load a model with all of its servers. Raises ValueError or OSError if it cannot be."""
        slot = self._slot(name, model)
        self._tend(slot)
        starts = list(slot.starting.values())
        await asyncio.gather(*starts, return_exceptions=True)  # none, if others have it placed
        for start in starts:
            if start.cancelled():
                raise ValueError("it was told to stop before the model was loaded")
            if (error := start.exception()) is not None:
                await self.close()
                raise ValueError(f"{name} cannot be loaded: {error}")
        return slot

    def reload_keys(self) -> None:
        """Let all models read the file of keys again."""
        for worker in self._workers():
            worker.reload_keys()

    def kill(self) -> None:
        """End all models at once."""
        for worker in self._workers():
            worker.kill()

    def _workers(self) -> list[Worker]:
        return [worker for slot in self.slots.values() for worker in slot.workers.values()]

    async def close(self) -> None:
        """Start no more models; end each when its requests have ended or its time is up."""
        self._is_closed = True
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._shutdown_timeout_s
        while any(slot.num_users for slot in self.slots.values()) and loop.time() < deadline_s:
            await asyncio.sleep(0.02)
        starting = [task for slot in self.slots.values() for task in slot.starting.values()]
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        await asyncio.gather(*(self._unload(slot) for slot in self.slots.values()))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._spare is not None:
            spare = await self._spare
            with contextlib.suppress(ProcessLookupError):
                spare.kill()
            await spare.wait()
        self._folder.remove()

    # --- loading -------------------------------------------------------------------------------

    def _tend(self, slot: Slot) -> None:
        """Begin to start the servers that a model lacks. Raises ApiError at the end of all."""
        if self._is_closed:
            raise ApiError(503, "the server is stopping", code="stopping")
        for number in range(1, slot.num_wanted + 1):
            if number not in slot.workers and number not in slot.starting:
                task = asyncio.create_task(self._load(slot, number))
                slot.starting[number] = task
                task.add_done_callback(partial(self._note_start, slot, number))

    def _note_start(self, slot: Slot, number: int, start: asyncio.Task[Worker]) -> None:
        """Take note of how a start ended; try again later if it failed, and is still wanted."""
        del slot.starting[number]
        if _is_well(start) or start.cancelled():
            return
        if slot.num_wanted > 1:
            self._write(f"server {number} of {slot.name} cannot be started: {start.exception()}")
        if slot.workers or slot.deaths:  # it has run before
            self._tend_later(slot)
        elif not slot.starting:
            slot.plan = None

    def _tend_later(self, slot: Slot) -> None:
        """Start what is missing: at once after the first failure, later after more in a row."""
        if slot.is_kept and not self._is_closed:
            self._later(self._tend_after(slot, min(_LONGEST_REST_S, float(slot.num_failed))))
        slot.num_failed += 1

    async def _tend_after(self, slot: Slot, rest_s: float) -> None:
        await asyncio.sleep(rest_s)
        if slot.is_kept and not self._is_closed:
            self._tend(slot)

    async def _load(self, slot: Slot, number: int) -> Worker:
        loop = asyncio.get_running_loop()
        async with self._loading:
            begin_s = loop.time()
            slot.plan = slot.plan or await self._make_room(slot)
            self._num_started += 1
            worker = await Worker.start(
                await self._take_spare(),
                slot.model,
                self._folder.path / f"{self._num_started}.sock",
                self._flags.arguments(slot.name),
                {
                    **self._flags.variables(slot.name, number, slot.starts[number]),
                    TUNNEL_KEY: self.key,
                    "RIDGELINE_KV_CACHE_MEMORY": str(slot.plan.config.kv_bytes),
                    "RIDGELINE_THREADS": str(slot.plan.config.threads),
                },
                number,
                self._write,
            )
            slot.starts[number] += 1
            try:
                await self.adapters.match(worker)
            except NotLoaded as error:  # the others have it
                self._write(f"{slot.called(worker)} lacks an adapter: {error}")
            slot.take(worker)
        self._write(f"{slot.called(worker)} is loaded, in {loop.time() - begin_s:.2f} s")
        slot.note(worker, "is ready")
        self._watch(slot, worker)
        self._later(self.prepare())
        if not slot.num_users:  # all clients that asked have left
            self._begin_idle(slot)
        return worker

    async def prepare(self) -> None:
        """Have a process at hand for the next model: starting one takes longer than loading."""
        if self._spare is None and not self._is_closed:
            self._spare = asyncio.create_task(spare_process())
            await asyncio.shield(self._spare)

    async def _take_spare(self) -> asyncio.subprocess.Process:
        """Return a process for a model, and begin the next one when this model is loaded."""
        if self._spare is not None:
            spare = await asyncio.shield(self._spare)
            self._spare = None
            if memory_of(spare.pid).resident_bytes:  # else it has died
                return spare
        return await spare_process()

    async def _make_room(self, slot: Slot) -> ServersPlan:
        """Let idle models sleep, or end them, until this one fits as it would alone.

        It returns its plan. If only models that answer are left, it takes what there is, or waits
        for one of them if that is too little. Raises ValueError if it does not fit even alone.
        """
        while True:
            self._freed.clear()
            others = [one for one in self.slots.values() if one.plan and one is not slot]
            plan, problem = await in_thread(self._plan, slot, *self._room(others))
            if plan is not None and not plan.config.notes:
                return plan
            idle = [one for one in others if not one.num_users]
            if idle:
                oldest = min(idle, key=lambda one: (one.is_asleep, one.used_s))
                await self._give_way(oldest, slot.name)
            elif plan is not None:
                return plan
            elif others:
                self._write(f"{slot.name} waits for memory: {problem}")
                self.num_waiting += 1
                await self._freed.wait()
                self.num_waiting -= 1
            else:
                raise ValueError(problem)

    async def join(self, slot: Slot, server: JoinedServer) -> None:
        """Let a server of another machine have requests. Raises NotTaken if it may not."""
        self._num_started += 1
        path = self._folder.path / f"{self._num_started}.sock"
        await server.listen(path)
        worker = Worker(server, path, 0, server.tunnel_key)
        await take_same(slot, worker, server, self.adapters)
        self._write(f"{slot.called(worker)} is {server.node}, process {server.pid}")
        slot.note(worker, f"has joined ({server.node})")
        self._watch(slot, worker)

    async def _give_way(self, slot: Slot, name: str) -> None:
        """Let an idle model sleep; end one that sleeps already, or whose backend cannot."""
        workers = list(slot.workers.values())
        is_awake = bool(workers) and not slot.is_asleep
        if is_awake and all(await asyncio.gather(*(worker.sleep() for worker in workers))):
            self._write(f"{slot.name} sleeps, to make room for {name}")
            slot.is_asleep = not slot.num_users  # a request that came meanwhile wakes it
        else:
            self._write(f"{slot.name} makes room for {name}")
            await self._unload(slot)

    def _room(self, others: list[Slot]) -> tuple[int, int | None]:
        """Return how much of what seems free is for other models, and the most one may take.

        One that sleeps needs room before it wakes; until then it has only its weights.
        """
        promised = total = 0
        for slot in others:
            assert slot.plan is not None
            if slot.is_asleep:
                total += slot.plan.weights_bytes
            else:
                private = sum(one.memory.private_bytes for one in slot.workers.values())
                promised += max(0, slot.plan.total_bytes - private)
                total += slot.plan.total_bytes
        return promised, None if self._memory_bytes is None else self._memory_bytes - total

    def _plan(
        self, slot: Slot, taken_bytes: int, most_bytes: int | None
    ) -> tuple[ServersPlan | None, str]:
        """Return how a model's servers would be loaded, or None and why they cannot be."""
        try:
            most = taken_bytes, most_bytes
            found = plan_servers(self._options, slot.model, slot.num_wanted, self._guards, *most)
        except ValueError as error:
            return None, str(error)
        return found, ""

    # --- ending --------------------------------------------------------------------------------

    def _begin_idle(self, slot: Slot) -> None:
        """Begin to count the time that a model is idle; others may have its memory."""
        self._freed.set()
        if slot.keep_alive_s >= 0 and slot.workers:
            loop = asyncio.get_running_loop()
            if slot.timer is not None:
                slot.timer.cancel()
            slot.timer = loop.call_later(slot.keep_alive_s, self._end_idle, slot)

    def _end_idle(self, slot: Slot) -> None:
        self._later(self._unload_if_idle(slot))

    async def _unload_if_idle(self, slot: Slot) -> None:
        async with self._loading:  # or a start would count its memory as taken, or miss it
            if not slot.num_users and slot.workers:
                self._write(f"{slot.name} was idle and is unloaded")
                await self._unload(slot)

    async def _unload(self, slot: Slot) -> None:
        """End all servers of a model."""
        if slot.timer is not None:
            slot.timer.cancel()
        for start in slot.starting.values():
            start.cancel()
        workers = list(slot.workers.values())
        for worker in workers:
            slot.drop(worker)
        slot.plan, slot.is_asleep = None, False
        slot.missing.clear()
        await asyncio.gather(*(worker.stop() for worker in workers))
        self._freed.set()

    def _watch(self, slot: Slot, worker: Worker) -> None:
        """Forget a server whose process ends by itself."""

        async def watch() -> None:
            beside = [asyncio.ensure_future(self._look_after(slot, worker))]
            beside += (
                [asyncio.ensure_future(self._on_ready(slot, worker))] if self._on_ready else []
            )
            await worker.wait()
            for one in beside:
                one.cancel()
            await self._forget(slot, worker)

        self._later(watch())

    async def _look_after(self, slot: Slot, worker: Worker) -> None:
        """Look at a server while its model is in use.

        While it does not answer, its requests go to another one that does. Once it hangs it is
        ended.
        """
        while not worker.is_hung(self._step_timeout_s):
            await asyncio.sleep(_LOOK_S)
            if slot.num_users or worker.trouble:
                await worker.look()
            if self._is_closed or not slot.has_lost(worker, self._silence_timeout_s):
                continue
            if num := worker.let_go():
                why, some = worker.trouble or "leaves", f"{num} request{'s' * (num > 1)}"
                slot.note(worker, f"{why}: {some} moved to other servers")
        worker.end_hung()

    async def _forget(self, slot: Slot, worker: Worker) -> None:
        """Take a server that has ended out of use, and start it again if it is missed."""
        if slot.workers.get(worker.number) is not worker:
            return
        slot.drop(worker)
        await worker.stop()
        self._write(f"{slot.called(worker)} {worker.fate}")
        slot.lose(worker)
        if not slot.is_kept and not slot.starting:
            slot.plan = None
        self._tend_later(slot)
        self._freed.set()

    def _later(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is_well(start: asyncio.Task[Worker]) -> bool:
    return not start.cancelled() and start.exception() is None


def _failure(slot: Slot, start: asyncio.Task[Worker]) -> ApiError:
    """Return the error of a request that waited for a server which could not be started."""
    if start.cancelled():
        return ApiError(503, "the server is stopping", code="stopping")
    error = start.exception()
    if not isinstance(error, StartError | ValueError | OSError):
        assert error is not None
        raise error
    message = f"{slot.name} cannot be loaded: {error}"
    return ApiError(503, message, code="model_not_loaded")
