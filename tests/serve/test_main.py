"""``ridgeline serve`` as a process: its words, its signals, its end, its rest."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import APIError, OpenAI

from tests.real_models import real_model
from tests.serve.serving import serving
from tests.waiting import PATIENCE_S, connected, eventually, free_port, started

RIDGELINE = Path(sys.executable).parent / "ridgeline"
LONG: dict[str, Any] = {"model": "random", "prompt": [40, 41], "max_tokens": 110}
NO_EOS = {"extra_body": {"ignore_eos": True}}


@contextmanager
def process(
    model: Path, *flags: str, program: tuple[str, ...] = (str(RIDGELINE),), **variables: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [*program, "serve", str(model), "--port", "0", "--kv-cache-memory", "1MiB"]
    with started(
        [*command, "--threads", "1", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | variables,
    ) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert "is ready at" in line, server.stderr and server.stderr.read()
        yield server, line.split(" at ")[1].split()[0]


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ")[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rests(pid: int, span_s: float, most_s: float) -> None:
    """A process comes to rest: in such a span it uses so much of a processor at most."""

    def is_at_rest() -> bool:
        before_s = cpu_s(pid)
        time.sleep(span_s)
        return cpu_s(pid) - before_s <= most_s

    eventually(is_at_rest)


def test_a_server_from_start_to_end(model: Path) -> None:
    """It answers, rests at no cost while somebody is connected, and ends without a word."""
    with process(model) as (server, url):
        with OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            answer = client.completions.create(**LONG, **NO_EOS)
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 110
            rests(server.pid, 1.5, 0.01)  # one tick of the clock
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0
        assert server.stderr is not None
        words = server.stderr.read()
    assert "status=200" in words
    assert "Traceback" not in words


def test_at_the_limit_of_open_files_it_rests_and_then_goes_on(model: Path) -> None:
    """Who finds no room waits; that costs nothing, is said once, and ends when others leave."""
    with process(model) as (server, url):
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (40, 40))
        port = int(url.rsplit(":", 1)[1])
        crowd = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
        eventually(lambda: len(list(Path(f"/proc/{server.pid}/fd").iterdir())) == 40)
        rests(server.pid, 3, 0.15)  # 5 % of a core
        for connection in crowd:
            connection.close()
        with connected(port) as late:
            late.request("GET", "/health")
            assert late.getresponse().status == 200
        server.send_signal(signal.SIGTERM)
        assert server.stderr is not None
        words = server.stderr.read()
    assert words.count("new connections wait") == 1
    assert "Traceback" not in words


def test_a_server_whose_output_nobody_can_keep_goes_on(model: Path) -> None:
    """Standard output and log on a full disk."""
    port = free_port()
    command = [str(RIDGELINE), "serve", str(model), "--port", str(port), "--threads", "1"]
    command += ["--kv-cache-memory", "1MiB"]

    def listens() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    with open("/dev/full", "w") as full, started(command, stdout=full, stderr=full) as server:
        eventually(lambda: server.poll() is not None or listens())
        url = f"http://127.0.0.1:{port}/v1"
        with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            assert client.completions.create(**LONG | {"max_tokens": 2}, **NO_EOS).choices
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_those_who_run_finish(model: Path, signum: signal.Signals) -> None:
    with process(model, "--shutdown-timeout", "300") as (server, url):
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        streams = [client.completions.create(**LONG, n=8, stream=True, **NO_EOS) for _ in range(10)]
        firsts = [next(iter(stream)) for stream in streams]
        server.send_signal(signum)
        for first, stream in zip(firsts, streams, strict=True):
            chunks = [first, *stream]
            ends = [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason]
            assert ends == ["length"] * 8
        assert server.wait(PATIENCE_S) == 0


def test_while_it_drains_it_takes_nothing_new(model: Path) -> None:
    with serving(model) as served:
        held = served.valve.hold()
        done: list[int] = []
        body = {"prompt": "hello", "max_tokens": 5}
        running = threading.Thread(
            target=lambda: done.append(served.call("/v1/completions", body)[0])
        )
        running.start()
        eventually(lambda: served.valve.num_steps == 1)
        served.loop.call_soon_threadsafe(served.running.stop)
        eventually(lambda: served.call("/ready")[0] == 503)
        status, answer, headers = served.call("/v1/completions", body)
        assert (status, answer["error"]["code"]) == (503, "stopping")
        assert int(headers["retry-after"]) >= 1
        assert served.call("/health")[0] == 200
        held.set()
        running.join()
        assert done == [200]


def test_who_takes_too_long_at_the_end_gets_an_error(model: Path) -> None:
    with serving(model, shutdown_timeout=0.3) as served:
        served.valve.before = lambda step: time.sleep(0.05)
        stream = served.client().completions.create(**LONG | {"model": "tiny"}, stream=True)
        next(iter(stream))
        served.loop.call_soon_threadsafe(served.running.stop)
        with pytest.raises(APIError, match="stopping"):
            list(stream)
        served.thread.join(PATIENCE_S)
        assert not served.thread.is_alive()


def test_a_second_signal_ends_at_once(model: Path) -> None:
    with serving(model, shutdown_timeout=60) as served:
        served.valve.before = lambda step: time.sleep(0.05)
        stream = served.client().completions.create(**LONG | {"model": "tiny"}, stream=True)
        next(iter(stream))
        for _ in range(2):
            served.loop.call_soon_threadsafe(served.running.stop)
        with pytest.raises(APIError, match="stopping"):
            list(stream)
        served.thread.join(PATIENCE_S)
        assert not served.thread.is_alive()


def test_no_thread_outlives_a_server(model: Path) -> None:
    before = set(threading.enumerate())
    with serving(model) as served:
        served.call("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
    left = [t.name for t in set(threading.enumerate()) - before if t.is_alive()]
    assert not [name for name in left if name.startswith("engine")]


def test_each_start_draws_a_seed_unless_one_is_given(model: Path, tmp_path: Path) -> None:
    def seed(*flags: str) -> tuple[int, str]:
        """Return the seed that the engine has, and what is said of it."""
        trace = tmp_path / "trace.jsonl"
        with process(model, "--trace", str(trace), *flags) as (server, _):
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE_S) == 0
            assert server.stderr is not None
            words = server.stderr.read()
        return json.loads(trace.read_text().splitlines()[0])["seed"], words

    (first, words), (second, _) = seed(), seed()
    assert first != second
    assert f"seed {first} " in words
    assert seed("--seed", "17")[0] == 17


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--port", "70000"], 2, "--port is 70000"),
        (["--max-body", "lots"], 2, "lots"),
        (["--max-queued-requests", "0"], 2, "--max-queued-requests is 0"),
        (["--host", "no.such.host.invalid"], 1, "cannot listen on no.such.host.invalid"),
        (
            ["--host", "192.0.2.1"],
            1,
            "cannot listen on 192.0.2.1: this machine has no such address",
        ),
        (["--api-key-file", "/no/such/file"], 1, "/no/such/file"),
    ],
)
def test_flags_that_make_no_sense(model: Path, flags: list[str], status: int, words: str) -> None:
    done = subprocess.run(
        [str(RIDGELINE), "serve", str(model), *flags], capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [str(RIDGELINE), "serve", str(tmp_path / "no-model"), "--port", port],
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, port in done.stderr) == (1, True)


def test_sighup_reads_the_keys_again_and_an_open_host_is_warned_of(
    model: Path, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("old\n")
    with process(model, "--api-key-file", str(keys)) as (server, url):
        assert OpenAI(base_url=f"{url}/v1", api_key="old").models.list().data
        keys.write_text("new\n")
        server.send_signal(signal.SIGHUP)
        assert server.stderr is not None
        assert any("read again" in line for line in iter(server.stderr.readline, ""))
        assert OpenAI(base_url=f"{url}/v1", api_key="new").models.list().data
    with process(model, "--host", "0.0.0.0") as (server, _):
        assert server.stderr is not None
        assert any("--api-key" in line for line in iter(server.stderr.readline, ""))


def test_chat_with_a_real_model() -> None:
    with serving(real_model("smollm2"), {"max_model_len": 512, "kv_cache_memory": "64MiB"}) as real:
        wish: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Say hello in French, with an emoji."}],
            "max_tokens": 40,
            "temperature": 0,
        }
        whole = real.client().chat.completions.create(**wish)
        chunks = real.client().chat.completions.create(**wish, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert streamed == whole.choices[0].message.content
        assert "\ufffd" not in streamed
