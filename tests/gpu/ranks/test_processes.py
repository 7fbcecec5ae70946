"""Ranks as processes: the same bits, and one line if one of them is lost; nobody stays behind."""

from __future__ import annotations

import gc
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

pytest.importorskip("torch", reason="the cuda backend needs torch: make test-gpu")

from ridgeline.backends import cuda
from ridgeline.backends.cuda.processes import rank_processes as watch
from ridgeline.backends.cuda.processes import runner as runner_
from ridgeline.backends.cuda.ranks import group
from ridgeline.core.params import SamplingParams
from ridgeline.core.request import NO_ADAPTER, Adapter
from ridgeline.core.step import Sampling, Step, Work
from ridgeline.system.machine import DeviceLost
from tests.engine.test_llm import model  # noqa: F401  (a fixture)
from tests.gpu.engines import IDS, NOWHERE, answers, engine_over
from tests.gpu.on_cpu import ORDERED, compute_on_cpu
from tests.gpu.ranks.threads import tiny_model
from tests.lora import random_adapter
from tests.waiting import PATIENCE_S, children, started

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=6, temperature=0.9, seed=3, n=2, logprobs=1, ignore_eos=True)
REQUESTS = [(IDS[:41], GREEDY), (IDS[3:20], DRAWN), (IDS[:35], GREEDY)]
PLAIN = [(IDS[:5], GREEDY), (IDS[7:30], GREEDY)]  # runs ahead


@pytest.fixture(autouse=True)
def _ordered_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_on_cpu(monkeypatch, ORDERED)


def pids_of(runner: Any) -> dict[int, int]:
    """Return the process of each rank but the first."""
    return {rank: process.pid for rank, process in runner.processes._processes.items()}


@contextmanager
def several(
    folder: Path, count: int, name: str = "qwen2", **settings: Any
) -> Iterator[tuple[Any, Any]]:
    """Make a runner over processes; they are gone at the end."""
    checkpoint, setup = tiny_model(folder, name, tensor_parallel_size=count, **settings)
    runner = cuda.new_runner(checkpoint, setup, NOWHERE)
    pids = list(pids_of(runner).values())
    assert len(pids) == count - 1
    try:
        yield runner, setup
    finally:
        runner.processes.close()
        runner.processes.join()
        assert not any(map(is_alive, pids))


def is_alive(pid: int) -> bool:
    """Whether a process is there, and not only its status."""
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_four_processes_give_the_bits_of_one_until_one_of_them_stops(tmp_path: Path) -> None:
    checkpoint, setup = tiny_model(tmp_path, "qwen2")
    alone = cuda.new_runner(checkpoint, setup, NOWHERE)
    assert checkpoint.arch.attentions[0].num_kv_heads == 2
    with several(tmp_path / "four", 4) as (runner, of_four):
        assert (runner.prompt_logits(IDS[:40]) == alone.prompt_logits(IDS[:40])).all()
        for requests in REQUESTS, PLAIN:
            wanted = answers(engine_over(alone, setup), requests)
            assert answers(engine_over(runner, of_four), requests) == wanted
        assert runner.first.num_ahead == alone.num_ahead > 0
        memory = runner.memory()
        for rank in (1, 2, 3):
            of_rank = memory[f"rank {rank}.kv_cache"]
            assert (of_rank.device, of_rank.num_bytes) == (
                f"rank {rank}",
                memory["kv_cache"].num_bytes,
            )
        stops(runner, of_four, 2)


def test_adapters_come_and_go_on_all_processes(tmp_path: Path) -> None:
    checkpoint, setup = tiny_model(tmp_path, "qwen2", max_lora_rank=8)
    alone, made = cuda.new_runner(checkpoint, setup, NOWHERE), {}
    for number in (1, 2):
        made[number] = random_adapter(checkpoint.arch, 4 * number, number)
    adapters = [Adapter(1, b"1"), Adapter(2, b"2"), NO_ADAPTER]
    kept = [alone.add_adapter(number, weights) for number, weights in made.items()]
    wanted = answers(engine_over(alone, setup), REQUESTS, adapters)
    with several(tmp_path / "two", 2, max_lora_rank=8) as (runner, of_two):
        kept = [runner.add_adapter(number, weights) for number, weights in made.items()]
        assert answers(engine_over(runner, of_two), REQUESTS, adapters) == wanted
        with pytest.raises(ValueError, match="rank 9: the runner has room for 8"):
            runner.add_adapter(3, random_adapter(checkpoint.arch, 9, 3))
        kept.clear()
        gc.collect()
        assert answers(engine_over(runner, of_two), REQUESTS) == answers(
            engine_over(alone, setup), REQUESTS
        )
        with pytest.raises(KeyError):  # on both alike, or a rank would be lost
            answers(engine_over(runner, of_two), REQUESTS, adapters)
        again = runner.add_adapter(1, made[1])
        adapters[1] = NO_ADAPTER
        found = answers(engine_over(runner, of_two), REQUESTS, adapters)
        assert found[0] == wanted[0]
        assert again.num_bytes > 0


def stops(runner: Any, setup: Any, rank: int) -> None:
    """A rank stops in a step: as soon as all others wait for it, time is up."""
    fails_alike(runner, setup)  # so that none is still at a step before
    processes = runner.processes
    pid = pids_of(runner)[rank]
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(answers, engine_over(runner, setup), REQUESTS)
        others = [one for one in range(processes.count) if one != rank]
        while processes.progress[others].min() <= processes.progress[rank]:
            assert not running.done()
            time.sleep(0.002)
        processes.step_timeout_s = 0
        line = rf"^a step has taken 0 s: rank {rank} of 4 \(process {pid}\) did not go on$"
        with pytest.raises(DeviceLost, match=line):
            running.result()


def fails_alike(runner: Any, setup: Any) -> None:
    """A step fails on every rank, and the first waits until all have said so."""
    wrong = Work((9, 0), 0, (10**6,), (0,), (1,), Sampling(GREEDY, 1, ()), (), ())
    wrong = wrong._replace(others=tuple((i,) for i in range(1, len(setup.groups))))
    with pytest.raises(IndexError):
        runner.execute(Step((wrong,), (), (), (), ()))


def test_a_rank_that_is_killed_ends_the_engine_and_an_error_of_all_does_not(tmp_path: Path) -> None:
    with several(tmp_path, 2, "gpt-oss") as (runner, setup):
        wanted = answers(engine_over(runner, setup), REQUESTS)
        fails_alike(runner, setup)
        assert answers(engine_over(runner, setup), REQUESTS) == wanted
        pid = pids_of(runner)[1]
        os.kill(pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(
                DeviceLost, match=rf"^rank 1 of 2 \(process {pid}\) was ended by SIGKILL$"
            ):
                answers(engine_over(runner, setup), REQUESTS)


@pytest.mark.parametrize("when", ["before it has read all", "when all meet"])
def test_a_rank_that_stops_while_it_loads_ends_the_engine(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, setup = tiny_model(tmp_path, "qwen2", tensor_parallel_size=2)
    pids = list[int]()

    def stop() -> None:
        if not pids:
            pids.extend(ranks_of(os.getpid()))
            os.kill(pids[0], signal.SIGSTOP)
            monkeypatch.setattr(watch, "LOADING_TIMEOUT_S", 4.0)

    def connect(*given: Any) -> Any:
        stop()
        return group.connect(*given)

    told = NOWHERE
    if when == "when all meet":
        monkeypatch.setattr(runner_, "connect", connect)
    else:
        told = NOWHERE._replace(progress=lambda done, total: stop())
    with pytest.raises(DeviceLost) as caught:
        cuda.new_runner(checkpoint, setup, told)
    which = rf"rank 1 of 2 \(process {pids[0]}\)"
    if when == "when all meet":  # it may have begun to
        which = rf"({which}|the ranks)"
    line = f"loading has stood still for 4 s: {which} did not go on"
    assert re.fullmatch(line, str(caught.value))
    while is_alive(pids[0]):
        time.sleep(0.01)


@contextmanager
def server(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str, int]]:
    """Serve a model on two ranks; yield the process, its address, and the second rank's process."""
    command = [sys.executable, "-m", "tests.gpu.ranks.command_line"]
    command += ["serve", str(folder), "--port", "0"]
    command += ["--backend", "cuda", "--tensor-parallel-size", "2", "--dtype", "f32"]
    command += ["--kv-cache-memory", "1MiB"]
    with started(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "is ready at" in line, process.stderr and process.stderr.read()
        (rank,) = ranks_of(process.pid)
        yield process, line.split(" at ")[1].split()[0], rank


def ranks_of(pid: int) -> list[int]:
    """Return the processes of ranks that this one has started."""
    return children(pid, "processes.rank")


def test_a_server_ends_with_one_line_if_a_rank_does(model: Path) -> None:  # noqa: F811
    with server(model) as (process, url, rank):
        body = json.dumps({"model": "random", "prompt": [40, 41], "max_tokens": 4}).encode()
        request = Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=PATIENCE_S) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] > 0
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(HTTPError, match="503"):
            urlopen(request, timeout=PATIENCE_S)
        assert process.stderr is not None
        *_, last = process.stderr.read().splitlines()
        assert last == f"ridgeline: rank 1 of 2 (process {rank}) was ended by SIGKILL"
        assert process.wait(PATIENCE_S) == 1


def test_no_rank_outlives_the_first_even_one_that_is_stopped(model: Path) -> None:  # noqa: F811
    with server(model) as (process, _, rank):
        os.kill(rank, signal.SIGSTOP)
        watched = os.pidfd_open(rank)
        process.kill()
        assert select.select([watched], [], [], PATIENCE_S)[0] == [watched]
        os.close(watched)
