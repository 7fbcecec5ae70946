"""A batch of a user's own: a model, a file of requests and a file of answers; no socket.

The requests are asked of the routes of a server, which has no address and no other caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from ridgeline.engine.llm import LLM
from ridgeline.serve.batch_files.lines import RequestFile
from ridgeline.serve.batch_files.run import BatchRun, Journal
from ridgeline.serve.batches.asgi_client import LocalClient
from ridgeline.serve.compose import compose
from ridgeline.serve.http.keys import ANYONE, Keys
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.model_server import GivenStages

_MOST_AT_ONCE = 1024


class Of(NamedTuple):
    """What is to be answered.

    Attributes:
        source: the requests.
        name: the model that requests may name.
        answers_all: whether it answers those that name another one.
    """

    source: RequestFile
    name: str
    answers_all: bool


def identity(llm: LLM, of: Of) -> dict[str, object]:
    """Return what must be the same for a batch to go on."""
    return {"input": of.source.digest(), "model": llm.fingerprint, "seed": llm.config.seed}


def answer(
    llm: LLM,
    of: Of,
    journal: Journal,
    report: Callable[[], object],
    new_stages: Callable[[ServeOptions, Keys], GivenStages],
) -> None:
    """Answer what ``journal`` has no answer of; ``report`` is called whenever it has more.

    ``new_stages`` makes what requests and answers pass.

    Raises Stopped if the engine fails, and OSError if an answer cannot be kept.
    """
    most = min(_MOST_AT_ONCE, 2 * llm.config.max_num_seqs)  # some are prepared while others run
    options = ServeOptions(max_queued_requests=max(most, 1 << 14))

    async def run() -> None:
        keys = Keys((), None)
        parts = compose(llm, of.name, options, keys, new_stages(options, keys))
        parts.start()
        adapters = parts.model_server.loras.names

        def renamed(model: str) -> str | None:
            return None if of.answers_all and model not in adapters else model

        asking = LocalClient(parts.app, ANYONE, is_background=False, renamed=renamed)
        batch = BatchRun(
            journal, asking, name=of.source.digest(), seed=llm.config.seed, most_at_once=most
        )
        try:
            await batch.run(of.source.lines(), report)
        finally:
            await parts.stop()

    asyncio.run(run())
