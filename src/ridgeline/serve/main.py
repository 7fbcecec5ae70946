"""``ridgeline serve``: a socket, a model, uvicorn and signals, from start to a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from ridgeline.engine.llm import LLM
from ridgeline.engine.setup.home import default_home
from ridgeline.engine.setup.identity import code_digest
from ridgeline.engine.setup.progress import say
from ridgeline.serve.compose import ServerParts, compose
from ridgeline.serve.engine.request_stream import ServerEnds
from ridgeline.serve.http.keys import Keys
from ridgeline.serve.http.listening import Listener, bind, bind_unix, certificate_settings, unbound
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.http.web_server import LOOPBACK, Edge, WebServer, address, obey_signals, settle
from ridgeline.serve.model_server import GivenStages
from ridgeline.serve.triton_grpc import check_grpc_port, grpc_beside
from ridgeline.serve.tunnel.joining import Joining, RouterAddress
from ridgeline.serve.tunnel.middleware import Tunnel
from ridgeline.system.log_writer import LogWriter, standard_error
from ridgeline.system.machine import DeviceLost, raise_file_limit
from ridgeline.system.shared_secret import read_key

TUNNEL_KEY = "RIDGELINE_TUNNEL_KEY"  # a variable, and no flag: only a router sets it
_JOURNAL_BYTES = 256 << 20  # of a router: a million tokens with their logprobs
_LAST_S = 2.0  # before a machine is taken away, nothing runs on it any more
_SWITCH_S = 0.0005  # the loop gives the interpreter back to the engine this soon, not after 5 ms


class ServerProcess:
    """A running server: its parts, and how it ends."""

    def __init__(
        self,
        parts: ServerParts,
        options: ServeOptions,
        keys: Keys,
        write: Callable[[str], object],
        joining: Joining | None = None,
    ) -> None:
        """Put ``parts`` behind a web server; ``write`` takes the lines of the log.

        With ``joining`` a router elsewhere has requests.
        """
        self.options, self.keys, self._write = options, keys, write
        self.parts, self.async_engine = parts, parts.async_engine
        self.model_server = server = parts.model_server
        key = os.environ.pop(TUNNEL_KEY, "")  # a router that started this process has the same
        key = joining.tunnel_key if joining else key
        self._joining = joining
        tunnel: Tunnel | None = None
        observer = server.stages.observer
        if key:
            server.limits.only_count()
            tunnel = Tunnel(parts.app, key, parts.fingerprint, server.limits.spent)
        bounded = _with_room(options) if key else options
        edge = Edge(
            tunnel or parts.app,
            parts.app.routes,
            bounded,
            keys,
            server.limits,
            write,
            parts.metrics.count_http,
            tunnel.vouched if tunnel else None,
        )
        front = observer.watch(edge.front) if observer else None
        self.server = WebServer(edge, bounded, write, front)
        self.also = ""  # what it says of other ports when it listens
        self._drain: asyncio.Task[None] | None = None
        self._rest_s = options.shutdown_timeout
        self._lost: DeviceLost | None = None
        self.async_engine.on_lost = self._end_without_device

    async def run(self, listener: Listener, announce: Callable[[], None]) -> None:
        """Serve until a signal, or ``stop``, ends it.

        Raises DeviceLost if the device that computes failed for good.
        """
        self.parts.start()
        self.server.on_started = announce
        async with grpc_beside(self.server, self.options) as self.also:
            await self.server.serve_on(listener)
        await self.parts.stop()
        if self._lost is not None:
            raise self._lost

    def _end_without_device(self, why: str) -> None:
        """End: what started this process can start another."""
        self._lost = DeviceLost(why)
        self.stop()

    def stop(self) -> None:
        """Take no more requests, and end when the running ones have; called again, end at once."""
        if self._drain is None:
            self.model_server.is_draining = True
            if self._joining:
                self._joining.leave()
            self._drain = asyncio.ensure_future(self._end())
        else:
            self.async_engine.abandon_all(ServerEnds("the server is stopping"))

    @contextlib.asynccontextmanager
    async def leaving_when_taken(self) -> AsyncIterator[None]:
        """Within the block, stop when the cloud says that it takes this machine away."""
        if self.options.spot == "off":
            yield
            return
        watching = asyncio.ensure_future(self._leave_when_taken(self.options.spot))
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _leave_when_taken(self, cloud: str) -> None:
        from ridgeline.serve.tunnel.spot import notice_of  # most servers are spared its client

        notice = await notice_of(cloud, self._write)
        self._write(
            f"{notice.cloud} reclaims this machine in {notice.left_s:.0f} s: requests continue "
            "elsewhere"
        )
        self._rest_s = min(self._rest_s, max(0.0, notice.left_s - _LAST_S))
        if self._drain is None:
            self.stop()

    async def _end(self) -> None:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + self._rest_s
        await self.parts.rest()
        while self.async_engine.num_streams and loop.time() < deadline_s:
            await asyncio.sleep(0.02)
        self.async_engine.abandon_all(ServerEnds("the server is stopping"))
        self.model_server.live.close()
        self.server.ended.set()

    def reload_keys(self) -> None:
        """Read the files of keys and rules again; of each, what holds stays if it is bad."""
        try:
            self.keys.reload()
            self._write("the keys were read again")
        except (OSError, ValueError) as error:
            self._write(f"the keys were not reloaded; the old ones stay in force: {error}")
        if said := self.model_server.stages.reload():
            self._write(said)


def _with_room(options: ServeOptions) -> ServeOptions:
    """Return options that take journals in front of bodies; a router bounds the bodies itself."""
    return replace(options, max_body=str(options.max_body_bytes + _JOURNAL_BYTES))


def serve(
    model: str,
    load: Callable[[bool], AbstractContextManager[LLM]],
    options: ServeOptions,
    new_stages: Callable[[Keys], AbstractContextManager[GivenStages]],
) -> None:
    """Serve a model until a signal ends it; ``load`` is told whether several keys share it.

    ``new_stages`` makes what requests and answers pass; models of its own come first, for a cache
    takes what is left.

    Raises OSError or ValueError if the address, the keys or the model cannot be had, and
    DeviceLost if a device fails for good.
    """
    keys = Keys(options.api_key or (), options.api_key_file, options.admin_api_key or ())
    certificate_settings(options)
    check_grpc_port(options)
    joining = _joining(options.join, options, keys) if options.join else None
    options = replace(options, uds=joining.socket) if joining else options
    listener = bind_unix(options.uds) if options.uds else bind(options.host, options.port)
    raise_file_limit()
    sys.setswitchinterval(_SWITCH_S)
    threading.Thread(target=code_digest, name="code", daemon=True).start()  # the disk has time now
    with (
        unbound(listener),
        new_stages(keys) as stages,
        load(len(keys.labels) > 1) as llm,
        contextlib.closing(LogWriter(standard_error())) as log,
    ):
        log.take_logging()
        name = (options.served_model_name or [Path(model).name])[0]
        with asyncio.Runner() as runner:
            runner.run(_main(llm, name, stages, options, keys, listener, log, joining))


async def _main(
    llm: LLM,
    name: str,
    stages: GivenStages,
    options: ServeOptions,
    keys: Keys,
    listener: Listener,
    log: LogWriter,
    joining: Joining | None,
) -> None:
    parts = compose(llm, name, options, keys, stages, default_home())
    running = ServerProcess(parts, options, keys, log.line, joining)
    obey_signals(running.stop, running.reload_keys, parts.model_server.sleep_state.begin)
    if not options.uds and options.host not in LOOPBACK and not keys.are_needed:
        say(f"warning: anyone who can reach {options.host} can use this server: set --api-key")
    for note in keys.notes(options.isolate_keys):
        say(note)
    announce = partial(_announce, name, listener, options, running)
    if joining is None:
        await running.run(listener, announce)
        return
    async with (
        running.leaving_when_taken(),
        joining.belonging(name, log.line, running.stop, running.reload_keys),
    ):
        await running.run(listener, joining.has_started.set)


def _joining(url: str, options: ServeOptions, keys: Keys) -> Joining:
    """Prepare to join the router at ``url``. Raises OSError or ValueError."""
    if options.fleet_key_file is None:
        raise ValueError("--join needs --fleet-key-file: the same file that the router has")
    address = RouterAddress(url, options.fleet_ca, is_plain=options.fleet_plain)
    return Joining(address, read_key(options.fleet_key_file), keys)


def _announce(name: str, listener: Listener, options: ServeOptions, running: ServerProcess) -> None:
    settle()
    url = address(listener, options)
    with contextlib.suppress(OSError):  # a full disk is no reason not to serve
        print(f"{name} is ready at {url} (OpenAI API: {url}/v1{running.also})", flush=True)
