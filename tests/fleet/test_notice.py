"""A cloud takes the machine of a server away: its streams move while it is still there."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from typer.testing import CliRunner

from ridgeline.cli.main import app
from ridgeline.serve.tunnel.spot import URL
from tests.fleet.test_remote_server import SMALL, key_file, routed, url_of  # noqa: F401
from tests.fleet.test_replicas import WISH, table
from tests.fleet.test_router import Routed
from tests.serve.serving import JSON, first_of
from tests.serve.tunnel.clouds import Cloud, serving_cloud
from tests.waiting import PATIENCE_S, connected, started

NUM_STREAMS = 2


@contextmanager
def joined_at(cloud: Cloud, model: Path, key: Path, url: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "ridgeline", "serve", str(model), "--join", url, *SMALL]
    command += ["--fleet-key-file", str(key), "--spot", "auto"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(command, **pipes, env=os.environ | {URL: cloud.url}) as process:
        assert process.stdout is not None
        assert "has joined" in process.stdout.readline()
        yield process


def test_all_streams_move_when_a_machine_is_taken_away(
    routed: Routed,  # noqa: F811
    folder: Path,
    key_file: Path,  # noqa: F811
) -> None:
    """None is lost, and each answer is that of a server that nothing happens to."""
    bodies = [WISH | {"seed": seed} for seed in range(NUM_STREAMS)]
    whole = [routed.call("/v1/completions", body | {"stream": False})[1] for body in bodies]
    before = table(routed)
    (own,) = [one["pid"] for one in before["replicas"]]
    with (
        serving_cloud("aws") as cloud,
        joined_at(cloud, folder / "a", key_file, url_of(routed)) as process,
        ExitStack() as stack,
    ):
        streams = [stack.enter_context(begun(routed, body)) for body in bodies]
        # Nobody reads on: they do not end, and the router moves them while it waits for a client.
        assert table(routed)["replicas"][1]["running"] > 0, "both servers have some"
        cloud.left_s = 120.0
        _, words = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, words
        assert "aws reclaims this machine in " in words
        for stream, answer in zip(streams, whole, strict=True):
            assert texts_of(*stream) == {one["index"]: one["text"] for one in answer["choices"]}
    after = table(routed)
    assert after["resumed"] > before["resumed"]
    assert after["diverged"] == 0
    assert [one["pid"] for one in after["replicas"]] == [own]


@contextmanager
def begun(
    routed: Routed,  # noqa: F811
    body: dict[str, object],
) -> Iterator[tuple[bytes, http.client.HTTPResponse]]:
    """A stream that has begun: its first line, and what brings the rest."""
    with connected(routed.port) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), JSON)
        with connection.getresponse() as response:
            yield first_of(response), response


def texts_of(first: bytes, response: http.client.HTTPResponse) -> dict[int, str]:
    """The texts of a stream, by the number of the answer."""
    lines = (first + response.read()).splitlines()
    *chunks, done = [line for line in lines if line.startswith(b"data:")]
    assert done == b"data: [DONE]"
    texts = dict[int, str]()
    for chunk in chunks:
        for choice in json.loads(chunk.removeprefix(b"data: "))["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def test_what_does_not_go_with_a_notice_is_said(folder: Path) -> None:
    for flags, problem in (
        (("--spot", "auto"), "say --join or --place ray too"),
        (("--spot", "gcp", "--replicas", "2"), "say --join or --place ray too"),
        (("--spot", "oracle"), "'oracle' is not one of"),
    ):
        result = CliRunner().invoke(app, ["serve", str(folder / "a"), "--port", "0", *flags])
        assert result.exit_code != 0, flags
        assert problem in (result.output + str(result.exception)), flags
