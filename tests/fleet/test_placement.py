"""What starts servers elsewhere: what it refuses, and the process that it runs there."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from typer.testing import CliRunner

from ridgeline.cli.main import app
from ridgeline.fleet.placement.ray_actor import ServerActor
from tests.fleet.test_remote_server import key_file  # noqa: F401
from tests.waiting import PATIENCE_S, children, eventually, free_port

HAS_RAY = importlib.util.find_spec("ray") is not None


def test_what_cannot_be_is_said_before_anything_is_loaded(
    folder: Path,
    key_file: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    nobody = f"127.0.0.1:{free_port()}"
    key, ray = ("--fleet-key-file", str(key_file)), ("--place", "ray")
    cases = [
        (("--replicas", "4..2"), "--replicas is '4..2': write a number from 1, or"),
        (("--replicas", "0"), "--replicas is '0'"),
        (("--replicas", "two"), "--replicas is 'two'"),
        (("--replicas", "1..2", *key), "--replicas 1..2 needs --place ray"),
        ((*ray, "--replicas", "2"), "--place ray needs --fleet-key-file"),
        (("--ray", nobody), "say --place ray too"),
        ((*ray, *key, "--join", "http://localhost:1"), "leave out --join"),
        ((*ray, *key, "--uds", str(tmp_path / "s")), "leave out --join, --uds"),
        ((*ray, *key, "--target-requests", "0"), "--target-requests is 0"),
        ((*ray, *key, str(folder / "b")), "--fleet-key-file works with one model"),
    ]
    if HAS_RAY:
        cases += [
            ((*ray, *key, "--ray", nobody), f"nothing listens at --ray {nobody}"),
            ((*ray, *key, "--ray", "ray://localhost"), "write HOST:PORT of Ray's head node"),
            ((*ray, *key, "--ray", "localhost"), "write HOST:PORT of Ray's head node"),
        ]
    else:
        cases.append(((*ray, *key), "--place ray needs Ray: pip install 'ridgeline[ray]'"))
    for flags, problem in cases:
        result = CliRunner().invoke(app, ["serve", str(folder / "a"), "--port", "0", *flags])
        assert result.exit_code != 0, flags
        assert problem in (result.output + str(result.exception)), flags


def test_ray_is_not_imported_unless_it_places() -> None:
    """Neither by a plain server nor by a router."""
    program = (
        "import sys, ridgeline.cli.main, ridgeline.serve.main, ridgeline.fleet.main\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'ray'])"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert found.stdout.split() == [b"[]"]


class Run:
    """A call of ``ServerActor.run``, as Ray makes it, in a thread."""

    def __init__(self, *arguments: str, **variables: str) -> None:
        self.is_drained = threading.Event()
        self.actor, self.result = ServerActor(self.is_drained.is_set), (-1, "")
        self._thread = threading.Thread(target=self._run, args=(arguments, variables))
        self._thread.start()

    def _run(self, arguments: tuple[str, ...], variables: dict[str, str]) -> None:
        self.result = self.actor.run(arguments, variables)

    def end(self) -> tuple[int, str]:
        self._thread.join(PATIENCE_S)
        self.is_drained.set()  # so that nobody asks any more
        return self.result


def serve(model: Path, path: Path) -> Run:
    """Serve a model on a socket, and wait until it listens."""
    run = Run("serve", str(model), RIDGELINE_UDS=str(path), RIDGELINE_KV_CACHE_MEMORY="1MiB")
    eventually(path.exists)
    return run


def child() -> int:
    """The process of the one server that this process has started."""
    (pid,) = children(os.getpid(), "model_process")
    return pid


def test_a_process_of_an_actor_says_why_it_has_ended(folder: Path, tmp_path: Path) -> None:
    """In its own words, or by a signal's name, or in those of who told it to leave."""
    status, why = Run("serve", str(tmp_path / "none")).end()
    assert (status, why[:20]) == (1, "there is no model '/")
    run = serve(folder / "a", tmp_path / "1")
    os.kill(child(), signal.SIGKILL)
    assert run.end() == (-signal.SIGKILL, "SIGKILL")
    run = serve(folder / "a", tmp_path / "2")
    run.actor.leave("it is time")
    assert run.end() == (0, "it is time")
    assert run.actor.run(("serve",), {}) == (0, "it is time"), "called again, it does not begin"


def test_a_server_leaves_a_node_that_is_drained(folder: Path, tmp_path: Path) -> None:
    run = serve(folder / "a", tmp_path / "1")
    run.is_drained.set()
    assert run.end() == (0, "Ray drains its node")
