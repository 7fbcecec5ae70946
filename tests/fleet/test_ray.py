"""Servers that a real Ray places, on a cluster of two nodes: actors killed, nodes drained."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.test_joined import key_file, names  # noqa: F401
from tests.fleet.test_replicas import WISH, Answers, streamed, table
from tests.fleet.test_router import Routed, routing
from tests.server.serving import eventually

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'ridgeline[ray]'")
STORE_BYTES = 80 << 20  # of objects, which are not used


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A head without processors, and two nodes with one each."""
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": STORE_BYTES, "include_dashboard": False}
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **small})
    for _ in range(2):
        nodes.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
    yield nodes
    nodes.shutdown()


@pytest.fixture(scope="module")
def routed(
    cluster: Any,
    folder: Path,
    key_file: Path,  # noqa: F811
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Routed]:
    log = tmp_path_factory.mktemp("log") / "log"
    flags = ("--replicas", "2", "--place", "ray", "--ray", cluster.address)
    with routing(folder / "a", log, *flags, "--fleet-key-file", str(key_file)) as running:
        try:
            yield running
        finally:
            running.process.send_signal(signal.SIGTERM)
            assert running.process.wait(120) == 0, running.log


@pytest.fixture(scope="module")
def whole(routed: Routed) -> Answers:
    choices = routed.call("/v1/completions", WISH | {"stream": False})[1]["choices"]
    return {one["index"]: (one["text"], one["logprobs"]["token_logprobs"]) for one in choices}


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def node_of(pid: int, cluster: Any) -> str:
    """The id of the node on which the actor of a server runs: of the raylet that has started it."""
    (node,) = (
        one
        for one in cluster.list_all_nodes()
        for raylet in one.all_processes["raylet"]
        if raylet.process.pid == parent(parent(pid))
    )
    return str(node.node_id)


def test_an_actor_is_killed_and_the_answer_goes_on(routed: Routed, whole: Answers) -> None:
    """Ray starts it again; the streams are the router's to move."""
    killed: list[int] = []

    def kill(pid: int) -> None:
        assert b"ServerActor" in Path(f"/proc/{parent(pid)}/cmdline").read_bytes()
        killed.append(pid)
        os.kill(parent(pid), signal.SIGKILL)

    assert streamed(routed, kill) == whole
    found = table(routed)
    assert (found["resumed"], found["diverged"], found["wanted"]) == (1, 0, 2)
    (shown,) = routed.call("/v1/models")[1]["data"]
    assert (shown["id"], shown["max_model_len"]) == ("a", 128), "as the servers say: it has no plan"
    eventually(lambda: len(names(routed)) == 2)
    assert killed[0] not in [one["pid"] for one in table(routed)["replicas"]]


def test_a_node_that_is_drained_is_left_in_time(
    routed: Routed, cluster: Any, whole: Answers
) -> None:
    """The stream moves while the node is there, and a server waits until there is another node."""
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    client = GcsClient(address=cluster.address)
    drained: list[str] = []

    def drain(pid: int) -> None:
        drained.append(node_of(pid, cluster))
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        end_ms = int((time.time() + 600) * 1000)
        assert client.drain_node(drained[0], reason, "it goes", end_ms)[0]
        eventually(lambda: pid not in [one["pid"] for one in table(routed)["replicas"]])

    before = table(routed)["resumed"]
    assert streamed(routed, drain, are_ready=False) == whole
    assert table(routed)["resumed"] == before + 1
    assert "Ray drains its node" in routed.log
    eventually(lambda: "1 of 2 servers of a are not there yet: each waits until Ray" in routed.log)
    cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
    eventually(lambda: len(names(routed)) == 2)
    pids = [one["pid"] for one in table(routed)["replicas"]]
    assert drained[0] not in [node_of(pid, cluster) for pid in pids]
