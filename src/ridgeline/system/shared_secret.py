"""A key that two machines have: both prove it to each other, and neither sends it.

Each side sends a number that it draws for this connection alone, and a MAC (HMAC-SHA256, RFC 2104)
of both numbers, of its role and of what it says: so what was heard elsewhere proves nothing, what
is said cannot be changed, and no proof can be sent back.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Sequence
from pathlib import Path

_KEY_BYTES = 32  # the least: shorter ones can be guessed from what was heard


def read_key(file: Path) -> bytes:
    """Return the key in a file. Raises OSError, and ValueError if it is too short."""
    key = file.read_bytes().strip()
    if len(key) < _KEY_BYTES:
        way_out = f"write one with: openssl rand -hex 32 > {file}"
        raise ValueError(
            f"{file} has a key of {len(key)} bytes, but it needs at least {_KEY_BYTES}: {way_out}"
        )
    return key


def proof(key: bytes, role: str, nonces: Sequence[str], said: str = "") -> str:
    """Return what proves, in hex, that the speaker of this in this role has the key."""
    return hmac.new(key, json.dumps([role, *nonces, said]).encode(), "sha256").hexdigest()


def is_proof(given: str, key: bytes, role: str, nonces: Sequence[str], said: str = "") -> bool:
    """Whether this is what ``proof`` returns, in a time that does not tell how much of it is."""
    whole = proof(key, role, nonces, said)
    return hmac.compare_digest(given.encode(errors="replace"), whole.encode())
