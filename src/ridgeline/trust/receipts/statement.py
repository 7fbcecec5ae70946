"""The statement of a receipt: what an answer is a function of, and the answer.

It is an in-toto statement (in-toto.io/Statement/v1) about the texts that were shown. These models
both write and read it. Anybody may have written what is read, so nothing is coerced, and a field
that is not known is an error: what is not checked must not look proved.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainSerializer,
    PlainValidator,
    Tag,
    model_validator,
)

from ridgeline.core.decoding.search import check_search
from ridgeline.core.engine import changed
from ridgeline.core.params import SamplingParams
from ridgeline.foresight.structure import params_from
from ridgeline.text.messages.message import REASONINGS, MessageForm
from ridgeline.text.messages.tool_calls import MessageDelta, texts_of
from ridgeline.text.messages.tools import Tool, ToolFormat, ToolUse
from ridgeline.trust.receipts.signing import PAYLOAD_TYPE
from ridgeline.version import __version__

FILTERED = "content_filter"  # how an answer ended that a rule has ended
NO_REASONING = "none"
ENGINE = f"ridgeline {__version__}"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://github.com/ridgeline-llm/ridgeline/receipt/v1"
_NOT_OF_ANSWERS = ("prompt_logprobs", "prediction", "truncate_prompt_tokens")  # change no token


def _is(wanted: str) -> AfterValidator:
    def check(value: str) -> str:
        if value != wanted:
            raise ValueError(f"this version reads {wanted}")
        return value

    return AfterValidator(check)


def _hex(text: str) -> str:
    try:
        return bytes.fromhex(text).hex()
    except ValueError:
        raise ValueError("it must be a digest in hex") from None


def _base64(text: str) -> str:
    try:
        base64.b64decode(text, validate=True)
    except binascii.Error:
        raise ValueError("it must be base64") from None
    return text


def _reasoning(name: str) -> str:
    if name not in (*REASONINGS, NO_REASONING):
        raise ValueError("this is no parser of reasoning")
    return name


def of_answers(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that answers depend on and that are not the default."""
    values = {name: one for name, one in changed(params).items() if name not in _NOT_OF_ANSWERS}
    values.pop("seed", None)  # stands beside each prompt
    if "logprobs" in values:
        values["logprobs"] = 0  # how many others are ranked beside each token is no matter
    return values


def _params(said: SamplingParams | Mapping[str, Any]) -> SamplingParams:
    """Return the sampling of an answer, or what a receipt says of it. Raises ValueError."""
    if isinstance(said, SamplingParams):
        return said
    try:
        params = params_from(said)
        check_search(params)
    except TypeError as error:
        raise ValueError(str(error)) from None
    if of_answers(params).keys() != said.keys() or params.pool:
        odd = sorted(said.keys() ^ of_answers(params).keys()) or ["pool"]
        raise ValueError(f"{odd[0]} is missing, or not allowed in a receipt")
    return params


class _Stated(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class Tokens(_Stated):
    """Token ids."""

    ids: tuple[Annotated[int, Field(ge=0, lt=1 << 31)], ...]

    @property
    def num(self) -> int:
        """How many there are."""
        return len(self.ids)

    def are(self, ids: Sequence[int]) -> bool:
        """Whether these are the tokens."""
        return tuple(ids) == self.ids


class HiddenTokens(_Stated):
    """Only the digest of token ids, where they must stay private.

    Attributes:
        num: how many there are.
        sha256: of the salt and the ids.
        salt: random, in hex, against finding short texts by trying them all.
    """

    ids: ClassVar[None] = None
    num: int = Field(ge=0)
    sha256: str
    salt: str

    def are(self, ids: Sequence[int]) -> bool:
        """Whether these are the tokens."""
        return len(ids) == self.num and _salted(ids, self.salt) == self.sha256


def tokens_of(ids: Sequence[int], *, are_told: bool) -> Tokens | HiddenTokens:
    """Return ids, or their digest unless they ``are_told``."""
    if are_told:
        return Tokens(ids=tuple(ids))
    salt = secrets.token_hex(16)
    return HiddenTokens(num=len(ids), sha256=_salted(ids, salt), salt=salt)


def _salted(ids: Sequence[int], salt: str) -> str:
    return hashlib.sha256(f"{salt}{list(ids)}".encode()).hexdigest()


def _kind_of_tokens(value: Any) -> str:
    is_hidden = isinstance(value, HiddenTokens) or (isinstance(value, dict) and "ids" not in value)
    return "[digest]" if is_hidden else "[ids]"


_Tokens = Annotated[
    Annotated[Tokens, Tag("[ids]")] | Annotated[HiddenTokens, Tag("[digest]")],
    Discriminator(_kind_of_tokens),
]


class StatedAnswer(_Stated):
    """One answer to a prompt.

    Attributes:
        tokens: all that were drawn for it, or until a rule ended it.
        finish: why it ended.
        stop: the stop string or id that ended it.
        logprobs: digest of the tokens' log-probabilities, if they were asked for.
        parts: digests of the texts that were shown, by their places in a message; empty where
            rules may have changed them.
    """

    tokens: _Tokens
    finish: str
    stop: str | int | None
    logprobs: str | None
    parts: dict[str, str]


class StatedPrompt(_Stated):
    """A prompt, its random seed, and its answers in the engine's order."""

    tokens: _Tokens
    seed: int = Field(ge=0, lt=1 << 64)
    answers: tuple[StatedAnswer, ...]

    @model_validator(mode="after")
    def _has_tokens(self) -> Self:
        if not self.tokens.num:
            raise ValueError("there are no tokens: a prompt needs at least one")
        return self


class StatedModel(_Stated):
    """A model: its name, its digest, and those of its files by their names."""

    name: str
    digest: str
    files: dict[str, str]


class _StatedTool(_Stated):
    name: str
    parameters: dict[str, Any]
    is_strict: bool


class _StatedTools(_Stated):
    tools: tuple[_StatedTool, ...]
    is_required: bool
    is_parallel: bool


class StatedForm(_Stated):
    """What a message may have, as ``MessageForm``, whose markers are those of the parsers."""

    reasons: bool
    is_reasoning: bool
    has_body: bool
    tools: _StatedTools | None

    @classmethod
    def of(cls, form: MessageForm) -> Self:
        """State a form."""
        use = form.tools[1] if form.tools else None
        tools = use and _StatedTools(
            tools=tuple(_StatedTool(**one._asdict()) for one in use.tools),
            is_required=use.is_required,
            is_parallel=use.is_parallel,
        )
        reasons = form.reasoning is not None
        return cls(
            reasons=reasons, is_reasoning=form.is_reasoning, has_body=form.has_body, tools=tools
        )

    def message_form(self, reasoning: str, tool_format: ToolFormat) -> MessageForm:
        """Return the form, with the markers of a parser of reasoning and a format of calls."""
        use = self.tools and ToolUse(
            tuple(Tool(**dict(one)) for one in self.tools.tools),
            self.tools.is_required,
            self.tools.is_parallel,
        )
        return MessageForm(
            REASONINGS[reasoning] if self.reasons else None,
            self.is_reasoning,
            (tool_format, use) if use else None,
            self.has_body,
        )


class Receipt(_Stated):
    """What is stated.

    Attributes:
        engine: name and version.
        fingerprint: that of the server, with the adapter's digest.
        model: what computed it.
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
    model: StatedModel
    adapter: Annotated[str, AfterValidator(_hex)]
    formats: tuple[str, str, str]
    max_model_len: int = Field(ge=1, lt=1 << 31)
    template: str
    parsers: tuple[str, Annotated[str, AfterValidator(_reasoning)]]
    code: str
    libraries: tuple[str, ...]
    params: Annotated[SamplingParams, PlainValidator(_params), PlainSerializer(of_answers)]
    form: StatedForm | None
    narrows: bool
    rules: str | None
    prompts: tuple[StatedPrompt, ...]
    request: str
    time: str

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.form and self.form.reasons and self.parsers[1] not in REASONINGS:
            raise ValueError(f"form.reasons, but parsers say {self.parsers[1]} of reasoning")
        if not self.prompts:
            raise ValueError("prompts is empty: a receipt needs at least one")
        wanted = self.params.num_answers
        for i, prompt in enumerate(self.prompts):
            if (num := len(prompt.answers)) != wanted:
                raise ValueError(f"prompts[{i}] has {num} answers, and params ask for {wanted}")
            if self.rules is None and any(one.finish == FILTERED for one in prompt.answers):
                raise ValueError(f"prompts[{i}] has an answer that a rule ended, and rules is null")
        return self

    def sampling(self, prompt: StatedPrompt) -> SamplingParams:
        """Return the parameters of one of the prompts."""
        return replace(self.params, seed=prompt.seed)


class _Digest(_Stated):
    sha256: str


class _Subject(_Stated):
    name: str
    digest: _Digest


class Statement(_Stated):
    """A receipt, and the texts that it is about."""

    kind: Annotated[str, _is(STATEMENT)] = Field(alias="_type")
    subject: tuple[_Subject, ...]
    predicate_type: Annotated[str, _is(PREDICATE)] = Field(alias="predicateType")
    predicate: Receipt


class Envelope(_Stated):
    """A statement as clients get it, in DSSE's envelope: what was signed, and by whom."""

    payload_type: Annotated[str, _is(PAYLOAD_TYPE)] = Field(alias="payloadType")
    payload: Annotated[str, AfterValidator(_base64)]
    signatures: tuple[dict[str, Any], ...]


def statement_of(receipt: Receipt, shown: Mapping[str, str]) -> bytes:
    """Return a statement about texts that were ``shown``: their digests, by their places."""
    statement = Statement(
        _type=STATEMENT,
        subject=tuple(
            _Subject(name=name, digest=_Digest(sha256=one)) for name, one in shown.items()
        ),
        predicateType=PREDICATE,
        predicate=receipt,
    )
    return statement.model_dump_json(by_alias=True).encode()


def enveloped(payload: bytes, signatures: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Return a receipt as clients get it: a statement in DSSE's envelope."""
    text = base64.b64encode(payload).decode()
    envelope = Envelope(payloadType=PAYLOAD_TYPE, payload=text, signatures=tuple(signatures))
    return envelope.model_dump(mode="json", by_alias=True)


def parts_of(pieces: Iterable[MessageDelta]) -> dict[str, str]:
    """Return digests of the texts of a message, by their places in it.

    Some APIs show text before and after a call apart: then each stands there, too.
    """
    pieces = list(pieces)
    texts, runs = texts_of(pieces), dict[str, list[str]]()
    for kind, run in groupby(pieces, lambda one: one.kind):
        if kind in ("content", "reasoning"):
            runs.setdefault(kind, []).append("".join(text for _, text in run))
    for kind, each in runs.items():
        if len(each) > 1:
            texts |= {f"{kind}[{i}]": text for i, text in enumerate(each)}
    return {name: digest_of(text) for name, text in texts.items()}


def digest_of(text: str) -> str:
    """Return the digest of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of_logprobs(logprobs: Iterable[float]) -> str:
    """Return the digest of log-probabilities, as float64."""
    packed = b"".join(struct.pack("<d", one) for one in logprobs)
    return hashlib.sha256(packed).hexdigest()


def name_of_reasoning(markers: object) -> str:
    """Return by which parser reasoning in these markers is read."""
    return next((name for name, one in REASONINGS.items() if one == markers), NO_REASONING)
