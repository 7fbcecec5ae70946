"""A model's engine in a thread of its own, and the application over it, without a socket.

A file of requests is answered by its routes, without an address and another caller.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fastapi import FastAPI

from ridgeline.engine.calibration import newest_calibration, save_quietly
from ridgeline.engine.llm import LLM
from ridgeline.engine.setup import identity
from ridgeline.engine.text_processor import TextProcessor
from ridgeline.foresight.deadline import PromiseMargin
from ridgeline.foresight.step_time.fit import PredictionMonitor
from ridgeline.serve.app import new_app
from ridgeline.serve.batch_files.lines import RequestFile
from ridgeline.serve.batch_files.run import BatchProgress, BatchRun
from ridgeline.serve.batches.asgi_client import LocalClient
from ridgeline.serve.batches.routes import add_batches
from ridgeline.serve.batches.runner import Batches, store_of
from ridgeline.serve.engine.async_engine import AsyncEngine
from ridgeline.serve.http.keys import ANYONE, Keys
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.model_server import GivenStages, ModelServer
from ridgeline.serve.observe.metrics import CountSources, Metrics
from ridgeline.system.machine import lower_priority

_STEP_S = 10.0  # for the step under way at the end


@dataclass(frozen=True)
class ServerParts:
    """What a server is composed of; ``start`` is to be called on the loop.

    Attributes:
        async_engine: runs the engine.
        engines: run those of models that stages need, by name.
        monitor: compares steps with what was predicted of them.
        metrics: what is counted.
        model_server: what the routes share.
        app: the routes.
        batches: run when nobody waits, if the server keeps files.
    """

    async_engine: AsyncEngine
    engines: Mapping[str, AsyncEngine]
    monitor: PredictionMonitor
    metrics: Metrics
    model_server: ModelServer
    app: FastAPI
    batches: Batches | None

    def fingerprint(self) -> str:
        """Return what all answers hang on, those of adapters and what stages change too."""
        server = self.model_server
        of_stages, adapters = server.stages.digest, server.loras
        own = hashlib.blake2b(of_stages)
        for name in adapters.names:
            own.update(json.dumps([name, adapters.digest_of(name).hex()]).encode())
        has_own = of_stages or adapters.names
        return identity.with_adapter(server.fingerprint, own.digest() if has_own else b"")

    def start(self) -> None:
        """Begin to answer."""
        for engine in (self.async_engine, *self.engines.values()):
            engine.start()
        self.model_server.sleep_state.start()
        if self.batches:
            self.batches.start()

    async def rest(self) -> None:
        """Begin no more batches; those that run go on at the next start."""
        if self.batches:
            await self.batches.close()

    async def stop(self) -> None:
        """End the engine's thread and all that works beside it."""
        await self.rest()
        self.model_server.work.close()
        self.model_server.deadline_admission.close()
        self.model_server.arrivals.close()
        loop = asyncio.get_running_loop()
        for engine in (self.async_engine, *self.engines.values()):
            if not await loop.run_in_executor(None, engine.stop, _STEP_S):
                os._exit(1)  # a step does not end: stop waiting for it, all clients have been told
        self.monitor.close()


def compose(
    llm: LLM,
    name: str,
    options: ServeOptions,
    keys: Keys,
    stages: GivenStages,
    home: Path | None = None,
) -> ServerParts:
    """Put a server together; what clients have belongs to one of ``keys``.

    What is known of the time of steps is read from ``home`` and kept there, if it is given, and so
    are files and batches. Requests and answers pass ``stages``. Raises OSError or ValueError if one
    of them cannot begin.
    """
    engines = {one: AsyncEngine(own.engine) for one, own in stages.models.items()}
    async_engine = AsyncEngine(llm.engine)
    async_engine.lost = lambda: llm.runner.lost
    trace, observer = llm.trace, stages.observer
    monitor = PredictionMonitor(
        newest_calibration(home, llm.path, llm.arch, llm.config),
        start=_in_quiet_thread,
        keep=partial(save_quietly, home),
        now_s=time.time,
    )
    metrics = Metrics(
        name,
        CountSources(
            async_engine.gauges,
            lambda: trace.num_lost if trace else 0,
            lambda: llm.adapters.in_use,
            lambda: llm.kv_disk.counted if llm.kv_disk else {},
            lambda: observer.num_lost if observer else None,
        ),
        monitor,
        PromiseMargin(),
        keys.labels or (ANYONE,),
    )
    async_engine.listeners += [monitor.on_record, metrics.on_record]
    _set_up_text(llm.text, options)
    server = ModelServer(llm, name, async_engine, metrics, options, stages, engines, home)
    app, store = new_app(server), store_of(home, name)
    batches = None
    if not isinstance(store, str):
        most_at_once = 2 * llm.config.max_num_seqs  # some are prepared while others run
        of_server = server.fingerprint, most_at_once, stages.observer
        batches = Batches(store, app, keys, *of_server)
    add_batches(app, batches or str(store), options)
    return ServerParts(async_engine, engines, monitor, metrics, server, app, batches)


def _in_quiet_thread(work: Callable[[], None]) -> None:
    def run() -> None:
        lower_priority()
        work()

    threading.Thread(target=run, name="fit", daemon=True).start()


def _set_up_text(text: TextProcessor, options: ServeOptions) -> None:
    """Let texts be written and read as the options say. Raises ValueError if that cannot be."""
    if options.chat_template:
        text.use_chat_template(options.chat_template)
    text.generation_defaults |= options.sampling
    text.choose_parsers(options.tool_call_parser, options.reasoning_parser)
    text.limit_grammars(max_bytes=options.max_grammar_bytes, timeout_s=options.grammar_timeout)


_MOST_AT_ONCE = 1024


class RequestSource(NamedTuple):
    """What is to be answered.

    Attributes:
        source: the requests.
        name: the model that requests may name.
        answers_all: whether it answers those that name another one.
    """

    source: RequestFile
    name: str
    answers_all: bool


def batch_identity(llm: LLM, of: RequestSource) -> dict[str, object]:
    """Return what must be the same for a batch to go on."""
    return {"input": of.source.digest(), "model": llm.fingerprint, "seed": llm.config.seed}


def answer_file(
    llm: LLM,
    of: RequestSource,
    progress: BatchProgress,
    report: Callable[[], object],
    new_stages: Callable[[ServeOptions, Keys], GivenStages],
) -> None:
    """Answer what ``progress`` has no answer of; ``report`` is called whenever it has more.

    ``new_stages`` makes what requests and answers pass.

    Raises Stopped if the engine fails, and OSError if an answer cannot be kept.
    """
    most = min(_MOST_AT_ONCE, 2 * llm.config.max_num_seqs)  # some are prepared while others run
    options = ServeOptions(max_queued_requests=max(most, 1 << 14))

    async def run() -> None:
        keys = Keys((), None)
        parts = compose(llm, of.name, options, keys, new_stages(options, keys))
        parts.start()
        adapters = parts.model_server.loras.names

        def renamed(model: str) -> str | None:
            return None if of.answers_all and model not in adapters else model

        asking = LocalClient(parts.app, ANYONE, is_background=False, renamed=renamed)
        batch = BatchRun(
            progress, asking, name=of.source.digest(), seed=llm.config.seed, most_at_once=most
        )
        try:
            await batch.run(of.source.lines(), report)
        finally:
            await parts.stop()

    asyncio.run(run())
