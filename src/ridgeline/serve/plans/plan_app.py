"""``ridgeline plan --web``: the page of plans and its routes, without an engine."""

from __future__ import annotations

import asyncio
import contextlib
import signal

from fastapi import FastAPI
from starlette.responses import RedirectResponse
from starlette.routing import Route

from ridgeline.planner.memory.model_spec import ModelSpec
from ridgeline.serve.http.error_handlers import add_errors
from ridgeline.serve.http.errors import ApiError
from ridgeline.serve.http.keys import Keys
from ridgeline.serve.http.limits import Limits
from ridgeline.serve.http.listening import bind, unbound
from ridgeline.serve.http.logs import LogWriter, standard_error
from ridgeline.serve.http.options import ServeOptions
from ridgeline.serve.http.strangers import Listener
from ridgeline.serve.http.turns import WorkTurns
from ridgeline.serve.http.web_server import WebServer, address
from ridgeline.serve.page import FILES
from ridgeline.serve.plans.routes import add_plans
from ridgeline.version import __version__


def plan_app(spec: ModelSpec | None) -> FastAPI:
    """Return the application; ``spec`` is a model that requests may name, beside configs."""
    app = FastAPI(title="Ridgeline plans", version=__version__, docs_url=None, redoc_url=None)
    app.state.work = WorkTurns()
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
        asyncio.run(_serve(plan_app(spec), listener, options, log))


async def _serve(app: FastAPI, listener: Listener, options: ServeOptions, log: LogWriter) -> None:
    server = WebServer(
        app,
        app.routes,
        options,
        Keys((), None),
        Limits(),
        log.line,
        lambda path, method, status: None,
    )
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, server.ended.set)
    url = address(listener, options)
    server.on_started = lambda: print(f"plans are at {url}/plan (Ctrl-C ends it)", flush=True)
    await server.serve_on(listener)
