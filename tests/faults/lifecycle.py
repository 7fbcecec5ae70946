"""Starts, ends and the world around a process: T14, T15, T27, T48, T49, T51 to T53."""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.faults.oracles import COMPLETE, watched
from tests.faults.process import process, send
from tests.fleet.test_router import routing
from tests.waiting import PATIENCE_S, eventually

DAY_S = 86_400


def _two_models(folder: Path, model: Path) -> Path:
    for name in ("one", "two"):
        (folder / name).symlink_to(model)
    return folder


def _is_gone(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


def t14(model: Path, count: int, rng: random.Random) -> str:
    """A model's process is killed amid a request; the other model goes on, and it comes back."""
    with tempfile.TemporaryDirectory() as folder:
        models = _two_models(Path(folder), model)
        with routing(models, Path(folder) / "log") as routed:
            wanted = [routed.complete("one"), routed.complete("two")]
            for _ in range(count):
                before = set(routed.pids())
                victim = rng.choice(sorted(before))
                os.kill(victim, signal.SIGKILL)
                eventually(lambda gone=victim: gone not in routed.pids() or _is_gone(gone))
                assert [routed.complete("one"), routed.complete("two")] == wanted
    return f"{count}/{count} kills of a model's process: both models answer, and as before"


def t15(model: Path, count: int, rng: random.Random) -> str:
    """A model's process stands still: it is named, ended and started again; the other goes on."""
    with tempfile.TemporaryDirectory() as folder:
        models = _two_models(Path(folder), model)
        for _ in range(count):
            name, other = rng.sample(["one", "two"], 2)
            with routing(models, Path(folder) / "log", "--step-timeout", "30") as routed:
                (first,) = routed.pids()
                wanted = routed.complete(name), routed.complete(other)
                os.kill(first, signal.SIGSTOP)
                assert name in routed.call("/health")[1]["hung"]
                assert routed.states()[name] == "hung"
                assert routed.complete(other) == wanted[1]
                eventually(lambda of=routed: "hung" not in of.states().values())
                assert _is_gone(first)
                assert routed.complete(name) == wanted[0]
                assert f"{name} has not answered for " in routed.log
                eventually(lambda of=routed: "hung" not in of.call("/health")[1])
    return f"{count}/{count} models that stood still were named and ended; the other answered"


def t27(model: Path, count: int, rng: random.Random) -> str:
    """The calendar jumps by up to ten years, back and forth, with requests under way."""
    now, offset = time.time, [0.0]
    with patch.object(time, "time", lambda: now() + offset[0]), watched(model) as watch:
        for number in range(count):
            offset[0] = rng.choice([-1, 1]) * rng.choice([3600.0, DAY_S, 3650.0 * DAY_S])
            status, answer = watch.ask(
                {"prompt": [40, 41], "max_tokens": 3, "stream": bool(number % 2)}
            )
            assert status == 200
            made = answer[0]["created"] if number % 2 else answer["created"]
            assert abs(made - now() - offset[0]) < 3600
        offset[0] = 0.0
        negative = {name: value for name, value in watch.served.metrics().items() if value < 0}
        assert not negative, negative
        assert all(r.finish_s >= r.arrival_s for r in watch.records)
    return f"{count}/{count} jumps of an hour to ten years: no time-out, no negative time"


def t48(model: Path, count: int, rng: random.Random) -> str:
    """The log goes to a full disk, the trace may not grow, the home is a file: answers come."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder) / "home"
        home.write_text("no folder")
        trace = Path(folder) / "trace.jsonl"
        given: dict[str, Any] = {"log": Path("/dev/full"), "RIDGELINE_HOME": str(home)}
        with process(model, "--trace", str(trace), **given) as (server, port):
            most = trace.stat().st_size + 200
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (most, most))
            for number in range(count):
                body = {"prompt": [40 + number % 100], "max_tokens": 2, "stream": bool(number % 2)}
                status, answer = send(port, COMPLETE, json.dumps(body).encode())
                assert status == 200, answer
        assert trace.stat().st_size <= most
    return f"{count}/{count} answered with a full disk and without a home"


HOSTILE = ("\r\nfake=line", "\x1b[31mred", "a" * 5000, "\x00", "\u2028x", '"}{"', "\udcff", "%s{}")


def t49(model: Path, count: int, rng: random.Random) -> str:
    """Names from outside: each request has one line, which is JSON, and short."""
    with watched(model, log_format="json") as watch:
        start = len(watch.served.lines)
        for _ in range(count):
            text = "".join(rng.choice(HOSTILE) for _ in range(rng.randint(1, 3)))
            field = rng.choice(["model", "user", "prompt", "stop"])
            body = {"prompt": "a", "max_tokens": 1, field: text}
            headers = {"x_request_id": "".join(c for c in text if 32 <= ord(c) < 127)[:60]}
            status, _ = watch.send(COMPLETE, json.dumps(body).encode(), **headers)
            assert status in (200, 400, 404)
        eventually(lambda: len(watch.served.lines) >= start + count)
        for line in watch.served.lines[start:]:
            assert isinstance(json.loads(line), dict)
            assert len(line) < 2000, line[:300]
            assert line.isascii() or line.isprintable()
    return f"{count}/{count} lines are JSON, one each, none longer than 2,000 letters"


def t51(model: Path, count: int, rng: random.Random) -> str:
    """Its output is closed, its input too, and its terminal goes."""
    with process(model, log=Path("/dev/null")) as (server, port):
        server.stdout.close()
        for number in range(count):
            server.send_signal(rng.choice([signal.SIGHUP, signal.SIGPIPE, signal.SIGWINCH]))
            body = {"prompt": [40 + number % 100], "max_tokens": 2}
            assert send(port, COMPLETE, json.dumps(body).encode())[0] == 200
        server.send_signal(signal.SIGTERM)
        assert server.wait(PATIENCE_S) == 0
    return f"{count}/{count} signals of a terminal that goes: answered, and a clean end"


def t52(model: Path, count: int, rng: random.Random) -> str:
    """Starts that cannot succeed: one line with the cause, and no process is left."""
    with socket.create_server(("127.0.0.1", 0)) as taken, tempfile.TemporaryDirectory() as folder:
        port = str(taken.getsockname()[1])
        empty, broken = Path(folder) / "empty", Path(folder) / "broken.gguf"
        empty.mkdir()
        broken.write_bytes(b"GGUF" + bytes(20))
        wrong = [
            ([str(model), "--port", port], port),
            ([str(Path(folder) / "nowhere")], "nowhere"),
            ([str(empty)], "empty"),
            ([str(broken)], "broken"),
            ([str(model), "--kv-cache-memory", "1KiB"], "kv-cache-memory"),
            ([str(model), "--kv-cache-memory", "much"], "much"),
            ([str(model), "--max-model-len", "0"], "max-model-len"),
            ([str(model), "--api-key-file", str(Path(folder) / "none")], "none"),
            ([str(model), "--ssl-certfile", str(broken)], "ssl"),
            ([str(model), "--host", "999.1.1.1"], "999.1.1.1"),
            ([str(model), "--backend", "abacus"], "abacus"),
        ]
        rng.shuffle(wrong)
        for number in range(count):
            flags, name = wrong[number % len(wrong)]
            command = [sys.executable, "-m", "ridgeline", "serve", *flags]
            command += [] if "--port" in flags else ["--port", "0"]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, cwd=folder
            )
            words = done.stderr.strip().splitlines()
            assert done.returncode != 0, command
            assert "Traceback" not in done.stderr
            assert name in done.stderr, (name, done.stderr)
            assert sum(line.startswith(("ridgeline: ", "Error: ")) for line in words) == 1, words
    return f"{count}/{count} starts that cannot succeed end with the cause in one error"


def t53(model: Path, count: int, rng: random.Random) -> str:
    """The router is killed with models loaded: none of their processes is left."""
    with tempfile.TemporaryDirectory() as folder:
        models = _two_models(Path(folder), model)
        for _ in range(count):
            with routing(models, Path(folder) / "log") as routed:
                names = rng.sample(["one", "two"], rng.randint(1, 2))
                for name in names:
                    routed.complete(name)
                children = routed.pids()
                assert len(children) >= len(names)
                routed.process.kill()
                eventually(lambda left=children: all(map(_is_gone, left)))
    return f"{count}/{count} kills of a router: no process of a model is left"
