"""Which models are loaded: started when asked for, ended when idle or when memory is needed.

A model that is answering, or that a request waits for, is never ended to make room. One that hangs
is ended, as one that has crashed: the next request starts it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from ridgeline.engine_setup.locate import locate
from ridgeline.engine_setup.options import Options
from ridgeline.engine_setup.resolve import EngineConfig, resolve
from ridgeline.fleet.folder import SocketFolder
from ridgeline.fleet.worker import StartError, Worker, spare_process
from ridgeline.machine import memory_of
from ridgeline.models.checkpoint import load_checkpoint
from ridgeline.server.http.errors import ApiError
from ridgeline.server.http.options import ServeOptions
from ridgeline.server.http.turns import in_thread
from ridgeline.server.main import TUNNEL_KEY

_LOOK_S = 1.0  # from one look at a model that is in use to the next
_OF_ROUTER = (  # flags that are not for its models, which only it can reach
    *(
        "host",
        "port",
        "grpc_port",
        "uds",
        "allowed_host",
        "root_path",
        "cors_origin",
        "shutdown_timeout",
    ),
    *("ssl_certfile", "ssl_keyfile", "ssl_keyfile_password"),
    *("models_dir", "models_memory", "keep_alive"),
)


@dataclass(eq=False)
class Slot:
    """A model that was asked for at least once.

    Attributes:
        name: what requests call it.
        model: what people type.
        worker: its process, None while it is not loaded.
        num_users: requests that it answers, or that wait for it.
        keep_alive_s: how long it stays after the last of them; below 0 for ever.
        used_s: when the last of them ended, on the loop's clock.
        is_asleep: whether its process has given its memory back.
    """

    name: str
    model: str
    keep_alive_s: float
    worker: Worker | None = None
    starting: asyncio.Task[Worker] | None = None
    num_users: int = 0
    used_s: float = 0.0
    is_asleep: bool = False
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def state(self) -> str:
        """What ``/v1/models`` says of it."""
        if self.worker is not None:
            well = "asleep" if self.is_asleep else "loaded"
            return "hung" if self.worker.trouble else well
        return "loading" if self.starting is not None else "unloaded"


class Pool:
    """The models that are loaded."""

    def __init__(
        self,
        options: Options,
        variables: Mapping[str, str],
        *,
        keep_alive_s: float,
        memory_bytes: int | None,
        step_timeout_s: float,
        shutdown_timeout_s: float,
        write: Callable[[str], object],
    ) -> None:
        """Begin with none.

        Args:
            options: those of every engine.
            variables: the same and all other flags of every model, as environment variables.
            keep_alive_s: how long an unused model stays; below 0 for ever.
            memory_bytes: what all may take together; None is what is free.
            step_timeout_s: how long a model may be silent before it is ended.
            shutdown_timeout_s: what running requests get at the end.
            write: takes the lines of the log, the models' own too.
        """
        self.slots: dict[str, Slot] = {}
        self._options, self._variables, self._write = options, variables, write
        self._keep_alive_s, self._shutdown_timeout_s = keep_alive_s, shutdown_timeout_s
        self._memory_bytes, self._step_timeout_s = memory_bytes, step_timeout_s
        self._folder = SocketFolder()
        self.key = secrets.token_hex(32)  # by which its models know us
        self.counts = dict.fromkeys(("resumed", "diverged"), 0)  # streams that changed processes
        self._spare: asyncio.Task[asyncio.subprocess.Process] | None = None
        self._num_started = 0
        self._loading = asyncio.Lock()  # one at a time: each is planned with what the others left
        self._freed = asyncio.Event()  # a model became idle, or ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @contextlib.asynccontextmanager
    async def use(
        self, name: str, model: str, keep_alive_s: float | None = None
    ) -> AsyncIterator[Worker]:
        """Have a model loaded for as long as the block lasts. Raises ApiError if it cannot be.

        ``keep_alive_s`` is how long it stays after its last request from now on.
        """
        slot = self.slots.setdefault(name, Slot(name, model, self._keep_alive_s))
        if slot.worker is None and slot.starting is None:
            slot.model = model  # another file may have the name now
        if keep_alive_s is not None:
            slot.keep_alive_s = keep_alive_s
        if slot.worker is not None and not slot.worker.takes_requests:
            raise self.refusal(slot)
        slot.num_users += 1
        if slot.timer is not None:
            slot.timer.cancel()
        try:
            is_awake = slot.worker is not None and not slot.is_asleep
            yield slot.worker if is_awake and slot.worker else await self._started(slot)
        finally:
            slot.num_users -= 1
            slot.used_s = asyncio.get_running_loop().time()
            if not slot.num_users:
                self._begin_idle(slot)

    async def look(self) -> dict[str, str]:
        """Return what is wrong with which loaded models; it takes about a second at most."""
        workers = {one.name: one.worker for one in self.slots.values() if one.worker is not None}
        await asyncio.gather(*(worker.look() for worker in workers.values()))
        return {name: worker.trouble for name, worker in workers.items() if worker.trouble}

    def refusal(self, slot: Slot) -> ApiError:
        """Return the error of a request for a model that hangs."""
        trouble = slot.worker.trouble if slot.worker else "has ended"
        message = f"{slot.name} {trouble}; it is ended after {self._step_timeout_s:g} s, and loaded"
        message += " again when it is asked for"
        return ApiError(503, message, code="model_hung", headers={"retry-after": "5"})

    async def forget_dead(self, name: str, worker: Worker) -> None:
        """Forget a process that has ended, or is about to, so that the next request gets a new one.

        One that still listens is left alone, however busy it is.
        """
        if not (worker.memory.resident_bytes and worker.is_listening):
            await self._forget(self.slots[name], worker)

    def reload_keys(self) -> None:
        """Let all models read the file of keys again."""
        for slot in self.slots.values():
            if slot.worker is not None:
                slot.worker.reload_keys()

    def kill(self) -> None:
        """End all models at once."""
        for slot in self.slots.values():
            if slot.worker is not None:
                slot.worker.kill()

    async def close(self) -> None:
        """Start no more models; end each when its requests have ended or its time is up."""
        self._is_closed = True
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._shutdown_timeout_s
        while any(slot.num_users for slot in self.slots.values()) and loop.time() < deadline_s:
            await asyncio.sleep(0.02)
        starting = [slot.starting for slot in self.slots.values() if slot.starting is not None]
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

    async def _started(self, slot: Slot) -> Worker:
        """Wait until a model is loaded, also if another request asked for it first."""
        if self._is_closed:
            raise ApiError(503, "the server is stopping", code="stopping")
        if slot.starting is None:
            slot.starting = asyncio.create_task(self._load(slot))
        try:  # a client that leaves does not stop what others wait for
            return await asyncio.shield(slot.starting)
        except (StartError, ValueError, OSError) as error:
            message = f"{slot.name} cannot be loaded: {error}"
            raise ApiError(503, message, code="model_not_loaded") from None

    async def _load(self, slot: Slot) -> Worker:
        loop = asyncio.get_running_loop()
        try:
            async with self._loading:
                begin_s = loop.time()
                config = await self._make_room(slot)
                if slot.worker is not None:
                    slot.is_asleep = False
                    self._write(f"{slot.name} wakes")
                    return slot.worker
                self._num_started += 1
                slot.worker = await Worker.start(
                    await self._take_spare(),
                    slot.model,
                    self._folder.path / f"{self._num_started}.sock",
                    {
                        **self._variables,
                        TUNNEL_KEY: self.key,
                        "RIDGELINE_SERVED_MODEL_NAME": slot.name,
                        "RIDGELINE_KV_CACHE_MEMORY": str(config.kv_bytes),
                    },
                    config,
                    self._write,
                )
            self._write(f"{slot.name} is loaded, in {loop.time() - begin_s:.2f} s")
            self._watch(slot, slot.worker)
            self._later(self.prepare())
            if not slot.num_users:  # all who asked have left
                self._begin_idle(slot)
            return slot.worker
        finally:
            slot.starting = None

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

    async def _make_room(self, slot: Slot) -> EngineConfig:
        """Let idle models sleep, or end them, until this one fits as it would alone.

        It returns its plan. If only models that answer are left, it takes what there is, or waits
        for one of them if that is too little. Raises ValueError if it does not fit beside none.
        """
        while True:
            self._freed.clear()
            others = [one for one in self.slots.values() if one.worker is not None]
            others = [one for one in others if one is not slot]
            config, problem = await in_thread(self._plan, slot.model, *self._room(others))
            if config is not None and not config.notes:
                return config
            idle = [one for one in others if not one.num_users]
            if idle:
                oldest = min(idle, key=lambda one: (one.is_asleep, one.used_s))
                await self._give_way(oldest, slot.name)
            elif config is not None:
                return config
            elif others:
                self._write(f"{slot.name} waits for memory: {problem}")
                await self._freed.wait()
            else:
                raise ValueError(problem)

    async def _give_way(self, slot: Slot, name: str) -> None:
        """Let an idle model sleep; end one that sleeps already, or whose backend cannot."""
        worker = slot.worker
        if worker is not None and not slot.is_asleep and await worker.sleep():
            self._write(f"{slot.name} sleeps, to make room for {name}")
            slot.is_asleep = not slot.num_users  # a request that came meanwhile wakes it
        else:
            self._write(f"{slot.name} makes room for {name}")
            await self._unload(slot)

    def _room(self, others: list[Slot]) -> tuple[int, int | None]:
        """Return how much of what seems free is for other models, and the most one may take.

        One that sleeps needs room before it wakes; until then it has but its weights.
        """
        awake = [one.worker for one in others if one.worker and not one.is_asleep]
        promised = sum(max(0, one.plan.total_bytes - one.memory.private_bytes) for one in awake)
        if self._memory_bytes is None:
            return promised, None
        asleep = [one.worker.plan.weights_bytes for one in others if one.worker and one.is_asleep]
        taken = sum(one.plan.total_bytes for one in awake) + sum(asleep)
        return promised, self._memory_bytes - taken

    def _plan(
        self, model: str, taken_bytes: int, most_bytes: int | None
    ) -> tuple[EngineConfig | None, str]:
        """Return how a model would be loaded, or None and why it cannot be."""
        checkpoint = load_checkpoint(locate(model).path)
        try:
            config = resolve(
                self._options, checkpoint, taken_bytes=taken_bytes, most_bytes=most_bytes
            )
        except ValueError as error:
            return None, str(error)
        return config, ""

    # --- ending --------------------------------------------------------------------------------

    def _begin_idle(self, slot: Slot) -> None:
        """Begin to count the time that a model is idle; others may have its memory."""
        self._freed.set()
        if slot.keep_alive_s >= 0 and slot.worker is not None:
            loop = asyncio.get_running_loop()
            slot.timer = loop.call_later(slot.keep_alive_s, self._end_idle, slot)

    def _end_idle(self, slot: Slot) -> None:
        self._later(self._unload_if_idle(slot))

    async def _unload_if_idle(self, slot: Slot) -> None:
        async with self._loading:  # or a start would count its memory as taken, or miss it
            if not slot.num_users and slot.worker is not None:
                self._write(f"{slot.name} was idle and is unloaded")
                await self._unload(slot)

    async def _unload(self, slot: Slot) -> None:
        worker, slot.worker, slot.is_asleep = slot.worker, None, False
        if slot.timer is not None:
            slot.timer.cancel()
        if worker is not None:
            await worker.stop()
        self._freed.set()

    def _watch(self, slot: Slot, worker: Worker) -> None:
        """Forget a model whose process ends by itself: the next request starts it again."""

        async def watch() -> None:
            looking = asyncio.ensure_future(self._end_hung(slot, worker))
            await worker.wait()
            looking.cancel()
            await self._forget(slot, worker)

        self._later(watch())

    async def _end_hung(self, slot: Slot, worker: Worker) -> None:
        """Look at a model while it is in use, and end it once it hangs."""
        while not worker.is_hung(self._step_timeout_s):
            await asyncio.sleep(_LOOK_S)
            if slot.num_users or worker.trouble:
                await worker.look()
        worker.fate = f"{worker.trouble} and is ended"
        worker.kill()

    async def _forget(self, slot: Slot, worker: Worker) -> None:
        if slot.worker is worker:
            self._write(f"{slot.name} {worker.fate}")
            await self._unload(slot)

    def _later(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def as_variables(engine: Options, serving: ServeOptions) -> dict[str, str]:
    """Return the flags of each model as environment variables, without what is left as it was."""
    variables = {"RIDGELINE_SHUTDOWN_TIMEOUT": "0"}  # it is ended when its requests have
    for options in (engine, serving):
        for flag in fields(options):
            value = getattr(options, flag.name)
            if flag.name not in _OF_ROUTER and value not in (None, flag.default):
                text = " ".join(map(str, value)) if isinstance(value, list) else str(value)
                variables[f"RIDGELINE_{flag.name.upper()}"] = text
    return variables
