"""The statement of a receipt: what an answer is a function of, and the answer.

It is an in-toto statement (in-toto.io/Statement/v1) about the texts that were shown.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ridgeline import __version__
from ridgeline.api.receipts.signing import PAYLOAD_TYPE
from ridgeline.core.engine import changed
from ridgeline.core.params import SamplingParams
from ridgeline.decoding.messages.calls import Piece
from ridgeline.decoding.messages.message import REASONINGS, MessageForm

FILTERED = "content_filter"  # how an answer ended that a rule has ended
NO_REASONING = "none"
ENGINE = f"ridgeline {__version__}"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://github.com/ridgeline-llm/ridgeline/receipt/v1"
_NOT_OF_ANSWERS = ("prompt_logprobs", "prediction", "truncate_prompt_tokens")  # change no token


class Tokens(NamedTuple):
    """Token ids, or only their digest where they must stay private.

    Attributes:
        num: how many there are.
        ids: the ids themselves; None where they are not shown.
        sha256: of the salt and the ids; empty where they are shown.
        salt: random, in hex, against finding short texts by trying them all.
    """

    num: int
    ids: tuple[int, ...] | None
    sha256: str = ""
    salt: str = ""

    @classmethod
    def of(cls, ids: Sequence[int], *, are_told: bool) -> Tokens:
        """Return ids, or their digest unless they ``are_told``."""
        if are_told:
            return cls(len(ids), tuple(ids))
        salt = secrets.token_hex(16)
        return cls(len(ids), None, _salted(ids, salt), salt)

    def are(self, ids: Sequence[int]) -> bool:
        """Whether these are the tokens."""
        return tuple(ids) == self.ids if self.ids is not None else self._has_digest_of(ids)

    def _has_digest_of(self, ids: Sequence[int]) -> bool:
        return len(ids) == self.num and _salted(ids, self.salt) == self.sha256

    def to_json(self) -> dict[str, Any]:
        """Return what stands in a receipt."""
        if self.ids is not None:
            return {"ids": list(self.ids)}
        return {"num": self.num, "sha256": self.sha256, "salt": self.salt}


class StatedAnswer(NamedTuple):
    """One answer to a prompt.

    Attributes:
        tokens: all that were drawn for it, or until a rule ended it.
        finish: why it ended.
        stop: the stop string or id that ended it.
        logprobs: digest of the tokens' log-probabilities, if they were asked for.
        parts: digests of the texts that were shown, by their places in a message; empty where
            rules may have changed them.
    """

    tokens: Tokens
    finish: str
    stop: str | int | None
    logprobs: str | None
    parts: Mapping[str, str]


class StatedPrompt(NamedTuple):
    """A prompt, its random seed, and its answers in the engine's order."""

    tokens: Tokens
    seed: int
    answers: tuple[StatedAnswer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What is stated.

    Attributes:
        engine: name and version.
        fingerprint: that of the server, with the adapter's digest.
        model: its name, its digest, and those of its files by their names.
        adapter: digest of the adapter, in hex; empty for none.
        formats: of the backend: its name, those of weights and cache.
        max_model_len: some models' positions and the longest answer depend on it.
        template: SHA-256 of the chat template.
        parsers: how calls and reasoning are read.
        code: digest of our code, and ``libraries`` the versions of others'.
        params: the sampling as it took effect, without a seed.
        form: what a message may have, None for text alone.
        narrows: whether llama.cpp's sampler for the middle of a text acts.
        rules: version and section of the rules that answers were under, if there were any.
        prompts: with their answers.
        request: its id. Like ``time`` it is stated by the server, and nothing depends on it.
        time: when the answer was complete, UTC.
    """

    engine: str
    fingerprint: str
    model: Mapping[str, Any]
    adapter: str
    formats: tuple[str, str, str]
    max_model_len: int
    template: str
    parsers: tuple[str, str]
    code: str
    libraries: tuple[str, ...]
    params: SamplingParams
    form: MessageForm | None
    narrows: bool
    rules: str | None
    prompts: tuple[StatedPrompt, ...]
    request: str
    time: str

    def sampling(self, prompt: StatedPrompt) -> SamplingParams:
        """Return the parameters of one of the prompts."""
        return replace(self.params, seed=prompt.seed)


def parts_of(pieces: Iterable[Piece]) -> dict[str, str]:
    """Return digests of the texts of a message, by their places in it."""
    texts = {"content": ""}
    calls, call = 0, ""
    for kind, text in pieces:
        if kind == "call":
            call, calls = f"tool_calls[{calls}].function.", calls + 1
            texts |= {f"{call}name": text, f"{call}arguments": ""}
        else:
            names = {"arguments": f"{call}arguments", "reasoning": "reasoning_content"}
            name = names.get(kind, kind)
            texts[name] = texts.get(name, "") + text
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}


def digest_of_logprobs(logprobs: Iterable[float]) -> str:
    """Return the digest of log-probabilities, as float64."""
    packed = b"".join(struct.pack("<d", one) for one in logprobs)
    return hashlib.sha256(packed).hexdigest()


def name_of_reasoning(markers: object) -> str:
    """Return by which parser reasoning in these markers is read."""
    return next((name for name, one in REASONINGS.items() if one == markers), NO_REASONING)


def of_answers(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that answers depend on and that are not the default."""
    found = {name: one for name, one in changed(params).items() if name not in _NOT_OF_ANSWERS}
    found.pop("seed", None)  # stands beside each prompt
    if "logprobs" in found:
        found["logprobs"] = 0  # the number of others that are ranked beside each token is no matter
    return found


def _salted(ids: Sequence[int], salt: str) -> str:
    return hashlib.sha256(f"{salt}{list(ids)}".encode()).hexdigest()


# --- written ---------------------------------------------------------------------------------


def written(receipt: Receipt, shown: Mapping[str, str]) -> bytes:
    """Return a statement about texts that were ``shown``: their digests, by their places."""
    subject = [{"name": name, "digest": {"sha256": one}} for name, one in shown.items()]
    said = {name: getattr(receipt, name) for name in Receipt.__dataclass_fields__}
    said["params"] = of_answers(receipt.params)
    said["form"] = _form_said(receipt.form)
    said["prompts"] = [_prompt_said(one) for one in receipt.prompts]
    statement = {
        "_type": STATEMENT,
        "subject": subject,
        "predicateType": PREDICATE,
        "predicate": said,
    }
    return json.dumps(statement, separators=(",", ":")).encode()


def enveloped(payload: bytes, signatures: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return a receipt as clients get it: a statement in DSSE's envelope."""
    return {
        "payloadType": PAYLOAD_TYPE,
        "payload": base64.b64encode(payload).decode(),
        "signatures": list(signatures),
    }


def _prompt_said(prompt: StatedPrompt) -> dict[str, Any]:
    answers = [one._asdict() | {"tokens": one.tokens.to_json()} for one in prompt.answers]
    return {"tokens": prompt.tokens.to_json(), "seed": prompt.seed, "answers": answers}


def _form_said(form: MessageForm | None) -> dict[str, Any] | None:
    if form is None:
        return None
    use = form.tools[1] if form.tools else None
    tools = use and {
        "tools": [one._asdict() for one in use.tools],
        "is_required": use.is_required,
        "is_parallel": use.is_parallel,
    }
    reasons = form.reasoning is not None
    return {
        "reasons": reasons,
        "is_reasoning": form.is_reasoning,
        "has_body": form.has_body,
        "tools": tools,
    }
