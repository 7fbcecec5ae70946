"""What strangers hold at every socket that a server listens on: F20.

The sockets are those that the system says a process has, so a new one cannot be forgotten. No key
is sent. What is sent stays there until all have: nothing is read, nothing is hung up. Sockets of a
router's and of gRPC's own, inside a folder that nobody else can enter, are no doors.
"""

from __future__ import annotations

import os
import random
import re
import resource
import selectors
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import grpc

from ridgeline.serve.http.request_state import LINK_PATH, LINK_PROTOCOL
from ridgeline.serve.page import FILES
from ridgeline.serve.triton_grpc.messages import SERVICE
from tests.faults.fleet import are_ready, check_rest, served_alone, servers
from tests.faults.links import KEY
from tests.faults.messages import STREAM
from tests.faults.oracles import Unreachable
from tests.faults.process import process
from tests.fleet.test_remote_server import joined, url_of
from tests.fleet.test_router import ASK, Routed, routing
from tests.serve.http.test_listening import certificate
from tests.waiting import eventually

_MOST_MIB = 72.0  # 64 was wanted; the most that was seen of 4,000 of each kind is 70
_FEW = 2
_QUIET_S = 1.0  # after which a socket takes no more of what is sent
_FEW_QUIET_S = 0.2  # while nothing is measured yet, it is no matter whether that is true
_ALL_BYTES = 400 << 20  # that are sent of one kind, if all is taken
_BODY_BYTES = 7_900_000  # shorter than one may be
_HOST = b"host: localhost\r\n"
_POST = b"POST %b HTTP/1.1\r\n" + _HOST + b"content-type: application/json\r\n"
_UPGRADE = f"connection: upgrade\r\nupgrade: {LINK_PROTOCOL}\r\n\r\n".encode()
_JOIN = b"GET %b HTTP/1.1\r\n" % LINK_PATH.encode() + _HOST + _UPGRADE
_FRAME = b"\0\0\0\4\0\0\0\0\0"  # empty settings, as HTTP/2 begins
_PAGE = max(FILES, key=lambda path: len(FILES[path].body))
_MESSAGES, _MESSAGE_BYTES = 120, 4 << 20
_OVER_TLS = ("silent", "answered, and silent", "half a head")
_ROUTER, _NAMES = "a router", ("its own server", "a server that joined")


def _kinds(count: int) -> dict[str, bytes]:
    """Return what each of so many strangers sends."""
    body = b"x" * min(_BODY_BYTES, _ALL_BYTES // count)
    half = b"content-length: %d\r\n\r\n" % (len(body) + 1) + body
    return {
        "silent": b"",
        "half a head": b"GET / HTTP/1.1\r\nx: " + b"y" * 60_000,
        "half a body for an open path": _POST % b"/health" + half,
        "half a body": _POST % b"/v1/completions" + half,
        "answered, and silent": b"GET /health HTTP/1.1\r\n" + _HOST + b"\r\n",
        "a page that nobody reads": b"GET %b HTTP/1.1\r\n" % _PAGE.encode() + _HOST + b"\r\n",
        "a link": _JOIN,
        "a link, and words": _JOIN + b'{"nonce": "a", "said": "{}", "proof": "\\ud800"}\n',
        "a link, and noise": _JOIN + b"[" * 60_000,
        "the beginning of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _FRAME,
        "the beginning of TLS": b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03" + b"z" * 9000,
    }


class Door(NamedTuple):
    """A listening socket: an address of this machine, or the path of a Unix socket."""

    pid: int
    address: tuple[str, int] | str


def doors_of(pid: int) -> list[Door]:
    """Return all sockets on which a process listens."""
    own = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            own.add(entry.readlink().name.removeprefix("socket:[").removesuffix("]"))
    found: list[Door] = []
    for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
        row = line.split()
        if row[3] == "0A" and row[9] in own:  # it listens
            found.append(Door(pid, ("127.0.0.1", int(row[1].partition(":")[2], 16))))
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        row = line.split()
        if int(row[3], 16) & 1 << 16 and row[6] in own:
            found.append(Door(pid, row[7]))
    return found


def mib_of(pid: int) -> float:
    """Return the memory that is a process's own."""
    status = Path(f"/proc/{pid}/status").read_text()
    return sum(int(kib) for kib in re.findall(r"(?:RssAnon|VmSwap):\s+(\d+) kB", status)) / 1024


def _connection(door: Door, tls: ssl.SSLContext | None) -> socket.socket:
    family = socket.AF_UNIX if isinstance(door.address, str) else socket.AF_INET
    connection = socket.socket(family)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.settimeout(60)
    connection.connect(door.address)
    if tls is not None:
        connection = tls.wrap_socket(connection)
    connection.setblocking(False)
    return connection


def crowd(
    door: Door,
    count: int,
    said: bytes,
    tls: ssl.SSLContext | None = None,
    quiet_s: float = _QUIET_S,
) -> tuple[list[socket.socket], float]:
    """Connect so often, and send this until nothing more is taken for some seconds.

    Return the connections, and the most memory that the process had meanwhile.
    """
    most, connections = mib_of(door.pid), []
    with selectors.DefaultSelector() as waiting:
        left = {}
        for number in range(count):
            with suppress(OSError):  # it is full, and says so
                connections.append(one := _connection(door, tls))
                left[one] = memoryview(said)
                waiting.register(one, selectors.EVENT_WRITE)
            most = max(most, mib_of(door.pid)) if number % 100 == 0 else most
        while left and (ready := waiting.select(quiet_s)):
            for key, _ in ready:
                one = key.fileobj
                assert isinstance(one, socket.socket)
                try:
                    left[one] = left[one][one.send(left[one]) :] if left[one] else left[one]
                except OSError:  # it was shut out
                    left[one] = memoryview(b"")
                if not left[one]:
                    waiting.unregister(one)
                    del left[one]
            most = max(most, mib_of(door.pid))
    return connections, most


def _flood(door: Door, quiet_s: float) -> float:
    """Send messages over one call of gRPC without reading; return the most memory meanwhile."""
    assert not isinstance(door.address, str)
    most, message = mib_of(door.pid), b"\x1a\x80\x80\x80\x02" + bytes(_MESSAGE_BYTES)
    with grpc.insecure_channel(f"127.0.0.1:{door.address[1]}") as channel:
        num_taken, num_before, is_over = 0, -1, threading.Event()

        def messages() -> Iterator[bytes]:
            nonlocal num_taken
            for _ in range(_MESSAGES):
                yield message
                num_taken += 1
            is_over.wait()

        call = channel.stream_stream(f"/{SERVICE}/{STREAM}")(messages())
        while call.is_active() and num_taken > num_before:
            num_before = num_taken
            end_s = time.monotonic() + quiet_s
            while call.is_active() and num_taken == num_before and time.monotonic() < end_s:
                most = max(most, mib_of(door.pid))
                time.sleep(0.01)
        is_over.set()
        call.cancel()
    return max(most, mib_of(door.pid))


class Figures(NamedTuple):
    """What was attacked, and the most memory that a process had more than before."""

    names: list[str]
    mib: list[float]


@contextmanager
def _files(count: int) -> Iterator[None]:
    """Let this process have so many connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, count + 500)), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def _attack(
    pid: int, name: str, count: int, figures: Figures, tls: ssl.SSLContext | None = None
) -> None:
    """Attack all sockets of a process in all ways; first by few, for what it loads only then."""
    for _ in _peaks(pid, name, _FEW, tls, _FEW_QUIET_S):
        pass
    before = mib_of(pid)
    for address, kind, most in _peaks(pid, name, count, tls, _QUIET_S):
        figures.mib.append(most - before)
        assert most - before < _MOST_MIB, (name, address, kind, most - before)
    figures.names.append(name)


def _peaks(
    pid: int, name: str, count: int, tls: ssl.SSLContext | None, quiet_s: float
) -> Iterator[tuple[tuple[str, int] | str, str, float]]:
    """Attack all sockets; yield for each way where, how, and the most memory meanwhile."""
    doors = doors_of(pid)
    assert doors, name
    for door in doors:
        if isinstance(door.address, str):
            folder = Path(door.address).parent.stat()
            assert (folder.st_mode & 0o77, folder.st_uid) == (0, os.getuid()), door.address
            if name == _ROUTER or door.address.endswith("grpc.sock"):
                continue
        for kind, said in _kinds(count).items():
            for context in {None, tls} if kind in _OVER_TLS else {None}:
                connections, most = crowd(door, count, said, context, quiet_s)
                for one in connections:
                    one.close()
                yield door.address, kind, most
        if not isinstance(door.address, str):
            yield door.address, "messages of gRPC", _flood(door, quiet_s)


def _fleet(model: Path, folder: Path, count: int, figures: Figures) -> None:
    """Attack a router, its own server, and one that has joined, which stays ready."""
    served = served_alone(model, folder)
    (key := folder / "key").write_text(KEY)
    (keys := folder / "keys").write_text("anna anna\nboss boss admin\n")
    own = ("--api-key-file", str(keys))
    flags = ("--fleet-key-file", str(key), "--grpc-port", "0", *own)
    with routing(served, folder / "log", *flags) as routed:
        routed.key = "boss"
        with joined(served, key, url_of(routed), *own) as process:
            eventually(lambda: len(servers(routed)) == 2)
            pids = [one["pid"] for one in servers(routed)]
            _check_joined(routed, pids)
            for pid, name in ((routed.process.pid, _ROUTER), *zip(pids, _NAMES, strict=True)):
                _attack(pid, name, count, figures)
                _check_joined(routed, pids)
            door = Door(routed.process.pid, ("127.0.0.1", routed.port))
            for said in (b"", _JOIN):
                connections, _ = crowd(door, count, said)
                for _ in range(3):
                    _check_joined(routed, pids)
                for one in connections:
                    one.close()
            assert process.poll() is None
            check_rest(routed)


def _check_joined(routed: Routed, pids: list[int]) -> None:
    """All servers are there and ready, none has ended, and answers come."""
    eventually(lambda: are_ready(routed))  # a busy machine is silent for a moment, too
    assert [(one["pid"], one["deaths"]) for one in servers(routed)] == [(pid, 0) for pid in pids]
    for _ in range(4):
        assert routed.call("/v1/completions", ASK | {"model": "model"})[0] == 200


def f20(model: Path, count: int, rng: random.Random) -> str:
    """Strangers, so many at once, at each socket of a fleet, of a server with TLS, of the page."""
    if not shutil.which("openssl"):
        raise Unreachable("openssl is not installed: it makes the certificates")
    figures = Figures([], [])
    with _files(count), tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _fleet(model, folder, count, figures)
        certificate(folder)
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        tls = ("--ssl-certfile", str(folder / "cert.pem"), "--ssl-keyfile", str(folder / "key.pem"))
        flags = ("--grpc-port", "0", *tls, "--api-key", "k")
        with process(model, *flags, log=folder / "l") as (one, _):
            _attack(one.pid, "a server with TLS", count, figures, context)
        with process(model, "--grpc-port", "0", log=folder / "m") as (one, _):
            _attack(one.pid, "a server without keys", count, figures)
        with _page() as pid:
            _attack(pid, "the page of plans", count, figures)
    most = max(figures.mib)
    return f"{count} strangers at all sockets of {', '.join(figures.names)}: {most:.0f} MiB more"


@contextmanager
def _page() -> Iterator[int]:
    command = [sys.executable, "-m", "ridgeline", "plan", "--web", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as page:
        try:
            assert page.stdout is not None
            assert b"plans are at" in page.stdout.readline()
            yield page.pid
        finally:
            page.kill()
