"""Servers of other machines: processes that join a router over links that they open themselves."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from selenium.webdriver import Chrome
from typer.testing import CliRunner

from ridgeline.cli.commands.fleet import fleet as show_fleet
from ridgeline.cli.main import app
from ridgeline.serve.http.request_state import LINK_PATH, LINK_PROTOCOL
from ridgeline.serve.tunnel.proof import TICKET, Ticket
from tests.fleet.test_replicas import WISH, Answers, answered, streamed, table
from tests.fleet.test_router import Routed, routing
from tests.fleet.wire import wire
from tests.serve.http.test_listening import pems  # noqa: F401
from tests.serve.page.browser import find, keep, texts
from tests.waiting import PATIENCE_S, eventually, free_port, started

LIAR = "TEST_FINGERPRINT"
LIES = f"""
import os
from ridgeline.engine.setup import identity
identity.fingerprint = lambda facts: os.environ["{LIAR}"]
from ridgeline.cli.main import main
main()
"""
SMALL = ("--kv-cache-memory", "1MiB", "--threads", "1")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key"
    path.write_text("0123456789abcdef" * 4)
    return path


@pytest.fixture(scope="module")
def routed(
    folder: Path, key_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Routed]:
    log = tmp_path_factory.mktemp("log") / "log"
    flags = ("--fleet-key-file", str(key_file), "--silence-timeout", "5")
    with routing(folder / "a", log, *flags) as running:
        yield running


@contextmanager
def joined(
    model: Path, key_file: Path, url: str, *flags: str, waits: bool = True, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """Start a server that joins the router at ``url``; the block begins when it has."""
    program = ["-c", LIES] if LIAR in variables else ["-m", "ridgeline"]
    command = [sys.executable, *program, "serve", str(model), "--join", url]
    command += ["--fleet-key-file", str(key_file), *SMALL, *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(command, **pipes, env=os.environ | variables) as process:
        if waits:
            assert process.stdout is not None
            assert "is ready, and has joined" in process.stdout.readline()
        yield process


def url_of(routed: Routed) -> str:
    return f"http://127.0.0.1:{routed.port}"


def names(routed: Routed) -> list[str]:
    return [one["node"] for one in table(routed)["replicas"] if one["state"] == "ready"]


@pytest.fixture(scope="module")
def whole(routed: Routed) -> Answers:
    """The answers to ``WISH`` of a server that nothing happens to."""
    return answered(routed, WISH)


def test_a_stream_goes_on_when_a_server_of_another_machine_is_killed(
    routed: Routed,
    folder: Path,
    key_file: Path,
    whole: Answers,
    browser: Chrome,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The answer is the same to the bit; page and table say which machine that was."""
    with joined(folder / "a", key_file, url_of(routed)) as process:
        own, other = table(routed)["replicas"]
        assert (own["node"], other["node"]) == ("", socket.gethostname())
        assert other["pid"] == process.pid
        assert own["fingerprint"] == other["fingerprint"]
        show_fleet(url_of(routed))
        head, titles, *servers = capsys.readouterr().out.splitlines()
        assert head.startswith("a: 2 of 2 servers")
        assert "machine" in titles
        assert [" this one " in servers[0], f" {other['node']} " in servers[1]] == [True, True]
        browser.get(url_of(routed))
        keep(browser)
        eventually(lambda: find(browser, "#servers-note").text == "2 of 2 ready")
        shown = [one.split() for one in texts(browser, "#servers-rows tr")]
        assert [one[5:] for one in shown] == [["this", "one"], [other["node"]]]
        before = table(routed)["resumed"]
        os.kill(own["pid"], signal.SIGSTOP)  # so that the other one gets it
        try:
            eventually(lambda: table(routed)["replicas"][0]["state"] == "silent")

            def swap(pid: int) -> None:
                assert pid == process.pid
                os.kill(own["pid"], signal.SIGCONT)
                process.kill()

            assert streamed(routed, swap, are_ready=False) == whole
        finally:
            os.kill(own["pid"], signal.SIGCONT)
        assert table(routed)["resumed"] == before + 1
        assert table(routed)["diverged"] == 0
    eventually(lambda: names(routed) == [""])
    gone = f"is gone: its link has ended ({other['node']})"
    assert gone in str(table(routed)["events"])
    eventually(lambda: gone in "".join(texts(browser, "#servers-events li")))
    eventually(lambda: "1 stream continued elsewhere" in find(browser, "#servers-facts").text)
    browser.get("about:blank")


def test_a_link_that_goes_dead_without_an_end_loses_its_streams_and_no_byte(
    routed: Routed, folder: Path, key_file: Path, whole: Answers
) -> None:
    """As when packets are dropped on the way; what was on the way comes to nobody."""
    own = table(routed)["replicas"][0]["pid"]
    before = table(routed)
    with (
        wire(routed.port) as between,
        joined(folder / "a", key_file, f"http://127.0.0.1:{between.port}") as process,
    ):

        def break_off(pid: int) -> None:
            assert pid == process.pid
            between.stand_still()
            os.kill(own, signal.SIGCONT)

        os.kill(own, signal.SIGSTOP)  # so that the other one gets it
        try:
            eventually(lambda: table(routed)["replicas"][0]["state"] == "silent")
            assert streamed(routed, break_off, are_ready=False) == whole
        finally:
            os.kill(own, signal.SIGCONT)
        states = {one["pid"]: one["state"] for one in table(routed)["replicas"]}
        assert states == {own: "ready", process.pid: "silent"}
        assert table(routed)["resumed"] == before["resumed"] + 1
        between.move()
        eventually(lambda: len(names(routed)) == 2)
        assert process.poll() is None, "it has requests again, and was not ended"
        assert table(routed)["diverged"] == 0
    eventually(lambda: names(routed) == [""])


def test_who_does_not_belong_is_refused_in_words(
    routed: Routed, folder: Path, key_file: Path, tmp_path: Path
) -> None:
    """Another key, other answers, another name, other API keys; and what is no router.

    One lies about what it computes.
    """
    (other_key := tmp_path / "key").write_text("f" * 64)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(PATIENCE_S)
        url, a = url_of(routed), folder / "a"
        nobody = f"http://127.0.0.1:{silent.getsockname()[1]}"
        cases = [
            (a, other_key, url, (), "it does not know the key of this fleet"),
            (folder / "b", key_file, url, ("--served-model-name", "a"), "would not be the same"),
            (folder / "b", key_file, url, (), "it serves 'b', and this router 'a'"),
            (a, key_file, url, ("--api-key", "k"), "its API keys are not those of this router"),
            (folder / "b", key_file, url, (LIAR,), "it computes other numbers"),
            (a, key_file, nobody, (), "it is not a router with --fleet-key-file"),
        ]

        def refused(case: tuple[Path, Path, str, tuple[str, ...], str]) -> None:
            model, key, url, flags, why = case
            told = {}
            if LIAR in flags:
                served = routed.call("/v1/models")[1]["data"][0]
                told = {LIAR: served["system_fingerprint"]}
                flags = ("--served-model-name", "a")
            with joined(model, key, url, *flags, waits=False, **told) as process:
                said, words = process.communicate(timeout=PATIENCE_S)
            assert process.returncode == 1
            assert said == ""
            last = words.splitlines()[-1]
            assert last.startswith(f"ridgeline: the router at {url} does not take this server: ")
            assert why in last

        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(refused, case) for case in cases]
            connection, _ = silent.accept()
            with connection, connection.makefile("rb") as words:
                while words.readline().strip():
                    pass
                connection.sendall(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            for one in asked:
                one.result()
    assert names(routed) == [""]
    assert "does not know the key" in routed.log


def raw(routed: Routed, *pieces: bytes, ticket: str = "") -> bytes:
    """Ask for a link, hear its number, say this, and return all that comes back.

    The number is heard first: a router that closes on bytes it has not read resets the connection,
    and what was not heard by then is lost.
    """
    with socket.create_connection(("127.0.0.1", routed.port), timeout=PATIENCE_S) as connection:
        head = f"GET {LINK_PATH} HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\n"
        connection.sendall(f"{head}upgrade: {LINK_PROTOCOL}\r\n{TICKET}: {ticket}\r\n\r\n".encode())
        heard = b""
        while b"\n" not in heard.partition(b"\r\n\r\n")[2] and b"refused" not in heard:
            data = connection.recv(1 << 16)
            assert data, heard
            heard += data
        with contextlib.suppress(OSError):  # it need not read all
            for piece in pieces:
                connection.sendall(piece)
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(1 << 16):
                heard += data
    return heard


LINES = (
    b"",
    b"\n",
    b'{"nonce": "1", "said": "{}", "proof": "0"}\n',
    b'{"nonce": "1", "said": "{}", "proof": "\\ud800"}\n',
    json.dumps({"nonce": "1", "said": '{"kind": "request", "id": "1"}', "proof": ""}).encode(),
    b"GET /v1/fleet HTTP/1.1\r\nhost: localhost\r\n\r\n",
    b"\x00" * (1 << 20),
)


def test_strangers_get_no_link(routed: Routed) -> None:
    """Without a ticket, with one of another key, with one for a link that nobody has asked for."""
    key = b"0123456789abcdef" * 4
    tickets = ["", "x", Ticket("one", 0).written(b"f" * 64), Ticket("one", 1).written(key)]
    for ticket in tickets:
        for line in LINES[:4]:
            head, _, said = raw(routed, line, ticket=ticket).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 403 ")
            assert b"it does not know the key of this fleet" in said
    status, answer, _ = routed.call(LINK_PATH, connection="upgrade", upgrade="websocket")
    assert (status, answer["error"]["code"]) == (403, "not_allowed"), "another protocol"
    assert "Traceback" not in routed.log


def test_a_ticket_that_was_overheard_gets_a_number_and_nothing_else(
    routed: Routed, key_file: Path
) -> None:
    """Whatever they send: no word, no proof, the request of a link that nobody asked for."""
    before = table(routed)
    ticket = Ticket("one", 0).written(key_file.read_bytes())
    for line in LINES:
        head, _, lines = raw(routed, line, ticket=ticket).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 ")
        nonce, *rest = lines.splitlines()
        assert list(json.loads(nonce)) == ["nonce"]
        assert [list(json.loads(one)) for one in rest] in ([], [["refused"]])
    after = table(routed)
    for one in before["replicas"] + after["replicas"]:
        del one["private_bytes"]  # which grow by a page or two behind a start
    assert after["replicas"] == before["replicas"]
    assert after["events"] == before["events"]
    assert "Traceback" not in routed.log


def test_a_server_joins_again_after_the_router_and_leaves_when_it_is_told(
    folder: Path,
    key_file: Path,
    tmp_path: Path,
    pems: Path,  # noqa: F811
) -> None:
    """Over TLS; and what it has begun goes on elsewhere, or is ended by it."""
    port = free_port()
    flags = ("--fleet-key-file", str(key_file), "--port", str(port))
    flags += ("--ssl-certfile", str(pems / "cert.pem"), "--ssl-keyfile", str(pems / "key.pem"))
    url, ca = f"https://localhost:{port}", ("--fleet-ca", str(pems / "cert.pem"))
    tls = ssl.create_default_context(cafile=pems / "cert.pem")
    with (
        routing(folder / "a", tmp_path / "log", *flags) as first,
        joined(folder / "a", key_file, url, *ca) as process,
    ):
        first.tls = tls
        eventually(lambda: names(first) == ["", socket.gethostname()])
        first.process.kill()
        first.process.wait()
        with routing(folder / "a", tmp_path / "log2", *flags) as second:
            second.tls = tls
            eventually(lambda: names(second) == ["", socket.gethostname()])
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE_S) == 0
            eventually(lambda: names(second) == [""])
            events = [one["what"] for one in table(second)["events"]]
            assert f"has left ({socket.gethostname()})" in events
            assert second.complete("a")


def test_what_does_not_go_together_is_said_before_anything_is_loaded(
    folder: Path, key_file: Path, tmp_path: Path
) -> None:
    key, a = ("--fleet-key-file", str(key_file)), str(folder / "a")
    join = ("--join", "http://localhost:1")
    for flags, problem in (
        (join, "--join needs --fleet-key-file"),
        ((*key, *join, "--replicas", "2"), "--join is for one server of one model"),
        ((*key, *join, "--grpc-port", "0"), "a server with --join does not listen"),
        ((*key, "--join", "http://10.1.2.3"), "say --fleet-plain"),
        ((*key, "--host", "0.0.0.0"), "give --ssl-certfile, or say --fleet-plain"),
        ((*key, "--keep-alive", "1m"), "works with one model that stays loaded"),
        ((*key, a), "works with one model that stays loaded"),
        (("--fleet-key-file", str(tmp_path / "none")), "No such file"),
    ):
        result = CliRunner().invoke(app, ["serve", a, "--port", "0", *flags])
        assert result.exit_code != 0, flags
        assert problem in (result.output + str(result.exception)), flags
