"""``ridgeline fleet``: the servers of each model, what they do, and what became of others."""

from __future__ import annotations

import json
import time
from typing import Any

from ridgeline.cli.commands.ps import URL, ApiKey, AsJson, Url, ask_server
from ridgeline.system.terminal import console, table_of


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
        table = table_of(*titles, "moved away", "ended", "process", "since")
        for one in model["replicas"]:
            since_s = one.get("since")
            table.add_row(
                one["name"],
                *([one.get("node") or "this one"] if has_others else []),
                one["state"],
                str(one.get("running", "-")),
                str(one["moved"]),
                str(one["deaths"]),
                str(one.get("pid", "-")),
                time.strftime("%H:%M:%S", time.localtime(since_s)) if since_s else "-",
            )
        out.print(table)
        for event in model["events"][-8:]:
            at = time.strftime("%H:%M:%S", time.localtime(event["time"]))
            out.print(f"{at}  server {event['server']} {event['what']}")


def summary(name: str, model: dict[str, Any]) -> str:
    """Return a line on a model as ``/v1/fleet`` describes it."""
    if not model["replicas"]:
        return f"{name}: not loaded"
    num_ready = sum(one["state"] == "ready" for one in model["replicas"])
    num_servers = max(model["wanted"], len(model["replicas"]))
    parts = [f"{num_ready} of {_count(num_servers, 'server')}"]
    if model["threads"]:
        cache = f"{model['kv_cache_bytes'] / 2**20:,.0f} MiB of KV cache"
        parts[0] += f", each with {_count(model['threads'], 'thread')} and {cache}"
    parts.append(f"{_count(model['resumed'], 'stream')} continued elsewhere")
    parts.append(f"{_count(model['again'], 'request')} retried")
    if model["diverged"]:
        parts.append(f"{_count(model['diverged'], 'stream')} could not continue")
    return f"{name}: {'; '.join(parts)}"


def _count(num: int, what: str) -> str:
    return f"{num} {what}" if num == 1 else f"{num} {what}s"
