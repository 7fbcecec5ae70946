"""The servers of one model: which there are, which one gets a request, what became of the rest."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

from ridgeline.backends import BACKENDS
from ridgeline.engine.adapters import read_adapters, room_for
from ridgeline.engine.setup.home import locate
from ridgeline.engine.setup.options import Options, guard_options
from ridgeline.engine.setup.resolve import EngineConfig, resolve
from ridgeline.fleet.servers.worker import Worker
from ridgeline.foresight.routing.balancer import PrefixBalancer, PromptKeys
from ridgeline.model.files.adapters import Base
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.system.machine import available_bytes, usable_cpus

STATES = ("ready", "starting", "silent", "leaving", "missing")  # of a server
COUNTS = ("resumed", "resumed_tokens", "read_first", "again", "diverged", "restarted")  # shown
_NUM_EVENTS = 50


class ReplicaPlan:
    """How the servers of a model are loaded: all of them alike.

    Attributes:
        config: of each one.
        total_bytes: what all of them take together; ``weights_bytes``: what they keep asleep.
    """

    def __init__(
        self, config: EngineConfig, checkpoint: Checkpoint, num_servers: int, beside_bytes: int = 0
    ) -> None:
        """Take what one would be loaded with, and how many there are.

        ``beside_bytes`` are what other models take, which they have beside it.
        """
        self.config = config
        shared_bytes = shared_by_servers(config, checkpoint)
        self.total_bytes = num_servers * (config.total_bytes - shared_bytes) + shared_bytes
        self.total_bytes += beside_bytes
        self.weights_bytes = config.weights_bytes * (1 if shared_bytes else num_servers)


def shared_by_servers(config: EngineConfig, checkpoint: Checkpoint) -> int:
    """Return how much of a server's memory is the same file's as that of its twin: the weights."""
    footprint = BACKENDS[config.backend].footprint(checkpoint.arch, config)
    rest_bytes = config.total_bytes - config.kv_bytes
    return min(config.weights_bytes, rest_bytes) if footprint.maps_weights else 0


def guards_bytes(names: Collection[str], options: Options) -> int:
    """Return what guards beside a model with these options take.

    Raises ValueError if one does not fit.
    """
    of_guard = guard_options(options)
    checkpoints = [load_checkpoint(locate(name).path) for name in names]
    return sum(resolve(of_guard, checkpoint).total_bytes for checkpoint in checkpoints)


def plan_servers(
    options: Options,
    model: str,
    num: int,
    guards: Collection[str],
    reserved_bytes: int,
    limit_bytes: int | None,
) -> ReplicaPlan:
    """Return how the servers of a model would be loaded. Raises ValueError if they cannot be.

    They share the processors and the memory evenly, and the weights wholly where these are mapped
    from a file. Each has ``guards`` beside it. Of what seems free ``reserved_bytes`` are for other
    models; ``limit_bytes`` is the most that this one may take.
    """
    checkpoint = load_checkpoint(locate(model).path)
    adapters = read_adapters(options.adapters, Base.of(checkpoint)).values()
    max_lora_rank, lora_bytes = room_for(options, [weights for _, weights in adapters])
    beside_bytes = num * guards_bytes(guards, options)
    reserved_bytes += num * lora_bytes + beside_bytes
    limit_bytes = limit_bytes and max(0, limit_bytes - beside_bytes)
    threads = options.threads or max(1, usable_cpus() // num)
    options = replace(options, threads=threads)
    resolved = partial(
        resolve, options, checkpoint, reserved_bytes=reserved_bytes, max_lora_rank=max_lora_rank
    )
    config = resolved(limit_bytes=limit_bytes)
    if num > 1:
        left_bytes = available_bytes() - reserved_bytes
        left_bytes = left_bytes if limit_bytes is None else min(left_bytes, limit_bytes)
        shared_bytes = shared_by_servers(config, checkpoint)
        limit_bytes = shared_bytes + max(0, left_bytes - shared_bytes) // num
        config = resolved(limit_bytes=limit_bytes)
    return ReplicaPlan(config, checkpoint, num, beside_bytes)


@dataclass(eq=False)
class ReplicaSet:
    """A model that was asked for at least once.

    Attributes:
        name: what requests call it.
        model: what people type.
        keep_alive_s: how long it stays after its last request; below 0 for ever.
        num_wanted: how many servers of this machine it has while it is loaded.
        num_placed: and of other machines, where they are started for it.
        plan: how they are loaded; None while none is.
        workers: those that run, by number, from 1.
        starting: those that are being started, by number.
        where: which of them gets a request.
        num_users: requests that it answers, or that wait for it.
        num_failed: starts in a row that failed.
        used_s: when the last request ended, on the loop's clock.
        is_asleep: whether its servers have given their memory back.
        waking: makes room for them again.
        joining: held while a server of another machine is compared with those that are here.
        counts: of streams and requests that changed servers, and of what became of servers.
        moved: requests that each server lost to others, by number; ``deaths``: its ends;
            ``starts``: how often it was started.
        missing: those that have ended and have not been started again yet.
        events: what happened to servers, the last ones.
    """

    name: str
    model: str
    keep_alive_s: float
    num_wanted: int
    num_placed: int = 0
    plan: ReplicaPlan | None = None
    workers: dict[int, Worker] = field(default_factory=dict)
    starting: dict[int, asyncio.Task[Worker]] = field(default_factory=dict)
    where: PrefixBalancer = field(default_factory=PrefixBalancer)
    num_users: int = 0
    num_failed: int = 0
    used_s: float = 0.0
    is_asleep: bool = False
    waking: asyncio.Task[None] | None = None
    joining: asyncio.Lock = field(default_factory=asyncio.Lock)
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)
    counts: Counter[str] = field(default_factory=Counter)
    moved: Counter[int] = field(default_factory=Counter)
    deaths: Counter[int] = field(default_factory=Counter)
    starts: Counter[int] = field(default_factory=Counter)
    missing: set[int] = field(default_factory=set)
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_NUM_EVENTS))

    @property
    def state(self) -> str:
        """What ``/v1/models`` says of it."""
        if self.workers:
            well = "asleep" if self.is_asleep else "loaded"
            return "hung" if all(one.trouble for one in self.workers.values()) else well
        return "loading" if self.starting else "unloaded"

    @property
    def first(self) -> Worker | None:
        """The server that is asked what all of them would answer; None if there is none."""
        well = [one for _, one in sorted(self.workers.items()) if not one.trouble]
        return next(iter(well or self.workers.values()), None)

    @property
    def max_model_len(self) -> int | None:
        """How long sequences may be, as planned, or as a server says that was placed elsewhere."""
        if self.first is None:
            return None
        max_model_len: int | None = self.first.facts.get(self.name, {}).get("max_model_len")
        return self.plan.config.max_model_len if self.plan else max_model_len

    @property
    def trouble(self) -> str:
        """What is wrong with its servers, if anything."""
        wrong = [
            f"{self.called(one)} {one.trouble}" for one in self.workers.values() if one.trouble
        ]
        return "; ".join(wrong).removeprefix(f"{self.name} ")

    @property
    def resident_bytes(self) -> int:
        """What its servers have in memory; what they map from the same file counts once."""
        used = [one.memory for one in self.workers.values()]
        shared = max((one.file_bytes for one in used), default=0)
        return sum(one.private_bytes for one in used) + shared

    @property
    def is_kept(self) -> bool:
        """Whether a server that has ended is missed now."""
        is_used = self.num_users or self.workers or self.keep_alive_s < 0
        return bool(is_used) and not self.is_asleep

    @property
    def expects_more(self) -> bool:
        """Whether a server that is missing is started, and has not failed to start twice."""
        return len(self.workers) < self.num_wanted + self.num_placed and self.num_failed < 2

    @property
    def are_several(self) -> bool:
        """Whether servers have to be told apart."""
        return max([self.num_wanted, self.num_placed, *self.workers]) > 1

    def free_number(self) -> int:
        """Return a number for a server of another machine."""
        return next(n for n in count(self.num_wanted + 1) if n not in self.workers)

    def called(self, worker: Worker) -> str:
        """Return what the log calls a server."""
        return f"{self.name} (server {worker.number})" if self.are_several else self.name

    def take(self, worker: Worker) -> None:
        """Let a server that is ready have requests."""
        self.counts["restarted"] += worker.number in self.missing
        self.missing.discard(worker.number)
        self.workers[worker.number] = worker
        self.where.add(str(worker.number), worker.node)

    def drop(self, worker: Worker) -> None:
        """Let a server have no more requests."""
        del self.workers[worker.number]
        self.where.remove(str(worker.number))

    def choose(self, prompt: PromptKeys, avoided: Collection[Worker] = ()) -> Worker | None:
        """Return the server that should get a request; None if only those to avoid take any."""

        def takes(name: str) -> bool:
            worker = self.workers[int(name)]
            return worker.takes_requests and worker not in avoided

        name = self.where.best(prompt, takes)
        return None if name is None else self.workers[int(name)]

    def has_lost(self, worker: Worker, silence_s: float) -> bool:
        """Whether a server is silent for so long, or is leaving, and another one answers."""
        others = [one for one in self.workers.values() if one is not worker and one.takes_requests]
        if worker.leaves:
            return bool(others)
        return worker.is_silent(silence_s) and not all(one.is_silent(silence_s) for one in others)

    def states(self) -> dict[int, str]:
        """Return in which of ``STATES`` each of its servers is, by number."""
        if not self.workers and not self.starting:
            return {}

        def state(number: int) -> str:
            if worker := self.workers.get(number):
                return "silent" if worker.trouble else "leaving" if worker.leaves else "ready"
            return "starting" if number in self.starting else "missing"

        own = range(1, self.num_wanted + 1)
        return {number: state(number) for number in sorted({*own, *self.workers})}

    def shown(self) -> dict[str, Any]:
        """Return what ``/v1/fleet`` says of it."""
        config = self.plan.config if self.plan else None
        return {
            "state": self.state,
            "wanted": self.num_wanted + self.num_placed,
            "threads": config.threads if config else None,
            "kv_cache_bytes": config.kv_bytes if config else None,
            "resident_bytes": self.resident_bytes,
            **{name: self.counts[name] for name in COUNTS},
            "replicas": [self._server(number, state) for number, state in self.states().items()],
            "events": list(self.events),
        }

    def _server(self, number: int, state: str) -> dict[str, Any]:
        shown: dict[str, Any] = {"name": str(number), "state": state}
        shown |= {"moved": self.moved[number], "deaths": self.deaths[number]}
        if worker := self.workers.get(number):
            shown["node"] = worker.node
            shown["speed"] = round(self.where.speed(str(number)), 2)
            shown["pid"] = worker.pid
            shown["since"] = worker.since_s
            shown["running"] = self.where.num_requests(str(number))
            shown["cached_keys"] = self.where.num_read(str(number))
            shown["private_bytes"] = worker.memory.private_bytes
            shown["fingerprint"] = worker.facts.get(self.name, {}).get("system_fingerprint")
            shown |= {"reason": worker.trouble} if worker.trouble else {}
        return shown

    def lose(self, worker: Worker) -> None:
        """Take note that a server has ended by itself."""
        self.deaths[worker.number] += 1
        if worker.number <= self.num_wanted:  # one of another machine comes by itself
            self.missing.add(worker.number)
        self.note(worker, worker.fate)

    def note(self, worker: Worker, what: str) -> None:
        """Keep what happened to a server for those who look."""
        self.events.append({"time": time.time(), "server": worker.number, "what": what})
