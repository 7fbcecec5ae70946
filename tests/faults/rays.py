"""Ray's own processes are killed under a fleet that it places: F08."""

from __future__ import annotations

import os
import random
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.faults.fleet import are_ready, served_alone, servers, under_load
from tests.faults.oracles import Unreachable
from tests.fleet.test_router import Routed, routing
from tests.server.serving import eventually

_STORE_BYTES = 80 << 20  # Ray's least
_LONG_S = 600.0


@contextmanager
def _cluster() -> Iterator[Any]:
    """A head without processors, and two nodes with one each."""
    try:
        from ray.cluster_utils import Cluster
    except ImportError:
        raise Unreachable("Ray is not installed: pip install 'ridgeline[ray]'") from None
    small = {"object_store_memory": _STORE_BYTES, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    try:
        for _ in range(2):
            nodes.add_node(num_cpus=1, object_store_memory=_STORE_BYTES)
        yield nodes
    finally:
        nodes.shutdown()


def f08(model: Path, count: int, rng: random.Random) -> str:
    """Actors, nodes, and at last the control store are killed under load.

    What Ray placed is placed again; without its control store nothing is, and streams go on.
    """
    with tempfile.TemporaryDirectory() as folder, _cluster() as cluster:
        served = served_alone(model, Path(folder))
        (key := Path(folder) / "key").write_text("0123456789abcdef" * 4)
        flags = ("--replicas", "2", "--place", "ray", "--ray", cluster.address)
        flags += ("--fleet-key-file", str(key), "--receive-timeout", "600")
        with routing(served, Path(folder) / "log", *flags) as routed:
            faults = [_end_actor, _end_node] * count
            rng.shuffle(faults)

            def harm(routed: Routed) -> None:
                fault = faults.pop()
                fault(routed, cluster, rng)

            num = under_load(routed, 2 * count, rng, harm)
            eventually(lambda: _are_all_there(routed), _LONG_S)
            num += under_load(routed, 1, rng, lambda routed: _end_store(cluster))
            assert "Traceback" not in routed.log, routed.log
    return f"{count} actors, {count} nodes, a control store: 0 lost, 0 different, {num} moved"


def _are_all_there(routed: Routed) -> bool:
    return len(servers(routed)) == 2 and are_ready(routed)


def _end_actor(routed: Routed, cluster: Any, rng: random.Random) -> None:
    """Kill the process in which Ray runs a server; Ray starts it again."""
    eventually(lambda: _are_all_there(routed), _LONG_S)
    pid = rng.choice([one["pid"] for one in servers(routed)])
    os.kill(_parent(pid), signal.SIGKILL)


def _end_node(routed: Routed, cluster: Any, rng: random.Random) -> None:
    """Kill the raylet of a node that has a server, and bring another node."""
    eventually(lambda: _are_all_there(routed), _LONG_S)
    raylet = _parent(_parent(rng.choice([one["pid"] for one in servers(routed)])))
    (node,) = (
        node
        for node in cluster.list_all_nodes()
        for one in node.all_processes["raylet"]
        if one.process.pid == raylet
    )
    with suppress(ProcessLookupError):
        os.kill(raylet, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)
    cluster.add_node(num_cpus=1, object_store_memory=_STORE_BYTES)


def _end_store(cluster: Any) -> None:
    cluster.head_node.kill_gcs_server(check_alive=False)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
