"""What the process of a rank runs: the same steps as the first rank, which sends them.

It says nothing on the terminal, and ends when the first rank does.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ridgeline.backends.cuda.processes.rank_processes import (
    Failed,
    Loaded,
    NewAdapter,
    OldAdapter,
    Ready,
    Start,
    map_progress,
)
from ridgeline.backends.interface import BackendContext
from ridgeline.system.machine import DeviceLost
from ridgeline.system.process import end_with_parent


def main(descriptor: int) -> None:
    """Serve a pipe until it closes."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the first rank ends first, and then this
        signal.signal(number, signal.SIG_IGN)
    end_with_parent(signal.SIGKILL)
    pipe = Connection(descriptor)
    try:
        start: Start = pipe.recv()
        if os.getppid() == start.parent:
            _serve(pipe, start)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        pass
    except BaseException as error:  # those that wait for this rank are told why
        first, *_ = [*str(error).splitlines(), ""]
        with suppress(OSError):
            pipe.send(Failed(-1, first or type(error).__name__))
    pipe.close()
    os._exit(0)


def _serve(pipe: Connection, start: Start) -> None:
    # Late, so that Linux knows before this with which parent this process ends.
    from ridgeline.backends.cuda.loading import load_rank
    from ridgeline.backends.cuda.ranks.group import Ranks, connect
    from ridgeline.backends.step_codec import StepDecoder
    from ridgeline.model.files.checkpoint import load_checkpoint

    count = start.setup.tensor_parallel_size
    progress = map_progress(start.folder, count)

    def advance(done: int, total: int) -> None:
        progress[start.rank] += 1

    def meet(device: Any) -> Ranks:
        pipe.send(Loaded())
        pipe.recv()
        progress[start.rank] += 1
        return connect(start.folder, start.rank, count, device, progress)

    nowhere = BackendContext(lambda: Path("/nonexistent"), progress=advance)
    checkpoint = load_checkpoint(start.model)
    ops = start.ops and import_module(start.ops)
    runner, ranks = load_rank(checkpoint, start.setup, nowhere, start.rank, meet, ops)
    pipe.send(Ready(dict(runner.memory())))
    decoder, number, adapters = StepDecoder(), 0, dict[int, Any]()
    while True:
        what = pipe.recv()
        if isinstance(what, NewAdapter):
            adapters[what.number] = runner.add_adapter(what.number, what.weights)
            continue
        if isinstance(what, OldAdapter):
            del adapters[what.number]
            continue
        number += 1
        ranks.advance()
        try:
            if isinstance(what, dict):
                runner.prompt_logits(**what)
            else:
                runner.execute(decoder.read(what))
        except DeviceLost:
            raise
        except Exception as error:
            pipe.send(Failed(number, str(error)))


if __name__ == "__main__":
    main(int(sys.argv[1]))
