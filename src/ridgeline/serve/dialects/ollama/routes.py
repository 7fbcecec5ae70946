"""Ollama's routes; OpenAI's answer them."""

from __future__ import annotations

import json
import os
import time
from functools import partial

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from ridgeline.engine.outputs import shaped
from ridgeline.serve.aliases import Alias
from ridgeline.serve.answer.protocol import ChatRequest, CompletionRequest
from ridgeline.serve.answer.schemas import TEXT_ERRORS, documented
from ridgeline.serve.dialects.ollama import models, schemas
from ridgeline.serve.dialects.ollama.managing import add_management
from ridgeline.serve.dialects.ollama.protocol import (
    EmbeddingRequest,
    EmbedRequest,
    GenerateRequest,
    OllamaChatRequest,
    OllamaRequest,
    ShowRequest,
)
from ridgeline.serve.dialects.ollama.request import (
    OLLAMA,
    chat_request,
    prompt_request,
    raw_request,
)
from ridgeline.serve.dialects.ollama.response import NS_PER_MS, OllamaWriter, time_of
from ridgeline.serve.dialects.openai.embeddings import Vectors, check_dimensions, vectors_of
from ridgeline.serve.model_server import ModelServer
from ridgeline.system.machine import memory_of

_LINES = partial(documented, stream=schemas.LINES, media=OllamaWriter.stream_type)


def add_ollama(app: FastAPI, server: ModelServer) -> None:
    """Add the routes to an application."""
    _add_answers(app, server)
    _add_vectors(app, server)
    _add_models(app, server)
    add_management(app, server)


def _add_answers(app: FastAPI, server: ModelServer) -> None:
    @app.post("/api/chat", responses=TEXT_ERRORS | _LINES(schemas.ChatAnswered))
    async def chat(body: OllamaChatRequest, request: Request) -> Response:
        """Answer a conversation, as Ollama does."""
        server.check_open(body.model)
        if not body.messages:
            message: schemas.SaidMessage = {"role": "assistant", "content": ""}
            return _at_once(body, {**_loaded(body), "message": message})
        convert, writer = partial(chat_request, body), partial(OllamaWriter, is_chat=True)
        return await server.reply_in(OLLAMA, request, convert, writer)

    @app.post("/api/generate", responses=TEXT_ERRORS | _LINES(schemas.GenerateAnswered))
    async def generate(body: GenerateRequest, request: Request) -> Response:
        """Answer a prompt, as Ollama does; with raw or a suffix, continue it or fill in."""
        server.check_open(body.model)
        if not body.prompt and not body.suffix:
            text: schemas.SaidText = {"response": ""}
            return _at_once(body, {**_loaded(body), **text})
        writer = partial(OllamaWriter, is_chat=False)
        with OLLAMA.errors():
            target: CompletionRequest | ChatRequest
            if body.suffix:
                target = raw_request(body)
                prompt = await server.preparer.from_middle(body.prompt, body.suffix)
            elif body.raw or not server.text.can_chat:
                target, prompt = raw_request(body), await server.preparer.from_text(body.prompt)
            else:
                target = prompt_request(body)
                prompt = await server.preparer.from_chat(target, request.state.created)
            return await server.reply(
                request,
                target,
                [prompt],
                "prompt",
                is_middle=bool(body.suffix),
                new_writer=writer,
                dialect=OLLAMA,
            )


def _add_vectors(app: FastAPI, server: ModelServer) -> None:
    @app.post("/api/embed", responses=TEXT_ERRORS | {200: {"model": schemas.Embedded}})
    async def embed(body: EmbedRequest, request: Request) -> Response:
        """Return the vectors of texts, as Ollama does."""
        server.check_open(body.model)

        def answer(vectors: Vectors | None) -> schemas.Embedded:
            values = vectors.values if vectors else []
            prompt_ms = vectors.timings().get("time_to_first_token_ms", 0.0) if vectors else 0.0
            return {
                "model": body.model,
                "embeddings": [shaped(vector, body.dimensions) for vector in values],
                "total_duration": int(prompt_ms * NS_PER_MS),
                "load_duration": 0,
                "prompt_eval_count": vectors.usage()["prompt_tokens"] if vectors else 0,
            }

        check_dimensions(server, body.dimensions)
        if not body.texts:
            return JSONResponse(answer(None))
        with OLLAMA.errors():
            return await vectors_of(server, request, body, body.texts, "input", answer)

    @app.post("/api/embeddings", responses=TEXT_ERRORS | {200: {"model": schemas.EmbeddedOne}})
    async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
        """Return the vector of one text as the model makes it, as Ollama once did."""
        server.check_open(body.model)

        def answer(vectors: Vectors) -> schemas.EmbeddedOne:
            return {"embedding": shaped(vectors.values[0], normalises=False)}

        if not body.prompt:
            return JSONResponse({"embedding": []})
        return await vectors_of(server, request, body, [body.prompt], "prompt", answer)


def _loaded(body: OllamaRequest) -> schemas.Answered:
    """Return the end of the answer to an empty request, which loads or unloads a model."""
    return {
        "model": body.model,
        "created_at": time_of(time.time()),
        "done": True,
        "done_reason": "unload" if body.keep_alive in (0, "0", "0s") else "load",
    }


def _at_once(
    body: OllamaRequest, answer: schemas.ChatAnswered | schemas.GenerateAnswered
) -> Response:
    """Return an answer for which nothing is computed."""
    if not body.is_streamed:
        return JSONResponse(answer)
    return Response(json.dumps(answer) + "\n", media_type=OllamaWriter.stream_type)


def _add_models(app: FastAPI, server: ModelServer) -> None:
    summary, text = server.summary, server.text

    @app.get("/api/tags", responses=TEXT_ERRORS)
    async def tags() -> schemas.ModelList:
        """List the one model and its further names, as Ollama does."""
        names = [*server.names, *server.other_names]
        return {"models": [models.entry(name, summary) for name in names]}

    @app.get("/api/ps", responses=TEXT_ERRORS)
    async def ps() -> schemas.LoadedList:
        """List it as loaded."""
        num_bytes = memory_of(os.getpid()).resident_bytes
        one = models.loaded(server.name, summary, num_bytes, server.max_model_len, None)
        return {"models": [one]}

    @app.post("/api/show", responses=TEXT_ERRORS)
    async def show(body: ShowRequest) -> schemas.Shown:
        """Say what the model is and can."""
        server.check_open(body.named)
        can = {
            "completion": text.has_head,
            "embedding": not text.has_head,
            "tools": text.can_chat,
            "insert": text.fim is not None,
        }
        can["thinking"] = text.reasoning is not None
        names = [name for name, has in can.items() if has]
        template = text.chat_template.source if text.can_chat else "{{ .Prompt }}"
        alias = server.alias_of(body.named) or Alias(body.named, server.name)
        sampling = {**text.generation_defaults, **alias.parameters}
        shown = models.shown(summary, alias.template or template, sampling, names)
        if alias.system:
            shown["system"] = alias.system
        return shown

    @app.get("/api/version")
    async def version() -> dict[str, str]:
        """Say which version of Ollama's API this is; ``/version`` has our own."""
        return {"version": models.VERSION}
