"""Servers that a real Ray places, on a cluster of two nodes: actors killed, nodes drained."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fleet.ray_cluster import add_node, node_of, parent, ray_cluster
from tests.fleet.test_remote_server import key_file, names  # noqa: F401
from tests.fleet.test_replicas import WISH, Answers, streamed, table
from tests.fleet.test_router import Routed, routing
from tests.waiting import PATIENCE_S, eventually

pytest.importorskip("ray", reason="Ray is not installed: pip install 'ridgeline[ray]'")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with ray_cluster() as nodes:
        yield nodes


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
            assert running.process.wait(PATIENCE_S) == 0, running.log


@pytest.fixture(scope="module")
def whole(routed: Routed) -> Answers:
    choices = routed.call("/v1/completions", WISH | {"stream": False})[1]["choices"]
    return {one["index"]: (one["text"], one["logprobs"]["token_logprobs"]) for one in choices}


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
        drained.append(str(node_of(pid, cluster).node_id))
        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        end_ms = int((time.time() + 600) * 1000)
        assert client.drain_node(drained[0], reason, "it goes", end_ms)[0]
        eventually(lambda: pid not in [one["pid"] for one in table(routed)["replicas"]])

    before = table(routed)["resumed"]
    assert streamed(routed, drain, are_ready=False) == whole
    assert table(routed)["resumed"] == before + 1
    assert "Ray drains its node" in routed.log
    eventually(lambda: "1 of 2 servers of a are not there yet: each waits until Ray" in routed.log)
    add_node(cluster)
    eventually(lambda: len(names(routed)) == 2)
    pids = [one["pid"] for one in table(routed)["replicas"]]
    assert drained[0] not in [str(node_of(pid, cluster).node_id) for pid in pids]
