"""The runner of a model whose layers are divided: it tells the stages, and is the last of them.

Stages compute tokens before they are asked for (``backends.lookahead``). As soon as the last one
has drawn some tokens of a step, the first begins with them, while the last one goes on with the
rest. What comes out of the last but one is kept until the next step asks for it. The last stage
itself never runs ahead: it alone knows what a request asks.
"""

from __future__ import annotations

import queue
import socket
import subprocess
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ridgeline.backends.cpu.buffers import HiddenRows
from ridgeline.backends.cpu.pipeline.parts import LEAST_ROWS, TokenSpan, cut, merged, piece_of
from ridgeline.backends.cpu.pipeline.process import written_setup
from ridgeline.backends.cpu.pipeline.split import bounds, layers_of, setup_of
from ridgeline.backends.cpu.pipeline.wire import KNOWN_STEPS, Link, bare, key_of, rows_of
from ridgeline.backends.cpu.runner import CpuRunner, load_runner
from ridgeline.backends.interface import (
    BackendContext,
    CacheMemory,
    Counters,
    KeptAdapter,
    MemoryUse,
    Setup,
    Traffic,
)
from ridgeline.backends.lookahead import is_where, next_item
from ridgeline.backends.step_codec import StepEncoder
from ridgeline.core.records import StepRecord
from ridgeline.core.step import SeqId, Step, StepOutput, Work
from ridgeline.model.files.adapters import AdapterWeights
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.shape.model import ModelArch
from ridgeline.system.machine import DeviceLost
from ridgeline.system.process import end_within, start_connected

_PARTS_PER_STAGE = 8  # more keep stages busy for longer, and read weights more often
_END_S = 5.0  # that a process gets to end by itself
_MOST_STRANGERS = 64  # who may be proving themselves at a stage port at once


class Stages:
    """All stages but the last, and what they say.

    Attributes:
        lost: why no step can run any more.
    """

    def __init__(self, links: Sequence[Link], processes: Sequence[subprocess.Popen[bytes]]) -> None:
        """Take connected stages in their order; ``processes`` are those that were started here."""
        self._links, self.processes = links, processes
        self.lost = ""
        self._rows: queue.SimpleQueue[tuple[int, int, HiddenRows] | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._is_closed = False
        for stage in range(len(links)):
            name = f"stage {stage + 1}"
            threading.Thread(target=self._read, args=(stage,), name=name, daemon=True).start()

    def memory(self) -> dict[str, MemoryUse]:
        """Wait until all have loaded; return what they keep. Raises DeviceLost."""
        by_name: dict[str, MemoryUse] = {}
        for _ in self._links:
            said = self._ready.get()
            self.raise_lost()
            stage, memory = said
            for name, use in memory.items():
                by_name[f"stage {stage + 1}.{name}"] = MemoryUse(*use)._replace(
                    device=f"stage {stage + 1}"
                )
        return by_name

    def tell(self, number: int, parts: Sequence[Sequence[TokenSpan]], written: Any) -> None:
        """Let all stages compute a step in these parts. Raises DeviceLost."""
        self.raise_lost()
        for link in self._links:
            with suppress(OSError):  # the thread that reads from it finds out why
                link.send("step", [number, parts, written])

    def rows(self, number: int, place: int) -> HiddenRows:
        """Wait for what the stages give the last one of a part. Raises DeviceLost."""
        while (message := self._rows.get()) is not None:
            if message[:2] == (number, place):  # else of a step that was given up
                return message[2]
        self._rows.put(None)
        self.raise_lost()
        raise DeviceLost("the stages have ended")

    def raise_lost(self) -> None:
        """Raise DeviceLost if a stage is no more."""
        if self.lost:
            raise DeviceLost(self.lost)

    def close(self) -> None:
        """Let all of them end."""
        self._is_closed = True
        for link in self._links:
            link.close()
        for process in self.processes:
            end_within(_END_S, process)

    def _read(self, stage: int) -> None:
        """Read what a stage says, and pass its rows on to the next."""
        link, name = self._links[stage], f"stage {stage + 1} of {len(self._links) + 1}"
        try:
            while True:
                kind, what, body = link.receive()
                if kind == "ready":
                    self._ready.put((stage, what))
                elif kind == "failed":
                    self._fail(f"{name} has failed: {what}")
                    return
                elif stage + 1 < len(self._links):
                    self._links[stage + 1].send("rows", what, rows_of(body, what[2]))
                else:
                    self._rows.put((what[0], what[1], rows_of(body, what[2])))
        except (EOFError, OSError, ValueError, TypeError, IndexError) as error:
            self._fail(
                f"{name} has ended" + (f": {error}" if isinstance(error, ValueError) else "")
            )

    def _fail(self, why: str) -> None:
        if not self.lost and not self._is_closed:
            self.lost = f"{why}, and no step can run without it"
        self._rows.put(None)
        self._ready.put(None)


class _PartUnderWay(NamedTuple):
    """A part of a step, which stages compute.

    Attributes:
        number: of what they were told.
        place: of the part in it.
        pieces: of the step's items.
        rows: which of the part's rows are theirs; None: all.
    """

    number: int
    place: int
    pieces: Sequence[TokenSpan]
    rows: Sequence[int] | None = None


class StagesRunner:
    """A runner over all stages.

    Attributes:
        arch: the whole model.
        num_blocks: of the cache, on every stage.
        num_ahead: tokens that were there already when they were asked for.
        last: the runner of the last stage.
        stages: all others.
    """

    def __init__(
        self, arch: ModelArch, last: CpuRunner, stages: Stages, max_model_len: int
    ) -> None:
        """Take stages that load, or have loaded. Raises DeviceLost if one cannot."""
        self.arch, self.last, self.stages = arch, last, stages
        self.num_blocks, self._limits = last.num_blocks, (last.block_size, max_model_len)
        self._memory = stages.memory()
        self._num_stages = len(stages._links) + 1
        self._encoder, self._number = StepEncoder(KNOWN_STEPS), 0
        self._ahead: list[PartAhead] = []
        self.num_ahead = 0
        self.close = weakref.finalize(self, _close, stages, last)

    @property
    def lost(self) -> str:
        """Which stage is no more, and how it ended."""
        return self.stages.lost

    def execute(self, step: Step) -> StepOutput:
        """Execute a step in parts, on all stages. Raises DeviceLost if one is lost."""
        drawn = Drawn(step, self._num_stages + 1, *self._limits)
        outputs, ahead = [], list[PartAhead]()
        for place, part in enumerate(self._parts(step)):
            rows = self.stages.rows(part.number, part.place)
            if part.rows is not None:
                rows = HiddenRows(rows.x[part.rows], rows.non_finite[part.rows])
            work = tuple(piece_of(step.work[piece.item], piece) for piece in part.pieces)
            copies = step.copies if place == 0 else ()
            of_part = step._replace(work=work, copies=copies, state_copies=())
            output = self.last.execute(of_part, rows)
            outputs.append((part.pieces, output))
            if following := drawn.note(part.pieces, output):
                ahead.append(self._run_ahead(following))
        if following := drawn.rest():
            ahead.append(self._run_ahead(following))
        self._ahead = ahead
        return merged(len(step.work), outputs)

    def _parts(self, step: Step) -> list[_PartUnderWay]:
        """Return the parts of a step: first those that stages compute already.

        Blocks are copied before anything is computed, so a step with copies is computed anew.
        """
        ahead, self._ahead = self._ahead, []
        parts, rest = [], dict.fromkeys(range(len(step.work)))
        at = {item.seq_id: i for i, item in enumerate(step.work)}
        for part in ahead if not step.copies else ():
            pieces, rows = part.matches(step, at, self.last.block_size)
            if pieces:
                parts.append(_PartUnderWay(part.number, 0, pieces, rows))
            for piece in pieces:
                del rest[piece.item]
        self.num_ahead += len(step.work) - len(rest)
        if rest:
            others = step._replace(work=tuple(step.work[i] for i in rest))
            names, cuts = list(rest), cut(others.work, _PARTS_PER_STAGE * self._num_stages)
            number = self._tell(others, cuts)
            for place, pieces in enumerate(cuts):
                named = [piece._replace(item=names[piece.item]) for piece in pieces]
                parts.append(_PartUnderWay(number, place, named))
        return parts

    def _run_ahead(self, work: tuple[Work, ...]) -> PartAhead:
        step = Step(work, (), (), (), ())
        return PartAhead(self._tell(step, [[TokenSpan(i, 0, 1) for i in range(len(work))]]), work)

    def prompt_logits(self, tokens: Sequence[int], start: int = 0) -> NDArray[np.float32]:
        """Return the logits after each token of one text, for measuring."""

        def before(item: Work) -> HiddenRows:
            whole = [[TokenSpan(0, 0, len(item.tokens))]]
            return self.stages.rows(self._tell(Step((item,), (), (), (), ()), whole), 0)

        self._ahead = []
        return self.last.prompt_logits(tokens, start, before)

    def _tell(self, step: Step, parts: Sequence[Sequence[TokenSpan]]) -> int:
        """Let the stages compute a step in these parts; return the number they know it by."""
        self._number += 1
        self.stages.tell(self._number, parts, self._encoder.write(bare(step)))
        return self._number

    def memory(self) -> dict[str, MemoryUse]:
        """Return what this stage keeps now, and the others since they had loaded."""
        return self._memory | self.last.memory()

    def add_adapter(self, number: int, weights: AdapterWeights) -> KeptAdapter:
        """Raise ValueError: there are none of a model that is divided."""
        raise ValueError("a model that is divided into stages has no adapters yet")

    def traffic(self, step: StepRecord, num_experts: int | None = None) -> dict[str, Traffic]:
        """Return nothing: the other stages' is not known here."""
        return {}

    def cache_memory(self) -> CacheMemory:
        """Raise ValueError: the other stages' cache is not in this process."""
        raise ValueError("--stages: the cache of a divided model is not kept on disk: leave it out")

    def give_back(self, *, weights: bool) -> None:
        """Raise ValueError: the other stages' memory is not in this process."""
        raise ValueError("a model that is divided into stages does not sleep yet")

    def profile(self, announce: Callable[[], None] = lambda: None) -> Counters:
        """Raise ValueError: the other stages' cycles are not known here."""
        raise ValueError("--stages: cycles are counted in one process: leave it out")


def load_stages(checkpoint: Checkpoint, setup: Setup, context: BackendContext) -> StagesRunner:
    """Load a model, each stage its layers.

    Raises DeviceLost, which names the stage and says why, if one of them cannot, and OSError if
    the port of ``setup`` is taken.
    """
    count, ends = setup.stages, bounds(checkpoint.arch, setup.stages)
    shares = list(pairwise(ends))
    if setup.stage_port is None:
        setup = replace(setup, threads=max(1, setup.threads // count))
        begun = [start_connected("ridgeline.backends.cpu.pipeline.process") for _ in shares[:-1]]
        links, processes = [Link(ours) for _, ours in begun], [process for process, _ in begun]
    else:
        links, processes = _joined(setup, count - 1, context.say), []
    start = {"path": str(checkpoint.path), "home": str(context.home())}
    if setup.stage_port is not None:
        start["digest"] = checkpoint.contents.digest(context.home() / "packed")
    for link, (first, end) in zip(links, shares, strict=False):
        link.send("start", start | {"setup": written_setup(setup), "first": first, "end": end})
    stages = Stages(links, processes)
    try:
        first, end = shares[-1]
        own = setup_of(setup, checkpoint.arch, first, end)
        last = load_runner(layers_of(checkpoint, first, end), own, context)
        return StagesRunner(checkpoint.arch, last, stages, setup.max_model_len)
    except BaseException:
        stages.close()
        raise


def _joined(setup: Setup, count: int, say: Callable[[str], None]) -> list[Link]:
    """Wait for this many stages of other machines."""
    assert setup.stage_port is not None
    key = key_of(setup.stage_key_file)
    host = "0.0.0.0" if key else "127.0.0.1"  # without a key nobody elsewhere can join
    with socket.create_server((host, setup.stage_port)) as listener:
        port = listener.getsockname()[1]
        say(f"waiting for {count} to join: ridgeline stage MODEL --join HOST:{port}")
        door = _StageDoor(listener, key, say)
        links = [door.proved.get() for _ in range(count)]
        door.close()
    return links


class _StageDoor:
    """Lets those who connect prove themselves side by side: who says nothing keeps nobody out.

    Attributes:
        proved: the links of those who have.
    """

    def __init__(self, listener: socket.socket, key: bytes, say: Callable[[str], None]) -> None:
        """Begin to accept."""
        self._listener, self._key, self._say = listener, key, say
        self.proved: queue.SimpleQueue[Link] = queue.SimpleQueue()
        self._strangers: dict[Link, None] = {}  # the oldest first
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="stage door", daemon=True).start()

    def close(self) -> None:
        """Accept nobody any more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            for link in self._strangers:
                link.close()

    def _accept(self) -> None:
        with suppress(OSError):  # it was closed
            while True:
                connection, (other, *_) = self._listener.accept()
                link = Link(connection)
                with self._lock:
                    self._strangers[link] = None
                    if len(self._strangers) > _MOST_STRANGERS:
                        oldest = next(iter(self._strangers))
                        del self._strangers[oldest]
                        oldest.close()
                threading.Thread(target=self._prove, args=(link, other), daemon=True).start()

    def _prove(self, link: Link, other: str) -> None:
        try:
            link.prove(self._key, "engine", "stage")
        except PermissionError as error:
            self._say(f"{other} was not let in: {error}")
            link.close()
        with self._lock:
            is_kept = link in self._strangers and not link.is_closed
            self._strangers.pop(link, None)
        if is_kept:
            self.proved.put(link)


def _close(stages: Stages, last: CpuRunner) -> None:
    stages.close()
    last.close()


class PartAhead(NamedTuple):
    """Some sequences' next tokens, which stages compute.

    Attributes:
        number: what the stages call it.
        work: an item of one token each.
    """

    number: int
    work: tuple[Work, ...]

    def matches(
        self, step: Step, at: Mapping[SeqId, int], block_size: int
    ) -> tuple[list[TokenSpan], list[int]]:
        """Return which of a step's items this is, and which of its rows they are.

        ``at`` is where each sequence's item is in the step.
        """
        pieces, rows = [], []
        for row, mine in enumerate(self.work):
            i = at.get(mine.seq_id, -1)
            if i < 0 or step.work[i].tokens != mine.tokens:
                continue
            if is_where(step.work[i], mine, block_size):
                pieces.append(TokenSpan(i, 0, 1))
                rows.append(row)
        return pieces, rows


class Drawn:
    """The tokens that a step has drawn, to be computed in parts of about equal size."""

    def __init__(self, step: Step, most: int, block_size: int, max_model_len: int) -> None:
        """Expect the results of a step; make at most ``most`` parts of them."""
        self._step, self._limits = step, (block_size, max_model_len)
        count = sum(map(_goes_on, step.work))
        num_parts = max(1, min(most, count // LEAST_ROWS))
        self._full = -(-count // num_parts)
        self._work: list[Work] = []

    def note(self, pieces: Sequence[TokenSpan], output: StepOutput) -> tuple[Work, ...]:
        """Take the results of a part; return the next tokens if they are enough for a part."""
        for place, (piece, tokens) in enumerate(zip(pieces, output.tokens, strict=True)):
            item = self._step.work[piece.item]
            if piece.high < len(item.tokens) or place in output.errors or not _goes_on(item):
                continue
            following = next_item(item, tokens, *self._limits)
            if following is not None:
                self._work.append(following)
        return self.rest() if len(self._work) >= self._full else ()

    def rest(self) -> tuple[Work, ...]:
        """Return what is not in a part yet."""
        work, self._work = tuple(self._work), []
        return work


def _goes_on(item: Work) -> bool:
    """Whether a single token is drawn behind an item, which is probably the text's next."""
    return len(item.seeds) == 1 and not (item.drafts or item.top)
