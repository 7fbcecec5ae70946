"""What a cloud says of a machine that it is about to take away, asked for every two seconds.

Each cloud has an address that only its machines can reach, and serves documents there:

- AWS: ``spot/instance-action`` of the instance metadata service, version 2: 404 until there is a
  notice, then ``{"action": "terminate", "time": "2017-09-18T08:22:00Z"}``, two minutes ahead.
- Azure: ``scheduledevents``: a list of events of a group of machines, each with ``EventType``, the
  ``Resources`` that it is about, and ``NotBefore``, at least 30 s ahead.
- Google: ``instance/preempted``: FALSE, then TRUE, 30 s ahead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import httpx2

URL = "RIDGELINE_METADATA_URL"  # a variable and no flag: another address to ask
_LINK_LOCAL = "http://169.254.169.254"
_TIMEOUT_S, _LOOK_S = 1.0, 2.0
_LEFT_S = 30.0  # for notices without a time, or with an unreadable one
_LATEST = "latest/meta-data/"
_AZURE = {"Metadata": "true"}
_GOOGLE = {"Metadata-Flavor": "Google"}


class Notice(NamedTuple):
    """This machine will be taken away: which ``cloud`` says so, and in how many seconds."""

    cloud: str
    left_s: float


async def _aws(client: httpx2.AsyncClient) -> float | None:
    ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
    token = (await client.put("latest/api/token", headers=ttl)).raise_for_status().text
    headers = {"X-aws-ec2-metadata-token": token}
    answer = await client.get(f"{_LATEST}spot/instance-action", headers=headers)
    if answer.status_code == 404:
        return None
    said = _object(answer.raise_for_status().json())
    return _left_s(said["time"]) if said["action"] else None


async def _azure(client: httpx2.AsyncClient) -> float | None:
    query = {"api-version": "2020-07-01"}
    answer = await client.get("metadata/scheduledevents", params=query, headers=_AZURE)
    events = _object(answer.raise_for_status().json()).get("Events") or []
    going = [one for one in events if one["EventType"] in ("Preempt", "Terminate")]
    if not going:
        return None
    query = {"api-version": "2021-02-01", "format": "text"}
    name = await client.get("metadata/instance/compute/name", params=query, headers=_AZURE)
    ours = [one for one in going if name.raise_for_status().text in one["Resources"]]
    return min((_left_s(one.get("NotBefore")) for one in ours), default=None)


async def _gcp(client: httpx2.AsyncClient) -> float | None:
    answer = await client.get("computeMetadata/v1/instance/preempted", headers=_GOOGLE)
    if answer.raise_for_status().headers.get("metadata-flavor") != "Google":
        raise ValueError("it is not Google's")
    return _LEFT_S if answer.text.strip() == "TRUE" else None


# Each returns the seconds that are left, None without a notice, and raises where it is another
# cloud's address, or nobody's.
_CLOUDS: dict[str, Callable[[httpx2.AsyncClient], Awaitable[float | None]]] = {
    "aws": _aws,
    "azure": _azure,
    "gcp": _gcp,
}


async def notice_of(cloud: str, write: Callable[[str], object]) -> Notice:
    """Wait until this machine is taken away.

    Args:
        cloud: aws, azure, gcp, or auto for the one that answers.
        write: takes lines of the log.

    Returns the notice. With ``auto``, on a machine of no cloud, it waits for ever.
    """
    base = os.environ.get(URL, _LINK_LOCAL)
    # No proxy from the environment: it would answer for its own machine.
    async with httpx2.AsyncClient(base_url=base, timeout=_TIMEOUT_S, trust_env=False) as client:
        clouds = list(_CLOUDS) if cloud == "auto" else [cloud]
        answering = [one for one in clouds if not isinstance(await _ask(client, one), Exception)]
        if not answering:
            names = "AWS, Azure or GCP" if cloud == "auto" else cloud
            write(
                f"--spot {cloud}: no metadata service of {names} answers at {base}, so no notice "
                "can arrive"
            )
            if cloud == "auto":
                await asyncio.Event().wait()
        cloud = (answering or clouds)[0]
        while not isinstance(left_s := await _ask(client, cloud), float):
            await asyncio.sleep(_LOOK_S)
    return Notice(cloud, left_s)


async def _ask(client: httpx2.AsyncClient, cloud: str) -> float | Exception | None:
    """Return what a cloud says, or the error if it gave no valid answer: it is asked again."""
    try:
        return await _CLOUDS[cloud](client)
    except (httpx2.HTTPError, ValueError, KeyError, TypeError) as error:
        return error


def _object(document: Any) -> dict[str, Any]:
    if not isinstance(document, dict):
        raise ValueError("it is not an object")
    return document


def _left_s(stamp: Any) -> float:
    """Return the seconds until a time, as AWS writes it or as Azure does."""
    for read in (datetime.fromisoformat, parsedate_to_datetime):
        with contextlib.suppress(ValueError, TypeError):
            return max(0.0, (read(stamp) - datetime.now(UTC)).total_seconds())
    return _LEFT_S
