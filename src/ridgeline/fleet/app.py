"""The router's routes: its own few, and one that passes a request on to the model that it names."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import httpx2
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import TypeAdapter
from starlette.responses import Response
from starlette.routing import Route

from ridgeline import __version__
from ridgeline.engine_setup.locate import locate, stores
from ridgeline.fleet.catalogue import Catalogue
from ridgeline.fleet.passed_on import PassedOn
from ridgeline.fleet.pool import Pool, Slot
from ridgeline.fleet.triton import add_triton
from ridgeline.fleet.worker import STATUS_S
from ridgeline.models.checkpoint import load_checkpoint
from ridgeline.models.summary import Summary, summarise
from ridgeline.planner.memory.model_spec import ModelSpec, subject_of
from ridgeline.server.dialects.llamacpp.lm_studio import listed
from ridgeline.server.dialects.ollama.models import VERSION, entry, loaded
from ridgeline.server.http.error_handlers import add_errors
from ridgeline.server.http.errors import ApiError
from ridgeline.server.http.json_body import in_turn
from ridgeline.server.http.options import parse_seconds
from ridgeline.server.http.static import FILES
from ridgeline.server.http.turns import WorkTurns
from ridgeline.server.plans.routes import add_plans

POSTS = (  # their bodies name a model
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/responses/input_tokens",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/v1/score",
    "/score",
    "/infill",
    "/completion",
    "/completions",
    "/apply-template",
    "/v1/chat/completions/input_tokens",
    "/tokenize",
    "/detokenize",
    "/api/chat",
    "/api/generate",
    "/api/show",
    "/api/embed",
    "/api/embeddings",
)
_SAMPLE = re.compile(r"^(\w[\w:]*)(?:\{(.*)\})? ", re.MULTILINE)  # up to its value
_ANSWERS = "ridgeline:model_answers"
_COUNTED = {
    "resumed": "Streams that went on when the process that answered had ended.",
    "diverged": "Streams that ended then, since the answer would not have been the same.",
}
_FIELDS = TypeAdapter[dict[str, Any]](dict[str, Any])


class Router:
    """What the routes share."""

    def __init__(self, catalogue: Catalogue, pool: Pool, *, takes_any_name: bool = False) -> None:
        """Serve the models of ``catalogue`` from ``pool``.

        With ``takes_any_name`` an unknown name means the model that was used last.
        """
        self._takes_any_name = takes_any_name
        self.catalogue, self.pool = catalogue, pool
        self.created = int(time.time())
        self.is_draining = False

    def listing(self, is_operator: bool) -> list[dict[str, Any]]:
        """Return all models as ``/v1/models`` shows them."""
        return [self.shown(name, is_operator) for name in self.catalogue.models()]

    def shown(self, name: str, is_operator: bool) -> dict[str, Any]:
        """Return a model as ``/v1/models`` shows it; only operators see how much it is used."""
        slot = self.pool.slots.get(name)
        worker = slot.worker if slot else None
        status: dict[str, Any] = {"value": slot.state if slot else "unloaded"}
        if slot and worker:
            idle_s = asyncio.get_running_loop().time() - slot.used_s
            is_kept = slot.num_users or slot.keep_alive_s < 0
            status["num_requests"] = slot.num_users if is_operator else None
            status["resident_bytes"] = worker.memory.resident_bytes
            is_shown = is_operator and not is_kept
            status["unload_s"] = max(0.0, slot.keep_alive_s - idle_s) if is_shown else None
            status |= {"reason": worker.trouble} if worker.trouble else {}
        shown = {"id": name, "object": "model", "created": self.created, "owned_by": "ridgeline"}
        if worker:
            shown["max_model_len"] = worker.plan.max_model_len
        return shown | {"status": status}

    def summary(self, name: str) -> Summary | None:
        """Return the facts of a model, None if it cannot be read."""
        try:
            return summarise(load_checkpoint(locate(self.catalogue.models()[name]).path))
        except (ValueError, OSError, KeyError):
            return None

    def listed(self) -> list[dict[str, Any]]:
        """Return all models as LM Studio lists them; those that cannot be read are left out."""
        entries = []
        for name in self.catalogue.models():
            slot = self.pool.slots.get(name)
            worker = slot.worker if slot else None
            if (summary := self.summary(name)) is not None:
                entries.append(listed(name, summary, worker.plan.max_model_len if worker else None))
        return entries

    def loaded(self) -> list[dict[str, Any]]:
        """Return the models that are loaded, as Ollama lists them."""
        entries = []
        for slot in tuple(self.pool.slots.values()):
            if (worker := slot.worker) and (summary := self.summary(slot.name)):
                left_s = None if slot.keep_alive_s < 0 else slot.keep_alive_s
                expires_s = None if left_s is None else time.time() + left_s
                num_bytes = worker.memory.resident_bytes
                max_len = worker.plan.max_model_len
                entries.append(loaded(slot.name, summary, num_bytes, max_len, expires_s))
        return entries

    def chosen(self, name: Any) -> tuple[str, str]:
        """Return the name and the model that a request means. Raises ApiError if there is none."""
        models = self.catalogue.models()
        known = ", ".join(map(repr, list(models)[:10])) or "no model any more"
        known += ", ..." if len(models) > 10 else ""
        if not isinstance(name, str) or not name:
            message = f"model is missing: name one of {known}"
            raise ApiError(400, message, param="model", code="missing_parameter")
        known_name = self.catalogue.find(name)
        if known_name is None and self._takes_any_name and models:
            known_name = self.last_used()
        if known_name is None:
            message = f"there is no model {name[:80]!r} here: this server has {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return known_name, models[known_name]

    def subject(self, name: str | None) -> ModelSpec:
        """Return the model that a plan is for. Raises ApiError if there is none."""
        known_name, model = self.chosen(name)
        return replace(subject_of(model, stores()), name=known_name)

    def last_used(self) -> str:
        """Return the name of the model that was used last, or of the first if none was."""
        loaded = [slot for slot in self.pool.slots.values() if slot.worker is not None]
        if not loaded:
            return next(iter(self.catalogue.models()), "")
        return max(loaded, key=lambda slot: (slot.num_users > 0, slot.used_s)).name


def new_app(router: Router) -> FastAPI:
    """Return the application, with its routes over ``router``."""
    app = FastAPI(
        title="Ridgeline", version=__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.state.work = WorkTurns()
    add_errors(app)
    _add_status(app, router)
    add_plans(app, router.subject, lambda: list(router.catalogue.models()))

    async def post(request: Request) -> Response:
        """Pass on a request that names its model in its body."""
        if router.is_draining:
            raise ApiError(503, "the server is stopping", code="stopping")
        body = await request.body()
        fields = await in_turn(request.app.state.work, _FIELDS, body)
        name, model = router.chosen(fields.get("model"))
        kept_s = _keep_alive(request.url.path, fields) if request.state.is_operator else None
        use = partial(router.pool.use, name, model, kept_s)
        return PassedOn(router.pool, name, use, body)

    async def get(request: Request) -> Response:
        """Pass on a request that names its model in its query; by default the model last used."""
        name, model = router.chosen(request.query_params.get("model") or router.last_used())
        return PassedOn(router.pool, name, partial(router.pool.use, name, model))

    async def named(request: Request) -> Response:
        """Pass on what names its model in its path."""
        if router.is_draining:
            raise ApiError(503, "the server is stopping", code="stopping")
        name, model = router.chosen(request.path_params["model"])
        use = partial(router.pool.use, name, model)
        return PassedOn(router.pool, name, use, await request.body())

    async def live(request: Request) -> Response:
        """Pass on what a loaded model's process says of itself; looking neither loads nor keeps.

        So is what lets it sleep.
        """
        body = await request.body()
        fields = await in_turn(request.app.state.work, _FIELDS, body) if body else {}
        named = fields.get("model") or request.query_params.get("model")
        name, _ = router.chosen(named or router.last_used())
        slot = router.pool.slots.get(name)
        if slot is None or slot.worker is None:
            request.state.note["passed_on"] = True  # pages ask again and again
            message = f"{name} is not loaded: it is when it is first asked for"
            raise ApiError(503, message, code="model_not_loaded")
        worker = slot.worker
        await worker.look()
        if worker.trouble:
            raise router.pool.refusal(slot)
        return PassedOn(router.pool, name, lambda: contextlib.nullcontext(worker), body)

    add_triton(app, router, named)
    for path in POSTS:
        app.router.routes.append(Route(path, post, methods=["POST"]))
    for path in ("/openapi.json", "/tokenizer_info", "/props"):
        app.router.routes.append(Route(path, get, methods=["GET"]))
    for path in ("/v1/live", "/v1/memory", "/v1/requests/{name}/explain"):
        app.router.routes.append(Route(path, live, methods=["GET"]))
    for path in ("/v1/sleep", "/v1/wake"):
        app.router.routes.append(Route(path, live, methods=["POST"]))
    app.router.routes += [Route(path, file, methods=["GET"]) for path, file in FILES.items()]
    return app


def _keep_alive(path: str, fields: dict[str, Any]) -> float | None:
    """Return how long a request of Ollama's asks its model to stay; other requests do not say."""
    value = fields.get("keep_alive")
    if not path.startswith("/api/") or value is None:
        return None
    try:
        return parse_seconds(value)
    except ValueError as error:
        raise ApiError(
            400, f"keep_alive: {error}", param="keep_alive", code="invalid_value"
        ) from None


def _add_status(app: FastAPI, router: Router) -> None:
    @app.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        """List all models, loaded or not."""
        await router.pool.look()
        return {"object": "list", "data": router.listing(request.state.is_operator)}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str, request: Request) -> dict[str, Any]:
        """Describe one."""
        known_name, _ = router.chosen(name)
        await router.pool.look()
        return router.shown(known_name, request.state.is_operator)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Say that this process lives, and which models hang; it ends those itself."""
        hung = await router.pool.look()
        return {"status": "ok"} | ({"hung": hung} if hung else {})

    @app.get("/ready")
    async def ready() -> Response:
        """Say whether requests are taken."""
        if router.is_draining:
            return JSONResponse({"status": "no", "reason": "the server is stopping"}, 503)
        return JSONResponse({"status": "ok"})

    @app.get("/version")
    async def version() -> dict[str, str]:
        """Say which version this is."""
        return {"version": __version__}

    @app.get("/api/version")
    async def ollama_version() -> dict[str, str]:
        """Say which version of Ollama's API this is."""
        return {"version": VERSION}

    @app.get("/api/tags")
    async def tags() -> dict[str, Any]:
        """List all models, as Ollama does; those that cannot be read are left out."""

        def entries() -> list[dict[str, Any]]:
            names = router.catalogue.models()
            return [entry(name, one) for name in names if (one := router.summary(name)) is not None]

        return {"models": await app.state.work.reports.run(entries)}

    @app.get("/api/v0/models")
    async def lm_studio_models() -> dict[str, Any]:
        """List all models, as LM Studio does."""
        return {"object": "list", "data": await app.state.work.reports.run(router.listed)}

    @app.get("/api/ps")
    async def ps() -> dict[str, Any]:
        """List those that are loaded, as Ollama does."""
        return {"models": await app.state.work.reports.run(router.loaded)}

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Return the metrics of all loaded models; each sample names its own."""
        hung = await router.pool.look()
        slots = [slot for slot in router.pool.slots.values() if slot.worker is not None]
        well = [slot for slot in slots if slot.name not in hung]
        kept = ("authorization", "x-api-key")
        key = {name: request.headers[name] for name in kept if name in request.headers}
        texts = await asyncio.gather(*(_metrics(slot, key) for slot in well))
        texts.append(_answering({slot.name: slot in well for slot in slots}))
        texts += [_counted(name, value) for name, value in router.pool.counts.items()]
        return PlainTextResponse(merged(texts), media_type="text/plain; version=0.0.4")


def _answering(models: Mapping[str, bool]) -> str:
    """Return a metric of the router's own: which of the loaded models answer."""
    head = f"# HELP {_ANSWERS} Whether the model's process answers.\n# TYPE {_ANSWERS} gauge\n"
    names = [f"{_ANSWERS}{{model_name={json.dumps(name)}}} " for name in models]
    lines = [f"{name}{well:d}\n" for name, well in zip(names, models.values(), strict=True)]
    return "".join([head, *lines])


def _counted(name: str, value: int) -> str:
    """Return a counter of streams that went on in another process, or could not."""
    metric, said = f"ridgeline_fleet_{name}_total", _COUNTED[name]
    return f"# HELP {metric} {said}\n# TYPE {metric} counter\n{metric} {value}\n"


async def _metrics(slot: Slot, key: Mapping[str, str]) -> str:
    """Return the metrics that a model's process shows to a key, each with the model's name."""
    try:
        async with asyncio.timeout(STATUS_S):
            client = slot.worker.client if slot.worker else None
            text = (await client.get("/metrics", headers=key)).text if client else ""
    except (httpx2.HTTPError, TimeoutError):  # it is ending, or begins to hang
        return ""
    name = json.dumps(slot.name)

    def named(sample: re.Match[str]) -> str:
        metric, labels = sample[1], sample[2] or ""
        if "model_name=" in labels:
            return sample[0]
        return f"{metric}{{model_name={name}{',' if labels else ''}{labels}}} "

    return _SAMPLE.sub(named, text)


def merged(texts: Iterable[str]) -> str:
    """Return several texts of Prometheus' format as one: each family once, with all samples."""
    families: dict[str, list[str]] = {}
    for text in texts:
        family: list[str] = []
        for line in text.splitlines(keepends=True):
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                family = families.setdefault(name, [])
                if family:
                    continue
            elif line.startswith("#") and line in family:
                continue
            family.append(line)
    return "".join(line for family in families.values() for line in family)
