"""The answers to a request while they grow: events become the choices of OpenAI's objects.

One path for both kinds of completion, streamed or whole; they differ in how a piece of text and
the logprobs of a token are written. An assistant's message is made of the pieces that were read,
whole or in deltas; the times of an answer come from the records of its prompts. It knows nothing of
connections.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

from ridgeline.core.decoding.text import HeldEntries
from ridgeline.core.records import RequestRecord
from ridgeline.core.request import Request
from ridgeline.core.step import (
    MASKED_OUT,
    RULED_OUT,
    TOO_FEW,
    Event,
    FinishReason,
    TokenLogprobs,
)
from ridgeline.engine.outputs import likeliest
from ridgeline.engine.text_processor import TextProcessor
from ridgeline.serve.answer import schemas
from ridgeline.serve.answer.choice_state import FILTERED, ChoiceState, means_of
from ridgeline.serve.answer.protocol import ChatRequest, CompletionRequest
from ridgeline.serve.answer.stages import AnswerFilter, AnswerRow, Stage
from ridgeline.serve.answer.tools import is_named
from ridgeline.serve.deadlines.promise import Promise
from ridgeline.serve.engine.request_stream import (
    PromptProgress,
    Refusal,
    RequestStream,
    StreamError,
    StreamEvent,
)
from ridgeline.text.messages.message import AnswerReader, MessageForm
from ridgeline.text.messages.tool_calls import MessageDelta

Choice = dict[str, Any]
_FIELDS = {"content": "content", "reasoning": "reasoning_content", "refusal": "refusal"}
_LOWEST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's number for it


class ResponseBuilder:
    """The answers to one request."""

    def __init__(
        self,
        text: TextProcessor,
        body: ChatRequest | CompletionRequest,
        stream: RequestStream,
        form: MessageForm | None = None,
        *,
        room: int | None = None,
    ) -> None:
        """Answer what ``body`` asks; messages are read in ``form``, if there is one.

        ``room`` is what the model's context leaves, where that is less than what was allowed.
        """
        self.room, self.text, self.body, self.stream = room, text, body, stream
        self._text, self._body, self._stream, self._form = text, body, stream, form
        self._is_chat, self._echo = isinstance(body, ChatRequest), bool(body.echo)
        self._hides_reasoning = isinstance(body, ChatRequest) and body.include_reasoning is False
        # What holds for all pieces is asked of the body once.
        self._is_empty = body.longest == 0
        self._tells_ids = bool(body.return_token_ids)
        self._tells_prompt = self._tells_ids or body.prompt_logprobs is not None
        self.with_logprobs = self._with_logprobs = stream.params.logprobs is not None
        self._is_named = isinstance(body, ChatRequest) and is_named(body.tool_choice)
        self._reasons = form is not None and form.reasoning is not None
        self.is_parallel = form is None or form.is_parallel
        self.choices = [
            ChoiceState(i, AnswerReader(form))
            for i in range(stream.params.num_answers * len(stream.prompts))
        ]
        self.chosen = self.choices  # those that are shown
        self.stages: Sequence[Stage] = ()
        self._filter: AnswerFilter | None = None
        self._requests: dict[int, Request] = {}  # by prompt
        self._digest: bytes | None = None  # of the request, for ids
        self.records: list[RequestRecord] = []
        self._end_s: dict[int, float] = {}  # by prompt
        self.promise: Promise | None = None

    def pass_through(self, row: AnswerRow) -> None:
        """Let the answers pass a row before they are shown."""
        self.stages, self._filter = row
        if row.stages:  # at the end they are told what was shown
            for answer in self.choices:
                answer.shown_pieces = []
        if row.filter:
            for answer in self.choices:
                answer.filter = row.filter.choice(answer.index // self.stream.params.num_answers)

    def take_chunks(self, event: StreamEvent) -> list[Choice]:
        """Take an event; return the choices of the chunks that it gives. Raises StreamError."""
        answer = self.take(event)
        return self._chunks(answer) if answer else []

    def take_written(self, event: StreamEvent, write: Callable[[Choice], bytes]) -> list[bytes]:
        """Take an event; return a stream's chunks as ``write`` has them. Raises StreamError."""
        if self._body.stream:
            return list(map(write, self.take_chunks(event)))
        self.take(event)  # nothing is chunked: what is held is for the whole answer
        return []

    def take(self, event: StreamEvent) -> ChoiceState | None:
        """Take an event; return the answer that it belongs to, if any. Raises StreamError."""
        index, payload = event
        if isinstance(payload, Request):
            self._requests[index] = payload
            return None
        if isinstance(payload, RequestRecord):
            self.records.append(payload)
            self._end_s[index] = payload.finish_s
        if not isinstance(payload, Event | Refusal):
            return None
        number = payload.answer if isinstance(payload, Refusal) else payload.seq_id[1]
        answer = self.choices[index * self._stream.params.num_answers + number]
        if answer.finish_reason == FILTERED:
            return None
        if isinstance(payload, Refusal):
            return answer.refuse(payload.says)
        if payload.finish_reason is FinishReason.ERROR:
            status = 400 if payload.error in (RULED_OUT, MASKED_OUT, TOO_FEW) else 500
            param = self._stream.form_param if payload.error == MASKED_OUT else None
            raise StreamError(payload.error or "the model failed on this request", status, param)
        if self._echo and not answer.has_begun:
            self._add_echo(answer, index)
        answer.has_begun = True
        self._add_event(answer, payload, index)
        return answer

    def _chunks(self, answer: ChoiceState) -> list[Choice]:
        """Return the new part of a streamed answer, its end apart from its text.

        Clients may stop reading at ``finish_reason``, so no text may come with it.
        """
        has_news = bool(answer.pieces or answer.logprobs or answer.token_ids)
        chunks = []
        if self._is_chat and not answer.has_role and (has_news or answer.finish_reason):
            answer.has_role = True
            delta = {"role": "assistant", "content": None}  # text, thoughts or calls may follow
            chunks.append(self._choice(answer, {"delta": delta}))
        if has_news:
            chunks += self._news(answer)
        if answer.finish_reason:
            form: Choice = {"delta": {}} if self._is_chat else {"text": ""}
            chunks.append(self._ended(answer, self._choice(answer, form)))
        return chunks

    def _add_event(self, answer: ChoiceState, event: Event, prompt: int) -> None:
        answer.finish_reason = event.finish_reason and event.finish_reason.value
        if self._is_empty:  # the engine had to generate one: it is not shown
            answer.finish_reason = answer.finish_reason and "length"
            event = event._replace(token=None, text="", logprobs=None, stop_reason=None)
        answer.stop_reason = event.stop_reason
        answer.num_tokens += event.token is not None
        pieces = answer.reader.take(event)
        if self._hides_reasoning:
            pieces = [piece for piece in pieces if piece.kind != "reasoning"]
        if event.logprobs:
            answer.cumulative_logprob += event.logprobs.logprob
        if answer.filter:
            entries = answer.filter.let_out(answer, pieces, event)
        else:
            answer.pieces += pieces
            entries = self._shown_entries(answer, event, prompt)
        if self._tells_ids and entries:
            answer.token_ids = [*(answer.token_ids or ()), *(one.token for one in entries)]
        if self._with_logprobs:
            answer.logprobs += entries

    def _shown_entries(self, answer: ChoiceState, event: Event, prompt: int) -> list[TokenLogprobs]:
        """Return the tokens whose text is shown now: none tells what the text holds back."""
        if not (self._with_logprobs or self._tells_ids):
            return []
        if answer.pending is None:
            answer.pending = self.new_pending(prompt)
        if event.token is not None:
            entry = event.logprobs or TokenLogprobs(event.token, 0.0, 0, ())
            answer.pending.feed(event.token, entry)
        is_over = event.finish_reason is not None
        return answer.pending.take(len(event.text), answer.reader.num_held, is_over=is_over)

    def new_pending(self, prompt: int) -> HeldEntries[Any]:
        """Return what holds back the tokens of an answer to a prompt as long as their text is."""
        params = replace(self._stream.params, stop=())
        return HeldEntries(self._text.new_text(self._stream.prompts[prompt], params, self._form))

    # --- what filters let out ------------------------------------------------------------------

    @property
    def is_cut(self) -> bool:
        """Whether a filter has ended answers, and nothing more can come."""
        ends = [answer.finish_reason for answer in self.choices] if self._filter else []
        return FILTERED in ends and all(ends)

    def shown(self, value: Any) -> Any:
        """Return what an answer repeats of its request, as it may be shown."""
        return self._filter.shown(value) if self._filter else value

    def shown_fields(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return fields that an answer repeats of its request: their names are the dialect's."""
        return {name: self.shown(value) for name, value in fields.items()}

    def may_show(self, prompt: int) -> bool:
        """Whether an answer may tell of all tokens of a prompt."""
        return self._filter is None or self._filter.may_show(prompt)

    def ends(self, texts: Callable[[], Mapping[str, str]]) -> schemas.StageFields:
        """Return what stages say at the end of answers that show these texts, by their places."""
        said: schemas.StageFields = {}
        for stage in self.stages:
            said |= stage.end(texts())
        return said

    def _add_echo(self, answer: ChoiceState, index: int) -> None:
        """Let an answer begin with its prompt; in a chat, with the message that it continues."""
        entries: list[TokenLogprobs | int] = []
        if isinstance(self._body, ChatRequest):
            last = self._body.messages[-1]
            echoed = [MessageDelta("content", last.text)] if last.role == "assistant" else []
        else:
            prompt = self._stream.prompts[index]
            echoed = [MessageDelta("content", self._text.tokenizer.decode(prompt))]
            ranked = self._requests[index].prompt_logprobs if self._with_logprobs else {}
            entries = [ranked.get(i, token) for i, token in enumerate(prompt)]
        if answer.filter:
            answer.pieces += answer.filter.echo(echoed, entries)
        else:
            answer.pieces += echoed
            answer.logprobs += entries if self._with_logprobs else []

    @property
    def created_s(self) -> int:
        """When the request came: the time that its answer names, in every dialect."""
        return self._stream.created_s

    def new_id(self, prefix: str, *place: int) -> str:
        """Return an id for a place in the answer.

        It follows from the request alone, so another server that goes on gives the same. Prompts
        are in it, since a client may send one ``x-request-id`` with each turn of a conversation.
        """
        if self._digest is None:
            of_request = repr((self._stream.name, [*map(tuple, self._stream.prompts)]))
            self._digest = blake2b(of_request.encode(), digest_size=16).digest()
        of_place = repr((prefix, place)).encode()
        return prefix + blake2b(of_place, key=self._digest, digest_size=12).hexdigest()

    def whole(self) -> list[Choice]:
        """Return all choices, with everything that has not been shown.

        Of more than ``n`` answers to a prompt these are the likeliest per token, best first.
        """
        params, answers = self._stream.params, self.choices
        if params.num_answers > params.n:
            groups = zip(*[iter(answers)] * params.num_answers, strict=True)
            best = [[group[i] for i in likeliest(means_of(group), params.n)] for group in groups]
            answers = self.chosen = [answer for group in best for answer in group]
            for index, answer in enumerate(answers):
                answer.index = index
        return [self._ended(answer, self._shown(answer)) for answer in answers]

    def _shown(self, answer: ChoiceState) -> Choice:
        """Return a choice with its new part, which then counts as shown."""
        pieces = answer.show()
        form: Choice = {"text": "".join(text for _, text in pieces)}
        if self._is_chat:
            form = {"message": message_of(pieces, partial(self.new_id, "call_", answer.index))}
            answer.num_calls += sum(kind == "call" for kind, _ in pieces)
        return self._choice(answer, form) | self._of_tokens(answer)

    def _news(self, answer: ChoiceState) -> list[Choice]:
        """Return the new parts of a streamed answer, which then count as shown."""
        if not self._is_chat:
            return [self._shown(answer)]
        deltas = []
        for piece in answer.show():
            answer.num_calls += piece.kind == "call"
            call_id = partial(self.new_id, "call_", answer.index)
            deltas.append(delta_of(piece, answer.num_calls - 1, call_id))
        first, *later = (self._choice(answer, {"delta": delta}) for delta in deltas or [{}])
        return [first | self._of_tokens(answer), *later]

    def _of_tokens(self, answer: ChoiceState) -> Choice:
        """Return what is told of the tokens whose text is shown now; it then counts as told."""
        said: Choice = {"logprobs": self._logprobs(answer)}
        if self._tells_ids:
            said["token_ids"] = answer.token_ids
        answer.logprobs, answer.token_ids = [], None
        return said

    def _choice(self, answer: ChoiceState, form: Choice) -> Choice:
        choice = {"index": answer.index, **form, "logprobs": None, "finish_reason": None}
        if self._tells_ids:
            choice["token_ids"] = None
        if self._tells_prompt and not self._is_chat:
            choice |= self.of_prompt(self.prompt_of(choice), is_told=answer.has_prompt_ids)
            answer.has_prompt_ids = True
        return choice

    def of_prompt(self, index: int = 0, *, is_told: bool = False) -> schemas.PromptFields:
        """Return what a request wants to know of its prompt, unless it was told: vLLM's fields."""
        said: schemas.PromptFields = {}
        may_show = self.may_show(index)
        if self._tells_ids and not is_told:
            said["prompt_token_ids"] = list(self._stream.prompts[index]) if may_show else []
        if self._body.prompt_logprobs is not None and may_show:
            most, entries = self._body.prompt_logprobs, self._requests[index].prompt_logprobs
            visible = [entries.get(i, token) for i, token in enumerate(self._stream.prompts[index])]
            if self._filter:
                visible = self._filter.visible_of_prompt(visible)
            said["prompt_logprobs"] = [
                self._ranked(entries[i], one, most) if isinstance(one, TokenLogprobs) else None
                for i, one in enumerate(visible)
            ]
        return said

    def _ranked(
        self, entry: TokenLogprobs, visible: TokenLogprobs, most: int
    ) -> dict[str, schemas.PromptLogprob]:
        """Return a token of the prompt and the likeliest in its place, by their ids, as text.

        Of these ``visible`` has the ones that may be shown.
        """
        places = {token: rank for rank, (token, _) in enumerate(entry.top, 1)}
        top = [one for one in entry.top[:most] if one in visible.top]
        return {
            str(token): {
                "logprob": max(logprob, _LOWEST_LOGPROB),
                "rank": places.get(token),  # unknown where it is not among those
                "decoded_token": self._text.spell(token),
            }
            for token, logprob in [(visible.token, visible.logprob), *top]
        }

    def _ended(self, answer: ChoiceState, choice: Choice) -> Choice:
        """Return a choice that also says how the answer ended."""
        calls = answer.num_calls and answer.finish_reason == "stop" and not self._is_named
        choice["finish_reason"] = "tool_calls" if calls else answer.finish_reason
        if answer.stop_reason is not None:
            choice["stop_reason"] = answer.stop_reason
        return choice

    # --- logprobs ------------------------------------------------------------------------------

    def _logprobs(self, answer: ChoiceState) -> Any:
        if not self._with_logprobs:
            return None
        if isinstance(self._body, CompletionRequest) and self._body.lists_logprobs:
            return self._completion_logprobs(answer)
        content: list[schemas.RankedTokenLogprob] = []
        for entry in answer.logprobs:
            assert isinstance(entry, TokenLogprobs)  # only an echo has bare tokens
            top = [self._chat_logprob(*ranked) for ranked in entry.top]
            content.append({**self._chat_logprob(entry.token, entry.logprob), "top_logprobs": top})
        listed: schemas.ChatLogprobs = {"content": content, "refusal": None}
        return listed

    def _chat_logprob(self, token: int, logprob: float) -> schemas.TokenLogprob:
        data = list(self._text.tokenizer.token_bytes(token))
        logprob = max(logprob, _LOWEST_LOGPROB)
        return {"token": self._shown_token(token), "logprob": logprob, "bytes": data}

    def _shown_token(self, token: int) -> str:
        is_id = self._body.return_tokens_as_token_ids
        return f"token_id:{token}" if is_id else self._text.spell(token)

    def _completion_logprobs(self, answer: ChoiceState) -> schemas.CompletionLogprobs:
        """Return four parallel lists; offsets count the characters of all tokens before."""
        answer.decode = answer.decode or self._text.tokenizer.new_decoder()
        out: schemas.CompletionLogprobs
        out = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in answer.logprobs:
            token = entry if isinstance(entry, int) else entry.token
            name, end = self._name(token), answer.offset + len(answer.decode(token))
            out["tokens"].append(self._logprob_name(token))
            # Before it may come the remains of a broken character.
            out["text_offset"].append(max(answer.offset, end - len(name)))
            answer.offset = end
            if isinstance(entry, int):
                out["token_logprobs"].append(None)
                out["top_logprobs"].append(None)
                continue
            ranked = ((token, entry.logprob), *entry.top)
            tops = {
                self._logprob_name(top_token): max(logprob, _LOWEST_LOGPROB)
                for top_token, logprob in ranked
            }
            out["token_logprobs"].append(max(entry.logprob, _LOWEST_LOGPROB))
            out["top_logprobs"].append(tops)
        return out

    def _logprob_name(self, token: int) -> str:
        is_id = self._body.return_tokens_as_token_ids
        return f"token_id:{token}" if is_id else self._name(token)

    def _name(self, token: int) -> str:
        data = self._text.tokenizer.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:  # a part of a character, spelled as OpenAI does
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    # --- numbers -------------------------------------------------------------------------------

    @property
    def finish_reasons(self) -> str:
        """How the answers ended, each way once."""
        return "+".join(sorted({a.finish_reason for a in self.choices if a.finish_reason}))

    @property
    def bounds(self) -> str:
        """Which bounds of calls have ended answers, each once."""
        return ", ".join(sorted({a.bound for a in self.choices if a.bound}))

    def ended_by(self) -> schemas.EndedBy:
        """Return the field for ``bounds`` in APIs whose choices have no ``stop_reason``."""
        return {"ended_by": self.bounds} if self.bounds else {}

    @property
    def num_tokens(self) -> int:
        """Tokens generated, except one that only the engine needed."""
        return sum(answer.num_tokens for answer in self.choices)

    @property
    def num_reasoning(self) -> int:
        """Tokens of reasoning among them."""
        return sum(answer.reader.num_reasoning for answer in self.choices)

    @property
    def num_cached(self) -> int:
        """Prompt tokens that the prefix cache had."""
        return sum(r.num_cached_tokens for r in self._requests.values())

    def usage(self) -> schemas.Usage:
        """Return OpenAI's count of tokens; a prompt counts once, however many its answers.

        All answers that were drawn count, of ``best_of`` also those not shown. Of a beam search the
        answers count, not the beams.
        """
        prompt, generated = sum(map(len, self._stream.prompts)), self.num_tokens
        usage: schemas.Usage = {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
        }
        if details := self._details():
            usage["completion_tokens_details"] = details
        return usage

    def _details(self) -> schemas.CompletionTokensDetails:
        details: schemas.CompletionTokensDetails = {}
        if self._reasons:
            details["reasoning_tokens"] = self.num_reasoning
        if self._stream.prediction:
            num_accepted = sum(r.num_accepted_tokens for r in self._requests.values())
            num_drafts = sum(r.num_draft_tokens for r in self._requests.values())
            details["accepted_prediction_tokens"] = num_accepted
            details["rejected_prediction_tokens"] = num_drafts - num_accepted
        return details

    def num_tokens_of(self, index: int) -> int:
        """Return how many tokens an answer has so far."""
        return self.choices[index].num_tokens

    def prompt_of(self, choice: Choice) -> int:
        """Return to which of the prompts a choice is an answer."""
        index: int = choice["index"]
        return index // self._stream.params.n

    def choice_of(self, prompt: int) -> int:
        """Return which choice is the first answer to a prompt."""
        return prompt * self._stream.params.n

    def prompt_text(self, prompt: int = 0) -> str:
        """Return a prompt as it was read, special tokens and all."""
        text = self._text.tokenizer.decode(self._stream.prompts[prompt], skip_special=False)
        return str(self.shown(text))

    def pace(self, prompt: int = 0) -> schemas.InfillTimings:
        """Return the times of a prompt and its answers so far, in llama.cpp's names.

        Nothing if no token came.
        """
        request = self._requests.get(prompt)
        if request is None or request.scheduled_s is None or request.first_token_s is None:
            return {}
        n, first_s = self._stream.params.num_answers, request.first_token_s
        num_generated = sum(map(self.num_tokens_of, range(prompt * n, (prompt + 1) * n)))
        num_computed = len(request.prompt) - request.num_cached_tokens
        prompt_s = first_s - request.scheduled_s
        answer_s = (self._end_s.get(prompt) or time.monotonic()) - first_s
        return {
            "cache_n": request.num_cached_tokens,
            "prompt_n": num_computed,
            "prompt_ms": 1e3 * prompt_s,
            "prompt_per_token_ms": _ratio(1e3 * prompt_s, num_computed),
            "prompt_per_second": _ratio(num_computed, prompt_s),
            "predicted_n": num_generated,
            "predicted_ms": 1e3 * answer_s,
            "predicted_per_token_ms": _ratio(1e3 * answer_s, num_generated),
            "predicted_per_second": _ratio(num_generated, answer_s),
        }

    def timings(self) -> schemas.Timings:
        """Return the engine's times, nothing if no token came."""
        times = timings_of(self.records, self._stream.arrival_s, self.num_cached)
        return {"promise": self.promise.timings(), **times} if self.promise and times else times


def message_of(
    pieces: Sequence[MessageDelta], call_id: Callable[[int], str]
) -> schemas.AssistantMessage:
    """Return a whole message as OpenAI writes it. Its content is null if it has calls and no text.

    ``call_id`` returns the id of a call, from its index.
    """
    calls: list[schemas.ToolCall] = []
    texts = {"content": "", "reasoning": "", "refusal": ""}
    for kind, text in pieces:
        if kind == "call":
            calls.append(_call(text, call_id(len(calls))))
        elif kind == "arguments":
            calls[-1]["function"]["arguments"] += text
        else:
            texts[kind] += text
    content = texts["content"] or (None if calls else "")
    message: schemas.AssistantMessage
    message = {"role": "assistant", "content": content, "refusal": texts["refusal"] or None}
    if texts["reasoning"]:
        message["reasoning_content"] = texts["reasoning"]
    if calls:
        message["tool_calls"] = calls
    return message


def delta_of(piece: MessageDelta, call: int, call_id: Callable[[int], str]) -> dict[str, Any]:
    """Return the delta of one piece; ``call`` is the index of the latest call."""
    kind, text = piece
    if kind == "call":
        return {"tool_calls": [{"index": call, **_call(text, call_id(call))}]}
    if kind == "arguments":
        return {"tool_calls": [{"index": call, "function": {"arguments": text}}]}
    return {_FIELDS[kind]: text}


def _call(name: str, call_id: str) -> schemas.ToolCall:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}


def timings_of(
    records: Sequence[RequestRecord], arrival_s: float, num_cached: int
) -> schemas.Timings:
    """Return the engine's times, nothing if no token came.

    For several prompts: until the last began, until the first token of any, until all ended.
    """
    firsts = [r.first_token_s for r in records if r.first_token_s is not None]
    starts = [r.scheduled_s for r in records if r.scheduled_s is not None]
    if not firsts or not starts:
        return {}
    end_s = max(r.finish_s for r in records)
    generation_s = end_s - min(firsts)
    num_gaps = max(max(r.num_generated) for r in records) - 1
    num_generated = sum(sum(r.num_generated) for r in records)
    return {
        "queue_time_ms": 1e3 * (max(starts) - arrival_s),
        "time_to_first_token_ms": 1e3 * (min(firsts) - arrival_s),
        "generation_time_ms": 1e3 * generation_s,
        "mean_itl_ms": 1e3 * generation_s / num_gaps if num_gaps > 0 else None,
        "tokens_per_second": num_generated / (end_s - min(starts)),
        "cached_tokens": num_cached,
        "num_preemptions": sum(r.num_preemptions for r in records),
        "speculative_decoding": {
            "num_drafts": sum(r.num_drafts for r in records),
            "num_draft_tokens": sum(r.num_draft_tokens for r in records),
            "num_accepted_tokens": sum(r.num_accepted_tokens for r in records),
        },
    }


def _ratio(a: float, b: float) -> float | None:
    return a / b if b else None


def progress_of(progress: PromptProgress) -> dict[str, Any]:
    """Return how far a prompt is computed, in llama.cpp's names."""
    return {
        "total": progress.num_tokens,
        "cache": progress.num_cached,
        "processed": progress.num_computed,
        "time_ms": 1e3 * progress.time_s,
    }
