"""What a router's audit log says of its servers' logs: which there are, so that each is missed."""

from __future__ import annotations

import contextlib

import httpx2

from ridgeline.fleet.servers.slot import Slot
from ridgeline.fleet.servers.variables import own_name
from ridgeline.fleet.servers.worker import Worker
from ridgeline.trust.audit.log import AuditLog


async def name_log(log: AuditLog, slot: Slot, worker: Worker) -> None:
    """Write which log a server has that is ready, if it has one.

    The folder of a server of another machine is not beside the router's.
    """
    with contextlib.suppress(httpx2.HTTPError):  # it has ended
        if found := await worker.log_id():
            name = own_name(slot.name, worker.number)
            said = {"server": name, "folder": None if worker.node else name, "server_log": found}
            log.submit({"event": "server", **said})
