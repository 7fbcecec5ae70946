"""llama.cpp's own routes, and LM Studio's list of models, over the one path."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from ridgeline import __version__
from ridgeline.server.dialects.llamacpp.infill import (
    InfillRequest,
    LlamaCppRequest,
    LlamaCppShape,
    TemplateRequest,
)
from ridgeline.server.dialects.llamacpp.lm_studio import listed
from ridgeline.server.dialects.openai.documented import (
    ERRORS,
    INFILL_CHUNKS,
    Infilled,
    documented,
)
from ridgeline.server.dialects.openai.protocol import ChatRequest
from ridgeline.server.dialects.openai.sampler_list import sampler_list
from ridgeline.server.http.errors import ApiError
from ridgeline.server.service import Service


def add_llamacpp(app: FastAPI, service: Service) -> None:
    """Add the routes to an application."""
    answered = ERRORS | documented(Infilled, INFILL_CHUNKS)

    @app.post("/infill", responses=answered)
    async def infill(body: InfillRequest, request: Request) -> Response:
        """Fill in what stands at the cursor of a text, as llama.cpp does."""
        service.check_open(body.model)
        prompt, is_truncated = await service.prompts.of_cursor(body)
        new_shape = partial(
            LlamaCppShape, prompt=prompt, text=service.text, is_truncated=is_truncated
        )
        param = "input_prefix"
        return await service.reply(
            request, body, [prompt], param, is_middle=True, new_shape=new_shape
        )

    @app.post("/completion", responses=answered)
    async def completion(body: LlamaCppRequest, request: Request) -> Response:
        """Continue a prompt, as llama.cpp does."""
        service.check_open(body.model)
        if len(body.prompts) != 1:
            message = f"prompt has {len(body.prompts)} prompts: send one, or ask /v1/completions"
            raise ApiError(400, message, param="prompt", code="invalid_value")
        prompts = await service.prompts.of_texts(body.prompts)
        new_shape = partial(LlamaCppShape, prompt=prompts[0], text=service.text, is_truncated=False)
        return await service.reply(request, body, prompts, "prompt", new_shape=new_shape)

    @app.post("/apply-template", responses=ERRORS)
    async def apply_template(body: TemplateRequest) -> dict[str, str]:
        """Return the prompt that the model's template makes of a conversation, as text."""
        service.check_open(body.model)
        return {"prompt": await service.prompts.text_of_chat(body)}

    @cache
    def fields() -> list[dict[str, Any]]:
        """Return the samplers' fields, which are read from a schema: that takes a while."""
        return sampler_list(service.text.generation_defaults)

    @app.post("/v1/chat/completions/input_tokens", responses=ERRORS)
    async def input_tokens(body: ChatRequest) -> dict[str, Any]:
        """Count the tokens of a conversation's prompt."""
        service.check_open(body.model)
        prompt = await service.prompts.of_chat(body)
        return {"object": "response.input_tokens", "input_tokens": len(prompt)}

    @app.get("/props", responses=ERRORS)
    async def props() -> dict[str, Any]:
        """Say what llama.cpp's clients, and the page, ask before their first request."""
        text = service.text
        samplers = await service.work.reports.run(fields)
        given = {one["name"]: one["default"] for one in samplers if one["default"] is not None}
        sampling = {**text.generation_defaults, **given, "n_predict": -1}
        slots = service.engine.settings.max_num_seqs
        return {
            "default_generation_settings": {"n_ctx": service.max_model_len, "params": sampling},
            "total_slots": slots,
            "model_alias": service.name,
            "model_path": service.name,  # where a file lies is nobody's business
            "chat_template": text.chat_template.source,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"ridgeline {__version__}",
            "is_sleeping": False,
            "reasoning": text.reasoning is not None,
            "sampling_fields": samplers,
        }

    _add_lm_studio(app, service)


def _add_lm_studio(app: FastAPI, service: Service) -> None:
    @app.get("/api/v0/models", responses=ERRORS)
    async def models() -> dict[str, Any]:
        """List the model as LM Studio does."""
        summary, max_len = service.summary, service.max_model_len
        return {
            "object": "list",
            "data": [listed(name, summary, max_len) for name in service.names],
        }
