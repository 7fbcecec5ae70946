"""Audit logs of several models: a router's and each server's own, a line for each request."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from ridgeline.trust.audit.check import check, compare, logs_in
from ridgeline.trust.audit.record_format import files_of, read_key
from tests.fleet.test_router import ASK, routing
from tests.waiting import eventually


def lines_in(folder: Path) -> list[dict[str, Any]]:
    whole = b"".join(file.read_bytes() for file in files_of(folder))
    return [json.loads(line) for line in whole.splitlines()]


def test_each_server_has_a_log_and_each_request_one_line(folder: Path, tmp_path: Path) -> None:
    logs, key = tmp_path / "audit", tmp_path / "key"
    flags = ("--audit", str(logs), "--audit-key", str(key))

    def are_told(*ids: str) -> bool:
        text = "".join(path.read_text() for path in logs.rglob("*") if path.is_file())
        return all(f'"{one}"' in text for one in ids)

    with routing(folder, tmp_path / "log", *flags) as routed:
        for i, (name, stream) in enumerate((("a", False), ("b", True), ("a", True))):
            body = ASK | {"model": name, "stream": stream}
            assert routed.call("/v1/completions", body, x_request_id=f"r{i}")[0] == 200
        for i, body in enumerate((b"{", json.dumps(ASK).encode(), json.dumps(ASK | {"n": 0}))):
            data = (
                body
                if isinstance(body, bytes)
                else body.replace("{", '{"model": "a", ', 1).encode()
            )
            assert routed.call("/v1/completions", data, x_request_id=f"bad{i}")[0] == 400
        heads = routed.call("/v1/audit/head")[1]
        assert set(heads["servers"]) == {"a-1", "b-1"}
        assert {len(one["head"]) for one in (heads, *heads["servers"].values())} == {64}
        assert "audit" not in routed.call("/health")[1]
        (server,) = routed.call("/v1/fleet")[1]["models"]["a"]["replicas"]
        eventually(lambda: are_told("r0", "r2", "bad2"))  # its lines follow its answers
        os.kill(server["pid"], signal.SIGKILL)
        eventually(lambda: routed.states()["a"] != "loaded")
        routed.call("/v1/completions", ASK | {"model": "a"}, x_request_id="again")
        eventually(lambda: are_told("r1", "again"))
    found = {path.name.partition("-")[0]: path for path in logs_in([logs])}
    assert set(found) == {"router", "a", "b"}
    events = {name: lines_in(path) for name, path in found.items()}
    ids = Counter(line["id"] for lines in events.values() for line in lines if "id" in line)
    assert {ids[name] for name in ("r0", "r1", "r2", "bad0", "bad1", "bad2", "again")} == {1}
    assert {"bad0", "bad1"} <= {line.get("id") for line in events["router"]}
    assert {"r0", "r2", "bad2", "again"} <= {line.get("id") for line in events["a"]}
    checked = {name: check(path, files_of(path), read_key(key)) for name, path in found.items()}
    compare([*checked.values()], [logs])
    assert {name: one.faults for name, one in checked.items()} == {"router": [], "a": [], "b": []}
    of_servers = {one["folder"]: log for log, one in checked["router"].servers.items()}
    assert of_servers == {checked[name].folder.name: checked[name].log for name in ("a", "b")}
    assert {heads["log"]} == {checked["router"].log}
    assert ["killed" in note for note in checked["a"].notes] == [True]
