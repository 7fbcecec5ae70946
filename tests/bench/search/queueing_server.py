"""A server with seats, each so long taken: ``python -m`` this module with PORT NUM SECONDS.

It takes ``NUM / SECONDS`` requests a second and no more; who finds no seat waits.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

from tests.bench.script_server import DONE, JSON, Script, chat, serving, usage


def two_tokens(seconds: float) -> Iterator[Any]:
    """Answer with two tokens, each after half of the time."""
    for text in ("a", "b"):
        yield seconds / 2
        yield chat(text)
    yield chat(finish="stop")
    yield usage(5, 2)
    yield DONE


def seats(num: int, seconds: float) -> Script:
    free = threading.Semaphore(num)

    def script(number: int, body: JSON) -> Iterator[Any]:
        with free:
            yield from two_tokens(seconds)

    return script


if __name__ == "__main__":
    port, num, seconds = sys.argv[1:]
    with serving(seats(int(num), float(seconds)), int(port)):
        print("ready", flush=True)
        threading.Event().wait()
