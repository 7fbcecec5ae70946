"""What Ray runs on a machine: a process that runs a server, which joins the router.

It is imported by Ray's workers, before Ridgeline's own process begins.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from threading import Lock, Thread
from typing import Any

from ridgeline.system.process import signal_of

_LOOK_S = 1.0  # between two looks whether this node is being drained


class ServerActor:
    """Runs one server as a child, which ends with it.

    Nothing of a request passes through it. If its process dies, Ray starts it again, on another
    machine if need be, and calls ``run`` again.
    """

    def __init__(self, is_drained: Callable[[], bool]) -> None:
        """Begin with none; ``is_drained`` says whether this machine is about to go."""
        self._is_drained = is_drained
        self._child: subprocess.Popen[str] | None = None
        self._starting = Lock()
        self._why = ""  # it was told to leave

    def run(self, arguments: Sequence[str], variables: Mapping[str, str]) -> tuple[int, str]:
        """Run ``ridgeline`` with these arguments and environment variables until it ends.

        Returns its status and why it has ended: its last words.
        """
        with self._starting:
            if self._why:
                return 0, self._why
            self._child = child = subprocess.Popen(
                [sys.executable, "-m", "ridgeline.cli.model_process"],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        Thread(target=self._watch_node, daemon=True).start()
        assert child.stdin is not None
        assert child.stderr is not None
        with child.stdin as orders:
            orders.write(json.dumps({"variables": dict(variables), "arguments": list(arguments)}))
            orders.write("\n")
        last = ""
        with child.stderr as words:
            for line in words:
                print(line, end="", file=sys.stderr)  # Ray keeps it, with the logs of this worker
                last = line.strip() or last
        status = child.wait()
        if self._why or not status:
            return 0, self._why or "it has left"
        return status, signal_of(status) or last.removeprefix("ridgeline: ") or "it said nothing"

    def leave(self, why: str) -> None:
        """Let the server leave the router; its requests go on elsewhere, and ``run`` returns."""
        with self._starting:
            self._why = self._why or why
            if self._child is not None:
                self._child.terminate()

    def _watch_node(self) -> None:
        while not self._is_drained():
            time.sleep(_LOOK_S)
        self.leave("Ray drains its node")


def is_drained() -> bool:
    """Return whether Ray says that this node is about to go, by its autoscaler or a drain.

    Ray has no public call for this; its own libraries use this one.
    """
    import ray

    node = ray.get_runtime_context().get_node_id()
    try:
        return node in [_hex(one) for one in _client().get_draining_nodes()]
    except Exception:  # Ray's head is away: its errors have no common class
        return False


@cache
def _client() -> Any:
    import ray
    from ray._raylet import GcsClient

    return GcsClient(address=ray.get_runtime_context().gcs_address)


def _hex(node: object) -> str:
    """Return a node's id as text; some versions of Ray have objects for it."""
    return node.hex() if hasattr(node, "hex") else str(node)
