"""The processes of all ranks but the first: started, told what to do, watched, and ended.

A thread of the first rank's process starts them, and Linux ends them with it. The thread reads what
they say. If one of them ends, a step is not done in time, or loading stands still, it ends all of
them and says in one line which one it was; whatever waits for a rank is woken.
"""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ridgeline.backends.interface import MemoryUse, Setup
from ridgeline.model.files.adapters import AdapterWeights
from ridgeline.system.machine import DeviceLost
from ridgeline.system.process import RunningTime, end_within, signal_of, start_connected

STEP_TIMEOUT_S = 60.0
# Of loading, in which no rank comes any further: one that reads a large tensor from a slow disk, or
# compiles a kernel, is only slow.
LOADING_TIMEOUT_S = 300.0
_LOOK_S = 0.25  # between two looks at the clock
_EXIT_S = 5.0  # that a process whose pipe has closed may take to end
_Result = TypeVar("_Result")


class Start(NamedTuple):
    """What a process is told first.

    Attributes:
        rank: which one it is.
        parent: the process that started it.
        folder: by which ranks find each other, with the file ``progress``.
        model: the path of the model.
        setup: of the runner, which says how many ranks there are.
        ops: the module of operations that compute on the CPU; None: kernels on a GPU.
    """

    rank: int
    parent: int
    folder: Path
    model: Path
    setup: Setup
    ops: str | None


class NewAdapter(NamedTuple):
    """Steps will name an adapter by ``number``."""

    number: int
    weights: AdapterWeights


class OldAdapter(NamedTuple):
    """No step will name the adapter ``number`` any more."""

    number: int


class Loaded(NamedTuple):
    """A process has its weights."""


class Ready(NamedTuple):
    """A process waits for steps; ``memory`` is what its runner keeps."""

    memory: dict[str, MemoryUse]


class Failed(NamedTuple):
    """The call ``number`` has failed and changed nothing; if it is -1, everything has failed."""

    number: int
    why: str


class Processes:
    """All ranks but the first.

    Attributes:
        folder: by which ranks find each other; ``forget_folder`` removes it.
        progress: of all ranks, in memory that they share: how far each has come.
        step_timeout_s: after which a step is given up.
        lost: why no step can run any more.
        on_lost: called once, in the watching thread, when a rank is lost.
    """

    def __init__(self, model: Path, setup: Setup, ops: str | None) -> None:
        """Start them; see ``Start``."""
        self.count, self.step_timeout_s = setup.tensor_parallel_size, STEP_TIMEOUT_S
        self._is_loading = True
        self.lost: str | None = None
        self.on_lost: Callable[[], None] = lambda: None
        self.folder = Path(tempfile.mkdtemp(prefix="ridgeline-ranks-"))
        self.progress = map_progress(self.folder, self.count)
        self._changed, self._sending = threading.Condition(), threading.Lock()
        self._pipes: dict[Connection, int] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._said: dict[int, list[Any]] = {rank: [] for rank in range(1, self.count)}
        self._number = self._running = 0  # of calls: the last one, and that under way
        self._waited = RunningTime(2 * _LOOK_S)
        self._waited_for: object = 0
        self._is_closed = self._is_started = False
        self._thread = threading.Thread(
            target=self._run, args=(model, setup, ops), name="ranks", daemon=True
        )
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._is_started or self.lost)
            self.raise_lost()

    def raise_lost(self, error: BaseException | None = None) -> None:
        """Raise DeviceLost if a rank is; ``error`` is what came of it here."""
        if self.lost is not None:
            raise DeviceLost(self.lost) from error

    def expect(self, kind: type[Any]) -> dict[int, Any]:
        """Wait for one message of each rank, and return them. Raises DeviceLost."""
        with self._changed:
            self._changed.wait_for(lambda: self.lost is not None or all(self._said.values()))
            self.raise_lost()
            messages = {rank: said.pop(0) for rank, said in self._said.items()}
        assert all(isinstance(message, kind) for message in messages.values())
        return messages

    def tell(self, what: Any) -> None:
        """Send all ranks the same; any thread may."""
        message = ForkingPickler.dumps(what)  # once; ``Connection.send`` would do it for each rank
        with self._sending:
            for pipe in self._pipes:
                with suppress(OSError):  # the thread finds out why
                    pipe.send_bytes(message)

    @contextmanager
    def call(self, what: Any) -> Iterator[None]:
        """Tell all ranks to do something, while this one does it as well.

        Raises DeviceLost, with the rank's name, if not all of them can. An error that all ranks
        have alike is passed on: they can continue.
        """
        self.raise_lost()
        self._number += 1
        self.tell(what)
        self._running = self._number
        try:
            yield
        except DeviceLost:
            raise
        except Exception as error:
            self._check_alike(error)
            raise
        except BaseException:
            self._fail("a step was interrupted")
            raise
        finally:
            self._running = 0
        self.raise_lost()

    def connected(self, connect: Callable[[], _Result]) -> _Result:
        """Return what ``connect`` does, which waits for all ranks. Raises DeviceLost.

        It may wait for a rank that is lost, and nothing wakes it then: a thread of its own stays.
        """
        result = Future[_Result]()

        def run() -> None:
            try:
                result.set_result(connect())
            except BaseException as error:
                result.set_exception(error)
            with self._changed:
                self._changed.notify_all()

        threading.Thread(target=run, name="connect", daemon=True).start()
        with self._changed:
            self._changed.wait_for(lambda: self.lost is not None or result.done())
            self.raise_lost()
        return result.result()

    def end_loading(self) -> dict[int, dict[str, MemoryUse]]:
        """Wait until all ranks are ready, and return what each keeps. Raises DeviceLost."""
        memory = {rank: ready.memory for rank, ready in self.expect(Ready).items()}
        self._is_loading = False
        self.forget_folder()
        return memory

    def close(self) -> None:
        """Let all of them end."""
        self._is_closed = True

    def join(self) -> None:
        """Wait until all of them have ended, once they are closed or one is lost."""
        self._thread.join()

    def forget_folder(self) -> None:
        """Remove the folder by which ranks found each other."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _check_alike(self, error: Exception) -> None:
        """Wait until each rank has said that the call failed there too, at the same place."""

        def all_have_said_so() -> bool:
            return self.lost is not None or all(self._said.values())

        with self._changed:
            self._changed.wait_for(all_have_said_so)
            self.raise_lost(error)
            failed = {said.pop(0).number for said in self._said.values()}
        if failed != {self._number} or len(set(self.progress.tolist())) > 1:
            self._fail(f"the ranks failed at different places, and cannot go on: {error}")
            self.raise_lost(error)

    # --- the thread ------------------------------------------------------------------------------

    def _run(self, model: Path, setup: Setup, ops: str | None) -> None:
        try:
            for rank in range(1, self.count):
                self._start(rank, model, setup, ops)
        except OSError as error:
            self._fail(f"a rank could not be started: {error}")
        with self._changed:
            self._is_started = True
            self._changed.notify_all()
        while not self._is_closed and self.lost is None:
            self._look()
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes.values():
            end_within(_EXIT_S, process)
        self.forget_folder()

    def _start(self, rank: int, model: Path, setup: Setup, ops: str | None) -> None:
        self._processes[rank], ours = start_connected("ridgeline.backends.cuda.processes.rank")
        pipe = Connection(ours.detach())
        self._pipes[pipe] = rank
        pipe.send(Start(rank, os.getpid(), self.folder, model, setup, ops))

    def _look(self) -> None:
        """Read what ranks say, and see whether a step takes too long."""
        for pipe in wait(list(self._pipes), _LOOK_S):
            assert isinstance(pipe, Connection)
            rank = self._pipes[pipe]
            try:
                message = pipe.recv()
            except (EOFError, OSError):
                first = self._who_ended(rank)
                self._fail(f"{self._name(first)} {self._end_of(first)}")
                return
            with self._changed:
                self._said[rank].append(message)
                self._changed.notify_all()
        if self._has_waited():
            self._fail(f"{self._what_took_long()}: {self._who_stalls()} did not go on")

    def _has_waited(self) -> bool:
        """Whether a step takes too long, or loading stands still."""
        loads, running = self._is_loading, self._running
        waits_for = self.progress.tolist() if loads else running
        if waits_for != self._waited_for:
            self._waited_for, self._waited.passed_s = waits_for, 0.0
        most_s = LOADING_TIMEOUT_S if loads else self.step_timeout_s
        return self._waited.look() > most_s and (loads or running > 0)

    def _what_took_long(self) -> str:
        if self._is_loading:
            return f"loading has stood still for {LOADING_TIMEOUT_S:g} s"
        return f"a step has taken {self.step_timeout_s:g} s"

    def _fail(self, line: str) -> None:
        """End all ranks, and wake those who wait for one."""
        for process in self._processes.values():
            process.kill()
        with self._changed:
            self.lost = line
            self._changed.notify_all()
        self.on_lost()

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {self.count} (process {self._processes[rank].pid})"

    def _who_ended(self, lost_rank: int) -> int:
        """Return the rank that ended first: it is silent, and others report that it is gone.

        ``lost_rank`` is one of them.
        """
        for pipe, rank in self._pipes.items():
            with suppress(EOFError, OSError):
                while rank != lost_rank and pipe.poll():
                    self._said[rank].append(pipe.recv())
        ended = [rank for rank, one in self._processes.items() if one.poll() is not None]
        silent = [rank for rank in ended if not self._failures(rank)]
        return (silent or [lost_rank])[0]

    def _failures(self, rank: int) -> list[str]:
        return [one.why for one in self._said[rank] if isinstance(one, Failed)]

    def _end_of(self, rank: int) -> str:
        """Return how a process has ended whose pipe has closed."""
        if said := self._failures(rank):
            return f"failed: {said[-1]}"
        try:
            status = self._processes[rank].wait(_EXIT_S)
        except subprocess.TimeoutExpired:
            return "has closed its pipe"
        name = signal_of(status)
        return f"was ended by {name}" if name else f"has ended with status {status}"

    def _who_stalls(self) -> str:
        """Return the names of the ranks that have come least far."""
        far = self.progress.tolist()
        late = [rank for rank in range(1, self.count) if far[rank] == min(far)]
        return " and ".join(map(self._name, late)) if min(far) < far[0] else "the ranks"


def map_progress(folder: Path, count: int) -> Any:
    """Return numbers that all ranks share, int64 ``[count]``, in the file ``progress``."""
    with (folder / "progress").open("a+b") as file:
        file.truncate(8 * count)
        return np.frombuffer(mmap.mmap(file.fileno(), 8 * count), np.int64)
