"""A Ray cluster of this machine, for tests that have Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_STORE = {"object_store_memory": 80 << 20}  # of objects, which are not used


def add_node(cluster: Any) -> None:
    """Add a node with one processor."""
    cluster.add_node(num_cpus=1, **_STORE)


@contextmanager
def ray_cluster() -> Iterator[Any]:
    """Run a head without processors, and two nodes with one each. Raises ImportError."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, **_STORE}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(2):
            add_node(cluster)
        yield cluster
    finally:
        cluster.shutdown()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def node_of(pid: int, cluster: Any) -> Any:
    """The node on which the actor of a server runs: that of the raylet which has started it."""
    (node,) = (
        one
        for one in cluster.list_all_nodes()
        for raylet in one.all_processes["raylet"]
        if raylet.process.pid == parent(parent(pid))
    )
    return node
