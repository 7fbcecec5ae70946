"""A receipt, read from a file.

Anybody may have written it, so each field is checked. One that is not known is an error: what is
not checked must not look proved.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from ridgeline.api.receipts.signing import PAYLOAD_TYPE
from ridgeline.api.receipts.statement import (
    NO_REASONING,
    PREDICATE,
    STATEMENT,
    Receipt,
    StatedAnswer,
    StatedPrompt,
    Tokens,
    of_answers,
)
from ridgeline.core.params import SamplingParams
from ridgeline.decoding.messages.message import REASONINGS, MessageForm
from ridgeline.decoding.messages.tools import Tool, ToolFormat, ToolUse
from ridgeline.decoding.search import check_search
from ridgeline.foresight.record_json import params_from

MOST_BYTES = 32 << 20  # of a receipt: a prompt of a million tokens has fewer


class Envelope(NamedTuple):
    """A receipt as it was given: what was signed, by whom, and which texts it is about."""

    payload: bytes
    signatures: tuple[dict[str, Any], ...]
    shown: Mapping[str, str]
    receipt: Receipt


def read(data: bytes) -> Envelope:
    """Return what a file says. Raises ValueError, which names the place, if it is no receipt."""
    if len(data) > MOST_BYTES:
        raise ValueError(f"it has {len(data):,} bytes, and a receipt has {MOST_BYTES:,} at most")
    outer = _Fields(_json(data), "")
    if outer.text("payloadType") != PAYLOAD_TYPE:
        raise ValueError(f"payloadType is not {PAYLOAD_TYPE}: this is no receipt")
    try:
        payload = base64.b64decode(outer.text("payload"), validate=True)
    except (binascii.Error, ValueError):
        raise ValueError("payload is not written in base64") from None
    signatures = tuple(_mapping(one, "signatures") for one in outer.items("signatures"))
    outer.end()
    statement = _Fields(_json(payload), "")
    for name, wanted in (("_type", STATEMENT), ("predicateType", PREDICATE)):
        if (found := statement.text(name)) != wanted:
            raise ValueError(f"{name} is {found!r:.90}: this version reads {wanted}")
    shown: dict[str, str] = {}
    for one in statement.items("subject"):
        subject = _Fields(one, "subject")
        digest = _Fields(subject.mapping("digest"), "subject.digest")
        shown[subject.text("name")] = digest.text("sha256")
        subject.end()
        digest.end()
    said = _Fields(statement.mapping("predicate"), "")
    statement.end()
    receipt = _receipt(said)
    if receipt.rules is None:
        texts = [one.parts.values() for each in receipt.prompts for one in each.answers]
        if others := [
            name for name, text in shown.items() if not any(text in one for one in texts)
        ]:
            raise ValueError(f"subject {others[0]}: no answer of this receipt has that text")
    return Envelope(payload, signatures, shown, receipt)


class _Fields:
    """An object of JSON, whose fields are taken one by one. Each of them raises ValueError."""

    def __init__(self, value: object, at: str) -> None:
        self._at = f"{at}." if at else ""
        self._left = dict(_mapping(value, at or "it"))

    def take(self, name: str, *kinds: type) -> Any:
        """Return a field that has one of these types."""
        if name not in self._left:
            raise ValueError(f"{self._at}{name} is missing")
        value = self._left.pop(name)
        if type(value) not in kinds:
            names = " or ".join(kind.__name__ for kind in kinds)
            raise ValueError(f"{self._at}{name} is {value!r:.60}: it must be {names}")
        return value

    def text(self, name: str) -> str:
        return str(self.take(name, str))

    def number(self, name: str, least: int = 0, most: int = (1 << 64) - 1) -> int:
        value = self.take(name, int)
        if not least <= value <= most:
            raise ValueError(f"{self._at}{name} is {value}: it must be from {least} to {most}")
        return int(value)

    def mapping(self, name: str) -> dict[str, Any]:
        return _mapping(self.take(name, dict), self._at + name)

    def items(self, name: str) -> list[Any]:
        found: list[Any] = self.take(name, list)
        return found

    def texts(self, name: str) -> tuple[str, ...]:
        found = tuple(self.items(name))
        if not all(isinstance(one, str) for one in found):
            raise ValueError(f"{self._at}{name} must have texts")
        return found

    def end(self) -> None:
        """Raise ValueError if anything was not taken."""
        if self._left:
            raise ValueError(f"{self._at}{next(iter(self._left))} is not known in a receipt")


def _receipt(said: _Fields) -> Receipt:
    formats, parsers = said.texts("formats"), said.texts("parsers")
    if len(formats) != 3 or len(parsers) != 2:
        raise ValueError("formats must have three names, and parsers two")
    if parsers[1] not in (*REASONINGS, NO_REASONING):
        raise ValueError(f"parsers name {parsers[1]!r:.60}, which is no parser of reasoning")
    model = said.mapping("model")
    of_model = _Fields(model, "model")
    for name in ("name", "digest"):
        of_model.text(name)
    files = of_model.mapping("files")
    if not all(isinstance(one, str) for one in files.values()):
        raise ValueError("model.files must have digests")
    of_model.end()
    prompts = tuple(
        _prompt(_Fields(one, f"prompts[{i}]"), f"prompts[{i}]")
        for i, one in enumerate(said.items("prompts"))
    )
    params = _params(said.mapping("params"))
    found = Receipt(
        engine=said.text("engine"),
        fingerprint=said.text("fingerprint"),
        model=model,
        adapter=_hex(said.text("adapter"), "adapter"),
        formats=(formats[0], formats[1], formats[2]),
        max_model_len=said.number("max_model_len", 1, 1 << 31),
        template=said.text("template"),
        parsers=(parsers[0], parsers[1]),
        code=said.text("code"),
        libraries=said.texts("libraries"),
        params=params,
        form=_form(said.take("form", dict, type(None)), parsers[1]),
        narrows=said.take("narrows", bool),
        rules=said.take("rules", str, type(None)),
        prompts=prompts,
        request=said.text("request"),
        time=said.text("time"),
    )
    said.end()
    if not prompts:
        raise ValueError("prompts is empty: it is a receipt of no answer")
    for i, prompt in enumerate(prompts):
        if len(prompt.answers) != params.num_answers:
            raise ValueError(
                f"prompts[{i}] has {len(prompt.answers)} answers, and params ask for "
                f"{params.num_answers}"
            )
    return found


def _params(said: dict[str, Any]) -> SamplingParams:
    try:
        params = params_from(said)
        check_search(params)
    except (ValueError, TypeError) as error:
        raise ValueError(f"params: {error}") from None
    if of_answers(params).keys() != said.keys() or params.pool:
        odd = sorted(said.keys() ^ of_answers(params).keys()) or ["pool"]
        raise ValueError(f"params.{odd[0]} does not stand in a receipt so")
    return params


def _prompt(said: _Fields, at: str) -> StatedPrompt:
    found = StatedPrompt(
        _tokens(said.mapping("tokens"), f"{at}.tokens"),
        said.number("seed"),
        tuple(
            _answer(_Fields(one, f"{at}.answers[{i}]"), f"{at}.answers[{i}]")
            for i, one in enumerate(said.items("answers"))
        ),
    )
    said.end()
    if found.tokens.num == 0:
        raise ValueError(f"{at}.tokens are none")
    return found


def _answer(said: _Fields, at: str) -> StatedAnswer:
    parts = said.mapping("parts")
    if not all(isinstance(one, str) for one in parts.values()):
        raise ValueError(f"{at}.parts must have digests")
    found = StatedAnswer(
        _tokens(said.mapping("tokens"), f"{at}.tokens"),
        said.text("finish"),
        said.take("stop", str, int, type(None)),
        said.take("logprobs", str, type(None)),
        parts,
    )
    said.end()
    return found


def _tokens(value: dict[str, Any], at: str) -> Tokens:
    said = _Fields(value, at)
    if "ids" in value:
        ids = tuple(said.items("ids"))
        if not all(type(one) is int and 0 <= one < 1 << 31 for one in ids):
            raise ValueError(f"{at}.ids must be token ids")
        found = Tokens(len(ids), ids)
    else:
        found = Tokens(said.number("num"), None, said.text("sha256"), said.text("salt"))
    said.end()
    return found


def _form(value: dict[str, Any] | None, reasoning: str) -> MessageForm | None:
    if value is None:
        return None
    said = _Fields(value, "form")
    reasons = said.take("reasons", bool)
    if reasons and reasoning not in REASONINGS:
        raise ValueError(f"form.reasons, but parsers say {reasoning!r:.60} of reasoning")
    tools = said.take("tools", dict, type(None))
    found = MessageForm(
        REASONINGS[reasoning] if reasons else None,
        said.take("is_reasoning", bool),
        None if tools is None else (ToolFormat(""), _use(_Fields(tools, "form.tools"))),
        said.take("has_body", bool),
    )
    said.end()
    return found


def _use(said: _Fields) -> ToolUse:
    tools = []
    for i, one in enumerate(said.items("tools")):
        tool = _Fields(one, f"form.tools[{i}]")
        name, parameters = tool.text("name"), tool.mapping("parameters")
        tools.append(Tool(name, parameters, tool.take("is_strict", bool)))
        tool.end()
    found = ToolUse(tuple(tools), said.take("is_required", bool), said.take("is_parallel", bool))
    said.end()
    return found


def _hex(text: str, at: str) -> str:
    try:
        return bytes.fromhex(text).hex()
    except ValueError:
        raise ValueError(f"{at} is {text!r:.60}: it must be a digest in hex") from None


def _mapping(value: object, at: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{at} is {value!r:.60}: it must be an object")
    return value


def _json(data: bytes) -> object:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(data, parse_constant=refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply for a receipt") from None
    except ValueError as error:
        raise ValueError(f"this is not JSON: {error}") from None
