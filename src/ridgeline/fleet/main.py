"""``ridgeline serve`` with several models or servers: a socket, a router, batches and signals."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import httpx2
from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from ridgeline.backends import AUTO
from ridgeline.engine.setup.home import default_home, locate
from ridgeline.engine.setup.options import Options
from ridgeline.engine.setup.progress import say
from ridgeline.fleet.app import Router, new_app
from ridgeline.fleet.catalogue import Catalogue
from ridgeline.fleet.placement.ray_place import RayCluster, RayServers, command_of, connected
from ridgeline.fleet.pool import Pool
from ridgeline.fleet.servers.remote_server import Door, RemoteServer, add_door
from ridgeline.fleet.servers.replica_set import ReplicaSet
from ridgeline.fleet.servers.worker import Worker
from ridgeline.fleet.servers.worker_flags import WorkerFlags, own_name
from ridgeline.foresight.routing.balancer import Scaling
from ridgeline.serve.aliases import Aliases
from ridgeline.serve.batches.routes import add_batches
from ridgeline.serve.batches.runner import Batches, store_of
from ridgeline.serve.http.keys import Keys, Limits
from ridgeline.serve.http.listening import Listener, bind, bind_unix, certificate_settings, unbound
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.http.web_server import LOOPBACK, Edge, WebServer, address, obey_signals, settle
from ridgeline.serve.triton_grpc import check_grpc_port, grpc_beside
from ridgeline.serve.tunnel.proof import NotTaken
from ridgeline.system.log_writer import LogWriter, standard_error
from ridgeline.system.machine import raise_file_limit
from ridgeline.system.report import counted, gib
from ridgeline.system.shared_secret import read_key
from ridgeline.trust.stages import add_receipts, observing, signer_of
from ridgeline.version import __version__

if TYPE_CHECKING:  # imported only where a router has an audit log
    from ridgeline.trust.audit.log import AuditLog
    from ridgeline.trust.audit.requests import AuditObserver
    from ridgeline.trust.rules.file import RulesFile

_ROUTER = "router"  # the folder of its own audit log
_STORE = "several models"  # the files of batches: no model is called so
_MOST_AT_ONCE = 16  # requests of a batch: a model that needs memory waits until these have ended
_REST_S = 0.1  # between two looks whether a model still waits for memory
_KEEP_ALIVE_S, _FOR_EVER = 300.0, -1.0  # defaults: for several models, and for one


class RunningFleet:
    """A running router: its parts, and how it ends."""

    def __init__(
        self,
        catalogue: Catalogue,
        engine: Options,
        options: ServeOptions,
        keys: Keys,
        log: LogWriter,
        observer: AuditObserver | None = None,
        cluster: RayCluster | None = None,
    ) -> None:
        """Put a router together; ``observer`` is told of requests that no model answers.

        With a ``cluster`` all servers are started there, and none by this process.
        """
        self._engine, self._cluster, self._ready_line = engine, cluster, ""
        self.keys, self._log, self._options = keys, log, options
        key_file = options.fleet_key_file
        self._fleet_key = read_key(key_file) if key_file else b""
        self._catalogue = catalogue
        catalogue.write = log.line
        self._is_of_one = len(catalogue.models()) == 1 and not options.models_dir
        default_s = _FOR_EVER if self._is_of_one else _KEEP_ALIVE_S
        self._rules = self._read_rules()
        limits = Limits(
            options.max_requests_per_minute,
            options.max_tokens_per_minute,
            options.max_concurrent_requests,
            own=lambda label: self._rules.of(label).limits if self._rules else {},
        )
        self.pool = Pool(
            engine,
            WorkerFlags(engine, options),
            limits,
            options,
            num_servers=0 if cluster else options.num_replicas,
            keep_alive_s=default_s if options.keep_alive_s is None else options.keep_alive_s,
            write=log.line,
            on_ready=partial(name_log, observer.log) if observer else None,
        )
        is_open = options.fleet_key_file is not None
        self.door = Door(self._fleet_key, self._join, log.line) if is_open else None
        self.router = Router(
            catalogue,
            self.pool,
            takes_any_name=options.any_model_name,
            isolates_keys=options.isolate_keys,
            audit=observer.log if observer else None,
            guards=[Path(name).name for name in options.guard or ()],
            # Servers on other machines do not see these files.
            aliases=Aliases(default_home() if self.door is None else None),
            is_of_one=self._is_of_one,
        )
        app = new_app(self.router, has_page=options.page)
        if is_open:
            add_door(app)
        add_receipts(app, cache(partial(signer_of, options.receipt_key)))
        self._batches = batches_of(app, self.pool, keys, options, default_home(), observer)
        edge = Edge(app, app.routes, options, keys, limits, log.line, lambda *counted: None)
        front = observer.watch(edge.front) if observer else None
        link_for = self.door.link_for if self.door else lambda headers: None
        self.server = WebServer(edge, options, log.line, front, link_for)
        self._end: asyncio.Task[None] | None = None

    async def run(self, listener: Listener, url: str) -> None:
        """Serve until a signal, or ``stop``, ends it.

        Raises OSError or ValueError if the only model cannot be loaded.
        """
        placing: AbstractAsyncContextManager[None] = nullcontext()
        if self._is_of_one:
            ((name, model),) = self._catalogue.models().items()
            if self._cluster is None:
                await self.pool.prepare()
            replica_set = await self.pool.load(name, model)
            announce = _loaded(replica_set, url)
            if self._cluster is not None:
                placing = self._placing(self._cluster, replica_set, listener)
        else:
            await self.pool.prepare()
            announce = _loaded_later(list(self._catalogue.models()), url)
        settle()
        if self._batches:
            self._batches.start()
        async with grpc_beside(self.server, self._options) as also, placing:
            self._ready_line = f"{announce}{also}"
            if self._cluster is None:
                self.server.on_started = self._say_ready
            await self.server.serve_on(listener)

    def _placing(
        self, cluster: RayCluster, replica_set: ReplicaSet, listener: Listener
    ) -> AbstractAsyncContextManager[None]:
        """Have the model's servers started on other machines while the block lasts."""
        options, port = self._options, listener.getsockname()[1]
        url = cluster.url_for_servers(options.host, port, is_safe=bool(options.ssl_certfile))
        scaling = Scaling(*options.replica_range, options.target_requests)
        order = partial(command_of, replica_set.name, replica_set.model, self._engine, options, url)
        return RayServers(cluster, scaling, self._log.line).keeping(replica_set, order, self.stop)

    def _say_ready(self) -> None:
        if self._ready_line:
            print(self._ready_line, flush=True)
        self._ready_line = ""

    def stop(self) -> None:
        """Take no more requests, and end when the running ones have; called again, end at once."""
        self.router.is_draining = True
        if self._end is None:
            self._end = asyncio.ensure_future(self._stop())
        else:
            self.pool.kill()

    async def _join(self, server: RemoteServer) -> None:
        """Let a server of another machine have requests. Raises NotTaken if it may not."""
        (replica_set,), facts = self.pool.replica_sets.values(), server.facts
        if facts["model"] != replica_set.name:
            raise NotTaken(
                f"it serves {facts['model'][:80]!r}, and this router {replica_set.name!r}: start "
                f"it with --served-model-name {replica_set.name}, if these are the same files"
            )
        if facts["keys"] != self.keys.proof(self._fleet_key):
            raise NotTaken("its API keys are not those of this router: give it the same ones")
        await self.pool.join(replica_set, server)
        self._say_ready()

    async def _stop(self) -> None:
        if self._batches:
            await self._batches.close()
        await self.pool.close()
        if self.door is not None:
            await self.door.close()
        self.server.ended.set()

    def reload_keys(self) -> None:
        """Read the files of keys and rules again, here and in all models."""
        try:
            self.keys.reload()
            self._rules = self._read_rules()
            self.pool.reload_keys()
            self._log.line("the keys were read again")
        except (OSError, ValueError) as error:
            self._log.line(
                f"the keys or the rules were not reloaded; the old ones stay in force: {error}"
            )

    def _read_rules(self) -> RulesFile | None:
        """Return the rules, whose limits are counted here. Raises OSError or ValueError."""
        if self._options.rules is None:
            return None
        # Routers without it need not import this.
        from ridgeline.trust.rules.file import read_rules

        return read_rules(self._options.rules, self.keys.labels)


def route(models: Sequence[str], engine: Options, options: ServeOptions) -> None:
    """Serve several models, each loaded when it is asked for, until a signal ends it.

    Raises OSError or ValueError if the address, the keys or a model cannot be had.
    """
    if engine.backend == "auto":  # a server takes all of a GPU
        engine = replace(engine, backend=AUTO)
    keys = Keys(options.api_key or (), options.api_key_file, options.admin_api_key or ())
    certificate_settings(options)
    check_grpc_port(options)
    _check_links(options)
    catalogue = Catalogue(models, options.models_dir, options.served_model_name or ())
    listener = bind_unix(options.uds) if options.uds else bind(options.host, options.port)
    raise_file_limit()
    with (
        unbound(listener),
        observing(options, _ROUTER) as observer,
        connected(options.ray) if options.place == "ray" else nullcontext() as cluster,
        contextlib.closing(LogWriter(standard_error())) as log,
    ):
        log.take_logging()
        for model in models if cluster is None else ():
            locate(model)  # pull the model now, not while a request waits
        with asyncio.Runner() as runner:
            runner.run(_main(catalogue, engine, options, keys, listener, log, observer, cluster))


async def _main(
    catalogue: Catalogue,
    engine: Options,
    options: ServeOptions,
    keys: Keys,
    listener: Listener,
    log: LogWriter,
    observer: AuditObserver | None,
    cluster: RayCluster | None,
) -> None:
    running = RunningFleet(catalogue, engine, options, keys, log, observer, cluster)
    obey_signals(running.stop, running.reload_keys)
    if not options.uds and options.host not in LOOPBACK and not keys.are_needed:
        say(f"warning: anyone who can reach {options.host} can use this server: set --api-key")
    for note in keys.notes(options.isolate_keys):
        say(note)
    await running.run(listener, address(listener, options))


def _check_links(options: ServeOptions) -> None:
    """Raise ValueError if servers on other machines could only join over links without TLS."""
    is_alone = bool(options.uds) or options.host in LOOPBACK
    if options.fleet_key_file and not (is_alone or options.ssl_certfile or options.fleet_plain):
        raise ValueError(
            f"on {options.host}, servers that join would get prompts as plain text: give "
            "--ssl-certfile, or say --fleet-plain if nobody else is on that network"
        )


def _loaded(replica_set: ReplicaSet, url: str) -> str:
    begin = f"{replica_set.name} is ready at {url} (OpenAI API: {url}/v1): "
    if replica_set.plan is None:
        return begin + "servers are started where there is room"
    config = replica_set.plan.config
    servers = counted(replica_set.num_wanted, "server")
    each = "" if replica_set.num_wanted == 1 else ", each"
    threads, cache = counted(config.threads, "thread"), gib(config.kv_bytes)
    return begin + f"{servers}{each} with {threads} and {cache} of KV cache"


def _loaded_later(names: Sequence[str], url: str) -> str:
    shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
    count = "1 model is" if len(names) == 1 else f"{len(names)} models are"
    return (
        f"{count} ready at {url} (OpenAI API: {url}/v1): {shown}; each is loaded "
        f"when it is first asked for"
    )


def batches_of(
    app: FastAPI,
    pool: Pool,
    keys: Keys,
    options: ServeOptions,
    home: Path | None,
    observer: AuditObserver | None,
) -> Batches | None:
    """Add the routes to a router's application; return what has to be started, if anything has.

    In the models' servers, batches give way to other requests. Where a model waits for memory that
    others have, no further request of a batch begins. ``observer`` is told of each request that no
    model answers.
    """

    async def in_quiet(scope: Scope, receive: Receive, send: Send) -> None:
        while pool.num_waiting:
            await asyncio.sleep(_REST_S)
        await app(scope, receive, send)

    store = store_of(home, _STORE)
    if isinstance(store, str):
        add_batches(app, store, options)
        return None
    batches = Batches(store, in_quiet, keys, f"router {__version__}", _MOST_AT_ONCE, observer)
    add_batches(app, batches, options)
    return batches


async def name_log(log: AuditLog, replica_set: ReplicaSet, worker: Worker) -> None:
    """Write which log a server has that is ready, if it has one.

    The folder of a server of another machine is not beside the router's.
    """
    with contextlib.suppress(httpx2.HTTPError):  # it has ended
        if log_id := await worker.log_id():
            name = own_name(replica_set.name, worker.number)
            said = {"server": name, "folder": None if worker.node else name, "server_log": log_id}
            log.submit({"event": "server", **said})
