"""A receipt, read from a file that anybody may have written: alone, or in an answer or a stream."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json, to_json

from ridgeline.trust.receipts.answers import ShownAnswer, objects_in, shown_in
from ridgeline.trust.receipts.statement import Envelope, Receipt, Statement

MOST_BYTES = 32 << 20  # of a receipt: a prompt of a million tokens has fewer
_MOST_SHOWN = 90  # characters of a wrong value
_SUBJECT = re.compile("^(Input|String|Tuple|Dictionary) should")
_Model = TypeVar("_Model", bound=BaseModel)


class Signed(NamedTuple):
    """A receipt as it was given: what was signed, by whom, and which texts it is about.

    Attributes:
        payload: what was signed.
        signatures: of DSSE's envelope.
        subject: places of texts in the answer, with their digests.
        receipt: what is stated.
        shown: the answer that the receipt stands in, or its stream; None if it is alone.
    """

    payload: bytes
    signatures: tuple[dict[str, Any], ...]
    subject: tuple[tuple[str, str], ...]
    receipt: Receipt
    shown: ShownAnswer | None


def read(data: bytes) -> Signed:
    """Return what a file says. Raises ValueError, which names the place, if it is no receipt."""
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has {len(data):,} bytes, and a receipt has {MOST_BYTES:,} at most")
    receipts = list(_receipts(data))
    if len(receipts) > 1:
        raise ValueError(f"there are {len(receipts)} receipts in it: save one of the answers alone")
    envelope = _read(Envelope, receipts[0] if receipts else data)
    payload = base64.b64decode(envelope.payload)
    statement = _read(Statement, payload)
    objects_in(payload)  # no field of it is there twice
    subject = tuple((one.name, one.digest.sha256) for one in statement.subject)
    shown = shown_in(data)
    return Signed(payload, envelope.signatures, subject, statement.predicate, shown)


def _receipts(data: bytes) -> Iterator[object]:
    """Yield the receipts of an answer, or of the lines of a stream or batch."""
    try:
        values, is_whole = [from_json(data)], True
    except ValueError:
        values, is_whole = _lines(data), False
    for value in values:
        if isinstance(value, dict) and isinstance(said := value.get("response"), dict):
            value = said.get("body", said)  # of a batch, or of the Responses API
        last = value[-1] if isinstance(value, list) and value else value
        if isinstance(last, dict) and "receipt" in last:
            yield last["receipt"]
        elif is_whole and isinstance(last, dict) and last and "payloadType" not in last:
            raise ValueError('it has no field receipt: ask for one with "receipt": true')


def _lines(data: bytes) -> list[Any]:
    """Return the objects of a stream, or of JSON lines."""
    values = []
    for line in data.splitlines():
        with suppress(ValueError):
            values.append(from_json(line.removeprefix(b"data:").strip()))
    return values


def _read(kind: type[_Model], given: object) -> _Model:
    """Return what JSON says, as bytes or read already."""
    try:
        data = given if isinstance(given, bytes) else to_json(given)
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
