"""SECURITY.md names every route, and which are open without a key."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from ridgeline.fleet.app import Router
from ridgeline.fleet.app import new_app as router_app
from ridgeline.fleet.catalogue import Catalogue
from ridgeline.fleet.pool import Pool
from ridgeline.serve.aliases import Aliases
from ridgeline.serve.http.keys import Limits
from ridgeline.serve.http.request_state import LINK_PATH, OPEN_PATHS
from tests.serve.serving import serving

TEXT = (Path(__file__).parents[2] / "SECURITY.md").read_text()
AUDIT = "/v1/audit/head"  # of servers with --audit alone


def table() -> dict[str, str]:
    """What a caller without a key gets from each path, or each below it, that the table names."""
    section = TEXT.split("\n## Routes\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `/")]
    return {
        path: without_key.strip()
        for route, without_key, *_ in rows
        for path in re.findall(r"`(/[^`]*)`", route)
    }


def is_named(path: str, name: str) -> bool:
    """Whether a name of the table is that of a path: itself, or one below it."""
    return path == name or (name != "/" and path.startswith(f"{name.removesuffix('/*')}/"))


def test_every_route_is_in_the_table_and_only_what_it_says_is_open(model: Path) -> None:
    pool = cast(Pool, SimpleNamespace(limits=Limits()))
    router = Router(Catalogue([str(model)], None), pool, aliases=Aliases(None))
    with serving(model) as served:
        routes = [*served.running.parts.app.routes, *router_app(router).routes]
        paths = {getattr(route, "path", "") for route in routes} | {AUDIT, LINK_PATH}
    names = table()
    missing = {path for path in paths if not any(is_named(path, name) for name in names)}
    assert not missing
    assert not {name for name in names if not any(is_named(path, name) for path in paths)}
    for path in paths - {LINK_PATH}:
        longest = max((name for name in names if is_named(path, name)), key=len)
        assert (names[longest] == "yes") == (path in OPEN_PATHS), path
