"""Prompts of requests, made into token ids in threads, when it is the turn of their key: rendering
and tokenising long texts takes milliseconds to seconds, in which the event loop must go on.

A prompt that can never run is refused here, with the numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from ridgeline.core.decoding.search import with_recommended
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import NO_RULES, TokenRules
from ridgeline.engine.text_processor import ConstraintFactory, TextProcessor, cut
from ridgeline.serve.answer.conversation import Rendering
from ridgeline.serve.answer.protocol import ChatRequest, CompletionRequest
from ridgeline.serve.answer.response_format import wanted_form
from ridgeline.serve.answer.stages import Screen
from ridgeline.serve.deadlines.field import Deadline
from ridgeline.serve.engine.request_stream import AnswerBounds
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.fair_pool import WorkPools
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.http.request_body import contradiction
from ridgeline.serve.observe.metrics import Metrics
from ridgeline.text.grammar import NotCached
from ridgeline.text.infill import File
from ridgeline.text.messages.message import MessageForm
from ridgeline.text.messages.tools import ToolUse

Ids = tuple[int, ...]
Encode = Callable[[str], list[int]]
Converted = TypeVar("Converted", bound=Rendering)
_MIN_ROOM = 8  # tokens of a prompt with a cursor: four are control tokens


class PiecesRequest(Protocol):
    """A request whose prompts and biases may mix ids and texts."""

    logit_bias: Any

    @property
    def prompts(self) -> list[Any]:
        """Texts, or lists of ids and texts."""

    def encode_biases(self, encode: Callable[[str], Sequence[int]]) -> None:
        """Give the bias of a text to each of its tokens; ``encode`` returns their ids."""


class CursorRequest(PiecesRequest, Protocol):
    """A request for what stands at a cursor."""

    n_predict: int
    input_extra: list[Any]

    def texts(self, max_chars: int) -> tuple[str, str, list[File]]:
        """Return the text before and after the cursor, and the last part of the other files."""


class Prepared(NamedTuple):
    """What a request asks of the engine, and its answers may be.

    Attributes:
        params: of each prompt.
        form: what a message may have, if it may have more than text.
        bounds: what the tokens of an answer are held to.
        ignored: paths of what the schemas of tools say and the answer is not held to.
        lost: names of other fields that it is not held to.
        room: how many tokens an answer may have, if the request allows more.
        deadline: by when it is wanted, if it must be promised.
        prompts: the token ids, cut where that was asked for.
    """

    params: SamplingParams
    form: MessageForm | None
    bounds: AnswerBounds = AnswerBounds()
    ignored: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    room: int | None = None
    deadline: Deadline | None = None
    prompts: Sequence[Ids] = ()

    @property
    def is_constrained(self) -> bool:
        """Whether a grammar holds the text of an answer, and not its calls alone."""
        return (self.form is None or self.form.has_body) and self.bounds.new_constraint is not None


class Preparer:
    """Turns messages, texts and token ids into prompts of one model."""

    def __init__(
        self,
        text: TextProcessor,
        max_model_len: int,
        metrics: Metrics,
        work: WorkPools,
        options: ServeOptions,
        screen: Callable[[], Screen | None] = lambda: None,
        fill: Callable[[Rendering], None] = lambda request: None,
    ) -> None:
        """Make prompts of what ``screen`` lets the model read; ``fill`` makes requests whole."""
        self._screen, self._fill, self._text = screen, fill, text
        self._max_model_len = max_model_len
        self._metrics, self._work, self._options = metrics, work, options
        text.tokenizer.prepare()
        work.prompts.soon(text.chat_template.start)
        vocab = range(text.tokenizer.vocab_size)
        longest = max(len(text.tokenizer.token_bytes(token)) for token in vocab)
        self.max_bytes = max_model_len * longest  # more cannot fit, whatever the text is

    async def from_chat(self, request: Rendering, now: datetime | None = None) -> Ids:
        """Return the prompt that the model's template makes of messages; raises ApiError.

        ``now`` is the request's time, which a template may write; None is this moment.
        """
        _, ids = await self.from_converted(lambda: request, now)
        return ids

    async def from_converted(
        self, convert: Callable[[], Converted], now: datetime | None = None
    ) -> tuple[Converted, Ids]:
        """Return a conversation of another API as ours, and its prompt; as ``from_chat``."""
        self._check_task(SamplingParams())
        requests: list[Converted] = []
        screen = self._screen()

        def render() -> list[int]:
            requests.append(convert())
            return self._rendered(requests[0], now, screen)

        ids = await self._in_thread("messages", render)
        return requests[0], ids

    async def text_from_chat(self, request: Rendering) -> str:
        """Return the prompt that ``from_chat`` tokenises; raises ApiError."""
        try:
            return await self._work.prompts.run(partial(self._written, request, self._screen()))
        except ValueError as error:
            raise _bad("messages", str(error)) from None

    def _written(self, request: Rendering, screen: Screen | None) -> str:
        messages, options = self._messages_and_options(request, screen)
        with self._text.chat_template.written_as(request.chat_template) as template:
            written = template.render_text(messages, **(options | {"strftime_now": None}))
        if screen:
            screen.check_read(written, "messages")
        return written

    def _rendered(
        self, request: Rendering, now: datetime | None, screen: Screen | None
    ) -> list[int]:
        messages, options = self._messages_and_options(request, screen)
        with self._text.chat_template.written_as(request.chat_template) as template:
            return template.render_ids(messages, **(options | {"strftime_now": now}))

    def _messages_and_options(
        self, request: Rendering, screen: Screen | None
    ) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        self._fill(request)
        options = request.template_options() | self._effort(request.effort)
        messages = [message.plain() for message in request.messages]
        self._check_bytes([messages, options], "messages")
        return screen.read((messages, options), "messages") if screen else (messages, options)

    def _effort(self, effort: str | None) -> dict[str, Any]:
        """Return what a template is told of OpenAI's ``reasoning_effort``."""
        if effort is None:
            return {}
        if effort == "none":
            return {"enable_thinking": False}  # templates that can do without have this switch
        return {"reasoning_effort": effort} if self._text.chat_template.knows_effort else {}

    def _lost(self, body: ChatRequest | CompletionRequest) -> tuple[str, ...]:
        """Return the names of what answers are not held to; raises ApiError if all must hold."""
        lost, template = dict(body.lost), self._text.chat_template
        effort = body.effort if isinstance(body, ChatRequest) else None
        if effort not in (None, "none") and not template.knows_effort:
            lost["reasoning_effort"] = "this model's chat template knows none"
        for name, why in lost.items() if self._options.strict else ():
            raise _bad(name, f"{name} is not supported: {why}", "unsupported_parameter")
        tells = isinstance(body, ChatRequest) and body.has_thoughts and body.chat_template is None
        if tells and not template.knows_thoughts:
            return (*lost, "messages.reasoning_content")
        return tuple(lost)

    async def from_text(
        self, prompt: str | list[int], *, param: str = "prompt", encode: Encode | None = None
    ) -> Ids:
        """Return a text's ids as ``encode`` makes them, or check ids; raises ApiError."""
        if isinstance(prompt, str):
            self._check_bytes(prompt, param)
            ids_of, read = encode or self._text.tokenizer.encode, self._read(param)
            return await self._in_thread(param, lambda: ids_of(read(prompt)))
        return await self._in_thread(param, lambda: self._text.encode(prompt))

    async def from_texts(
        self, prompts: Sequence[str] | Sequence[list[int]], *, are_cut: bool = False
    ) -> list[Ids]:
        """Return the token ids of prompts, each as ``from_text`` does; raises ApiError.

        Those that ``are_cut`` later may be too long.
        """
        for prompt in prompts:
            if isinstance(prompt, list) and len(prompt) > self._max_model_len and not are_cut:
                self._check_one(len(prompt), "prompt")
            self._check_bytes(prompt, "prompt")
        encode, read = self._text.encode, self._read("prompt")
        return await self._all_in_thread("prompt", lambda: [encode(read(one)) for one in prompts])

    async def from_pieces(self, body: PiecesRequest) -> list[Ids]:
        """Return the token ids of llama.cpp's prompts, some of them of ids and texts mixed.

        Its biases of texts become those of tokens, too. Raises ApiError.
        """
        for prompt in body.prompts:
            self._check_bytes(prompt, "prompt")
            if isinstance(prompt, list) and len(prompt) > self._max_model_len:
                self._check_one(len(prompt), "prompt")
        encode, read = self._text.tokenizer.encode, self._read("prompt")

        def ids_of(prompt: str | list[int | str]) -> list[int]:
            pieces: list[int | str] = read([prompt] if isinstance(prompt, str) else prompt)
            ids: list[int] = []
            for i, one in enumerate(pieces):
                if isinstance(one, int):
                    ids.append(one)
                else:  # in front it begins as one alone would
                    ids += encode(one, add_bos=False if i else None)
            return self._text.encode(ids)

        await self._encode_biases(body)
        return await self._all_in_thread("prompt", lambda: [ids_of(one) for one in body.prompts])

    async def _encode_biases(self, body: PiecesRequest) -> None:
        texts = [key for key, _ in body.logit_bias or () if isinstance(key, str)]
        self._check_bytes(texts, "logit_bias")
        encode = partial(self._text.tokenizer.encode, add_bos=False)
        await self._work.prompts.run(lambda: body.encode_biases(encode))

    async def from_wholes(
        self, texts: Sequence[str] | Sequence[list[int]], param: str, truncate_to: int | None
    ) -> list[Ids]:
        """Return the ids of each of the texts that become vectors; raises ApiError.

        ``truncate_to`` is how many tokens one keeps: -1 means as many as the model takes, and None
        refuses a longer text.
        """
        room, encode, read = self._room(truncate_to), self._text.encode_whole, self._read(param)
        most = None if truncate_to is None else self.max_bytes
        for text in texts if most is None else ():
            self._check_bytes(text, param)

        def encode_all() -> list[list[int]]:
            return [encode(read(one[:most]), room) for one in texts]

        return self._checked(await self._all_in_thread(param, encode_all), param)

    async def from_pairs(
        self, pairs: Sequence[tuple[str, str]], param: str, truncate_to: int | None
    ) -> list[Ids]:
        """Return the ids of each two texts that are read together; as ``from_wholes``."""
        room, encode, most = self._room(truncate_to), self._text.encode_pair, self.max_bytes
        read = self._read(param)
        for pair in pairs if truncate_to is None else ():
            self._check_bytes(list(pair), param)

        def encode_all() -> list[list[int]]:
            return [encode(read(a[:most]), read(b[:most]), room) for a, b in pairs]

        return self._checked(await self._all_in_thread(param, encode_all), param)

    def _room(self, truncate_to: int | None) -> int | None:
        """Return to how many tokens a text is cut, None for not at all; raises ApiError."""
        if truncate_to == 0:
            name = "truncate_prompt_tokens"
            raise _bad(name, f"{name} is 0, which leaves no text: send -1, or at least 1")
        return truncate_to and (
            self._max_model_len if truncate_to < 0 else min(truncate_to, self._max_model_len)
        )

    def _checked(self, texts: list[Ids], param: str) -> list[Ids]:
        """Return the ids. Raises ApiError if one has none, or more than the model takes."""
        for ids in texts:
            if not ids:
                raise _bad(param, f"{param} has an empty text: give at least one token")
            if len(ids) > self._max_model_len:
                raise _bad(
                    param,
                    f"this model takes {self._max_model_len} tokens, but {param} has a text of "
                    f"{len(ids)}: send truncate_prompt_tokens: -1 to cut it",
                    "context_length_exceeded",
                )
        return texts

    async def from_middle(self, prompt: str | list[int], suffix: str) -> Ids:
        """Return the token ids that ask for what stands between two texts; raises ApiError."""
        self._check_bytes([prompt, suffix], "suffix")
        encode, read = self._text.encode_infill, self._read("prompt")
        return await self._in_thread("suffix", lambda: encode(read(prompt), read(suffix)).ids)

    async def from_cursor(self, body: CursorRequest) -> tuple[Ids, bool]:
        """Return the token ids that ask for what stands at a cursor, cut to what the model takes.

        Also returns whether something was left out. Raises ApiError.
        """
        if self._text.fim is None:
            message = "/infill needs a model with fill-in-the-middle tokens: this one has none"
            raise _bad("input_suffix", message, "unsupported_parameter")
        most = self._max_model_len - _MIN_ROOM  # an answer that may have more is as one without end
        is_bounded = 0 <= body.n_predict <= most
        await self._encode_biases(body)
        room = self._max_model_len
        room -= max(1, body.n_predict) if is_bounded else self._max_model_len // 4
        prefix, suffix, files = body.texts(self.max_bytes)
        is_truncated = len(files) < len(body.input_extra)
        read = self._read("input_prefix")

        def encode() -> list[int]:
            nonlocal is_truncated
            read_files = [one._replace(text=read(one.text), name=read(one.name)) for one in files]
            prompt = self._text.encode_infill(read(prefix), read(suffix), read_files, room)
            is_truncated |= prompt.is_truncated
            return prompt.ids

        return await self._in_thread("input_prefix", encode), is_truncated

    async def prepare(
        self,
        body: ChatRequest | CompletionRequest,
        prompts: Sequence[Ids],
        param: str,
        deadline_header: str | None,
        *,
        is_middle: bool,
    ) -> Prepared:
        """Return what a request with these prompts asks for.

        Args:
            body: the request.
            prompts: token ids.
            param: the field that they come from.
            deadline_header: when it must end, as the header says it.
            is_middle: whether answers end where the model marks that the middle is over.

        Raises ApiError.
        """
        deadline = body.deadline_by(deadline_header)
        screen, make = self._screen(), partial(with_recommended, self._text.generation_defaults)
        params_of = partial(screen.params_of, body) if screen else body.params
        params = params_of(make, self._text.vocab_size)
        body.check_bounds(params, self._options)
        use = body.use if isinstance(body, ChatRequest) else None
        try:
            prompts = [cut(prompt, params, self._max_model_len) for prompt in prompts]
        except ValueError as error:
            raise _bad("truncate_prompt_tokens", str(error)) from None
        for prompt in prompts:
            self._check_one(len(prompt), param)
        room = self._max_model_len - max(map(len, prompts))
        prepare = partial(self._prepared, body, use, params, prompts[0], is_middle=is_middle)
        if not (body.form_fields or use or _names_tokens(params, body.narrows)):
            prepared = prepare(may_compile=False)
        else:
            try:
                prepared = await self._work.prompts.run(partial(prepare, may_compile=False))
            except NotCached:
                prepared = await self._work.grammars.run(partial(prepare, may_compile=True))
        is_capped = (body.longest or 0) > room
        if is_capped and self._options.strict:
            field = body.length_field
            message = f"{field} asks for {body.longest} tokens, but {param} leaves room for {room}"
            raise _bad(field, message, "context_length_exceeded")
        if deadline and prepared.params.searches:
            raise contradiction("deadline", "searches, such as beam search, cannot have a deadline")
        capped = room if is_capped else None
        return prepared._replace(
            prompts=prompts, lost=self._lost(body), room=capped, deadline=deadline
        )

    def _prepared(
        self,
        body: ChatRequest | CompletionRequest,
        use: ToolUse | None,
        params: SamplingParams,
        prompt: Ids,
        *,
        is_middle: bool,
        may_compile: bool,
    ) -> Prepared:
        """Do what ``prepare`` says. Raises NotCached if a grammar would have to be compiled."""
        wanted = wanted_form(body.form_fields)
        self._check_task(params)
        params = self._text.ending_at_fim(params) if is_middle else params
        form = None
        if isinstance(body, ChatRequest):
            continues = bool(body.continue_final_message)
            form = self._text.message_form(prompt, use, continues=continues)
        if wanted is None and not use:
            bounds = AnswerBounds(token_rules=self._token_rules(params, body.narrows))
            return Prepared(params, form, bounds)
        param = wanted.param if wanted else "tools"
        if params.penalty_alpha:
            raise _bad(param, f"{param} cannot be used with penalty_alpha")
        if wanted is not None:
            if use and use.is_required:
                raise _bad(param, f"{param} contradicts tool_choice, which requires a call")
            form = form and form._replace(has_body=True)
            try:
                params = replace(params, structured_outputs=wanted.structured_outputs)
            except ValueError as error:
                raise _bad(str(error).split(" ")[0], str(error)) from None
        constraint = self._constraint(params, form, param, may_compile=may_compile)
        bounds = AnswerBounds(constraint, param, self._token_rules(params, body.narrows))
        return Prepared(params, form, bounds, constraint.ignored)

    def _constraint(
        self, params: SamplingParams, form: MessageForm | None, param: str, *, may_compile: bool
    ) -> ConstraintFactory:
        begin_s = time.monotonic()
        try:
            constraint = self._text.new_constraint(params, form, may_compile=may_compile)
        except ValueError as error:
            self._metrics.count_refused_grammar(getattr(error, "reason", "invalid"))
            raise _bad(param, f"{param} cannot be used: {error}") from None
        if constraint is None:
            raise RuntimeError("nothing would enforce the requested form of the answer")
        self._metrics.note_grammar(time.monotonic() - begin_s)
        return constraint

    def _token_rules(self, params: SamplingParams, narrows: bool) -> TokenRules:
        """Return what the parameters say of tokens; making it may take a search of their texts.

        Raises ApiError as the lexicon does ValueError.
        """
        if not _names_tokens(params, narrows):
            return NO_RULES
        try:
            return self._text.lexicon.rules(params, narrows=narrows)
        except ValueError as error:
            raise _bad(str(error).split(" ")[0], str(error)) from None

    async def _in_thread(self, param: str, work: Callable[[], list[int]]) -> Ids:
        (ids,) = await self._all_in_thread(param, lambda: [work()])
        return ids

    async def _all_in_thread(self, param: str, work: Callable[[], list[list[int]]]) -> list[Ids]:
        screen = self._screen()
        if screen and screen.checks_ids:  # whatever a prompt was made of: what is read has no more
            decode, unchecked = partial(self._text.tokenizer.decode, skip_special=False), work

            def work() -> list[list[int]]:
                prompts = unchecked()
                for ids in prompts:
                    screen.check_read(decode(ids), param)
                return prompts

        try:
            return [tuple(ids) for ids in await self._work.prompts.run(work)]
        except ValueError as error:
            raise _bad(param, str(error)) from None

    def _read(self, param: str) -> Callable[[Any], Any]:
        """Return what makes of texts what a model may read."""
        screen = self._screen()
        return (lambda text: screen.read(text, param)) if screen else (lambda text: text)

    def _check_bytes(self, value: Any, param: str) -> None:
        """Raise ApiError if there is more text than a prompt can have."""
        num_chars, max_bytes = _num_chars(value), self.max_bytes
        if num_chars > max_bytes:
            raise _bad(
                param,
                f"{param} has {num_chars} characters; a prompt for this model "
                f"({self._max_model_len} tokens) has at most {max_bytes} bytes",
                "context_length_exceeded",
            )

    def _check_task(self, params: SamplingParams) -> None:
        try:
            self._text.check_task(params)
        except ValueError as error:
            raise _bad("model", str(error), "unsupported_endpoint") from None

    def _check_one(self, prompt_len: int, param: str) -> None:
        """Raise ApiError for a prompt that leaves no room for an answer."""
        max_model_len = self._max_model_len
        if not prompt_len:
            raise _bad(param, f"{param} is empty: give at least one token")
        if prompt_len >= max_model_len:
            message = f"this model takes {max_model_len} tokens, prompt and answer together, but "
            message += f"{param} has {prompt_len}: leave room for at least 1 more"
            counts = {"n_prompt_tokens": prompt_len, "n_ctx": max_model_len}
            code = "context_length_exceeded"
            raise ApiError(400, message, param=param, code=code, counts=counts)


def _names_tokens(params: SamplingParams, narrows: bool) -> bool:
    """Whether token rules say anything of an answer."""
    named = params.allowed_token_ids or params.bad_words or params.uses_dry
    return bool(named or narrows)


def _bad(param: str, message: str, code: str = "invalid_value") -> ApiError:
    return ApiError(400, message, param=param, code=code)


def _num_chars(value: Any) -> int:
    """Return the characters of all strings in a JSON value: never more than its bytes."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_num_chars, value)) + sum(map(_num_chars, value.values()))
    return sum(map(_num_chars, value)) if isinstance(value, list) else 0
