"""All rows: what each does to a server, how often at CI size, how often at full size."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.faults import clients, engine, hostile, process, text

Run = Callable[[Path, int, random.Random], str]


class Unreachable(Exception):
    """The row cannot be run here, and why."""


@dataclass(frozen=True)
class Row:
    """One row of the fault table; ``run`` takes a model, a count and a source of chance, returns
    its figure, and raises when an oracle fails. ``beyond`` says what of it is not reached."""

    id: str
    title: str
    run: Run
    ci: int
    full: int
    beyond: str = ""


NO_WORKER = "no T14: the engine is a thread, there is no worker to kill"
NO_TRACE = "system calls that no Python code makes: there is no strace"

ROWS = (
    Row("T01", "clients close at any moment", clients.t01, 60, 1000),
    Row("T02", "clients reset, or shut and close, amid a frame", clients.t02, 60, 1000),
    Row("T03", "slow senders of heads and bodies", clients.t03, 100, 2000),
    Row("T04", "clients that never read", clients.t04, 4, 500),
    Row("T05", "malformed JSON", hostile.t05, 600, 100_000),
    Row("T06", "heads, chunks and bodies of wrong sizes", hostile.t06, 25, 250),
    Row("T08", "huge prompts, up to so many KiB", hostile.t08, 1024, 102_400),
    Row("T09", "every number at and beyond its limits", hostile.t09, 400, 20_000),
    Row("T10", "token ids that do not exist", hostile.t10, 80, 5000),
    Row("T11", "sampling at its extremes", hostile.t11, 80, 2000),
    Row("T16", "a pool little larger than one request", engine.t16, 40, 500),
    Row("T18", "an exception at the k-th step", engine.t18, 24, 2000),
    Row("T19", "logits of one row that are not finite", engine.t19, 24, 1000),
    Row("T22", "metrics against what clients saw", engine.t22, 60, 2000, NO_WORKER),
    Row("T24", "characters, split anywhere", text.t24, 4000, text.NUM_SCALARS),
    Row("T25", "stop strings across any boundary", text.t25, 60, 50_000),
    Row("T26", "signals with requests in flight", process.t26, 20, 200),
    Row("T28", "every route without a key", process.t28, 400, 5000),
    Row("T33", "the source, and no reliance on assert", process.t33, 100, 20_000),
    Row("T34", "sockets: one listens, none goes out", process.t34, 40, 2000, NO_TRACE),
    Row("T36", "chat templates that attack", text.t36, 14, 280),
    Row("T37", "what errors tell", hostile.t37, 5, 500),
    Row("T38", "paths where names belong", hostile.t38, 60, 1000),
    Row("T40", "control tokens in content", text.t40, 200, 20_000),
    Row("T41", "distinct prompts, aborts and preemptions at once", engine.t41, 120, 10_000),
    Row("T50", "names that clients make up", hostile.t50, 100, 10_000),
    Row("T54", "one request id many times at once", engine.t54, 60, 1000),
    Row("T56", "usage against an independent count", engine.t56, 60, 10_000),
)
