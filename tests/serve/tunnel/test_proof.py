"""A router and a server know each other by a key that neither of them sends."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ridgeline.serve.tunnel.joining import RouterAddress
from ridgeline.serve.tunnel.proof import (
    LINE_BYTES,
    FleetLink,
    NotTaken,
    Ticket,
    accept,
    derived,
    greet_router,
    greet_server,
)
from ridgeline.system.shared_secret import proof, read_key

KEY, OTHER = b"k" * 32, b"o" * 32
HELLO = {"kind": "server", "id": "one"}
Side = Callable[[FleetLink], Awaitable[Any]]


class Tapped(FleetLink):
    """A link that keeps what was said over it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self.said: list[dict[str, Any]] = []

    def say(self, **fields: Any) -> None:
        self.said.append(fields)
        super().say(**fields)


def between(router: Side, server: Side) -> tuple[Any, Any, list[Tapped]]:
    """Connect both; return what became of each, errors too, and their ends of the link."""

    async def run() -> tuple[Any, Any, list[Tapped]]:
        ends: asyncio.Queue[Tapped] = asyncio.Queue()
        listener = await asyncio.start_server(
            lambda *streams: ends.put_nowait(Tapped(*streams)), "127.0.0.1", 0, limit=LINE_BYTES
        )
        port = listener.sockets[0].getsockname()[1]
        near = Tapped(*await asyncio.open_connection("127.0.0.1", port, limit=LINE_BYTES))
        far = await ends.get()

        async def one(side: Side, link: FleetLink) -> Any:
            try:
                return await side(link)
            finally:
                link.close()

        found = await asyncio.gather(one(router, far), one(server, near), return_exceptions=True)
        for link in (near, far):
            with contextlib.suppress(OSError):  # the other side did not read all
                await link.writer.wait_closed()
        listener.close()
        await listener.wait_closed()
        return *found, [far, near]

    return asyncio.run(run())


async def router(link: FleetLink) -> dict[str, Any]:
    said, nonces = await greet_server(link, KEY)
    accept(link, KEY, nonces, name="seven")
    return said


async def server(link: FleetLink) -> dict[str, Any]:
    return await greet_router(link, KEY, HELLO)


def saying(*lines: bytes) -> Side:
    """Return a side that only says this, whatever it hears, and listens to the end."""

    async def side(link: FleetLink) -> bytes:
        link.writer.write(b"".join(lines))
        return await link.reader.read()

    return side


def test_both_prove_that_they_have_the_key_and_neither_sends_it() -> None:
    said, answer, links = between(router, server)
    assert (said, answer) == (HELLO, {"name": "seven"})
    heard = json.dumps([link.said for link in links])
    assert KEY.decode() not in heard
    assert derived(KEY, "one") not in heard


def test_a_server_with_another_key_is_not_taken_and_is_told() -> None:
    said, answer, _ = between(router, lambda link: greet_router(link, OTHER, HELLO))
    for error in (said, answer):
        assert isinstance(error, NotTaken)
        assert str(error) == "it does not know the key of this fleet"


def test_a_server_does_not_take_a_router_with_another_key() -> None:
    async def false_router(link: FleetLink) -> None:
        link.say(nonce="0" * 32)
        await link.hear()
        accept(link, OTHER, ["0" * 32, "1" * 32], name="seven")

    _, answer, _ = between(false_router, server)
    assert isinstance(answer, NotTaken)
    assert str(answer) == "it does not know the key of this fleet"


def test_what_was_heard_before_proves_nothing() -> None:
    *_, (far, near) = between(router, server)
    lines = [json.dumps(one).encode() + b"\n" for one in near.said]
    assert len(lines) == 1
    said, _, _ = between(router, saying(*lines))
    assert isinstance(said, NotTaken), "as a server"
    lines = [json.dumps(one).encode() + b"\n" for one in far.said]
    _, answer, _ = between(saying(*lines), server)
    assert isinstance(answer, NotTaken), "as a router"


def test_a_router_cannot_be_given_its_own_words_back() -> None:
    """Each role proves itself in words of its own."""

    async def mirror(link: FleetLink) -> bytes:
        link.writer.write(await link.reader.readline())
        return await link.reader.read()

    said, _, _ = between(router, mirror)
    assert isinstance(said, NotTaken)


def test_what_is_said_cannot_be_changed() -> None:
    async def altered(link: FleetLink) -> Any:
        inner = Tapped(link.reader, link.writer)

        def say(**fields: Any) -> None:
            changed = json.loads(fields["said"]) | {"id": "two"}
            FleetLink.say(inner, **fields | {"said": json.dumps(changed)})

        inner.say = say  # type: ignore[method-assign]
        return await greet_router(inner, KEY, HELLO)

    said, _, _ = between(router, altered)
    assert isinstance(said, NotTaken)


@pytest.mark.parametrize(
    "line",
    [
        b"\n",
        b"{\n",
        b"[]\n",
        b"7\n",
        b"\xff\xfe\n",
        b"{}\n",
        b'{"nonce": 7, "said": "{}", "proof": ""}\n',
        b'{"nonce": "7", "said": {}, "proof": ""}\n',
        b'{"nonce": "7", "said": "{}", "proof": null}\n',
        b'{"nonce": "7", "said": "{}", "proof": "\\u00e4"}\n',
        b'{"nonce": "7", "said": "{}", "proof": "\\ud800"}\n',
        b'{"nonce": "7\\udfff", "said": "{}", "proof": "0"}\n',
        b"[" * 10_000 + b"\n",
        b"x" * (1 << 20),
    ],
    ids=lambda line: repr(line[:40]),
)
def test_strangers_are_refused_whatever_they_say(line: bytes) -> None:
    said, _, _ = between(router, saying(line))
    assert isinstance(said, NotTaken)


@pytest.mark.parametrize("said", ['{"id": "\\ud800"}', '["server"]', "7", "{"])
def test_who_has_the_key_and_says_what_cannot_be_written_is_refused(said: str) -> None:
    async def odd(link: FleetLink) -> None:
        nonces = [str((await link.hear())["nonce"]), "1"]
        link.say(nonce="1", said=said, proof=proof(KEY, "server", nonces, said))

    found, *_ = between(router, odd)
    assert isinstance(found, NotTaken)


def test_a_ticket_is_read_with_its_key_alone() -> None:
    text = Ticket("one", 7).written(KEY)
    assert Ticket.read(text, KEY) == ("one", 7)
    changed = (
        text.replace(" 7 ", " 8 "),
        text.replace("one", "two"),
        text[:-1],
        "",
        "one 7",
        "\xff",
    )
    for other in (*changed, text.replace(" 7 ", " \xb2 "), text.replace(" 7 ", f" {'7' * 5000} ")):
        assert Ticket.read(other, KEY) is None
    assert Ticket.read(text, OTHER) is None


def test_who_leaves_in_the_middle_is_no_error_of_ours() -> None:
    said, _, _ = between(router, saying_nothing)
    assert isinstance(said, OSError)


async def saying_nothing(link: FleetLink) -> None:
    await link.reader.readline()


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("router:8000", "write the router's URL"),
        ("ftp://router", "write the router's URL"),
        ("http://", "write the router's URL"),
        ("http://localhost:99999", "Port out of range"),
        ("http://router:8000", "say --fleet-plain"),
        ("http://10.0.0.1", "would send prompts and answers as plain text"),
    ],
)
def test_bad_addresses_are_named(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        RouterAddress(url, None, is_plain=False)


def test_plain_links_are_for_this_machine_or_said_to_be_wanted(tmp_path: Path) -> None:
    for url in ("http://localhost:1", "http://[::1]:1", "https://router"):
        RouterAddress(url, None, is_plain=False)
    RouterAddress("http://router:8000/prefix", None, is_plain=True)
    (bad := tmp_path / "ca").write_text("nothing")
    with pytest.raises(ValueError, match=r"--fleet-ca .* is not a file of certificates"):
        RouterAddress("https://router", bad, is_plain=False)


def test_a_short_key_is_refused(tmp_path: Path) -> None:
    (file := tmp_path / "key").write_text("short\n")
    with pytest.raises(
        ValueError, match="a key of 5 bytes, but it needs at least 32: write one with"
    ):
        read_key(file)
    file.write_text("k" * 32 + "\n")
    assert read_key(file) == KEY
