"""``ridgeline fleet``: the servers of each model, what they do, and what became of others."""

from __future__ import annotations

import json
import time
from typing import Any

from ridgeline.cli.commands.ps import URL, ApiKey, AsJson, Url, ask_server
from ridgeline.system.report import Table, counted, gib
from ridgeline.system.terminal import console, drawn


def fleet(url: Url = URL, api_key: ApiKey = None, as_json: AsJson = False) -> None:
    """Show the servers of each model (serve --replicas): load, moves and ends."""
    models: dict[str, dict[str, Any]] = ask_server(url, "/v1/fleet", "models", api_key)
    if as_json:
        print(json.dumps({"models": models}))
        return
    out = console()
    if not models:
        out.print("no model has been loaded yet")
    for name, model in models.items():
        out.print(summary(name, model))
        has_others = any(one.get("node") for one in model["replicas"])
        titles = ["server", *(["machine"] if has_others else []), "state", "requests"]
        titles += ["moved away", "ended", "process", "since"]
        rows = [
            (
                one["name"],
                *([one.get("node") or "this one"] if has_others else []),
                one["state"],
                str(one.get("running", "-")),
                str(one["moved"]),
                str(one["deaths"]),
                str(one.get("pid", "-")),
                _clock(one["since"]) if one.get("since") else "-",
            )
            for one in model["replicas"]
        ]
        out.print(drawn(Table(titles, rows, "l" * len(titles))))
        for event in model["events"][-8:]:
            out.print(f"{_clock(event['time'])}  server {event['server']} {event['what']}")


def _clock(at_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_s))


def summary(name: str, model: dict[str, Any]) -> str:
    """Return a line on a model as ``/v1/fleet`` describes it."""
    if not model["replicas"]:
        return f"{name}: not loaded"
    num_ready = sum(one["state"] == "ready" for one in model["replicas"])
    num_servers = max(model["wanted"], len(model["replicas"]))
    parts = [f"{num_ready} of {counted(num_servers, 'server')}"]
    if model["threads"]:
        cache = f"{gib(model['kv_cache_bytes'])} of KV cache"
        parts[0] += f", each with {counted(model['threads'], 'thread')} and {cache}"
    parts.append(f"{counted(model['resumed'], 'stream')} continued elsewhere")
    parts.append(f"{counted(model['again'], 'request')} retried")
    if model["diverged"]:
        parts.append(f"{counted(model['diverged'], 'stream')} could not continue")
    return f"{name}: {'; '.join(parts)}"
