"""What a stage runs, in a process of its own: steps and rows in, rows out.

It says nothing on the terminal, and ends when the engine does.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ridgeline.backends.cpu.buffers import HiddenRows
from ridgeline.backends.cpu.pipeline.parts import TokenSpan, piece_of
from ridgeline.backends.cpu.pipeline.split import layers_of, setup_of
from ridgeline.backends.cpu.pipeline.wire import KNOWN_STEPS, Link, key_of, read_written, rows_of
from ridgeline.backends.cpu.runner import CpuRunner, load_runner
from ridgeline.backends.interface import BackendContext, Setup
from ridgeline.backends.step_codec import StepDecoder
from ridgeline.core.step import Step
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.shape.cache_groups import CacheGroup

_WAIT_S = 1.0  # between two tries to reach an engine


def main(descriptor: int) -> None:
    """Serve the engine that has started this process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the engine ends first, and then this
        signal.signal(number, signal.SIG_IGN)
    link = Link(socket.socket(fileno=descriptor))
    with suppress(EOFError, OSError):
        kind, start, _ = link.receive()
        assert kind == "start"
        context = BackendContext(lambda: Path(start["home"]))
        _serve(link, start, lambda: load_checkpoint(Path(start["path"])), context)
    os._exit(0)


def join(
    checkpoint: Checkpoint,
    address: tuple[str, int],
    *,
    stage_key_file: Path | None,
    threads: int,
    context: BackendContext,
    digest: str,
    say: Callable[[str], None],
) -> None:
    """Be a stage of the engine at ``address``, until that ends.

    Args:
        checkpoint: the model, which must be the engine's.
        address: host and port.
        stage_key_file: with the key that both ends must know.
        threads: that compute.
        context: where this machine keeps its files.
        digest: of the model's files.
        say: told which layers it has.

    Raises:
        OSError: there is no such host, or no such file.
        PermissionError: the other end has another key.
        ValueError: it runs another model, this stage does not fit, or the key is too short.
    """
    key = key_of(stage_key_file)
    link = Link(_connected(address, say))
    try:
        link.prove(key, "stage", "engine")
        _, start, _ = link.receive()
        if start["digest"] != digest:
            link.send("failed", "it has another model file")
            raise ValueError(f"the engine at {address[0]}:{address[1]} has another model file")
        start["setup"]["threads"] = threads
        say(f"layers {start['first'] + 1} to {start['end']} of {checkpoint.arch.num_layers}")
        _serve(link, start, lambda: checkpoint, context)
    except PermissionError:
        raise
    except (EOFError, OSError):
        pass  # the engine has ended
    finally:
        link.close()


def _connected(address: tuple[str, int], say: Callable[[str], None]) -> socket.socket:
    """Connect to the engine, which may start later. Raises OSError if there is no such host."""
    is_said = False
    while True:
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            if not is_said:
                say(f"waiting for an engine at {address[0]}:{address[1]}")
            is_said = True
            time.sleep(_WAIT_S)


def _serve(
    link: Link, start: Mapping[str, Any], load: Callable[[], Checkpoint], context: BackendContext
) -> None:
    """Load the layers, and compute what comes. Raises EOFError or OSError at the engine's end."""
    try:
        checkpoint, first, end = load(), start["first"], start["end"]
        setup = read_setup(start["setup"])
        own = setup_of(setup, checkpoint.arch, first, end)
        runner = load_runner(layers_of(checkpoint, first, end), own, context)
        memory = {name: tuple(use) for name, use in runner.memory().items()}
        link.send("ready", memory)
        _compute(link, runner, is_first=first == 0)
    except (EOFError, OSError):
        raise
    except Exception as error:  # the stage that waits for this one is told why
        link.send("failed", f"{error}".splitlines()[0] if str(error) else type(error).__name__)
        raise


class _Orders:
    """What the engine sends: steps, and rows of their parts, which may come before or behind."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._steps: deque[Any] = deque()
        self._rows: dict[tuple[int, int], HiddenRows] = {}  # by step and part

    def step(self) -> Any:
        """Return the next step. Raises EOFError, OSError."""
        while not self._steps:
            self._receive()
        return self._steps.popleft()

    def rows(self, number: int, place: int) -> HiddenRows:
        """Return the rows of a part that the stage before this one has computed."""
        while (number, place) not in self._rows:
            self._receive()
        return self._rows.pop((number, place))

    def _receive(self) -> None:
        kind, what, body = self._link.receive()
        if kind == "step":
            self._steps.append(what)
        else:
            number, place, count = what
            self._rows[number, place] = rows_of(body, count)


def _compute(link: Link, runner: CpuRunner, *, is_first: bool) -> None:
    """Compute the parts of steps as they come; each stage but the first waits for its rows."""
    decoder, orders = StepDecoder(KNOWN_STEPS), _Orders(link)
    while True:
        number, parts, written = orders.step()
        step = decoder.read(read_written(written))
        for place, pieces in enumerate(parts):
            work = tuple(
                piece_of(step.work[p.item], p) for p in (TokenSpan(*one) for one in pieces)
            )
            copies = step.copies if place == 0 else ()
            given = None if is_first else orders.rows(number, place)
            count = sum(len(item.tokens) for item in work)
            rows = runner.rows(Step(work, copies, (), (), ()), given)
            link.send("rows", [number, place, count], rows)


def written_setup(setup: Setup) -> dict[str, Any]:
    """Return what a stage must know of a setup, as JSON takes it."""
    names = (
        *("dtype", "kv_cache_dtype", "block_size", "threads", "max_model_len", "max_num_seqs"),
        *("max_num_batched_tokens", "num_blocks", "groups"),
    )
    return {name: getattr(setup, name) for name in names}


def read_setup(written: Mapping[str, Any]) -> Setup:
    """Return the setup that ``written_setup`` wrote."""
    groups = tuple(CacheGroup(window, tuple(layers)) for window, layers in written["groups"])
    return Setup(**{**written, "groups": groups})


if __name__ == "__main__":
    main(int(sys.argv[1]))
