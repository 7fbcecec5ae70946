"""The router's connections to a server, against servers that do what a script says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

import httpx2
import pytest

from ridgeline.fleet.servers.transport import UnixTransport

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
WHOLE = b"HTTP/1.1 200 OK\r\nx-a: b\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


class Server:
    """A server on a socket, each of whose connections follows a script."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self.num_connections = 0

    async def on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            await self._script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has left
        finally:
            writer.close()


def talking(
    folder: Path,
    script: Script,
    talk: Callable[[httpx2.AsyncClient, Server], Awaitable[None]],
) -> None:
    """Let a client talk to a server."""

    async def run() -> None:
        server, path = Server(script), folder / "socket"
        async with (
            await asyncio.start_unix_server(server.on, str(path)),
            httpx2.AsyncClient(
                transport=UnixTransport(path), base_url="http://localhost", timeout=None
            ) as client,
            asyncio.timeout(60),
        ):
            await talk(client, server)

    asyncio.run(run())


async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each request."""
    while head := await reader.readuntil(b"\r\n\r\n"):
        if b"content-length: 4" in head:
            assert await reader.readexactly(4) == b"body"
        writer.write(WHOLE)


def test_requests_in_turn_use_one_connection(tmp_path: Path) -> None:
    async def talk(client: httpx2.AsyncClient, server: Server) -> None:
        for _ in range(3):
            answer = await client.post("/a?b=c", content=b"body")
            assert (answer.status_code, answer.text, answer.headers["x-a"]) == (200, "ok", "b")
        assert server.num_connections == 1
        await asyncio.gather(*(client.get("/") for _ in range(4)))
        assert server.num_connections == 4, "and at once each its own"

    talking(tmp_path, answers, talk)


def test_a_connection_that_the_server_has_closed_is_not_used_again(tmp_path: Path) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(WHOLE)

    async def talk(client: httpx2.AsyncClient, server: Server) -> None:
        for _ in range(20):
            assert (await client.get("/")).text == "ok"
            await asyncio.sleep(0.01)
        assert server.num_connections == 20

    talking(tmp_path, script, talk)


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (b"", None),
        (b"HTTP/1.1 200", None),
        (b"nonsense\r\n\r\n", None),
        (CHUNKED, b""),
        (CHUNKED + b"3\r\nabc\r\n", b"abc"),
        (CHUNKED + b"9\r\nabc", b"abc"),
        (CHUNKED + b"3\r\nabc\r\nzz\r\n", b"abc"),
        (WHOLE[:-1], b"o"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error_behind_what_has_come(
    tmp_path: Path, said: bytes, kept: bytes | None
) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)

    async def talk(client: httpx2.AsyncClient, server: Server) -> None:
        found: bytes | None = None

        async def read() -> None:
            nonlocal found
            answer = await client.send(client.build_request("GET", "/"), stream=True)
            found = b""
            async for piece in answer.aiter_raw():
                found += piece

        with pytest.raises(httpx2.TransportError):
            await read()
        assert found == kept

    talking(tmp_path, script, talk)


def test_no_server_is_an_error(tmp_path: Path) -> None:
    async def talk() -> None:
        async with httpx2.AsyncClient(transport=UnixTransport(tmp_path / "none")) as client:
            await client.get("http://localhost/")

    with pytest.raises(httpx2.ConnectError):
        asyncio.run(talk())


def test_who_stops_reading_makes_the_server_wait_and_who_leaves_ends_it(tmp_path: Path) -> None:
    num_sent, ends = [0], list[str]()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(CHUNKED)
        try:
            while True:
                writer.write(b"10000\r\n" + bytes(1 << 16) + b"\r\n")
                await writer.drain()
                num_sent[0] += 1
        except ConnectionError:
            ends.append("left")

    async def talk(client: httpx2.AsyncClient, server: Server) -> None:
        answer = await client.send(client.build_request("GET", "/"), stream=True)
        before = -1
        while num_sent[0] != before:  # until it stands still
            before = num_sent[0]
            await asyncio.sleep(0.2)
        assert num_sent[0] < 64, "4 MiB"
        num_bytes, more_bytes = 0, (before + 8) << 16  # than what lies between the two
        async with aclosing(answer.aiter_raw()) as pieces:
            async for piece in pieces:
                num_bytes += len(piece)
                if num_bytes > more_bytes:
                    break
        await answer.aclose()
        while not ends:
            await asyncio.sleep(0.01)

    talking(tmp_path, script, talk)


def test_answers_without_a_body_and_answers_before_the_answer(tmp_path: Path) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"HEAD"):
            writer.write(WHOLE.removesuffix(b"ok"))
            await reader.read()
        else:
            writer.write(b"HTTP/1.1 100 Continue\r\nx-no: 1\r\n\r\n" + WHOLE)

    async def talk(client: httpx2.AsyncClient, server: Server) -> None:
        answer = await client.head("/")
        assert (answer.status_code, answer.headers["content-length"]) == (200, "2")
        answer = await client.get("/")
        assert (answer.status_code, answer.text) == (200, "ok")
        assert "x-no" not in answer.headers

    talking(tmp_path, script, talk)
