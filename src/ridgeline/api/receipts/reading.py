"""A receipt, read from a file that anybody may have written."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError

from ridgeline.api.receipts.statement import Envelope, Receipt, Statement

MOST_BYTES = 32 << 20  # of a receipt: a prompt of a million tokens has fewer
_MOST_SHOWN = 90  # characters of a wrong value
_SUBJECT = re.compile("^(Input|String|Tuple|Dictionary) should")
_Model = TypeVar("_Model", bound=BaseModel)


class Signed(NamedTuple):
    """A receipt as it was given: what was signed, by whom, and which texts it is about."""

    payload: bytes
    signatures: tuple[dict[str, Any], ...]
    shown: Mapping[str, str]
    receipt: Receipt


def read(data: bytes) -> Signed:
    """Return what a file says. Raises ValueError, which names the place, if it is no receipt."""
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has {len(data):,} bytes, and a receipt has {MOST_BYTES:,} at most")
    envelope = _read(Envelope, data)
    payload = base64.b64decode(envelope.payload)
    statement = _read(Statement, payload)
    shown = {one.name: one.digest.sha256 for one in statement.subject}
    return Signed(payload, envelope.signatures, shown, statement.predicate)


def _read(kind: type[_Model], data: bytes) -> _Model:
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        raise ValueError(_first(error.errors(include_url=False)[0])) from None


def _first(problem: Mapping[str, Any]) -> str:
    """Return pydantic's words about a field in ours. A receipt has no field ``predicate``."""
    steps = [one for one in problem["loc"] if one not in ("predicate", "str", "int")]
    steps = [one for one in steps if not str(one).startswith("[")]
    at = "".join(f"[{one}]" if isinstance(one, int) else f".{one:.80}" for one in steps)
    at = at.removeprefix(".")
    if problem["type"] == "json_invalid":
        return f"this is not JSON that can be read: {problem['ctx']['error']}"
    if problem["type"] == "missing":
        return f"{at} is missing"
    if problem["type"] == "extra_forbidden":
        return f"{at} is not known in a receipt"
    text = _SUBJECT.sub("it must", problem["msg"].removeprefix("Value error, "))
    if isinstance(problem["input"], BaseModel | dict) and problem["type"] == "value_error":
        return f"{at}: {text}" if at else text
    return f"{at or 'it'} is {problem['input']!r:.{_MOST_SHOWN}}: {text}"
