"""All rows: what each does to a server, how often at CI size, how often at full size."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.faults import (
    budget,
    clients,
    crowds,
    engine,
    extremes,
    files,
    fleet,
    hostile,
    lifecycle,
    links,
    loads,
    places,
    process,
    rays,
    tenants,
    text,
    triton,
    wire,
    work,
)

Run = Callable[[Path, int, random.Random], str]


@dataclass(frozen=True)
class Row:
    """One row of the fault table; ``run`` takes a model, a count and a source of chance, returns
    its figure, and raises when an oracle fails. ``beyond`` says what of it is not reached; ``ci``
    is 0 where another test does the same at that size, or where it goes by the clock."""

    id: str
    title: str
    run: Run
    ci: int
    full: int
    beyond: str = ""

    @property
    def is_of_fleets(self) -> bool:
        """Whether it is about several servers."""
        return self.id.startswith("F")


NO_WORKER = "no T14: a server of one model has no worker to kill"
MAPPED = "a file that is cut while it is served ends the server (SIGBUS)"
NO_RESTART = "Ray's control store is not started again: that needs a Redis"
NO_TRACE = "system calls that no Python code makes: there is no strace"

ROWS = (
    Row("T01", "clients close at any moment", clients.t01, 60, 1000),
    Row("T02", "clients reset, or shut and close, amid a frame", clients.t02, 60, 1000),
    Row("T03", "slow senders of heads and bodies", clients.t03, 100, 2000),
    Row("T04", "clients that never read", clients.t04, 4, 300),
    Row("T05", "malformed JSON", hostile.t05, 600, 50_000),
    Row("T06", "heads, chunks and bodies of wrong sizes", hostile.t06, 25, 250),
    Row("T07", "framings that two readers read differently", wire.t07, 60, 2000),
    Row("T08", "huge prompts, up to so many KiB", hostile.t08, 1024, 102_400),
    Row("T09", "every number at and beyond its limits", hostile.t09, 400, 20_000),
    Row("B01", "every field at its extremes: 0.3 s, 100 MB", extremes.b01, 120, 10_000),
    Row("T10", "token ids that do not exist", hostile.t10, 80, 5000),
    Row("T11", "sampling at its extremes", hostile.t11, 80, 2000),
    Row("T12", "forms that are hard to compile, forms that are cut", work.t12, 15, 300),
    Row("T13", "mixed requests, a fifth with schemas of their own", budget.t13, 200, 5000),
    Row("T14", "a model's process is killed", lifecycle.t14, 1, 20),
    Row("T15", "a model's process stands still", lifecycle.t15, 0, 3),
    Row("T16", "a pool little larger than one request", engine.t16, 20, 500),
    Row("T17", "schedules that want too much memory", work.t17, 20, 1000),
    Row("T18", "an exception at the k-th step", engine.t18, 24, 1000),
    Row("T19", "logits of one row that are not finite", engine.t19, 24, 1000),
    Row("T20", "memory ends in a request's way", work.t20, 12, 500),
    Row("T21", "what memory short requests leave behind", work.t21, 60, 4000),
    Row("T22", "metrics against what clients saw", engine.t22, 60, 2000, NO_WORKER),
    Row("T23", "so many clients connected, then no descriptors", wire.t23, 60, 2000),
    Row("T24", "characters, split anywhere", text.t24, 4000, text.NUM_SCALARS),
    Row("T25", "stop strings across any boundary", text.t25, 60, 2000),
    Row("T26", "signals with requests in flight", process.t26, 20, 60),
    Row("T27", "the calendar jumps", lifecycle.t27, 10, 200),
    Row("T28", "every route without a key", process.t28, 400, 5000),
    Row("T29", "comparing keys", tenants.t29, 200, 20_000),
    Row("T30", "a key beyond its limits", tenants.t30, 24, 400),
    Row("T31", "pages of other sites, and names of other hosts", wire.t31, 40, 1000),
    Row("T32", "bodies that do not say they are JSON", wire.t32, 30, 1000),
    Row("T33", "the source, and no reliance on assert", process.t33, 50, 20_000),
    Row("T34", "sockets: one listens, none goes out", process.t34, 40, 2000, NO_TRACE),
    Row("T35", "directories that bring code, or lead out", files.t35, 12, 600),
    Row("T36", "chat templates that attack", text.t36, 14, 140),
    Row("T37", "what errors tell", hostile.t37, 5, 500),
    Row("T38", "paths where names belong", hostile.t38, 60, 1000),
    Row("T39", "links wherever one can be written", wire.t39, 40, 1000),
    Row("T40", "control tokens in content", text.t40, 200, 8000),
    Row("T41", "distinct prompts, aborts and preemptions at once", engine.t41, 120, 5000),
    Row("T42", "prefixes of another key", tenants.t42, 20, 1000),
    Row("T43", "keys of blocks that collide", tenants.t43, 40, 1000),
    Row("T45", "GGUF files that were damaged", files.t45, 300, 5000, MAPPED),
    Row("T46", "other model files that were damaged, of each kind", files.t46, 100, 5000, MAPPED),
    Row("T47", "caches, traces and stores that were damaged", files.t47, 100, 5000, MAPPED),
    Row("T48", "full disks, and no home", lifecycle.t48, 4, 200),
    Row("T49", "names that would be lines of the log", lifecycle.t49, 20, 1000),
    Row("T50", "names that clients make up", hostile.t50, 100, 5000),
    Row("T51", "a terminal that goes", lifecycle.t51, 6, 200),
    Row("T52", "starts that cannot succeed", lifecycle.t52, 3, 22),
    Row("T53", "the router is killed", lifecycle.t53, 1, 10),
    Row("T54", "one request id many times at once", engine.t54, 60, 1000),
    Row("T55", "optimisations, on and off", work.t55, 8, 200),
    Row("T56", "usage against an independent count", engine.t56, 60, 2000),
    Row("T57", "what the OpenAPI document allows and forbids", work.t57, 0, 20),
    Row("T58", "the types of OpenAI's client", work.t58, 12, 1000),
    Row("T59", "the event loop stands still", work.t59, 8, 100),
    Row("T61", "wishes of a plan that are absurd", work.t61, 40, 2000),
    Row("F01", "a server of a fleet is killed under load", fleet.f01, 5, 200),
    Row("F02", "a server of a fleet stands still", fleet.f02, 1, 50),
    Row("F03", "a link of a fleet is cut, late, torn, garbage", links.f03, 1, 50),
    Row("F04", "all servers of a fleet end at once", fleet.f04, 1, 50),
    Row("F05", "a request that ends servers, beside others", loads.f05, 1, 20),
    Row("F06", "servers restarted in turn under load", loads.f06, 100, 10_000),
    Row("F07", "clouds take machines away", places.f07, 1, 50),
    Row("F08", "Ray's processes are killed under its fleet", rays.f08, 0, 20, NO_RESTART),
    Row("F09", "a router is killed under load", links.f09, 1, 50),
    Row("F10", "a server with other answers wants to join", links.f10, 1, 50),
    Row("F11", "strangers at the door of a fleet", links.f11, 100, 10_000),
    Row("F12", "a key asks all servers for more than it may", loads.f12, 50, 1000),
    Row("F13", "a stage of a divided model is killed", fleet.f13, 1, 50),
    Row("F14", "attacks on Triton's protocol before a fleet", triton.f14, 40, 10_000),
    Row("F16", "a server in another time zone goes on", links.f16, 1, 20),
    Row("F17", "so many clients that do not read", loads.f17, 50, 1000),
    Row("F18", "one machine is ten times slower", loads.f18, 0, 20),
    Row("F20", "so many strangers at each listening socket", crowds.f20, 24, 4000),
    Row("F19", "requests in masses that a fleet refuses", fleet.f19, 100, 10_000),
    Row("T63", "any route attacked by one key, beside another", budget.t63, 0, 10),
)

# Rows of the plan for this table that no server of ours can fall to, and what comes nearest.
LEFT_OUT = {
    "T44": "padding against who measures encrypted chunks: nothing is padded, and a request for "
    "it (include_obfuscation) is told so (test_fields)",
    "T60": "replicas started anew behind a proxy: behind our router that is F06; how a process "
    "ends with requests in flight is T26's",
    "T62": "rules on what an answer may say: forced to forbidden text over all routes in "
    "tests/trust/rules; what stop strings hold back is T25's",
}
