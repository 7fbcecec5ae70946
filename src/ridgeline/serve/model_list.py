"""``/v1/models``: the one model, and each of its adapters with the model for a parent."""

from __future__ import annotations

import os
from typing import Any

from fastapi import FastAPI, Request
from starlette.datastructures import State

from ridgeline.serve.dialects.openai.documented import ERRORS
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.service import Service
from ridgeline.system.machine import memory_of


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
