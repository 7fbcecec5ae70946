"""How a server on another machine and a router identify each other: both prove they have a key.

They speak over the link in short lines of JSON (``machine.proof``).
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from ridgeline.system.shared_secret import is_proof, proof

# A header of the request that becomes a link: it proves the key before a link takes any place.
TICKET = "x-ridgeline-link"
LINE_BYTES = 1 << 14  # the longest
GREETING_S = 10.0  # for both to identify each other
SILENT_S = 30.0  # after which a link is taken for dead
BEAT_S = 1.0  # between two signs of life
FOREIGN = "it does not know the key of this fleet"
_MOST_DIGITS = 20


class NotTaken(Exception):
    """The other side does not belong to us, or refuses us; the text says why."""


class Ticket(NamedTuple):
    """Which link a server asks for: its first, or the one that the router has given a number.

    Each further one can be had once, so a ticket that was overheard opens nothing.
    """

    server: str
    number: int  # 0: the first

    def written(self, key: bytes) -> str:
        """Return it as it stands in a header."""
        return f"{self.server} {self.number} {proof(key, 'ticket', self._words())}"

    @classmethod
    def read(cls, text: str, key: bytes) -> Ticket | None:
        """Return the ticket in a header; None if it was not written with this key."""
        server, _, rest = text.partition(" ")
        number, _, given = rest.partition(" ")
        if not (number.isascii() and number.isdigit() and len(number) < _MOST_DIGITS):
            return None
        ticket = cls(server, int(number))
        return ticket if is_proof(given, key, "ticket", ticket._words()) else None

    def _words(self) -> list[str]:
        return [self.server, str(self.number)]


class FleetLink:
    """A connection to the other side, over which lines go."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take a connection that says nothing else."""
        self.reader, self.writer = reader, writer

    def say(self, **fields: Any) -> None:
        """Send a line."""
        self.writer.write(json.dumps(fields).encode() + b"\n")

    async def hear(self, timeout_s: float = SILENT_S) -> dict[str, Any]:
        """Return the next line. Raises NotTaken if it is malformed, OSError at the end."""
        try:
            async with asyncio.timeout(timeout_s):
                line = await self.reader.readuntil(b"\n")
        except asyncio.LimitOverrunError:
            raise NotTaken(f"it sent a line of more than {LINE_BYTES} bytes") from None
        except (EOFError, TimeoutError) as error:
            raise ConnectionResetError("the link has ended") from error
        fields = _object(line)
        if fields is None:
            raise NotTaken("it sent something that is not a line of this protocol")
        return fields

    def close(self) -> None:
        """End it."""
        self.writer.close()


def derived(key: bytes, of: str) -> str:
    """Return a key for one purpose, from which the fleet's own cannot be derived."""
    return hmac.new(key, f"derived {of}".encode(), "sha256").hexdigest()


async def greet_router(link: FleetLink, key: bytes, hello: Mapping[str, Any]) -> dict[str, Any]:
    """Introduce a server; return what the router answers. Raises NotTaken or OSError."""
    nonces = [_text(await link.hear(GREETING_S), "nonce"), secrets.token_hex(16)]
    said = json.dumps(hello)
    link.say(nonce=nonces[1], said=said, proof=proof(key, "server", nonces, said))
    answer = await link.hear(GREETING_S)
    if "refused" in answer:
        raise NotTaken(_text(answer, "refused")[:300])
    return _proved(answer, key, "router", nonces)


async def greet_server(link: FleetLink, key: bytes) -> tuple[dict[str, Any], list[str]]:
    """Let a server introduce itself; return what it says, and what ``accept`` needs.

    Raises NotTaken, once it has been told, or OSError.
    """
    link.say(nonce=(nonce := secrets.token_hex(16)))
    try:
        fields = await link.hear(GREETING_S)
        nonces = [nonce, _text(fields, "nonce")]
        return _proved(fields, key, "server", nonces), nonces
    except NotTaken as error:
        link.say(refused=str(error))
        raise


def accept(link: FleetLink, key: bytes, nonces: list[str], **answer: Any) -> None:
    """Let a server know that this is its router, and what it answers."""
    said = json.dumps(answer)
    link.say(said=said, proof=proof(key, "router", nonces, said))


def _proved(fields: dict[str, Any], key: bytes, role: str, nonces: list[str]) -> dict[str, Any]:
    """Return what a line says, if its sender has the key. Raises NotTaken."""
    said = _text(fields, "said")
    if not is_proof(_text(fields, "proof"), key, role, nonces, said):
        raise NotTaken(FOREIGN)
    content = _object(said)
    if content is None:
        raise NotTaken("it says what no server says")
    return content


def _object(text: str | bytes) -> dict[str, Any] | None:
    """Return an object of JSON whose texts can all be written; None if this is none."""
    try:
        document = json.loads(text)
        json.dumps(document, ensure_ascii=False).encode()  # no half of a surrogate pair
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _text(fields: Mapping[str, Any], name: str) -> str:
    text = fields.get(name)
    if not isinstance(text, str):
        raise NotTaken(f"it sent no {name}")
    return text


async def join_streams(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    other_reader: asyncio.StreamReader,
    other_writer: asyncio.StreamWriter,
) -> None:
    """Pass bytes on between two connections until either ends; then both end."""

    async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()

    ways = [
        asyncio.ensure_future(pass_on(reader, other_writer)),
        asyncio.ensure_future(pass_on(other_reader, writer)),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        writer.close()
        other_writer.close()
