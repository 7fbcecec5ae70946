"""A server that is started for a measurement, and ended after it."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ridgeline.engine.setup.progress import say

_PERIOD_S = 0.2
_GRACE_S = 15.0  # to end by itself, before it is killed


def first_model(base_url: str, api_key: str | None, timeout_s: float = 10.0) -> str:
    """Return the first model that a server lists.

    Raises ValueError if it lists none, and OSError, which names the address, if it does not answer.
    """
    url = base_url.rstrip("/").removesuffix("/v1") + "/v1/models"
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return str(json.load(response)["data"][0]["id"])
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{url} lists no model: name one with --model") from error
    except OSError as error:
        raise OSError(f"{url} does not answer: {getattr(error, 'reason', error)}") from error


@contextmanager
def served(command: str, api_key: str | None, timeout_s: float) -> Iterator[str]:
    """Start a server by ``command``, whose ``{port}`` becomes a free one; yield its base URL.

    It is ready once it lists its models. At the end it and its children are ended.

    Raises:
        ValueError: if the command has no ``{port}``, ends before it is ready, or takes longer than
            ``timeout_s``; with the last line that it wrote.
    """
    if "{port}" not in command:
        raise ValueError(f"--serve {command!r} has no {{port}}: write it where the port belongs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        say(f"starting {command.replace('{port}', str(port))}")
        process = subprocess.Popen(
            shlex.split(command.replace("{port}", str(port))),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            end_s = time.monotonic() + timeout_s
            while not _is_ready(url, api_key):
                if process.poll() is not None or time.monotonic() > end_s:
                    output.seek(0)
                    last = ([""] + [line for line in output.read().splitlines() if line.strip()])[
                        -1
                    ]
                    how = f"is not ready after {timeout_s:g} s"
                    if process.returncode is not None:
                        how = f"ended with status {process.returncode}"
                    raise ValueError(f"--serve: the server {how}; it last said: {last[:300]}")
                time.sleep(_PERIOD_S)
            yield url
        finally:
            _end(process)


def _is_ready(url: str, api_key: str | None) -> bool:
    try:
        first_model(url, api_key, timeout_s=2.0)
    except (OSError, ValueError):
        return False
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process gently, then whatever is left of its children and of itself."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
