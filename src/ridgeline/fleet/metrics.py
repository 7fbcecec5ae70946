"""The metrics of all servers as one text, and the router's own about what became of servers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Iterator, Mapping

import httpx2
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric

from ridgeline.fleet.servers.replica_set import COUNTS, STATES, ReplicaSet
from ridgeline.fleet.servers.worker import STATUS_S, Worker

_SAMPLE = re.compile(r"^(\w[\w:]*)(?:\{(.*)\})? ", re.MULTILINE)  # up to its value
_COUNTED = {
    "resumed": "Streams that went on at another server, when theirs had ended or was silent.",
    "resumed_tokens": "Tokens that those streams had at that time.",
    "read_first": "Streams that the other server had read before theirs, which left, stopped them.",
    "again": "Requests that began again at another server, since nothing of them was shown.",
    "diverged": "Streams that ended then, since the answer would not have been the same.",
    "restarted": "Servers that were started again.",
}
_LOST = {"blame": "they ended two servers", "failed": "servers ended under them too often"}


async def metrics_of(replica_sets: Mapping[str, ReplicaSet], key: Mapping[str, str]) -> str:
    """Return what the servers of all models show to a key, and what the router has counted."""
    workers = [
        (replica_set, one)
        for replica_set in replica_sets.values()
        for one in replica_set.workers.values()
    ]
    well = [(replica_set, one) for replica_set, one in workers if not one.trouble]
    texts = await asyncio.gather(
        *(_metrics(replica_set, worker, key) for replica_set, worker in well)
    )
    return merged([*texts, _own(replica_sets.values())])


async def _metrics(replica_set: ReplicaSet, worker: Worker, key: Mapping[str, str]) -> str:
    """Return the metrics that a server shows to a key, each with the model's name and its own."""
    try:
        async with asyncio.timeout(STATUS_S):
            text = (await worker.client.get("/metrics", headers=key)).text
    except (httpx2.HTTPError, TimeoutError):  # it is about to end, or hangs
        return ""
    name = f"model_name={json.dumps(replica_set.name)}"
    replica = f'replica="{worker.number}"' if replica_set.are_several else ""

    def named(sample: re.Match[str]) -> str:
        metric, labels = sample[1], sample[2] or ""
        own = () if "model_name=" in labels else (name,)
        return f"{metric}{{{','.join(filter(None, (*own, labels, replica)))}}} "

    return _SAMPLE.sub(named, text)


def _own(replica_sets: Iterable[ReplicaSet]) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Own(list(replica_sets)))
    return generate_latest(registry).decode()


class _Own:
    """A collector for a registry."""

    def __init__(self, replica_sets: list[ReplicaSet]) -> None:
        self._slots = replica_sets

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        named, loaded = (
            ["model_name"],
            [replica_set for replica_set in self._slots if replica_set.workers],
        )
        answers = GaugeMetricFamily(
            "ridgeline:model_answers", "Whether a server of the model answers.", labels=named
        )
        for replica_set in loaded:
            answers.add_metric([replica_set.name], replica_set.state == "loaded")
        yield answers
        wanted = GaugeMetricFamily(
            "ridgeline_fleet_wanted", "Servers that a model has while it is loaded.", labels=named
        )
        servers = GaugeMetricFamily(
            "ridgeline_fleet_replicas", "Servers of a model.", labels=[*named, "state"]
        )
        for replica_set in self._slots:
            wanted.add_metric([replica_set.name], replica_set.num_wanted + replica_set.num_placed)
            states = replica_set.states()
            for state in STATES:
                servers.add_metric([replica_set.name, state], list(states.values()).count(state))
        yield wanted
        yield servers
        for name in COUNTS:
            said = _COUNTED[name]
            counter = CounterMetricFamily(f"ridgeline_fleet_{name}", said, labels=named)
            for replica_set in self._slots:
                counter.add_metric([replica_set.name], replica_set.counts[name])
            yield counter
        why = "; ".join(f"{name}: {said}" for name, said in _LOST.items())
        lost = CounterMetricFamily(
            "ridgeline_fleet_lost", f"Requests that were given up. {why}.", labels=[*named, "why"]
        )
        for replica_set in self._slots:
            for name in _LOST:
                lost.add_metric([replica_set.name, name], replica_set.counts[f"lost_{name}"])
        yield lost


def merged(texts: Iterable[str]) -> str:
    """Return several texts of Prometheus' format as one: each family once, with all samples."""
    families: dict[str, list[str]] = {}
    for text in texts:
        family: list[str] = []
        for line in text.splitlines(keepends=True):
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                family = families.setdefault(name, [])
                if family:
                    continue
            elif line.startswith("#") and line in family:
                continue
            family.append(line)
    return "".join(line for family in families.values() for line in family)
