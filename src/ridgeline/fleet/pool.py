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
from ridgeline.fleet.servers.equivalence import admit_equivalent
from ridgeline.fleet.servers.remote_server import RemoteServer
from ridgeline.fleet.servers.replica_set import ReplicaPlan, ReplicaSet, plan_servers
from ridgeline.fleet.servers.worker import StartError, Worker, spare_process
from ridgeline.fleet.servers.worker_flags import WorkerFlags
from ridgeline.foresight.routing.balancer import PromptKeys
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.fair_pool import in_thread
from ridgeline.serve.http.keys import Limits
from ridgeline.serve.http.listening import SocketFolder
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.main import TUNNEL_KEY
from ridgeline.system.machine import memory_of

_LOOK_S = 1.0  # between two looks at a model that is in use
_REST_S = 0.1  # while no server takes a request
_LONGEST_REST_S = 30.0  # between two starts that fail


class Pool:
    """The models that are loaded."""

    def __init__(
        self,
        engine: Options,
        flags: WorkerFlags,
        limits: Limits,
        options: ServeOptions,
        *,
        num_servers: int,
        keep_alive_s: float,
        write: Callable[[str], object],
        on_ready: Callable[[ReplicaSet, Worker], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """Begin with none.

        Args:
            engine: the options of every engine.
            flags: the same and all others, as every model gets them.
            limits: what each key may use of all models.
            options: how long models may be silent and end, what memory they may take together, and
                the guards beside each server.
            num_servers: of each model while it is loaded.
            keep_alive_s: how long an unused model stays; below 0 for ever.
            write: takes the lines of the log, the models' own too.
            on_ready: runs beside each server, from when it may have requests.
        """
        self.replica_sets: dict[str, ReplicaSet] = {}
        self._engine, self._options, self._flags = engine, options, flags
        self._write, self._on_ready = write, on_ready
        self.limits = limits
        self.adapters = SharedAdapters(engine.adapters)
        self._keep_alive_s, self.num_servers = keep_alive_s, num_servers
        self._memory_bytes = options.models_memory_bytes
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
    ) -> AsyncIterator[ReplicaSet]:
        """Keep a model loaded for as long as the block lasts, once ``server`` has been asked for.

        ``keep_alive_s`` is how long it stays after its last request from now on.
        """
        replica_set = self._replica_set(name, model)
        if replica_set.state == "unloaded":
            replica_set.model = model  # another file may have the name now
        if keep_alive_s is not None:
            replica_set.keep_alive_s = keep_alive_s
        replica_set.num_users += 1
        if replica_set.timer is not None:
            replica_set.timer.cancel()
        try:
            yield replica_set
        finally:
            replica_set.num_users -= 1
            replica_set.used_s = asyncio.get_running_loop().time()
            if not replica_set.num_users:
                self._begin_idle(replica_set)

    def _replica_set(self, name: str, model: str) -> ReplicaSet:
        return self.replica_sets.setdefault(
            name, ReplicaSet(name, model, self._keep_alive_s, self.num_servers)
        )

    async def server(
        self,
        replica_set: ReplicaSet,
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
            if replica_set.is_asleep:
                await self._woken(replica_set)
            choice = replica_set.choose(prompt, avoided) or replica_set.choose(prompt)
            if choice is not None:
                return choice
            hangs = any(one.trouble for one in replica_set.workers.values())
            if hangs and not is_patient and not replica_set.expects_more:
                raise self.refusal(replica_set)
            if not replica_set.workers:
                self._tend(replica_set)
            starting = list(replica_set.starting.values())
            if starting:  # a client that leaves does not stop what others wait for
                await asyncio.wait(starting, timeout=_REST_S, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(_REST_S)
            failed = [one for one in starting if one.done() and not _is_well(one)]
            if failed and not replica_set.workers and not replica_set.starting:
                raise _failure(replica_set, failed[0])

    async def _woken(self, replica_set: ReplicaSet) -> None:
        """Wait until there is room for a model that sleeps; its servers wake by a request."""
        if replica_set.waking is None:
            replica_set.waking = asyncio.create_task(self._wake(replica_set))
        try:  # a client that leaves does not stop what others wait for
            await asyncio.shield(replica_set.waking)
        except (ValueError, OSError) as error:
            message = f"{replica_set.name} cannot be loaded: {error}"
            raise ApiError(503, message, code="model_not_loaded") from None

    async def _wake(self, replica_set: ReplicaSet) -> None:
        try:
            async with self._loading:
                if replica_set.is_asleep:
                    await self._make_room(replica_set)
                    replica_set.is_asleep = False
                    self._write(f"{replica_set.name} wakes")
        finally:
            replica_set.waking = None

    async def look(self) -> dict[str, str]:
        """Return what is wrong with which loaded models; it takes about a second at most."""
        replica_sets = list(self.replica_sets.values())
        workers = [
            worker for replica_set in replica_sets for worker in replica_set.workers.values()
        ]
        await asyncio.gather(*(worker.look() for worker in workers))
        return {
            replica_set.name: replica_set.trouble
            for replica_set in replica_sets
            if replica_set.trouble
        }

    def refusal(self, replica_set: ReplicaSet) -> ApiError:
        """Return the error of a request for a model that hangs."""
        message = f"{replica_set.name} {replica_set.trouble or 'has ended'}; it is stopped after "
        message += f"{self._options.step_timeout:g} s, and loaded again on the next request"
        return ApiError(503, message, code="model_hung", headers={"retry-after": "5"})

    async def forget_dead(self, replica_set: ReplicaSet, worker: Worker) -> None:
        """Forget a server that has ended, or is about to, so that no request goes there any more.

        One that still listens is only asked how it is, however busy it is.
        """
        if worker.is_there and worker.is_listening:
            await worker.look()
        else:
            await self._forget(replica_set, worker)
            await worker.wait()

    async def load(self, name: str, model: str) -> ReplicaSet:
        """Load a model with all of its servers. Raises ValueError or OSError if it cannot be."""
        replica_set = self._replica_set(name, model)
        self._tend(replica_set)
        starts = list(replica_set.starting.values())
        await asyncio.gather(*starts, return_exceptions=True)  # none, if others have it placed
        for start in starts:
            if start.cancelled():
                raise ValueError("it was told to stop before the model was loaded")
            if (error := start.exception()) is not None:
                await self.close()
                raise ValueError(f"{name} cannot be loaded: {error}")
        return replica_set

    def reload_keys(self) -> None:
        """Let all models read the file of keys again."""
        for worker in self._workers():
            worker.reload_keys()

    def kill(self) -> None:
        """End all models at once."""
        for worker in self._workers():
            worker.kill()

    def _workers(self) -> list[Worker]:
        return [
            worker
            for replica_set in self.replica_sets.values()
            for worker in replica_set.workers.values()
        ]

    async def close(self) -> None:
        """Start no more models; end each when its requests have ended or its time is up."""
        self._is_closed = True
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._options.shutdown_timeout
        while (
            any(replica_set.num_users for replica_set in self.replica_sets.values())
            and loop.time() < deadline_s
        ):
            await asyncio.sleep(0.02)
        starting = [
            task
            for replica_set in self.replica_sets.values()
            for task in replica_set.starting.values()
        ]
        for task in starting:
            task.cancel()
        await asyncio.gather(*starting, return_exceptions=True)
        await asyncio.gather(
            *(self._unload(replica_set) for replica_set in self.replica_sets.values())
        )
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._spare is not None:
            spare = await self._spare
            with contextlib.suppress(ProcessLookupError):
                spare.kill()
            await spare.wait()
        self._folder.remove()

    # --- loading -------------------------------------------------------------------------------

    def _tend(self, replica_set: ReplicaSet) -> None:
        """Begin to start the servers that a model lacks. Raises ApiError at the end of all."""
        if self._is_closed:
            raise ApiError(503, "the server is stopping", code="stopping")
        for number in range(1, replica_set.num_wanted + 1):
            if number not in replica_set.workers and number not in replica_set.starting:
                task = asyncio.create_task(self._load(replica_set, number))
                replica_set.starting[number] = task
                task.add_done_callback(partial(self._note_start, replica_set, number))

    def _note_start(
        self, replica_set: ReplicaSet, number: int, start: asyncio.Task[Worker]
    ) -> None:
        """Take note of how a start ended; try again later if it failed, and is still wanted."""
        del replica_set.starting[number]
        if _is_well(start) or start.cancelled():
            return
        if replica_set.num_wanted > 1:
            self._write(
                f"server {number} of {replica_set.name} cannot be started: {start.exception()}"
            )
        if replica_set.workers or replica_set.deaths:  # it has run before
            self._tend_later(replica_set)
        elif not replica_set.starting:
            replica_set.plan = None

    def _tend_later(self, replica_set: ReplicaSet) -> None:
        """Start what is missing: at once after the first failure, later after more in a row."""
        if replica_set.is_kept and not self._is_closed:
            self._later(
                self._tend_after(replica_set, min(_LONGEST_REST_S, float(replica_set.num_failed)))
            )
        replica_set.num_failed += 1

    async def _tend_after(self, replica_set: ReplicaSet, rest_s: float) -> None:
        await asyncio.sleep(rest_s)
        if replica_set.is_kept and not self._is_closed:
            self._tend(replica_set)

    async def _load(self, replica_set: ReplicaSet, number: int) -> Worker:
        loop = asyncio.get_running_loop()
        async with self._loading:
            begin_s = loop.time()
            replica_set.plan = replica_set.plan or await self._make_room(replica_set)
            self._num_started += 1
            worker = await Worker.start(
                await self._take_spare(),
                replica_set.model,
                self._folder.path / f"{self._num_started}.sock",
                self._flags.arguments(replica_set.name),
                {
                    **self._flags.variables(replica_set.name, number, replica_set.starts[number]),
                    TUNNEL_KEY: self.key,
                    "RIDGELINE_KV_CACHE_MEMORY": str(replica_set.plan.config.kv_bytes),
                    "RIDGELINE_THREADS": str(replica_set.plan.config.threads),
                },
                number,
                self._write,
            )
            replica_set.starts[number] += 1
            try:
                await self.adapters.match(worker)
            except NotLoaded as error:  # the others have it
                self._write(f"{replica_set.called(worker)} lacks an adapter: {error}")
            replica_set.take(worker)
        self._write(f"{replica_set.called(worker)} is loaded, in {loop.time() - begin_s:.2f} s")
        replica_set.note(worker, "is ready")
        self._watch(replica_set, worker)
        self._later(self.prepare())
        if not replica_set.num_users:  # all clients that asked have left
            self._begin_idle(replica_set)
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

    async def _make_room(self, replica_set: ReplicaSet) -> ReplicaPlan:
        """Let idle models sleep, or end them, until this one fits as it would alone.

        It returns its plan. If only models that answer are left, it takes what there is, or waits
        for one of them if that is too little. Raises ValueError if it does not fit even alone.
        """
        while True:
            self._freed.clear()
            others = [
                one for one in self.replica_sets.values() if one.plan and one is not replica_set
            ]
            plan, problem = await in_thread(self._plan, replica_set, *self._room(others))
            if plan is not None and not plan.config.notes:
                return plan
            idle = [one for one in others if not one.num_users]
            if idle:
                oldest = min(idle, key=lambda one: (one.is_asleep, one.used_s))
                await self._give_way(oldest, replica_set.name)
            elif plan is not None:
                return plan
            elif others:
                self._write(f"{replica_set.name} waits for memory: {problem}")
                self.num_waiting += 1
                await self._freed.wait()
                self.num_waiting -= 1
            else:
                raise ValueError(problem)

    async def join(self, replica_set: ReplicaSet, server: RemoteServer) -> None:
        """Let a server of another machine have requests. Raises NotTaken if it may not."""
        self._num_started += 1
        path = self._folder.path / f"{self._num_started}.sock"
        await server.listen(path)
        worker = Worker(server, path, 0, server.tunnel_key)
        await admit_equivalent(replica_set, worker, server, self.adapters)
        self._write(f"{replica_set.called(worker)} is {server.node}, process {server.pid}")
        replica_set.note(worker, f"has joined ({server.node})")
        self._watch(replica_set, worker)

    async def _give_way(self, replica_set: ReplicaSet, name: str) -> None:
        """Let an idle model sleep; end one that sleeps already, or whose backend cannot."""
        workers = list(replica_set.workers.values())
        is_awake = bool(workers) and not replica_set.is_asleep
        if is_awake and all(await asyncio.gather(*(worker.sleep() for worker in workers))):
            self._write(f"{replica_set.name} sleeps, to make room for {name}")
            # A request that came meanwhile wakes it.
            replica_set.is_asleep = not replica_set.num_users
        else:
            self._write(f"{replica_set.name} makes room for {name}")
            await self._unload(replica_set)

    def _room(self, others: list[ReplicaSet]) -> tuple[int, int | None]:
        """Return how much of what seems free is for other models, and the most one may take.

        One that sleeps needs room before it wakes; until then it has only its weights.
        """
        promised = total = 0
        for replica_set in others:
            assert replica_set.plan is not None
            if replica_set.is_asleep:
                total += replica_set.plan.weights_bytes
            else:
                private = sum(one.memory.private_bytes for one in replica_set.workers.values())
                promised += max(0, replica_set.plan.total_bytes - private)
                total += replica_set.plan.total_bytes
        return promised, None if self._memory_bytes is None else self._memory_bytes - total

    def _plan(
        self, replica_set: ReplicaSet, reserved_bytes: int, limit_bytes: int | None
    ) -> tuple[ReplicaPlan | None, str]:
        """Return how a model's servers would be loaded, or None and why they cannot be."""
        try:
            most = reserved_bytes, limit_bytes
            plan = plan_servers(
                self._engine,
                replica_set.model,
                replica_set.num_wanted,
                self._options.guard or (),
                *most,
            )
        except ValueError as error:
            return None, str(error)
        return plan, ""

    # --- ending --------------------------------------------------------------------------------

    def _begin_idle(self, replica_set: ReplicaSet) -> None:
        """Begin to count the time that a model is idle; others may have its memory."""
        self._freed.set()
        if replica_set.keep_alive_s >= 0 and replica_set.workers:
            loop = asyncio.get_running_loop()
            if replica_set.timer is not None:
                replica_set.timer.cancel()
            replica_set.timer = loop.call_later(
                replica_set.keep_alive_s, self._end_idle, replica_set
            )

    def _end_idle(self, replica_set: ReplicaSet) -> None:
        self._later(self._unload_if_idle(replica_set))

    async def _unload_if_idle(self, replica_set: ReplicaSet) -> None:
        async with self._loading:  # or a start would count its memory as taken, or miss it
            if not replica_set.num_users and replica_set.workers:
                self._write(f"{replica_set.name} was idle and is unloaded")
                await self._unload(replica_set)

    async def _unload(self, replica_set: ReplicaSet) -> None:
        if replica_set.timer is not None:
            replica_set.timer.cancel()
        for start in replica_set.starting.values():
            start.cancel()
        workers = list(replica_set.workers.values())
        for worker in workers:
            replica_set.drop(worker)
        replica_set.plan, replica_set.is_asleep = None, False
        replica_set.missing.clear()
        await asyncio.gather(*(worker.stop() for worker in workers))
        self._freed.set()

    def _watch(self, replica_set: ReplicaSet, worker: Worker) -> None:
        """Forget a server whose process ends by itself."""

        async def watch() -> None:
            beside = [asyncio.ensure_future(self._look_after(replica_set, worker))]
            beside += (
                [asyncio.ensure_future(self._on_ready(replica_set, worker))]
                if self._on_ready
                else []
            )
            await worker.wait()
            for one in beside:
                one.cancel()
            await self._forget(replica_set, worker)

        self._later(watch())

    async def _look_after(self, replica_set: ReplicaSet, worker: Worker) -> None:
        """Look at a server while its model is in use.

        While it does not answer, its requests go to another one that does. Once it hangs it is
        ended.
        """
        while not worker.is_hung(self._options.step_timeout):
            await asyncio.sleep(_LOOK_S)
            if replica_set.num_users or worker.trouble:
                await worker.look()
            if self._is_closed or not replica_set.has_lost(worker, self._options.silence_timeout):
                continue
            if num := worker.let_go():
                why, some = worker.trouble or "leaves", f"{num} request{'s' * (num > 1)}"
                replica_set.note(worker, f"{why}: {some} moved to other servers")
        worker.end_hung()

    async def _forget(self, replica_set: ReplicaSet, worker: Worker) -> None:
        """Take a server that has ended out of use, and start it again if it is missed."""
        if replica_set.workers.get(worker.number) is not worker:
            return
        replica_set.drop(worker)
        await worker.stop()
        self._write(f"{replica_set.called(worker)} {worker.fate}")
        replica_set.lose(worker)
        if not replica_set.is_kept and not replica_set.starting:
            replica_set.plan = None
        self._tend_later(replica_set)
        self._freed.set()

    def _later(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is_well(start: asyncio.Task[Worker]) -> bool:
    return not start.cancelled() and start.exception() is None


def _failure(replica_set: ReplicaSet, start: asyncio.Task[Worker]) -> ApiError:
    """Return the error of a request that waited for a server which could not be started."""
    if start.cancelled():
        return ApiError(503, "the server is stopping", code="stopping")
    error = start.exception()
    if not isinstance(error, StartError | ValueError | OSError):
        assert error is not None
        raise error
    message = f"{replica_set.name} cannot be loaded: {error}"
    return ApiError(503, message, code="model_not_loaded")
