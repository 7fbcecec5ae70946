"""Computes the answers of a receipt again: they are equal, or differ from some place on.

The answer's own tokens are the drafts, so a step checks several; the engine's own rule decides each
of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ridgeline.core.request import NO_ADAPTER, Adapter
from ridgeline.core.step import Event
from ridgeline.engine.llm import LLM
from ridgeline.engine.setup.identity import code_digest, with_adapter
from ridgeline.text.messages.message import AnswerReader
from ridgeline.text.messages.tool_calls import MessageDelta
from ridgeline.trust.receipts.compare import Computed
from ridgeline.trust.receipts.statement import (
    ENGINE,
    FILTERED,
    Receipt,
    StatedAnswer,
    digest_of_logprobs,
    parts_of,
)

_SHOWN_HEX = 12


def other_files(receipt: Receipt, digest: str, files: Mapping[str, str]) -> Iterator[str]:
    """Yield which of a model's files, by their digests, are not those of a receipt."""
    said = receipt.model.files
    if len(said) == len(files) == 1:  # the name of a file alone does not count
        said = dict.fromkeys(files, *said.values())
    names = [name for name in sorted({*files, *said}) if files.get(name) != said.get(name)]
    for name in names:
        yield f"the file {name} differs: {_two(said.get(name), files.get(name))}"
    if not names and digest != receipt.model.digest:
        yield f"the model differs: {_two(receipt.model.digest, digest)}"


def opened(
    receipt: Receipt,
    model: str | Path,
    *,
    chat_template: Path | None = None,
    **options: Any,
) -> LLM:
    """Load a model with the formats of a receipt. Raises ValueError as ``LLM`` does."""
    backend, dtype, kv_cache_dtype = receipt.formats
    formats = {"backend": backend, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
    llm = LLM(model, **formats, max_model_len=receipt.max_model_len, **options)
    if chat_template is not None:
        llm.text.use_chat_template(chat_template)
    llm.text.choose_parsers(*receipt.parsers)
    return llm


def notes_on(receipt: Receipt, llm: LLM) -> Iterator[str]:
    """Yield what differs here from the receipt, though the answer should still be the same."""
    facts = llm.facts
    if receipt.code != code_digest():
        yield f"the code differs: {_two(receipt.code, code_digest())}, {receipt.engine}"
    elif receipt.engine != ENGINE:
        yield f"the receipt names {receipt.engine}, but its code is that of {ENGINE}"
    if list(receipt.libraries) != facts["libraries"]:
        says, has = (", ".join(one) for one in (receipt.libraries, facts["libraries"]))
        yield f"the libraries differ: {says} in the receipt, {has} here"
    here = with_adapter(llm.fingerprint, bytes.fromhex(receipt.adapter))
    if receipt.code == code_digest() and receipt.fingerprint != here:
        yield f"its fingerprint is {receipt.fingerprint}, here {here}: other defaults"


def differences(receipt: Receipt, llm: LLM, prompts: Sequence[Sequence[int]]) -> Iterator[str]:
    """Yield where answers to ``prompts`` are not those of a receipt: for each the first place.

    ``llm`` is as ``opened`` returns it. Raises ValueError if a prompt can never run.
    """
    return iter(compute(receipt, llm, prompts)[0])


def compute(
    receipt: Receipt, llm: LLM, prompts: Sequence[Sequence[int]]
) -> tuple[list[str], dict[tuple[int, int], Computed]]:
    """Return what ``differences`` yields, and the answers, by prompt and number, as computed."""
    answers: dict[tuple[int, int], Computed] = {}
    return list(_differences(receipt, llm, prompts, answers)), answers


def _differences(
    receipt: Receipt,
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    answers: dict[tuple[int, int], Computed],
) -> Iterator[str]:
    if receipt.template != llm.facts["template"]:
        yield f"the chat template differs: {_two(receipt.template, llm.facts['template'])}"
        return
    adapter = _adapter_of(receipt, llm)
    if adapter is None:
        yield f"no adapter here has the digest {receipt.adapter[:_SHOWN_HEX]}: give it with --lora"
        return
    receipt.params.validate_ids(llm.text.vocab_size)
    for i, (ids, prompt) in enumerate(zip(prompts, receipt.prompts, strict=True)):
        most = max((max(one.tokens.ids or (0,)) for one in prompt.answers), default=0)
        if not prompt.tokens.are(ids):
            yield f"prompt {i} is not the receipt's"
        elif most >= llm.text.vocab_size:
            ends = f"this model's ids end at {llm.text.vocab_size - 1}"
            yield f"an answer to prompt {i} has the token {most}, and {ends}"
        else:
            computed = _ComputedPrompt(receipt, llm, adapter, i, tuple(llm.text.encode(list(ids))))
            yield from computed.compute()
            answers |= {(i, k): one.computed for k, one in enumerate(computed.answers)}


def _adapter_of(receipt: Receipt, llm: LLM) -> Adapter | None:
    if not receipt.adapter:
        return NO_ADAPTER
    adapters = llm.adapters
    digests = {adapters.digest_of(name).hex(): name for name in adapters.names}
    name = digests.get(receipt.adapter)
    return None if name is None else adapters.lease(name)


class _ComputedPrompt:
    """A prompt of a receipt, whose answers are computed.

    Attributes:
        answers: as far as they are known.
    """

    def __init__(
        self, receipt: Receipt, llm: LLM, adapter: Adapter, number: int, ids: tuple[int, ...]
    ) -> None:
        self._receipt, self._llm, self._adapter = receipt, llm, adapter
        self._number, self._ids = number, ids
        stated = receipt.form
        parser = receipt.parsers[1]
        self._form = stated.message_form(parser, llm.text.tool_format) if stated else None
        self._said = receipt.prompts[number]
        self.answers = [
            _Answer(llm, receipt, one, AnswerReader(self._form)) for one in self._said.answers
        ]

    def compute(self) -> Iterator[str]:
        """Compute the answers; yield the first difference of one of them."""
        engine, text, form = self._llm.engine, self._llm.text, self._form
        params = self._receipt.sampling(self._said)
        request = engine.add(
            self._ids,
            params,
            new_text=partial(text.new_answer, self._ids, params, form),
            adapter=self._adapter,
            prediction=self._said.answers[0].tokens.ids or (),
            new_constraint=text.new_constraint(params, form),
            token_rules=text.lexicon.rules(params, narrows=self._receipt.narrows),
        )
        try:
            while not all(one.is_settled for one in self.answers):
                for event in engine.step():
                    answer = event.seq_id[1]
                    if wrong := self.answers[answer].take(event):
                        yield f"answer {answer} to prompt {self._number} {wrong}"
                        return
        finally:
            engine.abort(request)


class _Answer:
    """One answer as it is computed, beside what a receipt says of it.

    Attributes:
        is_settled: whether it is known to be the same.
    """

    def __init__(
        self, llm: LLM, receipt: Receipt, said: StatedAnswer, reader: AnswerReader
    ) -> None:
        self._spell, self._said, self._reader = llm.text.spell, said, reader
        self._is_ruled = receipt.rules is not None
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._pieces: list[MessageDelta] = []
        self._end_of: tuple[str, str | int | None] = ("", None)
        self.is_settled = False

    @property
    def computed(self) -> Computed:
        """What it is, once it is settled."""
        return Computed(self._pieces, *self._end_of)

    def take(self, event: Event) -> str | None:
        """Take what comes next; return how it differs, if it does."""
        if self.is_settled:
            return None
        if event.error:
            return f"cannot be computed: {event.error}"
        if event.token is not None:
            if wrong := self._token(event.token):
                return wrong
            self._logprobs += [event.logprobs.logprob] if event.logprobs else []
        self._pieces += self._reader.take(event)
        is_cut = self._said.finish == FILTERED and len(self._tokens) == self._said.tokens.num
        if is_cut or event.finish_reason is not None:
            self.is_settled = True
            self._end_of = str(event.finish_reason), event.stop_reason
            return self._end(event)
        return None

    def _token(self, token: int) -> str | None:
        said, at = self._said.tokens, len(self._tokens)
        self._tokens.append(token)
        here = f"computed {self._named(token)}"
        if at == said.num:
            return f"has {at} tokens, but the computed answer continues: {self._named(token)}"
        if said.ids is not None and said.ids[at] != token:
            return f"differs from token {at} of {said.num} on: {self._named(said.ids[at])}, {here}"
        return None

    def _named(self, token: int) -> str:
        return f"{token} {self._spell(token)!r}"

    def _end(self, event: Event) -> str | None:
        said, count = self._said, len(self._tokens)
        if count < said.tokens.num:
            return f"has {said.tokens.num} tokens, but the computed answer ends after {count}"
        if not said.tokens.are(self._tokens):
            return f"has other tokens: only the digest of its {count} is there"
        if said.finish != FILTERED:
            stop = None if self._is_ruled else event.stop_reason
            ends = (said.finish, said.stop), (str(event.finish_reason), stop)
            if ends[0] != ends[1]:
                says = [f"{why} ({by!r})" for why, by in ends]
                return f"ended differently: {says[0]} in the receipt, {says[1]} computed"
        if said.logprobs is not None and said.logprobs != digest_of_logprobs(self._logprobs):
            return "has other log-probabilities"
        shown = {} if self._is_ruled else parts_of(self._pieces)
        names = sorted({*said.parts, *shown})
        others = [name for name in names if said.parts.get(name) != shown.get(name)]
        return f"has another text than its tokens: {', '.join(others)}" if others else None


def _two(said: str | None, here: str | None) -> str:
    says, has = ("none" if one is None else one[:_SHOWN_HEX] for one in (said, here))
    return f"the receipt has {says}, this machine {has}"
