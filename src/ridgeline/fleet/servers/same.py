"""Whether the answers of a server that joins would be those of the servers that are here."""

from __future__ import annotations

import asyncio
import contextlib
import time

import httpx2

from ridgeline import __version__
from ridgeline.fleet.servers.joined import JoinedServer
from ridgeline.fleet.servers.slot import Slot
from ridgeline.fleet.servers.worker import Worker
from ridgeline.server.tunnel.proof import NotTaken

_REST_S = 0.1  # while no server of ours can be asked


async def take_same(slot: Slot, worker: Worker, server: JoinedServer) -> None:
    """Let a server have requests, with a number of its own.

    Raises NotTaken, once it has been told, if its answers would not be those of the others.
    """
    async with slot.joining:  # the first of several says what the others have to be like
        try:
            await _check_same(slot, worker, server)
        except BaseException as error:
            server.refuse(str(error))
            await worker.stop()
            raise
        worker.number, worker.since_s = slot.free_number(), time.time()
        slot.take(worker)


async def _check_same(slot: Slot, worker: Worker, server: JoinedServer) -> None:
    """Raise NotTaken if the answers of a server would not be those of the others.

    Where the router has no server of its own, the first one that joins may be any.
    """
    ours = theirs = ""
    while not ours and server.is_there and (slot.num_wanted or slot.workers):
        with contextlib.suppress(httpx2.HTTPError, TimeoutError):  # it ends, and another one starts
            ours = await slot.first.fingerprint() if slot.first else ""
        await asyncio.sleep(0 if ours else _REST_S)
    with contextlib.suppress(httpx2.HTTPError, TimeoutError):
        theirs = await worker.fingerprint()
    if not server.is_there or not theirs:
        raise NotTaken("it does not answer over the links that it opens")
    if theirs != ours and ours:
        version = server.facts["version"]
        raise NotTaken(
            f"its answers would not be the same (fingerprint {theirs}, here {ours}; version "
            f"{version}, here {__version__}): serve the same files, version and flags"
        )
