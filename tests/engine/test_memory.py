"""What takes a process's memory, as it says itself: the sum, what grows, what stays."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.engine.memory import ProcessMemory
from ridgeline.engine.setup.home import default_home
from tests.engine.test_llm import GREEDY, model

__all__ = ["model"]  # a fixture


def printed(program: str, *arguments: object, **variables: str) -> Any:
    """Run a program and return the JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True, text=True, env=os.environ | variables, check=True,
    )  # fmt: skip
    return json.loads(done.stdout)


def lines_of(memory: ProcessMemory) -> dict[str, int]:
    return {line.name: line.resident_bytes for line in memory.lines}


LOOKING = """
import json, os, sys
from ridgeline import LLM
from ridgeline.system.machine import memory_of
model, backend = sys.argv[1:]
with LLM(model, kv_cache_memory="1MiB", threads=1, backend=backend) as llm:
    document = llm.memory().as_dict()
    print(json.dumps([memory_of(os.getpid()).resident_bytes, document]))
"""


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_lines_sum_to_what_the_process_has(model: Path, backend: str) -> None:
    # In a process of its own: in this one, threads of other tests may take and free memory.
    seen, document = printed(LOOKING, model, backend)
    lines = {one["name"]: one for one in document["lines"]}
    resident_bytes = document["resident_bytes"]
    assert sum(one["resident_bytes"] for one in lines.values()) == resident_bytes
    assert resident_bytes == pytest.approx(seen, rel=0.01)
    before_bytes = lines["process.before"]["resident_bytes"]
    assert resident_bytes - document["grown_bytes"] == before_bytes
    assert lines["kv_cache"]["bytes"] == pytest.approx(1 << 20, rel=0.05)
    assert {one["how"] for one in lines.values()} <= {"measured", "computed"}
    assert "at most 1 MB" in document["notes"][0]


FREEING = """
import ctypes, json, sys
from ridgeline import LLM
libc, num, size = ctypes.CDLL(None), 8000, 4096
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
with LLM(sys.argv[1], kv_cache_memory="1MiB", threads=1) as llm:
    found = [llm.memory().as_dict()]
    parts = [libc.malloc(size) for _ in range(num)]
    for part in parts:
        ctypes.memset(part, 1, size)
    found.append(llm.memory().as_dict())
    for start in (0, 2):
        for part in parts[start::4]:  # what lies between is in use: none goes back to the system
            libc.free(part)
        found.append(llm.memory().as_dict())
    print(json.dumps([num // 4 * size, *found]))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="another C library")
def test_what_was_freed_and_is_kept_has_a_line(model: Path) -> None:
    # In a process of its own: in one that ran other tests, what they freed is taken first.
    quarter, *documents = printed(FREEING, model)
    before, held, first, second = (
        {one["name"]: one["resident_bytes"] for one in document["lines"]} for document in documents
    )
    assert held["process.other"] - before["process.other"] > 3 * quarter
    # Not from the start: what was freed while the model was loaded is taken before the first part.
    gained = second["process.freed"] - first["process.freed"]
    assert gained == pytest.approx(quarter, rel=0.2)


def test_what_grows_with_use_and_stays(model: Path) -> None:
    with LLM(model, kv_cache_memory="64MiB", threads=1) as llm:
        before = lines_of(llm.memory())
        assert before["kv_cache"] == before.get("engine.sequences", 0) == 0
        stream = llm.stream("Once upon a time", GREEDY)
        next(stream)
        during = lines_of(llm.memory())
        assert during["engine.sequences"] > 0
        stream.close()
        llm.generate("Hello " * 20, SamplingParams(temperature=1.0, seed=1, max_tokens=8))
        after = lines_of(llm.memory())
        assert "engine.sequences" not in after
        assert after["kv_cache"] >= during["kv_cache"] > 0
        assert after["engine.blocks"] > before["engine.blocks"]  # texts that can be found again


def test_a_draft_model_has_lines_of_its_own(model: Path) -> None:
    config = {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}
    with LLM(model, speculative_config=config, kv_cache_memory="1MiB", threads=1) as llm:
        lines = lines_of(llm.memory())
    own = {name for name in lines if name.startswith("draft_model.")}
    assert {"draft_model.kv_cache", "draft_model.weights.mlp"} <= own
    assert lines["draft_model.weights.mlp"] == lines["weights.mlp"]


def named_bytes(document: dict[str, Any]) -> int:
    """What has come and has a name; more than has come, if something is counted twice."""
    nameless = ("process.before", "process.other")
    lines = [one for one in document["lines"] if one["name"] not in nameless]
    return sum(one["resident_bytes"] for one in lines)


PROGRAM = """
import gc, json, os, sys
import gguf  # which packing loads
from ridgeline import LLM, SamplingParams
from ridgeline.system.machine import memory_of
with LLM(sys.argv[1], kv_cache_memory="1MiB") as tiny:  # libraries are loaded with the first model
    tiny.generate("hello", SamplingParams(max_tokens=2))
gc.collect()
before = memory_of(os.getpid()).resident_bytes
with LLM("smollm2", kv_cache_memory="256MiB") as llm:
    llm.tokenizer.prepare()
    found = [before, llm.memory().as_dict()]
    llm.generate(["hello " * 50] * 8, SamplingParams(max_tokens=32))
    print(json.dumps([*found, llm.memory().as_dict()]))
"""


@pytest.mark.full
@pytest.mark.engine
def test_nearly_all_growth_of_a_real_model_has_a_name(model: Path, tmp_path: Path) -> None:
    (tmp_path / "models").symlink_to(default_home() / "models")
    for start in ("compiled", "packed", "mapped"):
        if start == "packed":
            shutil.rmtree(tmp_path / "packed")
        before, loaded, used = printed(PROGRAM, model, RIDGELINE_HOME=str(tmp_path))
        weights = [one for one in used["lines"] if one["name"].startswith("weights.")]
        assert any(one["mapped"] for one in weights)
        assert sum(one["resident_bytes"] for one in weights) > 120e6
        for one in (loaded, used):
            unnamed = one["resident_bytes"] - before - named_bytes(one)
            # Python's objects, some 0.3 MB, are more than a hundredth where nothing is read yet.
            assert abs(unnamed) < 0.01 * one["grown_bytes"] + 0.5e6, (start, unnamed, one)
        grown = used["resident_bytes"] - loaded["resident_bytes"]
        assert grown > 120e6  # weights are read when they are needed
