"""Plans over HTTP: what a model needs in memory, and what fits, from a config or of a served model.

It reads no file that a request names, and computes nothing itself: all that is ``planner``'s. Plans
for a load take seconds: of a key one is made at a time, and it waits for no others. ``ridgeline
plan --web`` serves the page of plans and these routes alone, without an engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from datetime import date
from functools import partial
from typing import Annotated, Any, Literal, get_type_hints

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic import Field, create_model
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive

from ridgeline.engine.setup.home import stores
from ridgeline.foresight.simulator.workload import parse_length
from ridgeline.model.cost.format_bytes import FORMATS, KV_BYTES
from ridgeline.model.cost.hardware import Device
from ridgeline.planner import LoadFlags, Plan, PlanFlags
from ridgeline.planner.catalogue import devices, this_machine
from ridgeline.planner.documents import as_csv, as_markdown, as_svg
from ridgeline.planner.memory.ledger import ENGINES
from ridgeline.planner.memory.model_spec import ModelSpec, read_model_spec
from ridgeline.planner.plan import plan_for
from ridgeline.serve.answer.schemas import ERRORS
from ridgeline.serve.http.errors import ApiError, add_errors
from ridgeline.serve.http.fair_pool import WorkPools
from ridgeline.serve.http.keys import Keys, Limits
from ridgeline.serve.http.listening import Listener, bind, unbound
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.http.request_body import BodyRoute, RequestModel, contradiction
from ridgeline.serve.http.request_state import client_left
from ridgeline.serve.http.web_server import Edge, WebServer, address
from ridgeline.serve.page import FILES
from ridgeline.system.log_writer import LogWriter, standard_error
from ridgeline.system.process import BUSY_TIMES
from ridgeline.version import __version__

_MOST_LAYERS = 512  # a plan over all devices takes a second or two then
_NUM_CACHED = 4
_FLAG = re.compile(r"--([a-z]+(?:-[a-z]+)*)")

_NO_FILES = ("trace_file", "prices", "lora", "devices")  # flags that name files
_LEAST_MOST = {  # what is simulated, and how finely; a plan for more is for the command line
    "request_rate": (1e-3, 1e5),
    "burstiness": (0.01, 1e6),
    "max_concurrency": (1, 1 << 16),
    "evictions_per_hour": (1e-6, 60.0),
    "notice": (0.0, 86_400.0),
    "max_usd_per_hour": (0.01, 1e9),
    "users": (1, 1 << 16),
}
_MOST_TOKENS = {"prompt_tokens": 32_768, "new_tokens": 8_192}  # in the mean
_MOST_VARIATION = 5

MOST_S = 30.0  # of computing, for one plan
_LEFT = 499  # it is not read

Find = Callable[[str | None], ModelSpec]
CancelCheck = Callable[[], None]  # raises ApiError once a plan is not wanted, or takes too long


def _is_text(name: str) -> bool:
    """Whether the command line takes a flag as text that a request may give as a number."""
    return name in (*_MOST_TOKENS, "replicas", "memory", "ram") or name.endswith(
        ("_memory", "_parallel_size")
    )


def _flag_fields() -> dict[str, Any]:
    """Return a field for each flag of ``ridgeline plan`` that names no file; none is required."""
    kinds = get_type_hints(PlanFlags) | get_type_hints(LoadFlags)
    kinds = {name: int | kind if _is_text(name) else kind for name, kind in kinds.items()}
    kinds["slo"] = Annotated[list[str], Field(max_length=16, fail_fast=True)]
    return {name: (kind | None, None) for name, kind in kinds.items() if name not in _NO_FILES}


_Flags: Any = create_model(
    "_Flags", __base__=RequestModel, model=(dict[str, Any] | str | None, None), **_flag_fields()
)


class PlanRequest(_Flags):  # type: ignore[misc]  # its fields are made from the flags
    """The flags of ``ridgeline plan`` as fields; ``model`` is a config, or a served model's name.

    Sizes are bytes, or text such as "4GiB"; lengths are tokens, or text such as "800:0.5".
    ``picture`` adds that of the choices to the document, so that it need not be planned twice.
    """

    compare_published: bool | None = None
    picture: bool | None = None
    format: Literal["json", "csv", "markdown", "svg"] = "json"

    def plan_flags(self) -> PlanFlags:
        """Return what is asked. Raises ValueError, which names the flag, if that is nonsense."""
        return PlanFlags(**self._values_of(PlanFlags))

    @property
    def load_is_given(self) -> bool:
        """Whether any field asks for more than memory."""
        return bool(self._values_of(LoadFlags))

    def load_flags(self) -> LoadFlags | None:
        """Return what load is asked for, if any.

        Raises ApiError for a load that a server does not plan, ValueError as ``plan_flags`` does.
        """
        values = self._values_of(LoadFlags)
        if not values:
            return None
        if {"request_rate", "max_concurrency"} <= values.keys():
            raise contradiction("max_concurrency", "request_rate says how requests arrive")
        for name, max_mean in _MOST_TOKENS.items():
            if name not in values and self.buy:
                continue  # a purchase is planned for a usual load
            if name not in values:
                raise _wrong(name, "is missing: a plan for a load needs it")
            mean, variation = parse_length(values[name], name)
            if mean > max_mean or variation > _MOST_VARIATION:
                limit = f"at most {max_mean:,} tokens here, with a variation of {_MOST_VARIATION}"
                raise _wrong(name, f"is {values[name][:80]}: {limit}")
        for name, (low, high) in _LEAST_MOST.items():
            if name in values and not low <= values[name] <= high:
                raise _wrong(name, f"is {values[name]:g}: from {low:g} to {high:g} here")
        return LoadFlags(**values)

    def _values_of(self, kind: type[PlanFlags | LoadFlags]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name in (field.name for field in fields(kind) if field.name not in _NO_FILES):
            value = getattr(self, name)
            if value is not None:
                values[name] = str(value) if _is_text(name) else value
        return values


def _wrong(name: str, why: str) -> ApiError:
    return ApiError(400, f"{name} {why}", param=name, code="invalid_value")


_STRING = {"schema": {"type": "string"}}
_FORMS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The plan, in the format that was asked for",
        "content": {
            "application/json": {"schema": {"type": "object", "required": ["model", "memory"]}},
            "text/csv": _STRING,
            "text/markdown": _STRING,
            "image/svg+xml": _STRING,
        },
    }
}


def add_plans(
    app: FastAPI, find: Find, names: Callable[[], Sequence[str]], *, has_chat: bool = True
) -> None:
    """Add the routes to an application.

    Args:
        app: the application.
        find: returns a model that is served, of a name or the only one; raises ApiError. Called in
            a thread.
        names: returns the names of all these models.
        has_chat: whether the application has the page that one can chat on.
    """
    app.router.route_class = BodyRoute

    cache = _PlanCache()

    @app.post("/v1/plan", responses=ERRORS | _FORMS)
    async def plan(body: PlanRequest, request: Request) -> Response:
        """Say what a model needs in memory, and what fits; for a load, what to choose."""
        work: WorkPools = request.app.state.work
        answer = partial(_answer, body, find, cache)
        if body.load_is_given and body not in cache:
            return await run_long(work, request.receive, answer)
        return await work.reports.run(answer)

    @app.get("/v1/plan/devices", responses=ERRORS)
    async def catalogue(request: Request) -> dict[str, Any]:
        """List what plans can be asked for: devices with their facts, formats, engines, models."""
        work: WorkPools = request.app.state.work
        return {
            "models": list(names()),
            "chat": has_chat,
            "devices": await work.reports.run(_devices),
            "dtypes": list(FORMATS),
            "kv_cache_dtypes": list(KV_BYTES),
            "engines": list(ENGINES),
        }


class _PlanCache:
    """The last plans for loads, which take seconds: the same one may be asked for in other forms.

    A plan is of its day, because prices grow old.
    """

    def __init__(self) -> None:
        self._plans: dict[str, Plan] = {}

    def __contains__(self, body: PlanRequest) -> bool:
        return _key(body) in self._plans

    def get(self, body: PlanRequest) -> Plan | None:
        return self._plans.get(_key(body))

    def put(self, body: PlanRequest, plan: Plan) -> None:
        self._plans[_key(body)] = plan
        while len(self._plans) > _NUM_CACHED:
            self._plans.pop(next(iter(self._plans)), None)


def _key(body: PlanRequest) -> str:
    same = body.model_copy(update={"format": "json", "picture": None})
    return f"{date.today()} {same.model_dump_json()}"


def _answer(
    body: PlanRequest, find: Find, cache: _PlanCache, check: CancelCheck = lambda: None
) -> Response:
    """Return the answer to a request; in a thread, because a plan over all devices takes time."""
    try:
        load_flags, plan_flags = body.load_flags(), body.plan_flags()
        spec = _spec(body, find)
        plan = cache.get(body)
        if plan is None:
            plan = plan_for(
                spec, plan_flags, bool(body.compare_published), load_flags, check_cancel=check
            )
            if load_flags is not None:
                cache.put(body, plan)
        if body.format == "json":
            return JSONResponse(plan.as_dict() | (_picture(plan) if body.picture else {}))
        text, media = _DRAWN[body.format](plan)
    except ValueError as error:
        raise _refusal(str(error)) from error
    return Response(text, media_type=media)


def _spec(body: PlanRequest, find: Find) -> ModelSpec:
    if not isinstance(body.model, dict):
        return find(body.model)
    try:
        spec = read_model_spec(body.model, stores())
    except ValueError as error:
        raise ApiError(400, str(error), param="model", code="invalid_value") from error
    if len(spec.shape.layers) > _MOST_LAYERS:
        message = f"model has {len(spec.shape.layers)} layers: at most {_MOST_LAYERS} here"
        raise ApiError(400, message, param="model", code="invalid_value")
    return spec


def _refusal(message: str) -> ApiError:
    """Return an error whose words name fields where the command line's name flags."""
    text = _FLAG.sub(lambda flag: flag[1].replace("-", "_"), message)
    flag = _FLAG.search(message)
    param = flag[1].replace("-", "_") if flag else None
    field = param if param in PlanRequest.model_fields else "on" if "device" in message else None
    return ApiError(400, text, param=field, code="invalid_value")


def _picture(plan: Plan) -> dict[str, str | None]:
    """Return what ``picture`` adds to the document: none where no choice bears the load."""
    try:
        return {"picture": as_svg(plan)}
    except ValueError:
        return {"picture": None}


_DRAWN: dict[str, Callable[[Plan], tuple[str, str]]] = {
    "csv": lambda plan: (as_csv(plan), "text/csv; charset=utf-8"),
    "markdown": lambda plan: ("\n".join(as_markdown(plan)), "text/markdown; charset=utf-8"),
    "svg": lambda plan: (as_svg(plan), "image/svg+xml"),
}


def _devices() -> list[dict[str, Any]]:
    return [_shown(device) for device in (this_machine(), *devices().values())]


def _shown(device: Device) -> dict[str, Any]:
    return {
        "id": device.id,
        "name": device.name,
        "kind": device.kind,
        "usable_bytes": device.usable_bytes,
        "memory": device.memory,
        "read_bytes_per_s": device.read_bytes_per_s,
        "peak_ops_per_s": dict(device.peak_ops_per_s),
        "max_ranks": device.max_ranks,
        "parent": device.parent or None,
        "source": device.source,
        "confidence": device.confidence,
    }


async def run_long(
    work: WorkPools, receive: Receive, make: Callable[[CancelCheck], Response]
) -> Response:
    """Return what ``make`` returns, which runs in a thread and calls what it is given often.

    Raises ApiError if another is at work, if it takes too long, or if the client leaves.
    """
    if not work.loads.is_free():
        raise ApiError(
            503,
            "another plan for a load is running, and each key has one at a time, with a rest after "
            "it while other keys ask: try again in a few seconds",
            code="plan_busy",
            headers={"retry-after": "2"},
        )
    gone = threading.Event()
    watcher = asyncio.ensure_future(_watch(receive, gone))
    try:
        return await work.loads.run(lambda: make(_until(gone)))
    finally:
        gone.set()  # also where the server ends this request
        watcher.cancel()


def _until(gone: threading.Event) -> CancelCheck:
    """Return what ends the work of this thread: it has a limit on what it computes.

    One on the time that passes would refuse on a busy machine what is made at once on another.
    """
    begin_s, computing_since_s = time.monotonic(), time.thread_time()

    def check_cancel() -> None:
        if gone.is_set():
            raise ApiError(_LEFT, "the client has left", code="client_left")
        if time.thread_time() - computing_since_s > MOST_S:
            raise ApiError(
                400,
                f"this plan takes more than {MOST_S:.0f} s of computing, and one is made at a "
                f"time: name fewer devices in on, or shorter answers, or use `ridgeline plan`",
                param="on",
                code="plan_too_long",
            )
        if time.monotonic() - begin_s > BUSY_TIMES * MOST_S:
            raise ApiError(
                503,
                "the machine is too busy for this plan now: try again later",
                code="plan_busy",
                headers={"retry-after": "60"},
            )

    return check_cancel


async def _watch(receive: Receive, gone: threading.Event) -> None:
    await client_left(receive)
    gone.set()


def plan_app(spec: ModelSpec | None) -> FastAPI:
    """Return the application; ``spec`` is a model that requests may name, beside configs."""
    app = FastAPI(title="Ridgeline plans", version=__version__, docs_url=None, redoc_url=None)
    app.state.work = WorkPools()
    add_errors(app)

    def find(name: str | None) -> ModelSpec:
        if spec is None or name not in (None, spec.name):
            message = "no such model is served here: give a config.json as an object"
            raise ApiError(404, message, param="model", code="model_not_found")
        return spec

    names = [] if spec is None else [spec.name]
    add_plans(app, find, lambda: names, has_chat=False)
    files = {path: file for path, file in FILES.items() if path != "/"}
    app.router.routes += [Route(path, file, methods=["GET"]) for path, file in files.items()]
    app.router.routes.append(Route("/", RedirectResponse("plan"), methods=["GET"]))
    return app


def serve_plans(spec: ModelSpec | None, options: ServeOptions) -> None:
    """Serve the page until a signal ends it. Raises OSError if the address cannot be had."""
    listener = bind(options.host, options.port)
    with unbound(listener), contextlib.closing(LogWriter(standard_error())) as log:
        log.take_logging()
        asyncio.run(_run_app(plan_app(spec), listener, options, log))


async def _run_app(app: FastAPI, listener: Listener, options: ServeOptions, log: LogWriter) -> None:
    keys, limits = Keys((), None), Limits()
    edge = Edge(app, app.routes, options, keys, limits, log.line, lambda *counted: None)
    server = WebServer(edge, options, log.line)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, server.ended.set)
    url = address(listener, options)
    server.on_started = lambda: print(f"plans are at {url}/plan (Ctrl-C ends it)", flush=True)
    await server.serve_on(listener)
