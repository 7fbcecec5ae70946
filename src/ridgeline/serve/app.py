"""The routes. Each validates, prepares a prompt, and hands a stream to its reply."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.datastructures import State
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ridgeline.serve.answer.protocol import (
    AnyTokenizeRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from ridgeline.serve.answer.reply import STREAMED
from ridgeline.serve.dialects.anthropic.documented import (
    MESSAGE_ERRORS,
    MESSAGE_EVENTS,
    MessageObject,
)
from ridgeline.serve.dialects.anthropic.protocol import CountTokensRequest, MessagesRequest
from ridgeline.serve.dialects.anthropic.request import ANTHROPIC
from ridgeline.serve.dialects.anthropic.request import chat_request as anthropic_request
from ridgeline.serve.dialects.anthropic.response import AnthropicWriter
from ridgeline.serve.dialects.documented import documented
from ridgeline.serve.dialects.llamacpp.routes import add_llamacpp
from ridgeline.serve.dialects.ollama.routes import add_ollama
from ridgeline.serve.dialects.openai.documented import ERRORS, ChatCompletion, Completion
from ridgeline.serve.dialects.openai.embeddings import add_embeddings
from ridgeline.serve.dialects.responses.documented import RESPONSE_EVENTS, ResponseObject
from ridgeline.serve.dialects.responses.protocol import ResponsesRequest
from ridgeline.serve.dialects.responses.request import RESPONSES, chat_request
from ridgeline.serve.dialects.responses.response import ResponsesWriter
from ridgeline.serve.dialects.triton.routes import add_triton
from ridgeline.serve.http.errors import LEAVING, STOPPING, ApiError, add_errors
from ridgeline.serve.http.request_body import BodyRoute
from ridgeline.serve.http.request_state import check_operator, own_view
from ridgeline.serve.lora import add_lora
from ridgeline.serve.observe.explain_route import add_explain
from ridgeline.serve.observe.live import MOST_READERS
from ridgeline.serve.page import FILES
from ridgeline.serve.plans import add_plans
from ridgeline.serve.prompts import Ids
from ridgeline.serve.service import Service
from ridgeline.serve.sleeping import add_sleep
from ridgeline.system.machine import memory_of
from ridgeline.trust.guards.moderations import add_moderations
from ridgeline.trust.receipts.http import add_receipts
from ridgeline.version import __version__


def new_app(service: Service) -> FastAPI:
    """Return the application, with its routes over ``service``."""
    app = FastAPI(
        title="Ridgeline",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # _add_status has it
        redirect_slashes=False,  # the edge takes them off
        servers=[{"url": root}] if (root := service.options.root_path) else None,
    )
    app.router.route_class = BodyRoute
    app.state.work, app.state.is_strict = service.work, service.options.strict
    add_errors(app)
    _add_completions(app, service)
    _add_tokens(app, service)
    add_models(app, service)
    _add_status(app, service)
    add_embeddings(app, service)
    add_moderations(app, service)
    add_explain(app, service)
    add_ollama(app, service)
    add_llamacpp(app, service)
    add_triton(app, service)
    add_lora(app, service.loras, service.check_open)
    add_sleep(app, service.sleep_state)
    if service.audit:
        # Servers without it need not import this.
        from ridgeline.trust.audit.requests import add_audit

        add_audit(app, service.audit)
    add_receipts(app, lambda: service.signer)
    add_plans(app, service.spec, lambda: [service.name])
    if service.options.page:
        app.router.routes += [Route(path, file, methods=["GET"]) for path, file in FILES.items()]
    return app


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", responses=ERRORS | documented(ChatCompletion))
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        service.check_open(body.model)
        prompt = await service.prompts.of_chat(body, request.state.created)
        predicted: Ids = ()
        if body.prediction:
            text, param = body.prediction.text, "prediction.content"
            encode = partial(service.text.tokenizer.encode, add_bos=False)
            predicted = await service.prompts.of_text(text, param=param, encode=encode)
        return await service.reply(request, body, [prompt], "messages", predicted)

    @app.post("/v1/completions", responses=ERRORS | documented(Completion))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or many."""
        return await service.complete(body, request)

    @app.post("/v1/responses", responses=ERRORS | documented(ResponseObject, RESPONSE_EVENTS))
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation that is given as items; nothing is stored."""
        service.check_open(body.model)
        convert, writer = partial(chat_request, body), partial(ResponsesWriter, asked=body)
        return await service.reply_in(RESPONSES, request, convert, writer)

    @app.post("/v1/responses/input_tokens", responses=ERRORS)
    async def count_input(body: ResponsesRequest) -> dict[str, Any]:
        """Count the tokens of a conversation that is given as items, without an answer."""
        service.check_open(body.model)
        with RESPONSES.errors():
            _, prompt = await service.prompts.of_converted(partial(chat_request, body))
            return {"object": "response.input_tokens", "input_tokens": len(prompt)}

    @app.post("/v1/messages", responses=MESSAGE_ERRORS | documented(MessageObject, MESSAGE_EVENTS))
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation, as Anthropic does."""
        service.check_open(body.model)
        convert = partial(anthropic_request, body)
        return await service.reply_in(ANTHROPIC, request, convert, AnthropicWriter)

    @app.post("/v1/messages/count_tokens", responses=MESSAGE_ERRORS)
    async def count_tokens(body: CountTokensRequest) -> dict[str, int]:
        """Count the tokens of a conversation, without an answer."""
        service.check_open(body.model)
        with ANTHROPIC.errors():
            convert = partial(anthropic_request, body)
            _, prompt = await service.prompts.of_converted(convert)
            return {"input_tokens": len(prompt)}


def _add_tokens(app: FastAPI, service: Service) -> None:
    text = service.text

    @app.post("/tokenize", responses=ERRORS, response_model=dict[str, Any])
    async def tokenize(body: AnyTokenizeRequest) -> Response:
        """Turn a text or a conversation into token ids."""
        service.check_open(body.model)
        if isinstance(body, TokenizeChatRequest):
            ids = await service.prompts.of_chat(body)
        else:
            add_bos = None if body.adds_special else False
            encode = partial(
                text.tokenizer.encode, add_bos=add_bos, parse_special=body.parse_special
            )
            ids = await service.prompts.of_text(body.text, encode=encode)

        def answer() -> Response:
            strings = [text.spell(token) for token in ids] if body.return_token_strs else None
            tokens: list[Any] = list(ids)
            if isinstance(body, TokenizeRequest) and body.with_pieces:
                spelt = text.tokenizer.token_bytes
                tokens = [{"id": token, "piece": _piece(spelt(token))} for token in ids]
            return JSONResponse(
                {
                    "count": len(ids),
                    "max_model_len": service.max_model_len,
                    "tokens": tokens,
                    "token_strs": strings,
                }
            )

        return await service.work.prompts.run(answer)

    @app.post("/detokenize", responses=ERRORS)
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """Turn token ids into text."""
        service.check_open(body.model)
        ids = await service.prompts.of_text(body.tokens, param="tokens")
        decode = partial(text.tokenizer.decode, ids, skip_special=False)
        found = await service.work.prompts.run(decode)
        return {"prompt": found, "content": found}  # as vLLM and llama.cpp call it

    @app.get("/tokenizer_info", responses=ERRORS)
    async def tokenizer_info() -> dict[str, Any]:
        """Say what programs that evaluate models ask of the tokenizer, as vLLM does."""
        return text.tokenizer_config | {"model_max_length": service.max_model_len}


def _piece(spelling: bytes) -> str | list[int]:
    """Return what a token stands for as llama.cpp does: as its bytes where they are no UTF-8."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return list(spelling)


def _add_status(app: FastAPI, service: Service) -> None:
    def probe(question: Callable[[], str | None]) -> Callable[[], Any]:
        async def answer() -> Response:
            why = question()
            body = {"status": "ok"} if why is None else {"status": "no", "reason": why}
            if level := service.sleep_state.level:
                body["asleep"] = f"level {level}: a request wakes it"
            if service.is_draining:
                body[LEAVING] = STOPPING
            if service.audit and (loss := service.audit.loss()):
                body["audit"] = loss
            return JSONResponse(body, 200 if why is None else 503)

        return answer

    app.get("/health", summary="Does the engine live?")(probe(service.trouble))
    app.get("/ready", summary="Are requests taken?")(probe(service.unready))

    reports = service.work.reports  # what no stream may wait for

    @cache
    def written() -> bytes:
        """Return the document, which takes half a second the first time."""
        return bytes(JSONResponse(app.openapi()).body)

    async def document(request: Request) -> Response:
        return Response(await reports.run(written), media_type="application/json")

    app.add_route("/openapi.json", document, include_in_schema=False)

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Say which version this is."""
        return {"version": __version__}

    @app.get("/v1/live", response_class=StreamingResponse, responses=ERRORS)
    async def live(request: Request) -> Response:
        """Send views of the engine as server-sent events, for as long as they are read.

        A key sees its own sequences alone, unless it is an operator's.
        """
        if service.live.is_full(request.state.tenant):
            message = f"this key reads {MOST_READERS} live views already: close one"
            raise ApiError(429, message, code="too_many_views", headers={"retry-after": "5"})
        events = service.live.events(request.state.tenant, own_view(request.state))
        return StreamingResponse(events, 200, STREAMED, "text/event-stream")

    @app.get("/v1/memory", responses=ERRORS)
    async def memory(request: Request) -> dict[str, Any]:
        """Say line by line what takes this process's memory, what may grow, and what is needed.

        For operators.
        """
        check_operator(request.state)
        return await reports.run(service.memory_document)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Return the metrics in Prometheus' text format: to a key its own use, to operators all."""
        seen = own_view(request.state)
        text = await reports.run(lambda: service.metrics.text(seen))
        return PlainTextResponse(text, media_type=service.metrics.content_type)


def add_models(app: FastAPI, service: Service) -> None:
    """Add the routes to an application."""
    model = {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "ridgeline",
        "digest": f"sha256:{service.digest}",
        "system_fingerprint": service.fingerprint,
        "max_model_len": service.max_model_len,
        "tool_call_parser": service.text.tool_format.name,
        "reasoning": service.text.reasoning is not None,
    }

    def entries(state: State) -> list[dict[str, Any]]:
        status = {
            "value": "loaded",
            "num_requests": service.engine.num_streams if state.is_operator else None,
            "resident_bytes": memory_of(os.getpid()).resident_bytes,
            "unload_s": None,
        }
        named = [model | {"id": name, "status": status} for name in service.names]
        others = [
            model | {"id": name, "parent": service.name, "status": status}
            for name in service.other_names
        ]
        return [*named, *service.loras.entries(model), *others]

    @app.get("/v1/models", responses=ERRORS)
    async def models(request: Request) -> dict[str, Any]:
        """List the one model, and its adapters."""
        return {"object": "list", "data": entries(request.state)}

    @app.get("/v1/models/{name:path}", responses=ERRORS)
    async def one_model(name: str, request: Request) -> dict[str, Any]:
        """Describe the model, or an adapter."""
        all_of_them = entries(request.state)
        for one in all_of_them:
            if one["id"] == name:
                return one
        if service.is_called(name):
            return all_of_them[0]
        raise ApiError(404, f"there is no model {name[:80]!r} here", code="model_not_found")
