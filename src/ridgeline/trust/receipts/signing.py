"""Signatures of receipts: Ed25519 (RFC 8032) in the envelope of DSSE (secure-systems-lab/dsse).

The bytes of a statement and its type are signed, so nothing has to be written in one canonical way.
The package cryptography does this. Without it receipts are not signed, and a reader needs it only
to check a signature.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ridgeline.system.machine import make_once

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

KEY_FILE = "receipt.key"  # in Ridgeline's own folder, if no other is named
NEEDED = "signing receipts needs the package cryptography: pip install 'ridgeline[receipts]'"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
_SIGNATURE_BYTES = 64


class PublicKey(NamedTuple):
    """A key by which receipts are checked.

    Attributes:
        key: the library's.
        name: SHA-256 of the key in DER, in hex; the ``keyid`` of its signatures.
        pem: the key as a file has it.
    """

    key: Ed25519PublicKey
    name: str
    pem: str


class Signer:
    """Signs receipts with the key of a server's operator."""

    def __init__(self, file: Path) -> None:
        """Read the private key in a PEM file, which is made if there is none.

        Raises OSError, ValueError for a file that is no private key, and ModuleNotFoundError
        without the package.
        """
        make_once(file, _new_key)
        self._key = _private(file)
        self.public = _named(self._key.public_key())

    def sign(self, payload: bytes) -> dict[str, str]:
        """Return a signature of a statement, as an envelope has it."""
        signature = self._key.sign(_signed(payload))
        return {"keyid": self.public.name, "sig": base64.b64encode(signature).decode()}


def read_public_key(file: Path) -> PublicKey:
    """Return the public key in a PEM file, or that of the private key in it.

    Raises OSError, ValueError for a file that is neither, and ModuleNotFoundError.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    data = file.read_bytes()
    if b"PRIVATE KEY" in data:
        return _named(_private(file).public_key())
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise ValueError(
            f"{file} is not a public key for receipts: it must be Ed25519 in PEM format"
        )
    return _named(key)


def is_signed(payload: bytes, signature: dict[str, Any], public: PublicKey) -> bool:
    """Whether a signature of an envelope is that of a statement, by this key."""
    from cryptography.exceptions import InvalidSignature

    try:
        value = base64.b64decode(str(signature.get("sig")), validate=True)
        if len(value) != _SIGNATURE_BYTES:
            return False
        public.key.verify(value, _signed(payload))
    except (InvalidSignature, binascii.Error):
        return False
    return True


def may_be_one(signature: dict[str, Any]) -> bool:
    """Whether a signature of an envelope has the form of one, of a key that has the form of one."""
    try:
        value = base64.b64decode(str(signature.get("sig")), validate=True)
        key = bytes.fromhex(str(signature.get("keyid")))
    except ValueError:  # binascii.Error is one
        return False
    return len(value) == _SIGNATURE_BYTES and len(key) == hashlib.sha256().digest_size


def _signed(payload: bytes) -> bytes:
    """Return what is signed: DSSE's pre-authentication encoding of type and statement."""
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def _new_key() -> bytes:
    from cryptography.hazmat.primitives import serialization as to
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    return key.private_bytes(to.Encoding.PEM, to.PrivateFormat.PKCS8, to.NoEncryption())


def _private(file: Path) -> Ed25519PrivateKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(file.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # the second: it has a password
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ValueError(
            f"{file} is not a key that can sign receipts: make one with openssl genpkey "
            "-algorithm ed25519 -out FILE"
        )
    return key


def _named(key: Ed25519PublicKey) -> PublicKey:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    form = PublicFormat.SubjectPublicKeyInfo
    name = hashlib.sha256(key.public_bytes(Encoding.DER, form)).hexdigest()
    return PublicKey(key, name, key.public_bytes(Encoding.PEM, form).decode())
