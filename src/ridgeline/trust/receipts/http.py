"""``GET /v1/receipts/key``: the key by which a server's receipts are checked."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import FastAPI

from ridgeline.serve.dialects.openai.documented import ERRORS
from ridgeline.serve.http.errors import ApiError

if TYPE_CHECKING:  # imported only where receipts are asked for
    from ridgeline.trust.receipts.signing import Signer


def signer_of(file: Path | None) -> Signer | None:
    """Return what signs with the key in a file, by default that of this user.

    None without the package for it, unless a file was named. Raises OSError or ValueError for a
    file that cannot be read, or has no key.
    """
    from ridgeline.engine.setup.home import default_home
    from ridgeline.trust.receipts.signing import KEY_FILE, NEEDED, Signer

    try:
        return Signer(file or default_home() / KEY_FILE)
    except ModuleNotFoundError:
        if file:
            raise ValueError(f"--receipt-key: {NEEDED}") from None
        return None


def no_key() -> ApiError:
    """Return what clients are told where there is no key, without the path of its file."""
    message = "the key of receipts cannot be read or made: the operator may name another"
    return ApiError(503, f"{message} (--receipt-key)", code="receipts_failed")


def add_receipts(app: FastAPI, signer: Callable[[], Signer | None]) -> None:
    """Add the route; ``signer`` raises OSError or ValueError where there is no key."""

    @app.get("/v1/receipts/key", responses=ERRORS)
    def key() -> dict[str, str]:
        """Return the public key that receipts are signed with, in PEM, and its name."""
        try:
            found = signer()
        except (OSError, ValueError):
            raise no_key() from None
        if found is None:
            message = "receipts are not signed here: ridgeline[receipts] is not installed"
            raise ApiError(404, message, code="receipts_unsigned")
        return {"keyid": found.public.name, "public_key": found.public.pem}
