"""What makes a server's receipts: its facts, its key, and a recorder of each answer."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ridgeline.core.request import Request
from ridgeline.core.step import Event
from ridgeline.engine.setup.identity import fingerprint, with_adapter
from ridgeline.serve.answer.response_builder import ResponseBuilder
from ridgeline.serve.answer.schemas import StageFields
from ridgeline.serve.engine.request_stream import StreamEvent
from ridgeline.text.messages.message import AnswerReader, MessageForm
from ridgeline.text.messages.tool_calls import MessageDelta
from ridgeline.trust.receipts.signing import Signer
from ridgeline.trust.receipts.statement import (
    ENGINE,
    FILTERED,
    Receipt,
    StatedAnswer,
    StatedForm,
    StatedModel,
    StatedPrompt,
    digest_of,
    digest_of_logprobs,
    enveloped,
    name_of_reasoning,
    parts_of,
    statement_of,
    tokens_of,
)


class ReceiptSigner:
    """Makes the receipts of one server."""

    def __init__(
        self,
        signer: Signer | None,
        name: str,
        facts: Mapping[str, Any],
        files: Mapping[str, str],
        max_model_len: int,
    ) -> None:
        """Sign with ``signer``, if there is one.

        ``facts`` are those of ``engine.setup.identity``, and ``files`` has digests of the model's.
        """
        self._signer, self._max_model_len = signer, max_model_len
        self._fingerprint = fingerprint(facts)
        self._model = StatedModel(name=name, digest=facts["model"], files=dict(files))
        backend, dtype, kv_cache_dtype = facts["formats"]
        tool_call, reasoning = facts["parsers"]
        self._of_server = {
            "template": facts["template"],
            "formats": (backend, dtype, kv_cache_dtype),
            "parsers": (tool_call, name_of_reasoning(reasoning)),
            "code": facts["code"],
            "libraries": tuple(facts["libraries"]),
        }

    def receipt(self, shown: Mapping[str, str], adapter: bytes, **of_answer: Any) -> dict[str, Any]:
        """Return the receipt of an answer with these texts, signed."""
        receipt = Receipt(
            engine=ENGINE,
            fingerprint=with_adapter(self._fingerprint, adapter),
            adapter=adapter.hex(),
            model=self._model,
            max_model_len=self._max_model_len,
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            **self._of_server,
            **of_answer,
        )
        payload = statement_of(receipt, shown)
        return enveloped(payload, [self._signer.sign(payload)] if self._signer else [])


class ReceiptRecorder:
    """Sees the events of an answer before they are shown, and states them at its end."""

    def __init__(
        self,
        receipt_signer: ReceiptSigner,
        answers: ResponseBuilder,
        form: MessageForm | None,
        rules: str | None,
    ) -> None:
        """Watch ``answers``, which ``rules`` of this version may change."""
        stream, choices = answers.stream, answers.choices
        self._notary, self._body, self._stream = receipt_signer, answers.body, stream
        self._choices, self._may_show = choices, answers.may_show
        self._form, self._rules = form, rules
        self._adapter = stream.adapter.digest  # the stream gives it back at its end
        self._requests: dict[int, Request] = {}  # by prompt
        self._results = [_AnswerResult(form) for _ in choices]

    def take(self, event: StreamEvent) -> tuple[StreamEvent]:
        """Take an event that the answers have not taken yet, and return it."""
        prompt, payload = event
        if isinstance(payload, Request):
            self._requests[prompt] = payload
        elif isinstance(payload, Event):
            index = prompt * self._stream.params.num_answers + payload.seq_id[1]
            if self._choices[index].finish_reason != FILTERED:
                self._results[index].take(payload)
        return (event,)

    def end(self, texts: Mapping[str, str]) -> StageFields:
        """Return the receipt of a complete answer, about its texts by their places in it."""
        receipt = self._notary.receipt(
            {place: digest_of(text) for place, text in texts.items()},
            self._adapter,
            params=self._stream.params,
            form=StatedForm.of(self._form) if self._form else None,
            narrows=self._body.narrows,
            rules=self._rules,
            prompts=tuple(map(self._prompt, range(len(self._stream.prompts)))),
            request=self._stream.name,
        )
        return {"receipt": receipt}

    def _prompt(self, index: int) -> StatedPrompt:
        params, request = self._stream.params_of(index), self._requests.get(index)
        seed = request.default_seed if params.seed is None and request else params.seed or 0
        first, n = index * params.num_answers, params.num_answers
        answers = tuple(map(self._answer, range(first, first + n)))
        tokens = tokens_of(self._stream.prompts[index], are_told=self._may_show(index))
        return StatedPrompt(tokens=tokens, seed=seed % (1 << 64), answers=answers)

    def _answer(self, index: int) -> StatedAnswer:
        result, choice = self._results[index], self._choices[index]
        is_cut = choice.finish_reason == FILTERED
        is_ruled = self._rules is not None
        logprobs = [] if is_ruled else result.logprobs
        return StatedAnswer(
            tokens=tokens_of(result.tokens, are_told=not is_ruled),
            finish=FILTERED if is_cut else result.finish,
            stop=None if is_cut or is_ruled else result.stop,
            logprobs=digest_of_logprobs(logprobs) if logprobs else None,
            parts={} if is_ruled else parts_of(result.pieces),
        )


class _AnswerResult:
    """The result of one answer."""

    def __init__(self, form: MessageForm | None) -> None:
        self._reader = AnswerReader(form)
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.pieces: list[MessageDelta] = []
        self.finish = ""
        self.stop: str | int | None = None

    def take(self, event: Event) -> None:
        self.pieces += self._reader.take(event)
        if event.token is not None:
            self.tokens.append(event.token)
            self.logprobs += [event.logprobs.logprob] if event.logprobs else []
        if event.finish_reason is not None:
            self.finish, self.stop = event.finish_reason.value, event.stop_reason
