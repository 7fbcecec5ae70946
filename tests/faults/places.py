"""Machines that go with notice: F07."""

from __future__ import annotations

import http.client
import json
import random
import shutil
import tempfile
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from ridgeline.serve.tunnel.spot import URL
from tests.faults.fleet import check_rest, servers
from tests.faults.links import KEY
from tests.fleet.test_remote_server import joined, url_of
from tests.fleet.test_router import Routed, routing
from tests.serve.serving import JSON
from tests.serve.tunnel.clouds import serving_cloud
from tests.waiting import PATIENCE_S, eventually

_CLOUDS = ("aws", "azure", "gcp")
_NUM_STREAMS, _BEFORE, _BEHIND = 4, 300, 50  # events that each stream has shown, and shows then
_NOTICE_S = 120.0  # Google's has no time, and is taken for 30
_ENDLESS: dict[str, Any] = {"prompt": "one two", "max_tokens": 30_000, "ignore_eos": True}
_ENDLESS |= {"stream": True, "temperature": 0.8, "logprobs": 1}
_LONG = ("--kv-cache-memory", "64MiB")


class Reading(threading.Thread):
    """A client that reads a stream until it is told to stop.

    Attributes:
        events: text and log-probabilities of each event so far.
    """

    def __init__(self, routed: Routed, seed: int) -> None:
        super().__init__(daemon=True)
        self.events: list[Any] = []
        self._is_over = False
        self._connection = http.client.HTTPConnection("127.0.0.1", routed.port, timeout=PATIENCE_S)
        self._connection.request(
            "POST", "/v1/completions", json.dumps(_ENDLESS | {"seed": seed}), JSON
        )
        self.start()

    def __enter__(self) -> Self:
        return self

    def run(self) -> None:
        with self._connection.getresponse() as response:
            while not self._is_over and (line := response.readline()):
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    assert "choices" in event, event
                    (choice,) = event["choices"]
                    self.events.append((choice["text"], choice["logprobs"]))

    def __exit__(self, *_: object) -> None:
        self._is_over = True
        self.join(PATIENCE_S)
        self._connection.close()


def f07(model: Path, count: int, rng: random.Random) -> str:
    """Clouds take machines away: their streams move while they still answer, read before."""
    num = 0
    with tempfile.TemporaryDirectory() as name:
        served, key = shutil.copytree(model, Path(name) / "model"), Path(name) / "key"
        config = json.loads((served / "config.json").read_text())
        longer = json.dumps(config | {"max_position_embeddings": 1 << 15})
        (served / "config.json").write_text(longer)
        key.write_text(KEY)
        flags = ("--fleet-key-file", str(key), *_LONG)
        with routing(served, Path(name) / "log", *flags) as routed:
            for number in range(count):
                cloud = _CLOUDS[number % len(_CLOUDS)]
                num += _take_away(routed, cloud, served, key, rng)
            check_rest(routed)
    return f"{count} notices of clouds: {num} streams moved, all read before, 0 different"


def _take_away(routed: Routed, cloud: str, model: Path, key: Path, rng: random.Random) -> int:
    """Take a machine away under streams; return how many have moved from it."""
    flags = ("--spot", cloud, "--shutdown-timeout", str(PATIENCE_S), *_LONG)
    before = _counts(routed)
    seeds = [rng.randrange(1 << 31) for _ in range(_NUM_STREAMS)]
    with serving_cloud(cloud) as metadata, ExitStack() as stack:
        address = {URL: metadata.url}
        process = stack.enter_context(joined(model, key, url_of(routed), *flags, **address))
        streams = [stack.enter_context(Reading(routed, seed)) for seed in seeds]
        eventually(lambda: all(len(one.events) > _BEFORE for one in streams))
        num = servers(routed)[1]["running"]
        assert num
        metadata.left_s = _NOTICE_S
        _, words = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, words
        most = max(len(one.events) for one in streams) + _BEHIND
        eventually(lambda: all(len(one.events) > most for one in streams))
    lengths = [len(one.events) for one in streams]
    with ExitStack() as stack:
        again = [stack.enter_context(Reading(routed, seed)) for seed in seeds]
        eventually(lambda: all(len(one.events) >= n for one, n in zip(again, lengths, strict=True)))
    for one, whole in zip(streams, again, strict=True):
        assert one.events == whole.events[: len(one.events)]
    found = _counts(routed)
    moved = {what: found[what] - before[what] for what in ("resumed", "read_first", "again")}
    assert moved == {"resumed": num, "read_first": num, "again": 0}, moved
    return num


def _counts(routed: Routed) -> dict[str, Any]:
    ((found,),) = (routed.call("/v1/fleet")[1]["models"].values(),)
    return dict(found)
