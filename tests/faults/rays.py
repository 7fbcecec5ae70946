"""Ray's own processes are killed under a fleet that it places: F08."""

from __future__ import annotations

import os
import random
import signal
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.faults.fleet import are_ready, served_alone, servers, under_load
from tests.faults.links import KEY
from tests.faults.oracles import Unreachable
from tests.fleet.ray_cluster import add_node, node_of, parent, ray_cluster
from tests.fleet.test_router import Routed, routing
from tests.waiting import eventually


def f08(model: Path, count: int, rng: random.Random) -> str:
    """Actors, nodes, and at last the control store are killed under load.

    What Ray placed is placed again; without its control store nothing is, and streams go on.
    """
    if find_spec("ray") is None:
        raise Unreachable("Ray is not installed: pip install 'ridgeline[ray]'")
    with tempfile.TemporaryDirectory() as folder, ray_cluster() as cluster:
        served = served_alone(model, Path(folder))
        (key := Path(folder) / "key").write_text(KEY)
        flags = ("--replicas", "2", "--place", "ray", "--ray", cluster.address)
        flags += ("--fleet-key-file", str(key), "--receive-timeout", "600")
        with routing(served, Path(folder) / "log", *flags) as routed:
            faults = [_end_actor, _end_node] * count
            rng.shuffle(faults)

            def harm(routed: Routed) -> None:
                faults.pop()(routed, cluster, rng)

            num = under_load(routed, 2 * count, rng, harm)
            eventually(lambda: _are_all_there(routed))
            num += under_load(routed, 1, rng, lambda routed: _end_store(cluster))
            assert "Traceback" not in routed.log, routed.log
    return f"{count} actors, {count} nodes, a control store: 0 lost, 0 different, {num} moved"


def _are_all_there(routed: Routed) -> bool:
    return len(servers(routed)) == 2 and are_ready(routed)


def _end_actor(routed: Routed, cluster: Any, rng: random.Random) -> None:
    """Kill the process in which Ray runs a server; Ray starts it again."""
    eventually(lambda: _are_all_there(routed))
    pid = rng.choice([one["pid"] for one in servers(routed)])
    os.kill(parent(pid), signal.SIGKILL)


def _end_node(routed: Routed, cluster: Any, rng: random.Random) -> None:
    """Kill the raylet of a node that has a server, and bring another node."""
    eventually(lambda: _are_all_there(routed))
    node = node_of(rng.choice([one["pid"] for one in servers(routed)]), cluster)
    (raylet,) = node.all_processes["raylet"]
    os.kill(raylet.process.pid, signal.SIGKILL)
    cluster.remove_node(node, allow_graceful=False)
    add_node(cluster)


def _end_store(cluster: Any) -> None:
    cluster.head_node.kill_gcs_server(check_alive=False)
