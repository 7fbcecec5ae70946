"""A router's routes: its own few, and those that one server of a model answers, or all of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx2
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import TypeAdapter
from starlette.responses import Response
from starlette.routing import Route

from ridgeline.engine.setup.home import locate, stores
from ridgeline.fleet.catalogue import Catalogue
from ridgeline.fleet.metrics import metrics_of
from ridgeline.fleet.pool import Pool
from ridgeline.fleet.proxy import ProxiedResponse
from ridgeline.fleet.servers.adapters import LOAD, UNLOAD, NotLoaded
from ridgeline.fleet.servers.replica_set import ReplicaSet
from ridgeline.fleet.servers.worker import STATUS_S, Worker, json_of
from ridgeline.fleet.triton import add_triton
from ridgeline.foresight.routing.balancer import NOTHING, PromptKeys, prompt_of
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.summary import Summary, summarise
from ridgeline.model.hub.pull import pull
from ridgeline.model.hub.search import is_hub_name
from ridgeline.planner.memory.model_spec import ModelSpec, read_model_spec
from ridgeline.serve.aliases import Aliases
from ridgeline.serve.dialects import COUNTED, MODERATIONS, NAME_A_MODEL
from ridgeline.serve.dialects.llamacpp.routes import listed
from ridgeline.serve.dialects.ollama.managing import add_management
from ridgeline.serve.dialects.ollama.models import VERSION, entry, loaded
from ridgeline.serve.http.errors import ApiError, add_errors
from ridgeline.serve.http.fair_pool import WorkPools
from ridgeline.serve.http.options import parse_seconds
from ridgeline.serve.http.request_body import in_turn
from ridgeline.serve.http.request_state import check_operator
from ridgeline.serve.model_server import untagged
from ridgeline.serve.page import FILES
from ridgeline.serve.routes.plans import add_plans
from ridgeline.system.machine import available_bytes
from ridgeline.version import __version__

if TYPE_CHECKING:  # imported only where a router has an audit log
    from ridgeline.trust.audit.log import AuditLog

_BYTES_OF_TOKEN = 4  # of a request's body, roughly: the server counts exactly
_LONG_BYTES = 1 << 16  # from this size on, a thread makes a body's keys
_FIELDS = TypeAdapter[dict[str, Any]](dict[str, Any])


class Router:
    """What the routes share."""

    def __init__(
        self,
        catalogue: Catalogue,
        pool: Pool,
        *,
        takes_any_name: bool = False,
        isolates_keys: bool = True,
        audit: AuditLog | None = None,
        guards: Collection[str] = (),
        aliases: Aliases,
        is_of_one: bool = False,
    ) -> None:
        """Serve the models of ``catalogue`` from ``pool``.

        With ``takes_any_name`` an unknown name means the model that was used last. With
        ``isolates_keys`` servers keep the prompts of each key apart. ``audit`` gets the lines of
        requests that none of them answers. Each server has the ``guards`` of these names.
        ``aliases`` are further names of models; a router that ``is_of_one`` takes no others.
        """
        self.aliases, self._is_of_one = aliases, is_of_one
        self._guards = guards
        self.audit = audit
        self._isolates_keys = isolates_keys
        self._takes_any_name = takes_any_name
        self.catalogue, self.pool = catalogue, pool
        self.created = int(time.time())
        self.is_draining = False

    def listing(self, is_operator: bool) -> list[dict[str, Any]]:
        """Return all models as ``/v1/models`` shows them."""
        entries = [self.shown(name, is_operator) for name in self.catalogue.models()]
        further = [*self.catalogue.other_names, *self.pool.adapters.names]
        further += self.names_of_aliases()
        return [*entries, *(self.shown(name, is_operator) for name in further)]

    def shown(self, name: str, is_operator: bool) -> dict[str, Any]:
        """Return a model, or an adapter, as ``/v1/models`` shows it.

        Only operators see how much it is used.
        """
        replica_set = self.pool.replica_sets.get(self.resolve_model(name)[0])
        worker = replica_set.first if replica_set else None
        status: dict[str, Any] = {"value": replica_set.state if replica_set else "unloaded"}
        status["num_servers"] = len(replica_set.workers) if replica_set else 0
        if replica_set and worker:
            idle_s = asyncio.get_running_loop().time() - replica_set.used_s
            is_kept = replica_set.num_users or replica_set.keep_alive_s < 0
            status["num_requests"] = replica_set.num_users if is_operator else None
            status["resident_bytes"] = replica_set.resident_bytes
            is_shown = is_operator and not is_kept
            status["unload_s"] = max(0.0, replica_set.keep_alive_s - idle_s) if is_shown else None
            status |= {"reason": replica_set.trouble} if replica_set.trouble else {}
        shown = {"id": name, "object": "model", "created": self.created, "owned_by": "ridgeline"}
        if replica_set and worker:
            shown |= (
                {"max_model_len": replica_set.max_model_len} if replica_set.max_model_len else {}
            )
            shown |= worker.facts.get(name, {})
        return shown | {"status": status}

    async def learn(self) -> None:
        """Ask new servers for the names that follow from their contents."""
        replica_sets = list(self.pool.replica_sets.values())
        servers = [one for replica_set in replica_sets for one in replica_set.workers.values()]
        await asyncio.gather(*(worker.learn() for worker in servers))

    def summary(self, name: str) -> Summary | None:
        """Return the facts of a model, None if it cannot be read."""
        try:
            return summarise(load_checkpoint(locate(self.catalogue.models()[name]).path))
        except (ValueError, OSError, KeyError):
            return None

    def tags(self) -> list[Mapping[str, Any]]:
        """Return all models, and their further names, as Ollama lists them."""
        names = {name: name for name in self.catalogue.models()}
        names |= {name: self.resolve_model(name)[0] for name in self.names_of_aliases()}
        of = {name: self.summary(model) for name, model in names.items()}
        return [entry(name, one) for name, one in of.items() if one is not None]

    def listed(self) -> list[dict[str, Any]]:
        """Return all models as LM Studio lists them; those that cannot be read are left out."""
        entries = []
        for name in self.catalogue.models():
            replica_set = self.pool.replica_sets.get(name)
            if (summary := self.summary(name)) is not None:
                entries.append(
                    listed(name, summary, replica_set.max_model_len if replica_set else None)
                )
        return entries

    def loaded(self) -> list[Mapping[str, Any]]:
        """Return the models that are loaded, as Ollama lists them."""
        entries: list[Mapping[str, Any]] = []
        for replica_set in tuple(self.pool.replica_sets.values()):
            max_model_len = replica_set.max_model_len
            if max_model_len and (summary := self.summary(replica_set.name)):
                left_s = None if replica_set.keep_alive_s < 0 else replica_set.keep_alive_s
                expires_s = None if left_s is None else time.time() + left_s
                num_bytes = replica_set.resident_bytes
                entries.append(
                    loaded(replica_set.name, summary, num_bytes, max_model_len, expires_s)
                )
        return entries

    def resolve_model(self, name: Any) -> tuple[str, str]:
        """Return the name and the model that a request means. Raises ApiError if there is none.

        Where there is one model, a request need not name it.
        """
        models = self.catalogue.models()
        if name is None and len(models) == 1:
            return next(iter(models.items()))
        names = ", ".join(map(repr, list(models)[:10])) or "no model any more"
        names += ", ..." if len(models) > 10 else ""
        if not isinstance(name, str) or not name:
            message = f"model is missing: name one of {names}"
            raise ApiError(400, message, param="model", code="missing_parameter")
        alias = None if self.model_of(name) else self.aliases.find(name)
        meant = self.model_of(alias.model if alias else name)
        is_adapter = meant in self.pool.adapters.names
        known_name = next(iter(models), None) if is_adapter else meant
        if known_name is None and self._takes_any_name and models:
            known_name = self.last_used()
        if known_name is None:
            message = f"there is no model {name[:80]!r} here: this server has {names}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return known_name, models[known_name]

    def model_of(self, name: str) -> str | None:
        """Return the name of a model or of an adapter that this is, None if it is neither."""
        adapters = self.pool.adapters.names
        adapter = next((one for one in untagged(name) if one in adapters), None)
        return adapter or self.catalogue.find(name)

    def names_of_aliases(self) -> list[str]:
        """Return the further names of models that are here."""
        return [one.name for one in self.aliases.all() if self.model_of(one.model)]

    def fetch(self, name: str, report: Callable[[int, int], None]) -> None:
        """Fetch a model from the hub, and serve it from now on.

        Raises ValueError if it cannot be had, or a router of one model takes no other.
        """
        if self._is_of_one:
            raise ValueError("this server has one model: --models-dir, or several, takes others")
        if not is_hub_name(name):
            raise ValueError("it is no name of the hub, nor of a known model")
        pull(name, stores(), budget_bytes=available_bytes(), progress=report)
        self.catalogue.add(name)

    def judging(self, path: str, name: Any) -> Any:
        """Return which model is meant; a guard is beside any model, so best one that is loaded."""
        is_guard = name is None or name in self._guards
        return self.last_used() if self._guards and path == MODERATIONS and is_guard else name

    async def find_worker(self, request: Request, named: Any = None) -> tuple[ReplicaSet, Worker]:
        """Return the server of a loaded model that a query names, or one. Raises ApiError."""
        name, _ = self.resolve_model(named or request.query_params.get("model") or self.last_used())
        replica_set, number = self.pool.replica_sets.get(name), request.query_params.get("replica")
        if replica_set is None or not replica_set.workers:
            request.state.note["polled"] = True  # pages ask again and again
            message = f"{name} is not loaded: it is when it is first asked for"
            raise ApiError(503, message, code="model_not_loaded")
        named = [one for one in replica_set.workers.values() if number in (None, str(one.number))]
        if not named:
            message = f"{name} has no server {number[:80]!r} now" if number else ""
            raise ApiError(404, message, param="replica", code="not_found")
        await asyncio.gather(*(one.look() for one in named))
        worker = next((one for one in named if not one.trouble), None)
        if worker is None:
            raise self.pool.refusal(replica_set)
        return replica_set, worker

    async def prompt(self, request: Request, body: bytes, fields: dict[str, Any]) -> PromptKeys:
        """Return what of a body has to be read: nothing where a model has one server."""
        replica_sets = self.pool.replica_sets.values()
        if self.pool.num_servers == 1 and not any(
            replica_set.are_several for replica_set in replica_sets
        ):
            return NOTHING
        salt = request.state.tenant if self._isolates_keys else ""
        if (name := fields.get("model")) in self.pool.adapters.names:
            salt += f" {name}"
        if len(body) < _LONG_BYTES:
            return prompt_of(fields, salt)
        work: WorkPools = request.app.state.work
        return await work.bodies.run(partial(prompt_of, fields, salt))

    def spec(self, name: str | None) -> ModelSpec:
        """Return the model that a plan is for. Raises ApiError if there is none."""
        known_name, model = self.resolve_model(name)
        return replace(read_model_spec(model, stores()), name=known_name)

    def audit_losses(self) -> dict[str, str]:
        """Return what to say of audit logs that have lost lines, by whose they are."""
        losses = {
            replica_set.called(one): one.audit
            for replica_set in self.pool.replica_sets.values()
            for one in replica_set.workers.values()
        }
        losses |= {"router": self.audit.loss() or ""} if self.audit else {}
        return {name: loss for name, loss in losses.items() if loss}

    @property
    def running(self) -> list[str]:
        """Names of the models that have servers."""
        return [
            replica_set.name
            for replica_set in self.pool.replica_sets.values()
            if replica_set.workers
        ]

    async def all_say(self, name: str, path: str, request: Request) -> list[Any]:
        """Return what each server of a model answers to a GET of ``path``.

        Those that have ended, or do not answer, are left out.
        """
        replica_set, answers = self.pool.replica_sets.get(name), []
        for worker in list(replica_set.workers.values()) if replica_set else ():
            with contextlib.suppress(httpx2.HTTPError, TimeoutError):
                async with asyncio.timeout(STATUS_S):
                    answer = await worker.client.get(path, headers=key_of(request))
                    answers += [json_of(answer)] if answer.is_success else []
        return answers

    def last_used(self) -> str:
        """Return the name of the model that was used last, or of the first if none was."""
        loaded = [
            replica_set for replica_set in self.pool.replica_sets.values() if replica_set.workers
        ]
        if not loaded:
            return next(iter(self.catalogue.models()), "")
        return max(
            loaded, key=lambda replica_set: (replica_set.num_users > 0, replica_set.used_s)
        ).name


def new_app(router: Router, *, has_page: bool = True) -> FastAPI:
    """Return the application, with its routes over ``router``, and the web pages if it has them."""
    app = FastAPI(
        title="Ridgeline",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,  # the edge takes them off
    )
    app.state.work = WorkPools(pace=router.pool.limits.pace)
    add_errors(app)
    _add_status(app, router)
    if router.audit:
        _add_audit(app, router, router.audit)
    add_plans(app, router.spec, lambda: list(router.catalogue.models()))

    async def post(request: Request) -> Response:
        """Pass on a request that names its model in its body."""
        if router.is_draining:
            raise ApiError(503, "the server is stopping", code="stopping")
        body = await request.body()
        fields = await in_turn(request.app.state.work, _FIELDS, body)
        name, model = router.resolve_model(router.judging(request.url.path, fields.get("model")))
        kept_s = _keep_alive(request.url.path, fields) if request.state.is_operator else None
        use = partial(router.pool.use, name, model, kept_s)
        return ProxiedResponse(
            router.pool,
            use,
            body,
            prompt=await router.prompt(request, body, fields),
            num_tokens=0 if request.url.path in COUNTED else 1 + len(body) // _BYTES_OF_TOKEN,
        )

    async def get(request: Request) -> Response:
        """Pass on a request that names its model in its query; by default the model last used."""
        name, model = router.resolve_model(request.query_params.get("model") or router.last_used())
        return ProxiedResponse(router.pool, partial(router.pool.use, name, model))

    async def named(request: Request) -> Response:
        """Pass on a request that names its model in its path."""
        if router.is_draining:
            raise ApiError(503, "the server is stopping", code="stopping")
        name, model = router.resolve_model(request.path_params["model"])
        body, use = await request.body(), partial(router.pool.use, name, model)
        num_tokens = len(body) // _BYTES_OF_TOKEN
        return ProxiedResponse(router.pool, use, body, num_tokens=num_tokens)

    async def live(request: Request) -> Response:
        """Pass on what a server says of itself; this neither loads nor keeps its model."""
        replica_set, worker = await router.find_worker(request)
        return ProxiedResponse(
            router.pool, lambda: contextlib.nullcontext(replica_set), only=worker
        )

    add_triton(app, router, named)
    add_management(app, router)
    _add(app, "POST", post, *NAME_A_MODEL)
    _add(app, "GET", get, "/openapi.json", "/tokenizer_info", "/props")
    _add(app, "GET", live, "/v1/live", "/v1/memory", "/is_sleeping")
    add_of_all_servers(app, router)
    if has_page:
        app.router.routes += [Route(path, file, methods=["GET"]) for path, file in FILES.items()]
    return app


def _add(app: FastAPI, method: str, answer: Callable[[Request], Any], *paths: str) -> None:
    app.router.routes += [Route(path, answer, methods=[method]) for path in paths]


def add_of_all_servers(app: FastAPI, router: Router) -> None:
    """Add the routes that all servers of a model answer together, or the one of them that can."""

    async def sleep(request: Request) -> Response:
        """Put all servers of a model to sleep, or wake them."""
        body = await request.body()
        fields = await in_turn(request.app.state.work, _FIELDS, body) if body else {}
        replica_set, worker = await router.find_worker(request, fields.get("model"))
        path = f"{request.scope['state']['path']}?{request.url.query}"
        for one in list(replica_set.workers.values()):
            if one is not worker:
                with contextlib.suppress(httpx2.HTTPError):  # it has ended: another one starts
                    await one.client.post(path, content=body, headers=key_of(request))
        return ProxiedResponse(
            router.pool, lambda: contextlib.nullcontext(replica_set), body, only=worker
        )

    async def adapters(request: Request) -> Response:
        """Load or unload an adapter on all servers of the model."""
        check_operator(request.state)
        fields = await in_turn(request.app.state.work, _FIELDS, await request.body())
        replica_set, worker = await router.find_worker(request)
        others = [one for one in replica_set.workers.values() if one is not worker]
        path = request.url.path
        try:
            await router.pool.adapters.change(path, fields, [worker, *others])
        except NotLoaded as error:
            answer = error.answer
            if answer is None:
                raise router.pool.refusal(replica_set) from None
            return Response(answer.content, answer.status_code, media_type="application/json")
        done = "added" if path == LOAD else "removed"
        name = fields["lora_name"]
        return PlainTextResponse(f"Success: LoRA adapter '{name}' {done} successfully.")

    async def explain(request: Request) -> Response:
        """Pass on what is said by the server that answered a request."""
        replica_set, worker = await router.find_worker(request)
        for one in [one for one in replica_set.workers.values() if not one.trouble]:
            with contextlib.suppress(httpx2.HTTPError, TimeoutError):  # it has ended, or hangs
                async with asyncio.timeout(STATUS_S):
                    path = request.scope["state"]["path"]
                    answer = await one.client.head(path, headers=key_of(request))
                worker = one if answer.is_success else worker
        return ProxiedResponse(
            router.pool, lambda: contextlib.nullcontext(replica_set), only=worker
        )

    _add(app, "POST", adapters, LOAD, UNLOAD)
    _add(app, "POST", sleep, "/v1/sleep", "/v1/wake", "/sleep", "/wake_up")
    _add(app, "GET", explain, "/v1/requests/{name}/explain")


def key_of(request: Request) -> dict[str, str]:
    """Return the headers by which servers know whose key this is."""
    names = ("authorization", "x-api-key")
    return {name: request.headers[name] for name in names if name in request.headers}


def _keep_alive(path: str, fields: dict[str, Any]) -> float | None:
    """Return for how long a request of Ollama's keeps its model loaded; others do not say."""
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
        await router.learn()
        return {"object": "list", "data": router.listing(request.state.is_operator)}

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str, request: Request) -> dict[str, Any]:
        """Describe one."""
        known_name, _ = router.resolve_model(name)
        await router.pool.look()
        await router.learn()
        is_further = name in {*router.pool.adapters.names, *router.names_of_aliases()}
        shown = name if is_further else known_name
        return router.shown(shown, request.state.is_operator)

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Say that this process lives, and which models hang; it ends these itself.

        It also says which audit logs have lost lines.
        """
        hung, lost = await router.pool.look(), router.audit_losses()
        of_audit = {"audit": lost} if lost else {}
        return {"status": "ok"} | ({"hung": hung} if hung else {}) | of_audit

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
        return {"models": await app.state.work.reports.run(router.tags)}

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
        """Return the metrics of all servers; each sample names its model, and its server."""
        await router.pool.look()
        text = await metrics_of(router.pool.replica_sets, key_of(request))
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    @app.get("/v1/fleet")
    async def fleet(request: Request) -> dict[str, Any]:
        """Say which servers each model has, what they do, and what became of others."""
        check_operator(request.state)
        request.state.note["polled"] = True  # pages ask again and again
        await router.pool.look()
        await router.learn()
        return {
            "models": {
                replica_set.name: replica_set.shown()
                for replica_set in router.pool.replica_sets.values()
            }
        }


def _add_audit(app: FastAPI, router: Router, log: AuditLog) -> None:
    @app.get("/v1/audit/head")
    async def head(request: Request) -> dict[str, Any]:
        """Say where the router's audit log ends, and that of each server that runs."""
        check_operator(request.state)
        servers: dict[str, Any] = {}
        for replica_set in list(router.pool.replica_sets.values()):
            for worker in list(replica_set.workers.values()):
                with contextlib.suppress(httpx2.HTTPError, TimeoutError):  # it has ended, or hangs
                    async with asyncio.timeout(STATUS_S):
                        path, headers = request.scope["path"], key_of(request)
                        answer = await worker.client.get(path, headers=headers)
                        servers[f"{replica_set.name}-{worker.number}"] = json_of(answer)
        return log.head() | {"servers": servers}
