"""Ctrl-C: never in the middle of a step, at once between steps, and for whoever handles it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM
from ridgeline.core.step import StepOutput
from ridgeline.engine.requests import Interrupts
from tests.engine.test_llm import GREEDY, assert_idle, write_model


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path: Path = write_model(tmp_path_factory.mktemp("models") / "random")
    return LLM(path, kv_cache_memory="1MiB", threads=1)


def test_ctrl_c_comes_between_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    execute, ended = llm.engine.runner.execute, []

    def interrupted(step: Any) -> StepOutput:
        os.kill(os.getpid(), signal.SIGINT)
        output = execute(step)
        ended.append(step)
        return output

    stream = llm.stream("hello", GREEDY)
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    assert len(ended) == 1  # the step was whole
    assert_idle(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_somebody_elses_handler_gets_the_signal(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    execute, seen = llm.engine.runner.execute, []

    def interrupted(step: Any) -> StepOutput:
        os.kill(os.getpid(), signal.SIGINT)
        return execute(step)

    monkeypatch.setattr(llm.engine.runner, "execute", interrupted)
    before = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        (out,) = llm.generate("hello", GREEDY)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT] * 12
    assert out.outputs[0].finish_reason == "length"


def test_between_steps_the_signal_is_not_kept_back(llm: LLM) -> None:
    """Also while two streams have begun, whichever ends first; then all is as it was."""
    first, second = llm.stream("hello", GREEDY), llm.stream("world", GREEDY)
    next(first)
    next(second)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    first.close()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    second.close()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_set_meanwhile_stays(llm: LLM) -> None:
    seen: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    try:
        stream = llm.stream("hello", GREEDY)
        next(stream)
        signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
        list(stream)
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [signal.SIGINT]


def test_who_ignores_it_goes_on_ignoring() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Interrupts():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_who_dies_of_it_dies_behind_the_step() -> None:
    program = """
import signal
from ridgeline.engine.requests import Interrupts
signal.signal(signal.SIGINT, signal.SIG_DFL)
interrupts = Interrupts()
with interrupts:
    interrupts.hold()
    signal.raise_signal(signal.SIGINT)
    print("whole", flush=True)
    interrupts.release()
    print("alive")
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGINT
    assert done.stdout == "whole\n"
