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
from ridgeline.serve.answer.schemas import ERRORS, ChatCompletion, Completion, documented
from ridgeline.serve.dialects.anthropic.protocol import CountTokensRequest, MessagesRequest
from ridgeline.serve.dialects.anthropic.request import ANTHROPIC
from ridgeline.serve.dialects.anthropic.request import chat_request as anthropic_request
from ridgeline.serve.dialects.anthropic.response import AnthropicWriter
from ridgeline.serve.dialects.anthropic.schemas import (
    MESSAGE_ERRORS,
    MESSAGE_EVENTS,
    MessageObject,
)
from ridgeline.serve.dialects.llamacpp.routes import add_llamacpp
from ridgeline.serve.dialects.ollama.routes import add_ollama
from ridgeline.serve.dialects.openai.embeddings import add_embeddings
from ridgeline.serve.dialects.responses.protocol import ResponsesRequest
from ridgeline.serve.dialects.responses.request import RESPONSES, chat_request
from ridgeline.serve.dialects.responses.response import ResponsesWriter
from ridgeline.serve.dialects.responses.schemas import RESPONSE_EVENTS, ResponseObject
from ridgeline.serve.dialects.triton.routes import add_triton
from ridgeline.serve.http.errors import LEAVING, STOPPING, ApiError, add_errors
from ridgeline.serve.http.request_body import BodyRoute
from ridgeline.serve.http.request_state import check_operator, own_view
from ridgeline.serve.model_server import ModelServer
from ridgeline.serve.observe.live import MOST_READERS
from ridgeline.serve.page import FILES
from ridgeline.serve.prepare import Ids
from ridgeline.serve.routes.explain import add_explain
from ridgeline.serve.routes.operator import add_lora, add_sleep
from ridgeline.serve.routes.plans import add_plans
from ridgeline.system.machine import memory_of
from ridgeline.version import __version__


def new_app(server: ModelServer) -> FastAPI:
    """Return the application, with its routes over ``server``."""
    app = FastAPI(
        title="Ridgeline",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,  # _add_status has it
        redirect_slashes=False,  # the edge takes them off
        servers=[{"url": root}] if (root := server.options.root_path) else None,
    )
    app.router.route_class = BodyRoute
    app.state.work, app.state.is_strict = server.work, server.options.strict
    add_errors(app)
    _add_completions(app, server)
    _add_tokens(app, server)
    add_models(app, server)
    _add_status(app, server)
    add_embeddings(app, server)
    server.stages.add_routes(app)
    add_explain(app, server)
    add_ollama(app, server)
    add_llamacpp(app, server)
    add_triton(app, server)
    add_lora(app, server.loras, server.check_open)
    add_sleep(app, server.sleep_state)
    add_plans(app, server.spec, lambda: [server.name])
    if server.options.page:
        app.router.routes += [Route(path, file, methods=["GET"]) for path, file in FILES.items()]
    return app


def _add_completions(app: FastAPI, server: ModelServer) -> None:
    @app.post("/v1/chat/completions", responses=ERRORS | documented(ChatCompletion))
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        server.check_open(body.model)
        prompt = await server.preparer.from_chat(body, request.state.created)
        predicted: Ids = ()
        if body.prediction:
            text, param = body.prediction.text, "prediction.content"
            encode = partial(server.text.tokenizer.encode, add_bos=False)
            predicted = await server.preparer.from_text(text, param=param, encode=encode)
        return await server.reply(request, body, [prompt], "messages", predicted)

    @app.post("/v1/completions", responses=ERRORS | documented(Completion))
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """Continue one prompt or many."""
        return await server.complete(body, request)

    @app.post("/v1/responses", responses=ERRORS | documented(ResponseObject, RESPONSE_EVENTS))
    async def responses(body: ResponsesRequest, request: Request) -> Response:
        """Answer a conversation that is given as items; nothing is stored."""
        server.check_open(body.model)
        convert, writer = partial(chat_request, body), partial(ResponsesWriter, body=body)
        return await server.reply_in(RESPONSES, request, convert, writer)

    @app.post("/v1/responses/input_tokens", responses=ERRORS)
    async def count_input(body: ResponsesRequest) -> dict[str, Any]:
        """Count the tokens of a conversation that is given as items, without an answer."""
        server.check_open(body.model)
        with RESPONSES.errors():
            _, prompt = await server.preparer.from_converted(partial(chat_request, body))
            return {"object": "response.input_tokens", "input_tokens": len(prompt)}

    @app.post("/v1/messages", responses=MESSAGE_ERRORS | documented(MessageObject, MESSAGE_EVENTS))
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation, as Anthropic does."""
        server.check_open(body.model)
        convert = partial(anthropic_request, body)
        return await server.reply_in(ANTHROPIC, request, convert, AnthropicWriter)

    @app.post("/v1/messages/count_tokens", responses=MESSAGE_ERRORS)
    async def count_tokens(body: CountTokensRequest) -> dict[str, int]:
        """Count the tokens of a conversation, without an answer."""
        server.check_open(body.model)
        with ANTHROPIC.errors():
            convert = partial(anthropic_request, body)
            _, prompt = await server.preparer.from_converted(convert)
            return {"input_tokens": len(prompt)}


def _add_tokens(app: FastAPI, server: ModelServer) -> None:
    text = server.text

    @app.post("/tokenize", responses=ERRORS, response_model=dict[str, Any])
    async def tokenize(body: AnyTokenizeRequest) -> Response:
        """Turn a text or a conversation into token ids."""
        server.check_open(body.model)
        if isinstance(body, TokenizeChatRequest):
            ids = await server.preparer.from_chat(body)
        else:
            add_bos = None if body.adds_special else False
            encode = partial(
                text.tokenizer.encode, add_bos=add_bos, parse_special=body.parse_special
            )
            ids = await server.preparer.from_text(body.text, encode=encode)

        def answer() -> Response:
            strings = [text.spell(token) for token in ids] if body.return_token_strs else None
            tokens: list[Any] = list(ids)
            if isinstance(body, TokenizeRequest) and body.with_pieces:
                spelt = text.tokenizer.token_bytes
                tokens = [{"id": token, "piece": _piece(spelt(token))} for token in ids]
            return JSONResponse(
                {
                    "count": len(ids),
                    "max_model_len": server.max_model_len,
                    "tokens": tokens,
                    "token_strs": strings,
                }
            )

        return await server.work.prompts.run(answer)

    @app.post("/detokenize", responses=ERRORS)
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """Turn token ids into text."""
        server.check_open(body.model)
        ids = await server.preparer.from_text(body.tokens, param="tokens")
        decode = partial(text.tokenizer.decode, ids, skip_special=False)
        prompt = await server.work.prompts.run(decode)
        return {"prompt": prompt, "content": prompt}  # as vLLM and llama.cpp call it

    @app.get("/tokenizer_info", responses=ERRORS)
    async def tokenizer_info() -> dict[str, Any]:
        """Say what programs that evaluate models ask of the tokenizer, as vLLM does."""
        return text.tokenizer_config | {"model_max_length": server.max_model_len}


def _piece(spelling: bytes) -> str | list[int]:
    """Return what a token stands for as llama.cpp does: as its bytes where they are no UTF-8."""
    try:
        return spelling.decode()
    except UnicodeDecodeError:
        return list(spelling)


def _add_status(app: FastAPI, server: ModelServer) -> None:
    def probe(question: Callable[[], str | None]) -> Callable[[], Any]:
        async def answer() -> Response:
            why = question()
            body = {"status": "ok"} if why is None else {"status": "no", "reason": why}
            if level := server.sleep_state.level:
                body["asleep"] = f"level {level}: a request wakes it"
            if server.is_draining:
                body[LEAVING] = STOPPING
            if (observer := server.stages.observer) and (loss := observer.loss()):
                body["audit"] = loss
            return JSONResponse(body, 200 if why is None else 503)

        return answer

    app.get("/health", summary="Does the engine live?")(probe(server.trouble))
    app.get("/ready", summary="Are requests taken?")(probe(server.unready))

    reports = server.work.reports  # what no stream may wait for

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
        if server.live.is_full(request.state.tenant):
            message = f"this key reads {MOST_READERS} live views already: close one"
            raise ApiError(429, message, code="too_many_views", headers={"retry-after": "5"})
        events = server.live.events(request.state.tenant, own_view(request.state))
        return StreamingResponse(events, 200, STREAMED, "text/event-stream")

    @app.get("/v1/memory", responses=ERRORS)
    async def memory(request: Request) -> dict[str, Any]:
        """Say line by line what takes this process's memory, what may grow, and what is needed.

        For operators.
        """
        check_operator(request.state)
        return await reports.run(server.memory_document)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics(request: Request) -> Response:
        """Return the metrics in Prometheus' text format: to a key its own use, to operators all."""
        view = own_view(request.state)
        text = await reports.run(lambda: server.metrics.text(view))
        return PlainTextResponse(text, media_type=server.metrics.content_type)


def add_models(app: FastAPI, server: ModelServer) -> None:
    """Add the routes to an application."""
    model = {
        "id": server.name,
        "object": "model",
        "created": server.created,
        "owned_by": "ridgeline",
        "digest": f"sha256:{server.digest}",
        "system_fingerprint": server.fingerprint,
        "max_model_len": server.max_model_len,
        "tool_call_parser": server.text.tool_format.name,
        "reasoning": server.text.reasoning is not None,
    }

    def entries(state: State) -> list[dict[str, Any]]:
        status = {
            "value": "loaded",
            "num_requests": server.engine.num_streams if state.is_operator else None,
            "resident_bytes": memory_of(os.getpid()).resident_bytes,
            "unload_s": None,
        }
        named = [model | {"id": name, "status": status} for name in server.names]
        others = [
            model | {"id": name, "parent": server.name, "status": status}
            for name in server.other_names
        ]
        return [*named, *server.loras.entries(model), *others]

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
        if server.is_called(name):
            return all_of_them[0]
        raise ApiError(404, f"there is no model {name[:80]!r} here", code="model_not_found")
