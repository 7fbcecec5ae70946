"""What the routes share: one model, its engine, whether it takes requests, and how it replies."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import Request
from opentelemetry.context import Context

from ridgeline.core.records import RequestRecord
from ridgeline.core.request import NO_ADAPTER
from ridgeline.engine.memory import ProcessMemory
from ridgeline.engine.setup import identity
from ridgeline.engine.setup.home import stores
from ridgeline.engine.text_processor import TextProcessor
from ridgeline.model.files.summary import Summary
from ridgeline.planner import PlanFlags
from ridgeline.planner.memory.model_spec import ModelSpec, read_model_spec
from ridgeline.planner.needs import Needs, needs_of
from ridgeline.serve.aliases import Alias, Aliases
from ridgeline.serve.answer.conversation import Rendering
from ridgeline.serve.answer.dialect import OPENAI, Dialect
from ridgeline.serve.answer.protocol import (
    ChatRequest,
    CompletionRequest,
)
from ridgeline.serve.answer.reply import OpenAiWriter, Reply, ResponseWriter
from ridgeline.serve.answer.response_builder import ResponseBuilder
from ridgeline.serve.deadlines.admission import Promises
from ridgeline.serve.deadlines.field import HEADER
from ridgeline.serve.deadlines.prediction_sampling import Arrivals
from ridgeline.serve.engine.between_steps import load
from ridgeline.serve.engine.interface import EngineClient
from ridgeline.serve.engine.request_stream import RequestStream, Screen
from ridgeline.serve.http.errors import STOPPING, ApiError
from ridgeline.serve.http.keys import ANYONE, Limits
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.http.request_body import CAPPED, contradiction, note_ignored
from ridgeline.serve.http.turns import WorkTurns
from ridgeline.serve.lora import Loras
from ridgeline.serve.observe.live import Live
from ridgeline.serve.observe.metrics import Metrics
from ridgeline.serve.observe.spans import emit, parent_of
from ridgeline.serve.observe.statistics import Statistics
from ridgeline.serve.observe.trace_buffer import TraceBuffer
from ridgeline.serve.prompts import Ids, Prepared, Prompts
from ridgeline.serve.sleeping import SleepState
from ridgeline.text.messages.message import MessageForm
from ridgeline.trust.guards.guard_models import Guards
from ridgeline.trust.receipts.http import no_key, signer_of

if TYPE_CHECKING:  # imported only where a server has them
    from ridgeline.engine.kv_disk.cache_tier import Tier
    from ridgeline.trust.audit.log import AuditLog
    from ridgeline.trust.audit.requests import AuditEntry
    from ridgeline.trust.guards.guard_loading import Judge
    from ridgeline.trust.receipts.receipt_signer import ReceiptSigner
    from ridgeline.trust.receipts.signing import Signer
    from ridgeline.trust.rules.policy_file import PolicyFile, RequestPolicy

# Of a body, and the names to show.
NewWriter = Callable[[ResponseBuilder, Any, str, str, str], ResponseWriter]


class Service:
    """What the routes share: one model, its engine, and whether it takes requests."""

    def __init__(
        self,
        text: TextProcessor,
        engine: EngineClient,
        metrics: Metrics,
        options: ServeOptions,
        *,
        name: str,
        summary: Summary,
        max_model_len: int,
        facts: Mapping[str, Any],
        files: Mapping[str, str],
        path: Path,
        plan_flags: PlanFlags,
        memory: Callable[[], ProcessMemory],
        loras: Loras,
        sleep_state: SleepState,
        kept: Tier | None = None,
        rules: PolicyFile | None = None,
        audit: AuditLog | None = None,
        guards: Callable[[WorkTurns], Mapping[str, Judge]] = lambda turns: {},
        aliases: Aliases,
    ) -> None:
        """Take the parts; ``facts`` (``engine.setup.identity``) are what equal answers hang on.

        ``files`` are digests of the model's, and ``path`` is its file or directory; ``plan_flags``
        say how it runs. ``memory`` says what takes this process's memory; any thread may call it.
        ``loras`` are its adapters, ``sleep_state`` its sleep, ``kept`` blocks of its cache in
        files, and ``rules`` what keys may ask and answers say. ``audit`` has a line for each
        request, and ``guards`` makes guards of other models, by name; ``aliases`` are further
        names of this one.

        Raises ValueError if rules name a model that cannot judge.
        """
        self.rule_book, self.audit, self.aliases = rules, audit, aliases
        self.text, self.engine, self.metrics, self.options = text, engine, metrics, options
        engine.step_timeout_s = options.step_timeout
        self.summary, self.memory, self._path, self.loras = summary, memory, path, loras
        self.name, self.max_model_len, self.fingerprint = (
            name,
            max_model_len,
            identity.fingerprint(facts),
        )
        self.digest, self.sleep_state, self.kept = str(facts["model"]), sleep_state, kept
        self._facts, self._files, self._plan_flags = facts, files, plan_flags
        self.created = int(time.time())
        self.limits = Limits(
            options.max_requests_per_minute,
            options.max_tokens_per_minute,
            options.max_concurrent_requests,
            own=lambda label: rules.now.of(label).limits if rules else {},
        )
        self.work = WorkTurns(options.max_queued_requests, self.limits.pace)
        of_server = options, self.rules, self._fill
        self.prompts = Prompts(text, max_model_len, metrics, self.work, *of_server)
        self.guards = Guards(self._as_guard, self.is_called, guards(self.work))
        if rules:
            rules.check_judges(self.guards.check)
        self.live = Live(engine, metrics.score)
        self.promises = Promises(engine, metrics.score, text, metrics.count_promise, metrics.margin)
        self.arrivals = Arrivals(engine, metrics.score)
        self.history = TraceBuffer(engine, metrics.score)
        self.statistics = Statistics(engine)
        self.is_draining = False

    # --- state ---------------------------------------------------------------------------------

    def trouble(self) -> str | None:
        """Return why this process should be replaced, if it should."""
        return self.engine.trouble() or self.guards.trouble()

    def unready(self) -> str | None:
        """Return why no request would be taken now, if so."""
        if self.is_draining:
            return STOPPING
        if self.engine.num_queued >= self.options.max_queued_requests:
            return "the queue is full"
        return self.trouble()

    @cached_property
    def signer(self) -> Signer | None:
        """What signs receipts. Raises OSError or ValueError for a key that cannot be had."""
        return signer_of(self.options.receipt_key)

    @cached_property
    def receipt_signer(self) -> ReceiptSigner:
        """What makes receipts. Raises OSError or ValueError as ``signer`` does."""
        from ridgeline.trust.receipts.receipt_signer import ReceiptSigner  # few ask for a receipt

        return ReceiptSigner(self.signer, self.name, self._facts, self._files, self.max_model_len)

    def rules(self) -> RequestPolicy | None:
        """Return the rules for the present request, if there are any."""
        return self.rule_book.here() if self.rule_book else None

    def entry(self, request: Request) -> AuditEntry | None:
        """Return what is to be known of a request in the audit log, if there is one."""
        found: AuditEntry | None = request.scope["state"].get("audit")
        if found is not None:
            found.rules = self.rules()
        return found

    # --- completions ---------------------------------------------------------------------------

    def check_open(self, model: str | None) -> None:
        """Raise ApiError unless requests for ``model`` are taken."""
        self.check_running()
        self._check_name(model)
        if rules := self.rules():
            rules.check_model(self._adapter(model) or self.name)

    def check_running(self) -> None:
        """Raise ApiError unless requests are taken."""
        if self.is_draining:
            raise ApiError(
                503, "the server is stopping", code="stopping", headers={"retry-after": "5"}
            )
        if why := self.engine.trouble():
            raise ApiError(503, why, code="engine_stopped")

    def _as_guard(self) -> Judge | None:
        from ridgeline.trust.guards.guard_loading import judge_of  # most servers have no guard

        return judge_of(self.name, self.text, self.engine, self.work.prompts)

    def _check_name(self, model: str | None) -> None:
        if model is not None and not self.is_called(model) and self._adapter(model) is None:
            has = ", ".join(map(repr, [*self.names, *self.loras.names]))
            message = f"there is no model {model[:80]!r} here: this server has {has}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _adapter(self, model: str | None) -> str | None:
        """Return the adapter that a request names, None if that is the model or nothing."""
        alias = self.alias_of(model) if model is not None else None
        found = self.model_of(alias.model if alias else model or "")
        return found if found in self.loras.names else None

    def model_of(self, name: str) -> str | None:
        """Return the name of the model or of an adapter that this is, None if it is neither."""
        known = {*self.loras.names, *self.names}
        return next((one for one in untagged(name) if one in known), None)

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
        if alias := self.alias_of(getattr(request, "model", None) or ""):
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

    def statistics_of(self, name: str, version: str) -> dict[str, Any]:
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
            prepare = self.prompts.of_middle
            prompts = [await prepare(prompt, body.suffix) for prompt in body.prompts]
        else:
            are_cut = body.truncate_prompt_tokens is not None
            prompts = await self.prompts.of_texts(body.prompts, are_cut=are_cut)
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
            body, prompt = await self.prompts.of_converted(convert, request.state.created)
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
        prepared = await self.prompts.prepare(body, prompts, param, header, is_middle=is_middle)
        screen = await self.judged(request, body, prepared.prompts, param)
        if state.is_background and prepared.deadline:
            raise contradiction("deadline", "a batch cannot have a deadline")
        rules, params = self.rules(), prepared.params
        if params.seed is None and state.seed is not None:
            params = replace(params, seed=state.seed)
        adapter, name = NO_ADAPTER, self.name
        if body.model is not None and not self.is_called(body.model):
            name = self._adapter(body.model) or body.model  # which may be gone again
            adapter = await self.loras.lease(name)
        operation = "chat" if isinstance(body, ChatRequest) else "text_completion"
        parent = parent_of(request.headers)
        stream = RequestStream(
            prepared.prompts,
            params,
            body.watched(partial(self.text.new_answer, form=prepared.form)),
            state.tenant,
            is_read=bool(body.stream) or state.is_background,  # steps that others can wait for
            is_background=state.is_background,
            tells_progress=bool(body.stream and body.return_progress),
            name=state.request_id,
            arrived_s=state.arrived_s,
            created_s=int(state.created.timestamp()),
            cache_root=self.cache_root(state.tenant, body.cache_salt),
            adapter=adapter,
            prediction=prediction,
            new_constraint=prepared.new_constraint,
            form_param=prepared.form_param,
            token_rules=prepared.token_rules,
            screen=screen,
            on_record=partial(self.note_end, state.tenant, parent, operation, name),
        )
        await load(self.engine, self.kept, stream)
        fingerprint = identity.with_adapter(self.fingerprint, adapter.digest)
        answers = ResponseBuilder(
            self.text, body, stream, prepared.form,
            room=prepared.room, rules=rules, is_constrained=prepared.is_constrained,
        )  # fmt: skip
        if entry := self.entry(request):
            entry.take(body, name, fingerprint, params, answers)
        writer = new_writer(answers, body, stream.name, name, fingerprint)
        if body.receipt:
            self._add_witness(body, stream, answers, prepared.form)
        deadline = prepared.deadline
        promising = partial(self.promises.ask, stream, deadline) if deadline else None
        of_server = self.options, self.work.prompts, promising, self.promises.note_lengths
        parts = stream, answers, body, writer, dialect
        reply = Reply(self.engine, self.limits, *parts, *of_server)
        if state.journal is not None and body.stream:
            reply.keep(state.journal, fingerprint + (rules.digest.hex() if rules else ""))
        return _told(reply, body, prepared, dialect)

    def _add_witness(
        self,
        body: ChatRequest | CompletionRequest,
        stream: RequestStream,
        answers: ResponseBuilder,
        form: MessageForm | None,
    ) -> None:
        """Have an answer end with its receipt. Raises ApiError if it cannot be signed."""
        from ridgeline.trust.receipts.receipt_signer import ReceiptRecorder  # few ask for a receipt

        rules = self.rules()
        is_ruled = rules and (rules.key.output or rules.key.output_judges)
        of_rules = rules.name if rules and is_ruled else None
        try:
            answers.receipt_recorder = ReceiptRecorder(
                self.receipt_signer,
                body,
                stream,
                answers.choices,
                form,
                may_show=answers.may_show,
                rules=of_rules,
            )
        except (OSError, ValueError):
            raise no_key() from None

    async def judged(
        self, request: Request, body: Any, prompts: Sequence[Ids], param: str
    ) -> Screen | None:
        """Have guards judge a request's prompts; return what screens its answers, if they do.

        Raises ApiError if they forbid a prompt.
        """
        rules, state = self.rules(), request.state
        if rules is None or not (rules.key.input_judges or rules.key.output_judges):
            return None
        from ridgeline.trust.guards.checks import Checks, conversations_of  # few have any
        from ridgeline.trust.guards.verdict import JudgeClient

        root = self.cache_root(state.tenant)
        judge_client = JudgeClient(state.tenant, state.request_id, root, state.is_background)
        decode = self.text.tokenizer.decode
        found = await self.work.prompts.run(partial(conversations_of, body, prompts, decode, rules))
        goes_on = bool(getattr(body, "continue_final_message", None))
        checks = Checks(rules, self.guards, judge_client, found, goes_on=goes_on)
        await checks.check_read(param)
        return checks.screen if rules.key.output_judges else None

    def cache_root(self, tenant: str, salt: str | None = None) -> bytes:
        """Return what separates the cached prefixes of tenants, and of salts, if anything does."""
        is_shared = tenant == ANYONE or not self.options.isolate_keys
        if is_shared and salt is None:
            return b""
        of = json.dumps(["" if is_shared else tenant, salt]) if salt is not None else tenant
        return hashlib.blake2b(of.encode(), digest_size=16).digest()

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


def _told(
    reply: Reply, body: ChatRequest | CompletionRequest, prepared: Prepared, dialect: Dialect
) -> Reply:
    """Return a reply that names what its answers are not held to."""
    note_ignored(reply, [*map(dialect.renamed_text, prepared.lost), *prepared.ignored])
    if prepared.room is not None:
        field = dialect.renamed_text(body.length_field)
        reply.headers[CAPPED] = f"{field} {body.longest} -> {prepared.room}"
    return reply
