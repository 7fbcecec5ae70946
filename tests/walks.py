"""How many files a reader visits to follow one thing: the walks of docs/architecture.md, counted.

A walk takes the calls in their order and each function once; each change of file is a visit, and so
is the way back to a file whose function goes on. ``python -m tests.walks`` prints the table's rows.
"""

from __future__ import annotations

import ast
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from safetensors.numpy import save_file

import ridgeline
from ridgeline.backends.cpu.layout import model_weights
from ridgeline.backends.cpu.layout.model_sizes import model_sizes
from ridgeline.backends.cpu.runner import CpuRunner
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Runner, Sampling, Step, Work
from ridgeline.engine.setup.home import stores
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.identity.digests import FileDigests
from ridgeline.planner.memory.model_spec import read_model_spec
from ridgeline.planner.plan import plan
from tests.kept_kernels import KERNELS
from tests.model.files.tiny import CONFIG as TINY
from tests.model.files.tiny import hf_weights
from tests.tiny import PLAIN, checkpoint, new_setup

PACKAGE = Path(ridgeline.__file__).parent
CONFIG = Path(__file__).parents[1] / "docs" / "learn" / "llama-3.1-8b.json"
# What others pass on and ask, and twins of kernels: a reader knows it before the walk.
VALUES = ("model/shape", "model/files/config", "model/files/tensors", "model/files/families/family",
          "model/files/families/fields", "backends/cpu/layout/shapes",
          "backends/cpu/layout/feed_forward", "core/params", "core/step",
          "backends/cuda/measure/twins")  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


def walk(
    call: Callable[[], object],
    known: Callable[..., object] | None = None,
    until: Callable[..., object] | None = None,
) -> list[str]:
    """Return the files that are visited, without ``.py``, by what runs when this is called.

    Of ``known``, whose walk is another one, what it calls is left out; with ``until`` it ends.
    """
    seen: set[CodeType] = set()
    files: list[str] = []
    left_out, last = (getattr(one, "__code__", None) for one in (known, until))

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and frame.f_code is last:
            sys.setprofile(None)
        if event == "call" and frame.f_code not in seen and _file(frame) and not _imports(frame):
            callers = [one for one in _callers(frame) if _file(one)]
            if not any(one.f_code is left_out for one in callers):
                seen.add(frame.f_code)
                files.extend((_file(callers[0] if callers else frame), _file(frame)))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [file for file, _ in groupby(one for one in files if not one.startswith(VALUES))]


def _file(frame: FrameType) -> str:
    """Return a frame's file within the package, empty if it stands elsewhere."""
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(PACKAGE):
        return ""
    return str(path.relative_to(PACKAGE).with_suffix("")).removesuffix("/__init__")


def _callers(frame: FrameType) -> Iterator[FrameType]:
    caller = frame.f_back
    while caller is not None:
        yield caller
        caller = caller.f_back


def _imports(frame: FrameType) -> bool:
    return any("importlib" in one.f_code.co_filename for one in _callers(frame))


def _plan() -> list[str]:
    config, here = json.loads(CONFIG.read_text()), stores()
    return walk(lambda: read_model_spec(config, here))


def _directory(folder: Path) -> list[str]:
    _write(folder)
    return walk(lambda: load_checkpoint(folder))


def _write(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(TINY))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    save_file(hf_weights(TINY), folder / "model.safetensors")


def _weights(cache: Path | None) -> list[str]:
    model, sizes = checkpoint(PLAIN), model_sizes(PLAIN, "int8", "int8")
    if cache is not None:
        file = cache / "model.gguf"
        file.write_bytes(b"as good as any")
        model = replace(model, path=file, contents=FileDigests({file.name: file}))
        model_weights._WORTH_KEEPING_BYTES = 1
    load = model_weights.load_weights
    return walk(lambda: load(model, sizes, "int8", 64, cache, lambda done, total: None))


def _named(home: Path) -> list[str]:
    os.environ["RIDGELINE_HOME"] = str(home)
    folder = home / "models" / "owner" / "name"
    folder.mkdir(parents=True)
    _write(folder)
    return walk(lambda: plan("owner/name", on="h100-sxm"), known=load_checkpoint)


def _body(folder: Path) -> list[str]:
    """Return the walk of a prompt of ids that is streamed; threads are not followed."""
    from starlette.requests import Request  # here: a step is walked where no server is installed

    from ridgeline import LLM
    from ridgeline.serve.answer.protocol import CompletionRequest
    from ridgeline.serve.engine.async_engine import AsyncEngine
    from ridgeline.serve.http.options import ServeOptions
    from ridgeline.serve.http.request_state import RequestState, local_scope
    from tests.engine.test_llm import write_model
    from tests.serve.serving import composed

    write_model(folder / "model")
    with LLM(folder / "model", backend="reference", speculative_config="off") as llm:
        server = composed(llm, ServeOptions()).model_server
        state: RequestState = {
            "note": {},
            "request_id": "one",
            "arrived_s": time.monotonic(),
            "created": datetime.now().astimezone(),
            "tenant": "anyone",
            "is_background": False,
            "seed": None,
            "journal": None,
        }
        scope = local_scope("POST", "/v1/completions", {}, state)
        body = CompletionRequest.model_validate({"prompt": [[1, 2, 3]], "stream": True})

        async def nothing_comes() -> dict[str, Any]:
            return await asyncio.get_running_loop().create_future()

        async def submit() -> None:
            reply = await server.complete(body, Request(scope))
            task = asyncio.ensure_future(reply(scope, nothing_comes, lambda _: nothing_comes()))
            while not (task.done() or server.engine.num_streams):
                await asyncio.sleep(0)
            task.cancel()

        return walk(lambda: asyncio.run(submit()), until=AsyncEngine.submit)


def step_walk(runner: Runner) -> list[str]:
    """Return the walk of a step in which one sequence draws its second token."""
    prompt, sampling = (1, 2, 3, 4, 5), Sampling(SamplingParams(), 5, ())
    first = Work((0, 0), 0, prompt, (0,), (7,), sampling, prompt, ())
    second = first._replace(start=5, tokens=(6,), history=(*prompt, 6))
    runner.execute(Step((first,), (), (), (), ()))
    return walk(lambda: runner.execute(Step((second,), (), (), (), ())))


def _step() -> list[str]:
    setup = new_setup(dtype="int8", kv_cache_dtype="int8", num_blocks=8)
    runner = CpuRunner(checkpoint(PLAIN), setup, kernel_cache=KERNELS)
    files = step_walk(runner)
    runner.close()
    return files


def row(name: str, files: list[str]) -> str:
    """Return the table's row of a walk."""
    visits = Counter("/".join(file.split("/")[-2:]) for file in files)
    through = ", ".join(f"`{name}` {count}" for name, count in visits.items())
    return f"| {name} | {len(files)} | {through} |"


def rows() -> Iterator[str]:
    """Yield the table's rows, counted now. It should be asked once in a process: some remember."""
    with tempfile.TemporaryDirectory() as folder:
        yield row("a config to a plan's shape, from `read_model_spec`", _plan())
        yield row("a directory to tensors, from `load_checkpoint`", _directory(Path(folder)))
        yield row("weights to kernels, from `load_weights`", _weights(None))
        yield row("the same by way of a file of packed weights", _weights(Path(folder)))
        yield row("a name to a plan, from `plan`, without `load_checkpoint`", _named(Path(folder)))
        yield row("a body to a submitted stream, from `complete`", _body(Path(folder)))
        yield row("a step of a sequence, from `CpuRunner.execute`", _step())


def modules_named(path: Path, class_name: str, method: str) -> set[str]:
    """Return the modules of the package that a method names, and all that it calls in its file.

    A name is one that the file imports, also in types of arguments and results, or an attribute of
    ``self`` that the constructor makes by such a name, or takes as one.
    """
    tree = ast.parse(path.read_text())
    imported = dict(_imported(tree))
    [owner] = [one for one in tree.body if getattr(one, "name", "") == class_name]
    assert isinstance(owner, ast.ClassDef)
    own = {one.name: one for one in (*owner.body, *tree.body) if isinstance(one, Function)}
    made_of = _attributes(own["__init__"])
    to_read, read, names = [method], set[str](), set[str]()
    while to_read:
        name = to_read.pop()
        if name in own and name not in read:
            read.add(name)
            mentioned = {*_names(own[name])}
            of_self = {one for one in mentioned if one.startswith("self.")}
            names |= mentioned.union(*(made_of.get(one, set()) for one in of_self))
            to_read += [one.removeprefix("self.") for one in mentioned]
    return {imported[name] for name in names & imported.keys()}


def _imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the names that a file imports of the package, and from which module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("ridgeline."):
            module = str(node.module).removeprefix("ridgeline.").replace(".", "/")
            for alias in node.names:
                inner = f"{module}/{alias.name}"
                is_module = PACKAGE.joinpath(f"{inner}.py").exists()
                yield alias.asname or alias.name, inner if is_module else module


def _names(node: ast.AST) -> Iterator[str]:
    """Yield what is named in some code: names alone, and attributes of ``self``."""
    for one in ast.walk(node):
        if isinstance(one, ast.Name):
            yield one.id
        elif isinstance(one, ast.Attribute) and ast.unparse(one.value) == "self":
            yield f"self.{one.attr}"


def _attributes(constructor: Function) -> dict[str, set[str]]:
    """Return what the attributes are made of: the names in calls, and in types of arguments."""
    arguments = (*constructor.args.args, *constructor.args.kwonlyargs)
    types = {one.arg: {*_names(one.annotation)} for one in arguments if one.annotation}
    made_of: dict[str, set[str]] = {}
    for node in ast.walk(constructor):
        if isinstance(node, ast.Assign):
            [target], value = node.targets, node.value
            of_many = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=True) if of_many else [(target, value)]
            for to, of in pairs:
                by = {*_names(of.func)} if isinstance(of, ast.Call) else types.get(ast.unparse(of))
                made_of[ast.unparse(to)] = by or set()
    return made_of


if __name__ == "__main__":
    print(*rows(), sep="\n")
