"""Files and batches of a server of several models: each request goes to the model that it names."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from ridgeline.fleet.pool import Pool
from ridgeline.serve.batches.background import Batches, store_of
from ridgeline.serve.batches.routes import add_batches
from ridgeline.serve.http.keys import Keys
from ridgeline.serve.http.options import ServeOptions
from ridgeline.version import __version__

if TYPE_CHECKING:  # imported only where a router has an audit log
    from ridgeline.trust.audit.log import AuditLog

_STORE = "several models"  # no model is called so
_MOST_AT_ONCE = 16  # requests of a key: a model that needs memory waits until these have ended
_REST_S = 0.1


def batches_of(
    app: FastAPI,
    pool: Pool,
    keys: Keys,
    options: ServeOptions,
    home: Path | None,
    audit: AuditLog | None,
) -> Batches | None:
    """Add the routes to a router's application; return what has to be started, if anything has.

    In the models' servers, batches give way to other requests. Where a model waits for memory that
    others have, no further request of a batch begins. ``audit`` gets a line for each request that
    no model answers.
    """

    async def in_quiet(scope: Scope, receive: Receive, send: Send) -> None:
        while pool.num_waiting:
            await asyncio.sleep(_REST_S)
        await app(scope, receive, send)

    store = store_of(home, _STORE)
    if isinstance(store, str):
        add_batches(app, store, options)
        return None
    batches = Batches(store, in_quiet, keys, f"router {__version__}", _MOST_AT_ONCE, audit)
    add_batches(app, batches, options)
    return batches
