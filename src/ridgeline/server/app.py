"""The routes. Each validates, prepares a prompt, and hands a stream to its reply."""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from opentelemetry.context import Context
from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ridgeline import __version__
from ridgeline.api.memory import ProcessMemory
from ridgeline.api.text_side import TextSide
from ridgeline.core.params import SamplingParams
from ridgeline.core.records import RequestRecord
from ridgeline.core.request import NO_ADAPTER
from ridgeline.engine_setup.locate import stores
from ridgeline.models.summary import Summary
from ridgeline.planner.subject import Subject, subject_of
from ridgeline.server.anthropic import request as anthropic
from ridgeline.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from ridgeline.server.anthropic.shape import MessageShape
from ridgeline.server.bodies import BodyRoute
from ridgeline.server.choices import Answers
from ridgeline.server.deadlines import HEADER, deadline_of
from ridgeline.server.embeddings import add_embeddings
from ridgeline.server.engine_thread import Bridge
from ridgeline.server.errors import ApiError, body_at
from ridgeline.server.explaining import add_explain
from ridgeline.server.history import History
from ridgeline.server.infill import InfillRequest, LlamaCppShape
from ridgeline.server.limits import Limits
from ridgeline.server.live import Live
from ridgeline.server.lora import Loras, add_lora, with_adapter
from ridgeline.server.metrics import Metrics
from ridgeline.server.model_list import add_models
from ridgeline.server.ollama.routes import add_ollama
from ridgeline.server.options import ServeOptions
from ridgeline.server.plans import add_plans
from ridgeline.server.promises import Promises
from ridgeline.server.prompts import Ids, Prompts
from ridgeline.server.protocol import (
    AnyTokenizeRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
)
from ridgeline.server.replies import OpenAiShape, Reply, Shape
from ridgeline.server.response_shape import ResponseShape
from ridgeline.server.responses import chat_request, renamed
from ridgeline.server.responses_protocol import ResponsesRequest
from ridgeline.server.schemas import (
    ERRORS,
    INFILL_CHUNKS,
    MESSAGE_ERRORS,
    MESSAGE_EVENTS,
    RESPONSE_EVENTS,
    ChatCompletion,
    Completion,
    Infilled,
    MessageObject,
    ResponseObject,
    documented,
)
from ridgeline.server.spans import emit, parent_of
from ridgeline.server.static import FILES
from ridgeline.server.stream import Stream
from ridgeline.server.strict import contradiction

_STATUS = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed"}


class Service:
    """What the routes share: one model, its engine, and whether it takes requests."""

    def __init__(
        self,
        text: TextSide,
        bridge: Bridge,
        metrics: Metrics,
        options: ServeOptions,
        *,
        name: str,
        summary: Summary,
        max_model_len: int,
        fingerprint: str,
        path: Path,
        memory: Callable[[], ProcessMemory],
        loras: Loras,
    ) -> None:
        """Take the parts; ``fingerprint`` names all that equal answers to equal seeds hang on.

        ``path`` is the model's file or directory. ``memory`` says what takes this process's memory;
        any thread may call it. ``loras`` are the model's adapters.
        """
        self.text, self.bridge, self.metrics, self.options = text, bridge, metrics, options
        self.summary, self.memory, self._path, self.loras = summary, memory, path, loras
        self.name, self.max_model_len, self.fingerprint = name, max_model_len, fingerprint
        self.created = int(time.time())
        self.prompts = Prompts(text, max_model_len, metrics)
        self.live = Live(bridge, metrics.score)
        self.promises = Promises(bridge, metrics.score, text, metrics.count_promise)
        self.history = History(bridge, metrics.score)
        self.limits = Limits(
            options.max_requests_per_minute,
            options.max_tokens_per_minute,
            options.max_concurrent_requests,
        )
        self.is_draining = False

    # --- state ---------------------------------------------------------------------------------

    def trouble(self) -> str | None:
        """Return why this process should be replaced, if it should."""
        began_s = self.bridge.step_began_s
        if self.bridge.error:
            return self.bridge.error
        if began_s and time.monotonic() - began_s > self.options.step_timeout:
            return f"a step has taken more than {self.options.step_timeout:g} s"
        return None

    def unready(self) -> str | None:
        """Return why no request would be taken now, if so."""
        if self.is_draining:
            return "the server is stopping"
        if self.bridge.num_queued >= self.options.max_queued_requests:
            return "the queue is full"
        return self.trouble()

    # --- completions ---------------------------------------------------------------------------

    def check_open(self, model: str | None) -> None:
        """Raise ApiError unless requests for ``model`` are taken."""
        if self.is_draining:
            raise ApiError(
                503, "the server is stopping", code="stopping", headers={"retry-after": "5"}
            )
        if self.bridge.error:
            raise ApiError(503, self.bridge.error, code="engine_stopped")
        self._check_name(model)

    def _check_name(self, model: str | None) -> None:
        if model is not None and not self.is_called(model) and model not in self.loras.names:
            has = ", ".join(map(repr, [self.name, *self.loras.names]))
            message = f"there is no model {model[:80]!r} here: this server has {has}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def subject(self, model: str | None) -> Subject:
        """Return what plans are made for. Raises ApiError if the model has another name."""
        self._check_name(model)
        return self._subject

    @cached_property
    def _subject(self) -> Subject:
        return replace(subject_of(self._path, stores()), name=self.name)

    def is_called(self, name: str) -> bool:
        """Whether this is the model's name; ``:latest``, which Ollama adds, says nothing."""
        return self.name in (name, name.removesuffix(":latest"))

    async def reply(
        self,
        request: Request,
        body: ChatRequest | CompletionRequest,
        prompts: list[Ids],
        param: str,
        prediction: Ids = (),
        *,
        is_middle: bool = False,
        new_shape: Callable[[Answers, Any, str, str, str], Shape] = OpenAiShape,
    ) -> Reply:
        """Return the reply to a request; raises ApiError if there cannot be one.

        Answers of ``is_middle`` end where the model marks that the middle is over.
        """
        params = body.params(self.text.default_params, self.text.vocab_size)
        params = self.text.ending_at_fim(params) if is_middle else params
        self._check_bounds(params, body)
        self.prompts.check_length(prompts, params, param, body.length_field)
        self.check_queue(len(prompts))
        deadline = deadline_of(body.deadline, request.headers.get(HEADER))
        if deadline and params.searches:
            raise contradiction("deadline", "nothing is promised of searches, as beam search is")
        form = None
        if isinstance(body, ChatRequest):
            continues = bool(body.continue_final_message)
            form = self.text.message_form(prompts[0], body.use, continues=continues)
        params, new_constraint, form = await self.prompts.of_form(params, body.form_fields, form)
        tenant = request.state.tenant
        operation = "chat" if isinstance(body, ChatRequest) else "text_completion"
        adapter, name = NO_ADAPTER, self.name
        if body.model is not None and not self.is_called(body.model):
            adapter, name = await self.loras.lease(body.model), body.model
        stream = Stream(
            prompts,
            params,
            body.watched(partial(self.text.new_text, form=form)),
            tenant,
            is_read=bool(body.stream),
            name=request.state.request_id,
            cache_root=self.cache_root(tenant),
            adapter=adapter,
            prediction=prediction,
            new_constraint=new_constraint,
            token_rules=await self.prompts.token_rules(params, narrows=body.narrows),
            on_record=partial(self.note_end, tenant, parent_of(request.headers), operation, name),
        )
        stream.arrived_s = request.state.arrived_s
        answers = Answers(self.text, body, stream, form)
        shape = new_shape(answers, body, stream.name, name, with_adapter(self.fingerprint, adapter))
        promising = partial(self.promises.ask, stream, deadline) if deadline else None
        of_promises = promising, self.promises.note_lengths
        return Reply(
            self.bridge, self.limits, stream, answers, body, shape, self.options, *of_promises
        )

    def cache_root(self, tenant: str) -> bytes:
        """Return what separates the cached prefixes of tenants, if anything does."""
        digest = hashlib.blake2b(tenant.encode(), digest_size=16).digest()
        return digest if self.options.isolate_keys else b""

    def note_end(
        self, tenant: str, parent: Context, operation: str, name: str, record: RequestRecord
    ) -> None:
        """Count a prompt that ended, of the model or adapter of this name."""
        self.metrics.count_usage(tenant, record)
        emit(record, parent, operation, name)

    def _check_bounds(self, params: SamplingParams, body: ChatRequest | CompletionRequest) -> None:
        """Raise ApiError for what OpenAI's specification allows and this server's flags do not."""
        options = self.options
        biases = (params.logit_bias or {}).values()
        logprobs = "top_logprobs" if isinstance(body, ChatRequest) else "logprobs"
        for name, value, most in (
            ("n", params.n, options.max_n),
            ("best_of", params.best_of or 0, options.max_n),
            ("stop", len(params.stop), options.max_stop),
            (logprobs, params.logprobs or 0, options.max_logprobs),
            ("temperature", body.temperature or 0, options.max_temperature),
            ("logit_bias", max(map(abs, biases), default=0), options.max_logit_bias),
        ):
            if value > most:
                message = f"{name} asks for {value:g}: this server allows at most {most:g}"
                raise ApiError(400, message, param=name, code="invalid_value")

    def check_count(self, num_prompts: int, param: str = "prompt") -> None:
        """Raise ApiError if a request has no prompt, or more than could ever wait."""
        most = self.options.max_queued_requests
        if not 0 < num_prompts <= most:
            message = f"{param} has {num_prompts} prompts: 1 to {most}"
            raise ApiError(400, message, param=param, code="invalid_value")

    def check_queue(self, num_prompts: int) -> None:
        """Raise ApiError if there is no room for so many prompts to wait."""
        most = self.options.max_queued_requests
        if self.bridge.num_queued + num_prompts > most:
            raise ApiError(
                429,
                f"the queue is full ({most} prompts): try again later",
                code="server_is_overloaded",
                headers={"retry-after": "5"},
            )


def new_app(service: Service) -> FastAPI:
    """Return the application, with its routes over ``service``."""
    app = FastAPI(
        title="Ridgeline",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        servers=[{"url": root}] if (root := service.options.root_path) else None,
    )
    app.router.route_class = BodyRoute
    add_errors(app)
    _add_completions(app, service)
    _add_tokens(app, service)
    add_models(app, service)
    _add_status(app, service)
    add_embeddings(app, service)
    add_explain(app, service)
    add_ollama(app, service)
    add_lora(app, service.loras, service.check_open)
    add_plans(app, service.subject, lambda: [service.name])
    app.router.routes += [Route(path, file, methods=["GET"]) for path, file in FILES.items()]
    return app


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", responses=ERRORS | documented(ChatCompletion))
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        service.check_open(body.model)
        prompt = await service.prompts.of_chat(body)
        predicted: Ids = ()
        if body.prediction:
            text, param = body.prediction.text, "prediction.content"
            predicted = await service.prompts.of_text(text, param=param, add_bos=False)
        return await service.reply(request, body, [prompt], "messages", predicted)

    @app.post("/v1/completions", responses=ERRORS | documented(Completion))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or many."""
        service.check_open(body.model)
        service.check_count(len(body.prompts))
        prepare = service.prompts
        if body.suffix:
            prompts = [await prepare.of_middle(prompt, body.suffix) for prompt in body.prompts]
        else:
            prompts = [await prepare.of_text(prompt) for prompt in body.prompts]
        is_middle = bool(body.suffix)
        return await service.reply(request, body, prompts, "prompt", is_middle=is_middle)

    @app.post("/v1/responses", responses=ERRORS | documented(ResponseObject, RESPONSE_EVENTS))
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation that is given as items; nothing is stored."""
        service.check_open(body.model)
        try:
            chat = chat_request(body)
            prompt = await service.prompts.of_chat(chat)
            shape = partial(ResponseShape, asked=body)
            return await service.reply(request, chat, [prompt], "messages", new_shape=shape)
        except ApiError as error:
            raise renamed(error) from None

    @app.post("/v1/messages", responses=MESSAGE_ERRORS | documented(MessageObject, MESSAGE_EVENTS))
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation, as Anthropic does."""
        service.check_open(body.model)
        try:
            chat = anthropic.chat_request(body)
            prompt = await service.prompts.of_chat(chat)
            return await service.reply(request, chat, [prompt], "messages", new_shape=MessageShape)
        except ApiError as error:
            raise anthropic.renamed(error) from None

    @app.post("/v1/messages/count_tokens", responses=MESSAGE_ERRORS)
    async def count_tokens(body: CountTokensRequest) -> dict[str, int]:
        """Count the tokens of a conversation, without an answer."""
        service.check_open(body.model)
        try:
            chat = anthropic.chat_request(body)
            return {"input_tokens": len(await service.prompts.of_chat(chat))}
        except ApiError as error:
            raise anthropic.renamed(error) from None

    @app.post("/infill", responses=ERRORS | documented(Infilled, INFILL_CHUNKS))
    async def infill(body: InfillRequest, request: Request) -> Response:
        """Fill in what stands at the cursor of a text, as llama.cpp does."""
        service.check_open(body.model)
        prompt, is_truncated = await service.prompts.of_cursor(body)
        if body.n_predict < 0:
            body.max_tokens = service.max_model_len - len(prompt)
        else:
            body.max_tokens = body.n_predict
        new_shape = partial(LlamaCppShape, is_truncated=is_truncated)
        param = "input_prefix"
        return await service.reply(
            request, body, [prompt], param, is_middle=True, new_shape=new_shape
        )


def _add_tokens(app: FastAPI, service: Service) -> None:
    text = service.text

    @app.post("/tokenize", responses=ERRORS)
    async def tokenize(body: AnyTokenizeRequest) -> dict[str, Any]:
        """Turn a text or a conversation into token ids."""
        service.check_open(body.model)
        if isinstance(body, TokenizeChatRequest):
            ids = await service.prompts.of_chat(body)
        else:
            add_bos = None if body.add_special_tokens in (None, True) else False
            ids = await service.prompts.of_text(body.prompt, add_bos=add_bos)
        strings = [text.spell(token) for token in ids] if body.return_token_strs else None
        return {
            "count": len(ids),
            "max_model_len": service.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }

    @app.post("/detokenize", responses=ERRORS)
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """Turn token ids into text."""
        service.check_open(body.model)
        ids = await service.prompts.of_text(body.tokens, param="tokens")
        return {"prompt": text.tokenizer.decode(ids, skip_special=False)}

    @app.get("/tokenizer_info", responses=ERRORS)
    async def tokenizer_info() -> dict[str, Any]:
        """Say what programs that evaluate models ask of the tokenizer, as vLLM does."""
        return text.tokenizer_config | {"model_max_length": service.max_model_len}


def _add_status(app: FastAPI, service: Service) -> None:
    def probe(question: Callable[[], str | None]) -> Callable[[], Any]:
        async def answer() -> Response:
            why = question()
            body = {"status": "ok"} if why is None else {"status": "no", "reason": why}
            return JSONResponse(body, 200 if why is None else 503)

        return answer

    app.get("/health", summary="Does the engine live?")(probe(service.trouble))
    app.get("/ready", summary="Are requests taken?")(probe(service.unready))

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Say which version this is."""
        return {"version": __version__}

    @app.get("/v1/live", response_class=StreamingResponse, responses=ERRORS)
    async def live() -> Response:
        """Send views of the engine as server-sent events, for as long as they are read."""
        headers = {"cache-control": "no-cache"}
        return StreamingResponse(service.live.events(), 200, headers, "text/event-stream")

    @app.get("/v1/memory", responses=ERRORS)
    async def memory() -> dict[str, Any]:
        """Say line by line what takes this process's memory, and what of it may still grow."""
        return (await asyncio.to_thread(service.memory)).as_dict()

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return the metrics in Prometheus' text format."""
        return PlainTextResponse(service.metrics.text(), media_type=service.metrics.content_type)


def add_errors(app: FastAPI) -> None:
    """Let an application answer all errors in the form of the API that the path belongs to."""

    async def api(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        request.scope["state"]["note"].setdefault("error", str(error))
        shown = body_at(request.url.path, error, request.state.request_id)
        return JSONResponse(shown, error.status, error.headers)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path[:80]
        text = f"{request.method} {path!r}: {error.detail}"
        headers = dict(error.headers or {})
        if error.status_code == 404:
            shown = [one for one in app.routes if getattr(one, "include_in_schema", True)]
            known = [getattr(route, "path", "") for route in shown]
            near = difflib.get_close_matches(path, known, n=1, cutoff=0.75)
            text += f"; did you mean {near[0]}?" if near else ""
        if "GET" in headers.get("Allow", ""):
            headers["Allow"] = "GET, HEAD"  # the gate makes one the other
        code = _STATUS.get(error.status_code)
        return await api(request, ApiError(error.status_code, text, code=code, headers=headers))

    async def bug(request: Request, error: Exception) -> Response:
        return await api(request, ApiError(500, "something went wrong; the server's log says what"))

    app.exception_handler(Exception)(bug)  # the gate logs it
    app.exception_handler(ApiError)(api)
    app.exception_handler(HTTPException)(http)
