"""Servers of other programs that a check starts, and requests to them."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE_S = 300


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@contextmanager
def running(command: list[str], environment: dict[str, str], ready_url: str) -> Iterator[None]:
    """Run a program for as long as the block lasts; begin when its URL answers."""
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as program:
        try:
            until_s = time.monotonic() + PATIENCE_S
            while not _answers(ready_url):
                assert program.poll() is None, "it ended"
                assert time.monotonic() < until_s, "it did not start"
                time.sleep(0.5)
            yield
        finally:
            program.terminate()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def asked(url: str, body: Any = None, key: str = "", method: str | None = None) -> str:
    """Return the text of an answer. Raises AssertionError, with that text, unless it is 200."""
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url}: {error.code} {error.read().decode()[:500]}") from None
