"""What the routes share: one model, its engine, whether it takes requests, and how it replies."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from fastapi import FastAPI, Request
from opentelemetry.context import Context

from ridgeline.core.records import RequestRecord
from ridgeline.core.request import NO_ADAPTER
from ridgeline.engine.llm import LLM
from ridgeline.engine.setup import identity
from ridgeline.engine.setup.home import stores
from ridgeline.planner.memory.model_spec import ModelSpec, read_model_spec
from ridgeline.planner.needs import Needs, flags_of, needs_of
from ridgeline.serve.adapters import Loras
from ridgeline.serve.aliases import Alias, Aliases
from ridgeline.serve.answer.conversation import Rendering
from ridgeline.serve.answer.dialect import OPENAI, Dialect
from ridgeline.serve.answer.protocol import (
    ChatRequest,
    CompletionRequest,
)
from ridgeline.serve.answer.reply import OpenAiWriter, Reply, ReplyParts, ResponseWriter
from ridgeline.serve.answer.response_builder import ResponseBuilder
from ridgeline.serve.answer.stages import AnswerRow, Observer, PreparedRequest, Screen
from ridgeline.serve.deadlines.admission import DeadlineAdmission
from ridgeline.serve.deadlines.field import HEADER
from ridgeline.serve.deadlines.prediction_sampling import Arrivals
from ridgeline.serve.engine.between_steps import load
from ridgeline.serve.engine.interface import EngineClient
from ridgeline.serve.engine.request_stream import Hold, RequestStream, StreamCaller, StreamReader
from ridgeline.serve.http.errors import STOPPING, ApiError
from ridgeline.serve.http.fair_pool import WorkPools
from ridgeline.serve.http.keys import ANYONE, Limits
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.http.request_body import CAPPED, contradiction, note_ignored
from ridgeline.serve.observe.live import Live
from ridgeline.serve.observe.metrics import Metrics
from ridgeline.serve.observe.spans import emit, parent_of
from ridgeline.serve.observe.statistics import OneModelStatistics, Statistics
from ridgeline.serve.observe.trace_buffer import TraceBuffer
from ridgeline.serve.prepare import Ids, Prepared, Preparer
from ridgeline.serve.sleep_state import SleepState

# Of a body, and the names to show.
NewWriter = Callable[[ResponseBuilder, str, str], ResponseWriter]


class GivenStages(Protocol):
    """All that a server is given to see its requests and their answers (``answer.stages``)."""

    @property
    def observer(self) -> Observer | None:
        """What is told of each request, if anything is."""

    @property
    def models(self) -> Mapping[str, LLM]:
        """Models beside the one that is served, by name."""

    @property
    def digest(self) -> bytes:
        """What answers hang on because of it, nothing where that is nothing."""

    def open(self, server: ModelServer) -> None:
        """Begin with a server. Raises OSError or ValueError if that cannot be."""

    def add_routes(self, app: FastAPI) -> None:
        """Add routes to the application over the server."""

    def trouble(self) -> str | None:
        """Return why the process should be replaced, if it should."""

    def reload(self) -> str:
        """Read files again; return what the log says of it, nothing where there are none."""

    def limits_of(self, label: str) -> Mapping[str, Any]:
        """Return the limits of a key that go before those of flags, by name."""

    def screen(self) -> Screen | None:
        """Return what reads the present request, if anything does."""

    async def judged(
        self, request: Request, body: Any, prompts: Sequence[Ids], param: str
    ) -> Hold | None:
        """Judge a request's prompts, which takes a while; return what holds its answers, if any.

        Raises ApiError for a prompt that may not be.
        """

    def row(self, answers: ResponseBuilder, prepared: Prepared) -> AnswerRow:
        """Return what answers pass before they are shown. Raises ApiError."""


class ModelServer:
    """What the routes share: one model, its engine, and whether it takes requests."""

    def __init__(
        self,
        llm: LLM,
        name: str,
        engine: EngineClient,
        metrics: Metrics,
        options: ServeOptions,
        stages: GivenStages,
        engines: Mapping[str, EngineClient],
        home: Path | None,
    ) -> None:
        """Serve a model under a name, computed by ``engine``.

        Requests and answers pass ``stages``, whose own models have the ``engines`` of their names.
        Further names of the model are read from ``home``, if it is given. Raises OSError or
        ValueError if an adapter cannot be served, or a stage cannot begin.
        """
        self.text, self.engine, self.metrics, self.options = llm.text, engine, metrics, options
        engine.step_timeout_s = options.step_timeout
        self.name, self.summary, self.memory = name, llm.summary, llm.memory
        self.max_model_len, self._path = llm.config.max_model_len, llm.path
        # On the facts all equal answers to equal seeds hang (engine.setup.identity).
        self.facts, self.files, self.digest = llm.facts, llm.file_digests, str(llm.facts["model"])
        self.fingerprint, self._plan_flags = identity.fingerprint(llm.facts), flags_of(llm.config)
        self.loras = Loras(llm.adapters, name, options.allow_lora_loading)
        self.sleep_state = SleepState(engine, llm.sleeping, options.idle_release_s)
        self.kv_disk, self.is_traced = llm.kv_disk, llm.trace is not None
        self.stages, self.engines, self.aliases = stages, engines, Aliases(home)
        self.created = int(time.time())
        self.limits = Limits(
            options.max_requests_per_minute,
            options.max_tokens_per_minute,
            options.max_concurrent_requests,
            own=stages.limits_of,
        )
        self.work = WorkPools(options.max_queued_requests, self.limits.pace)
        self.of_replies = ReplyParts(engine, self.limits, options, self.work.prompts)
        of_server = metrics, self.work, options, stages.screen, self._fill
        self.preparer = Preparer(self.text, self.max_model_len, *of_server)
        stages.open(self)
        self.live = Live(engine, metrics.monitor)
        counting = metrics.count_promise, metrics.margin
        self.deadline_admission = DeadlineAdmission(engine, metrics.monitor, self.text, *counting)
        self.arrivals = Arrivals(engine, metrics.monitor)
        self.trace_buffer = TraceBuffer(engine, metrics.monitor)
        self.statistics = Statistics(engine)
        self.is_draining = False

    # --- state ---------------------------------------------------------------------------------

    def trouble(self) -> str | None:
        """Return why this process should be replaced, if it should."""
        return self.engine.trouble() or self.stages.trouble()

    def unready(self) -> str | None:
        """Return why no request would be taken now, if so."""
        if self.is_draining:
            return STOPPING
        if self.engine.num_queued >= self.options.max_queued_requests:
            return "the queue is full"
        return self.trouble()

    def note(self, request: Request, prepared: PreparedRequest) -> None:
        """Let the observer know what a request asks for, if there is one."""
        if observer := self.stages.observer:
            observer.take(request.scope["state"], prepared)

    # --- completions ---------------------------------------------------------------------------

    def check_open(self, model: str | None) -> None:
        """Raise ApiError unless requests for ``model`` are taken."""
        self.check_running()
        self._check_name(model)
        if screen := self.stages.screen():
            screen.check_model(self._adapter(model) or self.name)

    def check_running(self) -> None:
        """Raise ApiError unless requests are taken."""
        if self.is_draining:
            raise ApiError(
                503, "the server is stopping", code="stopping", headers={"retry-after": "5"}
            )
        if why := self.engine.trouble():
            raise ApiError(503, why, code="engine_stopped")

    def _check_name(self, model: str | None) -> None:
        if model is not None and not self.is_called(model) and self._adapter(model) is None:
            has = ", ".join(map(repr, [*self.names, *self.loras.names]))
            message = f"there is no model {model[:80]!r} here: this server has {has}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _adapter(self, model: str | None) -> str | None:
        """Return the adapter that a request names, None if that is the model or nothing."""
        alias = self.alias_of(model) if model is not None else None
        name = self.model_of(alias.model if alias else model or "")
        return name if name in self.loras.names else None

    def model_of(self, name: str) -> str | None:
        """Return the name of the model or of an adapter that this is, None if it is neither."""
        names = {*self.loras.names, *self.names}
        return next((one for one in untagged(name) if one in names), None)

    def alias_of(self, name: str) -> Alias | None:
        """Return the alias that a name is, if what it means is here."""
        alias = None if self.model_of(name) else self.aliases.find(name)
        return alias if alias and self.model_of(alias.model) else None

    @property
    def other_names(self) -> list[str]:
        """Names of aliases of the model and of its adapters."""
        return [one.name for one in self.aliases.all() if self.model_of(one.model)]

    def fetch(self, name: str, report: Callable[[int, int], None]) -> None:
        """Fetch nothing: raise ValueError, which says what a server of one model is."""
        raise ValueError(
            f"this server has {self.name!r} alone: ridgeline pull fetches others, and ridgeline "
            "serve MODEL MODEL or --models-dir has several"
        )

    def _fill(self, request: Rendering | CompletionRequest) -> None:
        """Give a request by an alias what the alias adds."""
        model = getattr(request, "model", None)
        if model and (alias := self.alias_of(model)):
            alias.fill(request)

    def spec(self, model: str | None) -> ModelSpec:
        """Return what plans are made for. Raises ApiError if the model has another name."""
        self._check_name(model)
        return self._spec

    @cached_property
    def _spec(self) -> ModelSpec:
        return replace(read_model_spec(self._path, stores()), name=self.name)

    def memory_document(self) -> dict[str, Any]:
        """Return what takes this process's memory, and what the model needs, as JSON has it."""
        document, needs = self.memory().as_dict(), self._needs
        if needs is None:
            return document
        notes = [needs.sentence, *document["notes"]]
        return document | {"needs": needs.as_dict(), "notes": notes}

    @cached_property
    def _needs(self) -> Needs | None:
        """What the model needs; None if no plan can be made of how it runs."""
        try:
            return needs_of(self._spec, self._plan_flags)
        except ValueError:
            return None

    def statistics_of(self, name: str, version: str) -> OneModelStatistics:
        """Return what Triton's statistics say of the model or an adapter that a name means."""
        adapter = self._adapter(name)
        digest = self.loras.digest_of(adapter).hex() if adapter else ""
        return self.statistics.shown(name, version, digest)

    @property
    def names(self) -> list[str]:
        """All names of the model; the first stands in answers."""
        return list(dict.fromkeys([self.name, *(self.options.served_model_name or ())]))

    @property
    def file_name(self) -> str:
        """The name of the model's file or directory, without its path: that is nobody's matter."""
        return self._path.name

    def is_called(self, name: str) -> bool:
        """Whether this is the model's name."""
        if self._adapter(name):
            return False
        alias = self.alias_of(name)
        return alias is not None or self.model_of(name) is not None or self.options.any_model_name

    async def complete(
        self,
        body: CompletionRequest,
        request: Request,
        *,
        new_writer: NewWriter = OpenAiWriter,
        dialect: Dialect = OPENAI,
    ) -> Reply:
        """Return the reply to prompts that are continued as they stand.

        Raises ApiError if there cannot be one.
        """
        self.check_open(body.model)
        self._fill(body)
        self.check_count(len(body.prompts))
        if body.suffix:
            prepare = self.preparer.from_middle
            prompts = [await prepare(prompt, body.suffix) for prompt in body.prompts]
        else:
            are_cut = body.truncate_prompt_tokens is not None
            prompts = await self.preparer.from_texts(body.prompts, are_cut=are_cut)
        return await self.reply(
            request,
            body,
            prompts,
            "prompt",
            is_middle=bool(body.suffix),
            new_writer=new_writer,
            dialect=dialect,
        )

    async def reply_in(
        self,
        dialect: Dialect,
        request: Request,
        convert: Callable[[], ChatRequest],
        new_writer: NewWriter,
    ) -> Reply:
        """Return the reply to a conversation of another API, which ``convert`` makes OpenAI's.

        Raises ApiError, in the names of that API.
        """
        with dialect.errors():
            body, prompt = await self.preparer.from_converted(convert, request.state.created)
            return await self.reply(
                request, body, [prompt], "messages", new_writer=new_writer, dialect=dialect
            )

    async def reply(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        prompts: list[Ids],
        param: str,
        prediction: Ids = (),
        *,
        is_middle: bool = False,
        new_writer: NewWriter = OpenAiWriter,
        dialect: Dialect = OPENAI,
    ) -> Reply:
        """Return the reply to a request; raises ApiError if there cannot be one.

        Answers of ``is_middle`` end where the model marks that the middle is over. What goes wrong
        later is told in the names of the ``dialect``.
        """
        self.check_queue(len(prompts))
        state, header = request.state, request.headers.get(HEADER)
        prepared = await self.preparer.prepare(body, prompts, param, header, is_middle=is_middle)
        hold = await self.stages.judged(request, body, prepared.prompts, param)
        if state.is_background and prepared.deadline:
            raise contradiction("deadline", "a batch cannot have a deadline")
        screen, params = self.stages.screen(), prepared.params
        if params.seed is None and state.seed is not None:
            params = replace(params, seed=state.seed)
        adapter, name = NO_ADAPTER, self.name
        if body.model is not None and not self.is_called(body.model):
            name = self._adapter(body.model) or body.model  # which may be gone again
            adapter = await self.loras.lease(name)
        operation = "chat" if isinstance(body, ChatRequest) else "text_completion"
        is_growing = bool(body.stream) or state.is_background  # steps that others can wait for
        stream = RequestStream(
            prepared.prompts,
            params,
            body.watched(partial(self.text.new_answer, form=prepared.form)),
            self.caller(request, operation, name, body.cache_salt),
            StreamReader(is_growing, bool(body.stream and body.return_progress), hold),
            prepared.bounds,
            adapter=adapter,
            prediction=prediction,
        )
        await load(self.engine, self.kv_disk, stream)
        fingerprint = identity.with_adapter(self.fingerprint, adapter.digest)
        answers = ResponseBuilder(self.text, body, stream, prepared.form, room=prepared.room)
        self.note(request, PreparedRequest(body, name, fingerprint, params, answers))
        answers.pass_through(self.stages.row(answers, prepared))
        writer = new_writer(answers, name, fingerprint)
        deadline = prepared.deadline
        promising = partial(self.deadline_admission.request, stream, deadline) if deadline else None
        parts = stream, answers, body, writer, dialect
        reply = Reply(self.of_replies, *parts, promising, self.deadline_admission.note_lengths)
        if state.journal is not None and body.stream:
            reply.keep(state.journal, fingerprint + (screen.digest.hex() if screen else ""))
        return _with_notes(reply, body, prepared, dialect)

    def cache_root(self, tenant: str, salt: str | None = None) -> bytes:
        """Return what separates the cached prefixes of tenants, and of salts, if anything does."""
        is_shared = tenant == ANYONE or not self.options.isolate_keys
        if is_shared and salt is None:
            return b""
        of = json.dumps(["" if is_shared else tenant, salt]) if salt is not None else tenant
        return hashlib.blake2b(of.encode(), digest_size=16).digest()

    def caller(
        self, request: Request, operation: str, name: str, salt: str | None = None
    ) -> StreamCaller:
        """Return for whom a request to a model or adapter of this name is answered."""
        state = request.state
        of_end = state.tenant, parent_of(request.headers), operation, name
        return StreamCaller(
            state.tenant,
            state.request_id,
            self.cache_root(state.tenant, salt),
            state.is_background,
            partial(self.note_end, *of_end),
            state.arrived_s,
            int(state.created.timestamp()),
        )

    def note_end(
        self, tenant: str, parent: Context, operation: str, name: str, record: RequestRecord
    ) -> None:
        """Count a prompt that ended, of the model or adapter of this name."""
        self.metrics.count_usage(tenant, record)
        emit(record, parent, operation, name)

    def check_count(self, num_prompts: int, param: str = "prompt") -> None:
        """Raise ApiError if a request has no prompt, or more than can wait now or ever."""
        max_queued = self.options.max_queued_requests
        if not 0 < num_prompts <= max_queued:
            message = (
                f"{param} has {num_prompts} prompts: it must have 1 to {max_queued} "
                "(--max-queued-requests)"
            )
            raise ApiError(400, message, param=param, code="invalid_value")
        self.check_queue(num_prompts)  # before they are prepared, and once more then

    def check_queue(self, num_prompts: int) -> None:
        """Raise ApiError if there is no room for this many prompts to wait."""
        max_queued = self.options.max_queued_requests
        if self.engine.num_queued + num_prompts > max_queued:
            raise ApiError(
                429,
                f"the queue is full ({max_queued} prompts): try again later",
                code="server_is_overloaded",
                headers={"retry-after": "5"},
            )


def untagged(name: str) -> tuple[str, str]:
    """Return what a name may mean: ``:latest``, which Ollama's clients add, says nothing."""
    return name, name.removesuffix(":latest")


def _with_notes(
    reply: Reply, body: ChatRequest | CompletionRequest, prepared: Prepared, dialect: Dialect
) -> Reply:
    """Return a reply that names what its answers are not held to."""
    note_ignored(reply, [*map(dialect.renamed_text, prepared.lost), *prepared.ignored])
    if prepared.room is not None:
        field = dialect.renamed_text(body.length_field)
        reply.headers[CAPPED] = f"{field} {body.longest} -> {prepared.room}"
    return reply
