"""Servers that Ray places: an actor for each one, wherever there is room.

Ray finds a machine with free processors, orders one where its autoscaler runs (an actor that waits
is demand), restarts actors that die, and says which machines are about to go. A server that it
starts joins this router like any server on another machine, and nothing of a request passes through
Ray. Only this file imports Ray, when servers are to be placed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ridgeline.engine.setup.options import Options
from ridgeline.fleet.placement.ray_actor import ServerActor, is_drained
from ridgeline.fleet.servers.replica_set import ReplicaSet
from ridgeline.fleet.servers.worker_flags import WorkerFlags
from ridgeline.foresight.routing.balancer import Scaling
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.http.web_server import LOOPBACK
from ridgeline.serve.tunnel.joining import PLACED_AS

_LOOK_S = 1.0  # between two looks at the load
_WAITING_S = 10.0  # after which the log says that a server waits for a place
_LONGEST_REST_S = 30.0  # between two starts that fail
_LEAVE_S = 40.0  # for a server to leave: its shutdown timeout, and some more
_CONNECT_S = 3.0
_NOT_NEEDED = "it is not needed any more"
_OBJECT_STORE_BYTES = 80 << 20  # Ray's least: nothing of ours is kept there


class ServerCommand(NamedTuple):
    """What every server is started with.

    Attributes:
        arguments: of ``ridgeline``.
        variables: its flags, as environment variables.
        num_cpus: processors that it needs; ``num_gpus``: and GPUs.
    """

    arguments: Sequence[str]
    variables: Mapping[str, str]
    num_cpus: int
    num_gpus: int


def command_of(
    name: str, model: str, engine: Options, options: ServeOptions, url: str, number: int
) -> ServerCommand:
    """Return how a server is started that joins the router at ``url``.

    ``name`` is what the router calls the model, and ``model`` what people typed. Paths are the
    same on all machines.
    """
    num_cpus = engine.threads or 1
    flags = WorkerFlags(engine, options)
    variables = flags.variables(name, number, 0) | {
        PLACED_AS: f"ray-{number}",
        "RIDGELINE_THREADS": str(num_cpus),
        "RIDGELINE_SHUTDOWN_TIMEOUT": str(options.shutdown_timeout),
    }
    assert options.fleet_key_file is not None
    where = str(Path(model).absolute()) if Path(model).exists() else model
    arguments = ["serve", where, "--join", url, *flags.arguments(name)]
    arguments += ["--fleet-key-file", str(options.fleet_key_file.absolute())]
    arguments += ["--fleet-ca", str(options.fleet_ca.absolute())] if options.fleet_ca else []
    arguments += ["--fleet-plain"] if options.fleet_plain else []
    return ServerCommand(arguments, variables, num_cpus, int(engine.backend == "cuda"))


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[RayCluster]:
    """Connect to a Ray cluster: the one at ``address``, that of this machine, or a new one.

    Raises ValueError if Ray is not installed, or nobody is at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # of one that is started here
    try:
        import ray
    except ImportError:
        raise ValueError("--place ray needs Ray: pip install 'ridgeline[ray]'") from None
    target = address or os.environ.get("RAY_ADDRESS") or "auto"
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    if target not in ("auto", "local"):
        _check_address(target)
    try:
        if target != "local":
            ray.init(target, **quiet)
    except ConnectionError as error:
        if target != "auto" or address:
            raise ValueError(f"there is no Ray cluster at {target}: {_line(error)}") from None
        target = "local"
    if target == "local":
        small = {"object_store_memory": _OBJECT_STORE_BYTES, "include_dashboard": False}
        ray.init("local", **small, **quiet)
    try:
        yield RayCluster(ray)
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Raise ValueError if nobody listens there: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise ValueError(
            f"--ray is {address!r}: write HOST:PORT of Ray's head node, such as 10.0.0.1:6379"
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise ValueError(
            f"nothing listens at --ray {address} ({why}): start Ray there with ray start --head"
        ) from None


class RayCluster:
    """A Ray cluster that this process is connected to."""

    def __init__(self, ray: Any) -> None:
        """Take the module."""
        self._ray = ray

    @property
    def own_ip(self) -> str:
        """The address of this machine in the cluster."""
        return str(self._ray.util.get_node_ip_address())

    def url_for_servers(self, host: str, port: int, *, is_safe: bool) -> str:
        """Return the address at which servers find a router that listens on this ``host``.

        Raises ValueError if other machines have Ray and could not reach it.
        """
        nodes = {one["NodeManagerAddress"] for one in self._ray.nodes() if one["Alive"]}
        if host in LOOPBACK and nodes - {self.own_ip}:
            raise ValueError(
                f"Ray has {len(nodes)} machines, and servers there cannot reach {host}: "
                "listen on --host 0.0.0.0"
            )
        host = self.own_ip if host in ("0.0.0.0", "::") else host
        return f"http{'s' * is_safe}://{f'[{host}]' if ':' in host else host}:{port}"

    async def run(self, command: ServerCommand, stop_event: asyncio.Event) -> tuple[int, str]:
        """Run a server until it ends, or until it has left because of ``stop_event``.

        Returns its status and why it has ended.
        """
        remote = self._ray.remote(ServerActor).options(
            num_cpus=command.num_cpus,
            num_gpus=command.num_gpus,
            max_restarts=-1,  # if it or its machine dies, Ray starts it again, and runs it again
            max_task_retries=-1,
            max_concurrency=2,
        )
        actor = remote.remote(is_drained)
        has_place = actor.__ray_ready__.remote().future()
        running = asyncio.ensure_future(
            asyncio.wrap_future(
                actor.run.remote(list(command.arguments), dict(command.variables)).future()
            )
        )
        leaving = asyncio.ensure_future(stop_event.wait())
        try:
            await asyncio.wait({running, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done() and has_place.done():
                actor.leave.remote(_NOT_NEEDED)
                await asyncio.wait({running}, timeout=_LEAVE_S)
            status, why = running.result() if running.done() else (0, _NOT_NEEDED)
            return status, why
        except self._ray.exceptions.RayError as error:
            return 1, _line(error)
        finally:
            leaving.cancel()
            running.cancel()
            self._ray.kill(actor)


class RayServers:
    """Keeps as many servers of a model as are wanted, placed by Ray."""

    def __init__(
        self, cluster: RayCluster, scaling: Scaling, write: Callable[[str], object]
    ) -> None:
        """Begin with none; ``write`` takes the lines of the log."""
        self._cluster, self._scaling, self._write = cluster, scaling, write
        self._placed = dict[str, _RayServer]()  # by what each one is told
        self._num_started = self._num_failed = 0
        self._rest_until_s = 0.0

    @contextlib.asynccontextmanager
    async def keeping(
        self,
        replica_set: ReplicaSet,
        order: Callable[[int], ServerCommand],
        stop: Callable[[], None],
    ) -> AsyncIterator[None]:
        """Have servers placed for a model, as many as its load needs, within the block.

        Args:
            replica_set: the model's.
            order: returns how a server is started, by its number.
            stop: called when the first of them cannot serve.

        Raises ValueError then, in the end.
        """
        keeping = asyncio.ensure_future(self._keep(replica_set, order))
        keeping.add_done_callback(lambda done: None if done.cancelled() else stop())
        try:
            yield
        finally:
            keeping.cancel()
            (result,) = await asyncio.gather(keeping, return_exceptions=True)
        if isinstance(result, Exception):
            raise result

    async def _keep(self, replica_set: ReplicaSet, order: Callable[[int], ServerCommand]) -> None:
        loop = asyncio.get_running_loop()
        has_served, missing_since_s, is_said = False, loop.time(), False
        try:
            while True:
                now_s = loop.time()
                has_served |= bool(replica_set.workers)
                replica_set.num_placed = self._scaling.wanted(replica_set.num_users, now_s)
                self._adjust(replica_set, order, now_s)
                if len(replica_set.workers) >= replica_set.num_placed:
                    missing_since_s, is_said, self._num_failed = now_s, False, 0
                elif now_s > missing_since_s + _WAITING_S and not is_said:
                    self._say_waiting(replica_set, order(0))
                    is_said = True
                running = [one.running for one in self._placed.values()]
                if running:
                    first = asyncio.FIRST_COMPLETED
                    await asyncio.wait(running, timeout=_LOOK_S, return_when=first)
                else:
                    await asyncio.sleep(_LOOK_S)
                for place in [name for name, one in self._placed.items() if one.running.done()]:
                    self._note_end(
                        replica_set, place, is_first=not (has_served or replica_set.workers)
                    )
        finally:
            for one in self._placed.values():
                one.stop_event.set()
            running = [one.running for one in self._placed.values()]
            await asyncio.gather(*running, return_exceptions=True)

    def _adjust(
        self, replica_set: ReplicaSet, order: Callable[[int], ServerCommand], now_s: float
    ) -> None:
        """Start the servers that are missing, or let go of those that are too many, the last first.

        One that leaves because its machine is about to go is replaced while it is still there.
        """
        for worker in replica_set.workers.values():
            if (placed := self._placed.get(worker.place)) and not placed.stop_event.is_set():
                placed.leaves = worker.leaves  # Ray may have started it again since it left
        staying = [one for one in self._placed.values() if not one.leaves]
        for one in staying[replica_set.num_placed :]:
            one.leaves = True
            one.stop_event.set()
        num_more = replica_set.num_placed - len(staying) if now_s >= self._rest_until_s else 0
        for _ in range(num_more):
            self._num_started += 1
            command, stop_event = order(self._num_started), asyncio.Event()
            place = command.variables[PLACED_AS]
            running = asyncio.create_task(self._cluster.run(command, stop_event))
            self._placed[place] = _RayServer(running, stop_event)

    def _note_end(self, replica_set: ReplicaSet, place: str, *, is_first: bool) -> None:
        """Take note that a server has ended; after a failure the next one waits a little.

        Raises ValueError if none has served yet: the next ones would fail alike.
        """
        status, why = self._placed.pop(place).running.result()
        if status and is_first:
            raise ValueError(f"{replica_set.name} cannot be loaded where Ray has placed it: {why}")
        self._num_failed += bool(status)
        rest_s = min(_LONGEST_REST_S, float(self._num_failed)) if status else 0.0
        self._rest_until_s = asyncio.get_running_loop().time() + rest_s
        self._write(f"a server of {replica_set.name} that Ray had placed has ended: {why}")

    def _say_waiting(self, replica_set: ReplicaSet, command: ServerCommand) -> None:
        num = replica_set.num_placed - len(replica_set.workers)
        needs = f"{command.num_cpus} CPU" + (" and a GPU" if command.num_gpus else "")
        self._write(
            f"{num} of {replica_set.num_placed} servers of {replica_set.name} are not there yet: "
            f"each waits until Ray has {needs} free (ray status says), or loads"
        )


@dataclass
class _RayServer:
    """A server that was placed: its task, what tells it to leave, and whether it leaves."""

    running: asyncio.Task[tuple[int, str]]
    stop_event: asyncio.Event
    leaves: bool = False


def _line(error: BaseException) -> str:
    """Return the last line of one of Ray's errors, which have tracebacks in them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
