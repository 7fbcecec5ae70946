"""Whether the answers of a server that joins would be those of the servers that are here.

Fingerprints say what answers are made of. Whether equal files and code give equal bits on another
processor is tested as well: both servers compute the log-probabilities of the tokens of one text.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import httpx2

from ridgeline.fleet.servers.adapters import NotLoaded, SharedAdapters
from ridgeline.fleet.servers.remote_server import RemoteServer
from ridgeline.fleet.servers.replica_set import ReplicaSet
from ridgeline.fleet.servers.worker import Worker, json_of
from ridgeline.serve.tunnel.proof import NotTaken
from ridgeline.version import __version__

_REST_S = 0.1  # while no server of ours can be asked
_PROBE = {  # some fifty tokens, so that prompts are read in pieces of several rows
    "prompt": "One, two, three: 4 5 6; the quick brown fox jumps over 7 lazy dogs & a zebra? No.",
    "max_tokens": 1,
    "temperature": 0,
    "logprobs": 5,
    "prompt_logprobs": 5,
}


async def admit_equivalent(
    replica_set: ReplicaSet, worker: Worker, server: RemoteServer, adapters: SharedAdapters
) -> None:
    """Let a server have requests, with a number of its own.

    Raises NotTaken, once it has been told, if its answers would not be those of the others.
    """
    async with replica_set.joining:  # the first one decides what the others have to be like
        try:
            with contextlib.suppress(NotLoaded):  # which shows in its fingerprint
                await adapters.match(worker)
            await _check_same(replica_set, worker, server)
            await worker.learn()
        except BaseException as error:
            server.refuse(str(error))
            await worker.stop()
            raise
        worker.number, worker.since_s = replica_set.free_number(), time.time()
        replica_set.take(worker)


async def _check_same(replica_set: ReplicaSet, worker: Worker, server: RemoteServer) -> None:
    """Raise NotTaken if the answers of a server would not be those of the others.

    Where the router has no server of its own, the first one that joins is accepted as it is.
    """
    ours, our_numbers = "", None
    while not ours and server.is_there and (replica_set.num_wanted or replica_set.workers):
        with contextlib.suppress(httpx2.HTTPError, TimeoutError):  # it ends, and another one starts
            if (first := replica_set.first) is not None:
                our_numbers = await _numbers(first)
                ours = await first.fingerprint()
        await asyncio.sleep(0 if ours else _REST_S)
    theirs, their_numbers = "", None
    with contextlib.suppress(httpx2.HTTPError, TimeoutError):
        theirs = await worker.fingerprint()
        their_numbers = await _numbers(worker) if theirs == ours else None
    if not server.is_there or not theirs:
        raise NotTaken("it does not answer over the links that it opens")
    if theirs != ours and ours:
        version = server.facts["version"]
        raise NotTaken(
            f"its answers would not be the same (fingerprint {theirs}, here {ours}; version "
            f"{version}, here {__version__}): serve the same files, version and flags"
        )
    if ours and their_numbers != our_numbers:
        raise NotTaken(
            "its answers would not be the same: of the same files and flags it computes other "
            "numbers, so its processor or its memory is at fault, or one of its libraries"
        )


async def _numbers(worker: Worker) -> Any:
    """Return what a server computes for the probe, to the last bit, as JSON writes floats.

    Raises httpx2.HTTPError.
    """
    answer = json_of(await worker.order("/v1/completions", _PROBE))
    return answer.get("choices") or answer["error"]["code"]  # such as of an encoder
