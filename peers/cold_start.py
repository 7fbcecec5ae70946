"""A model that is not loaded: how long until its first text, here and in llama.cpp's router mode?

    python -m peers.cold_start MODEL ... [--rounds 8] [--llama-server PATH]
                               [--llama-flags=--no-warmup] [--anyway]

Both routers serve one folder of the same GGUF files over HTTP, each as it does by default. Timed is
a short greedy chat, from sending its request to the first text of its stream: once as the very
first request after ``/health`` says that the router is ready, and then again and again two seconds
after the model was unloaded. How long a router takes until it is ready is told beside it. All go in
turn; a first round, in which files and kernels get into caches, does not count. Without
``--llama-server`` it is built from the source that the peer llama.cpp has too; cmake and a C++
compiler are needed. The table is markdown; the last line is the result as JSON.
"""

from __future__ import annotations

import argparse
import http.client
import json
import shlex
import shutil
import socket
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from peers import machine
from peers.engines import HOME, PEERS, LeftOut, log_path, run
from ridgeline.engine.setup.home import locate

_TIMEOUT_S = 300.0
_SETTLE_S = 2.0
_LLAMA = next(peer for peer in PEERS if peer.name == "llama.cpp")
_CMAKE = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_TESTS=OFF"),
    *("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_OPENSSL=OFF"),
)
_CHAT = {
    "messages": [{"role": "user", "content": "Name a colour."}],
    "temperature": 0,
    "max_tokens": 4,
    "stream": True,
}

Times = dict[str, list[float]]  # seconds of each round, by router


class Router:
    """A running router, by its port."""

    def __init__(self, port: int) -> None:
        """Take the port; nothing is sent."""
        self.port = port

    def _ask(self, method: str, path: str, value: Any = None) -> http.client.HTTPResponse:
        body = None if value is None else json.dumps(value)
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=_TIMEOUT_S)
        head = {"Content-Type": "application/json", "Connection": "close"}
        connection.request(method, path, body, head)
        return connection.getresponse()

    def is_ready(self) -> bool:
        """Whether ``/health`` says so."""
        try:
            return self._ask("GET", "/health").status == http.HTTPStatus.OK
        except OSError:
            return False

    def first_text_s(self, model: str) -> float:
        """Return the seconds from a request to the first text of its answer, and read it all.

        Raises SystemExit if there is none.
        """
        begin_s = time.perf_counter()
        with self._ask("POST", "/v1/chat/completions", _CHAT | {"model": model}) as answer:
            for line in answer:
                if line.startswith(b"data: {") and _has_text(json.loads(line[6:])):
                    took_s = time.perf_counter() - begin_s
                    answer.read()
                    return took_s
        raise SystemExit(f"port {self.port} answers without text: status {answer.status}")

    def state(self, model: str) -> str:
        """Return what it says of a model: ``loaded``, ``unloaded`` or what lies between."""
        with self._ask("GET", "/v1/models") as answer:
            models = {one["id"]: one for one in json.load(answer)["data"]}
        return str(models[model]["status"]["value"])

    def unload(self, model: str) -> None:
        """Tell llama.cpp's router to unload a model."""
        self._ask("POST", "/models/unload", {"model": model}).close()

    def wait_until_unloaded(self, model: str) -> None:
        """Wait until a model is unloaded, and until who prepares for the next one has done so."""
        while self.state(model) != "unloaded":
            time.sleep(0.05)
        time.sleep(_SETTLE_S)


def _has_text(chunk: dict[str, Any]) -> bool:
    deltas = [choice["delta"] for choice in chunk.get("choices", ())]
    return any(delta.get("content") or delta.get("reasoning_content") for delta in deltas)


@contextmanager
def running(name: str, command: Sequence[str]) -> Iterator[tuple[Router, float]]:
    """Run a router for as long as the block lasts; yield it, and the seconds until it was ready.

    Raises SystemExit if it ends before that.
    """
    with socket.create_server(("127.0.0.1", 0)) as found:
        router = Router(found.getsockname()[1])
    begin_s = time.perf_counter()
    with log_path(f"cold-start-{name}").open("w") as log:
        flags = ("--port", str(router.port))
        process = subprocess.Popen([*command, *flags], stdout=log, stderr=subprocess.STDOUT)
    try:
        while not router.is_ready():
            if process.poll() is not None:
                raise SystemExit(f"{name} ended at its start: see {log.name}")
            time.sleep(0.005)
        yield router, time.perf_counter() - begin_s
    finally:
        process.terminate()
        process.wait()


def build_llama_server() -> Path:
    """Return llama.cpp's server, built now unless it is there. Raises LeftOut if it cannot be."""
    folder = HOME / "llama-server"
    program = folder / "build" / "bin" / "llama-server"
    if not program.exists():
        print("Building llama.cpp's server (once; it takes minutes)", file=sys.stderr)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "download"]
        of_source = ["--no-deps", "--no-binary", "llama-cpp-python", "--dest", str(folder)]
        run([*pip, *of_source, *_LLAMA.packages], "llama-server")
        (archive,) = folder.glob("*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(folder, filter="data")
        source = folder / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp"
        run(["cmake", "-S", source, "-B", folder / "build", *_CMAKE], "llama-server")
        build = ["cmake", "--build", str(folder / "build"), "--target", "llama-server", "-j"]
        run(build, "llama-server")
    return program


def from_the_start(
    models: Sequence[str], commands: dict[str, list[str]], rounds: int
) -> dict[str, Times]:
    """Start each router anew for each model: its time until it is ready, and to the first text."""
    ready: Times = {name: [] for name in commands}
    first: dict[str, Times] = {model: {name: [] for name in commands} for model in models}
    for number in range(rounds + 1):
        for model in models:
            for name, command in commands.items():
                with running(name, command) as (router, ready_s):
                    took_s = router.first_text_s(model)
                if number:
                    ready[name].append(ready_s)
                    first[model][name].append(took_s)
                    _say(f"{name}: ready after {ready_s:.3f} s, {model} after {took_s:.3f} s")
    firsts = {f"{model}, first request": times for model, times in first.items()}
    return {"until the router is ready": ready} | firsts


def unloaded(
    models: Sequence[str], commands: dict[str, list[str]], rounds: int
) -> dict[str, Times]:
    """Ask again and again for a model that is not loaded."""
    times: dict[str, Times] = {model: {name: [] for name in commands} for model in models}
    with ExitStack() as stack:
        routers = {
            name: stack.enter_context(running(name, command))[0]
            for name, command in commands.items()
        }
        for number in range(rounds + 1):
            for model in models:
                for name, router in routers.items():
                    took_s = router.first_text_s(model)
                    if name == _LLAMA.name:  # here it is --keep-alive that unloads
                        router.unload(model)
                    router.wait_until_unloaded(model)
                    if number:
                        times[model][name].append(took_s)
                        _say(f"{name}: {model}, not loaded, after {took_s:.3f} s")
    return {f"{model}, not loaded": found for model, found in times.items()}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def table(results: dict[str, Times]) -> str:
    """Return medians, least and greatest seconds, and the last router's median over the first's."""
    names = list(next(iter(results.values())))
    lines = [f"| seconds | {' | '.join(names)} | ratio |", f"|---|{'---|' * len(names)}---|"]
    for what, times in results.items():
        medians = [statistics.median(times[name]) for name in names]
        cells = [
            f"{median:.2f} ({min(times[name]):.2f} to {max(times[name]):.2f})"
            for name, median in zip(names, medians, strict=True)
        ]
        lines.append(f"| {what} | {' | '.join(cells)} | {medians[-1] / medians[0]:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(prog="python -m peers.cold_start", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("models", nargs="+", metavar="MODEL", help="a GGUF file, or its name")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--llama-server", type=Path, help="default: build it")
    parser.add_argument("--llama-flags", type=shlex.split, default=[], help="more of its flags")
    parser.add_argument("--anyway", action="store_true", help="measure on a busy machine too")
    flags = parser.parse_args()
    try:
        llama = flags.llama_server or build_llama_server()
        files = [locate(model).path for model in flags.models]
    except (LeftOut, ValueError) as error:
        raise SystemExit(f"{error}") from None
    if others := [path for path in files if path.suffix != ".gguf"]:
        raise SystemExit(f"{others[0]} is no .gguf file, which llama.cpp needs")
    if shutil.which(llama) is None:
        raise SystemExit(f"{llama} is no program: give --llama-server PATH, or leave it out")
    if not flags.anyway and (reason := machine.refusal(machine.sample_busy_cores())):
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory(prefix="ridgeline-") as folder:
        for path in files:
            (Path(folder) / path.name).symlink_to(path.resolve())
        ours = [sys.executable, "-m", "ridgeline", "serve", "--models-dir", folder]
        commands = {
            "ridgeline": [*ours, "--keep-alive", "0"],
            _LLAMA.name: [str(llama), "--models-dir", folder, *flags.llama_flags],
        }
        models = [path.stem for path in files]
        results = from_the_start(models, commands, flags.rounds)
        results |= unloaded(models, commands, flags.rounds)
    print(table(results))
    facts = {"machine": machine.description(), "llama_flags": flags.llama_flags}
    print(json.dumps(facts | {"seconds": results}))


if __name__ == "__main__":
    main()
