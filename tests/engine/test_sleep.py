"""Memory is given back while nothing runs, and answers are the same afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from tests.engine.test_llm import model
from tests.real_models import real_model

__all__ = ["model"]  # a fixture

SAMPLED = SamplingParams(max_tokens=8, temperature=0.8, seed=7, logprobs=2, ignore_eos=True)
PROMPTS = [[5 + (i * 7 + j) % 90 for j in range(90)] for i in range(6)]


def answers(llm: LLM, prompts: list[list[int]] = PROMPTS) -> list[Any]:
    """What is drawn, with all log-probabilities."""
    outputs = llm.generate(prompts, SAMPLED, progress=False)
    return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in outputs]


def resident(llm: LLM, *names: str) -> int:
    """What parts of the process's memory take."""
    return sum(llm.memory().part_bytes(name) for name in names)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("level", [1, 2])
def test_memory_is_given_back_and_answers_stay(model: Path, backend: str, level: int) -> None:
    with LLM(model, kv_cache_memory="8MiB", threads=1, backend=backend) as llm:
        first = answers(llm)
        before = resident(llm, "kv_cache")
        assert before > 0
        llm.sleep(level)
        assert llm.sleeping.level == level
        assert resident(llm, "kv_cache", "recurrent_states") <= 0.05 * before
        llm.engine.check()
        assert answers(llm) == first
        assert llm.sleeping.level == 0
        outputs = llm.generate(PROMPTS, SAMPLED, progress=False)
        assert all(one.num_cached_tokens for one in outputs), "nothing is kept after a sleep"


def test_what_was_cached_is_forgotten(model: Path) -> None:
    with LLM(model, kv_cache_memory="4MiB", threads=1) as llm:
        answers(llm)
        llm.sleep()
        outputs = llm.generate(PROMPTS, SAMPLED, progress=False)
        assert [one.num_cached_tokens for one in outputs] == [0] * len(PROMPTS)


REAL = """
import json, os
from ridgeline import LLM, SamplingParams
from ridgeline.system.machine import memory_of
start = memory_of(os.getpid()).resident_bytes
prompts = [[40 + (i * 31 + j * 7) % 9000 for j in range(400)] for i in range(4)]
params = SamplingParams(max_tokens=8, temperature=0.8, seed=3, logprobs=0, ignore_eos=True)
with LLM("smollm2", kv_cache_memory="256MiB", max_num_seqs=16) as llm:
    found = []
    for level in (1, 2, 0):
        outputs = llm.generate(prompts, params, progress=False)
        answers = [(one.outputs[0].token_ids, repr(one.outputs[0].logprobs)) for one in outputs]
        touched = llm.memory().part_bytes("kv_cache")
        if level:
            llm.sleep(level)
        memory = llm.memory()
        mapped = sum(line.resident_bytes for line in memory.lines if line.is_mapped)
        asleep = memory_of(os.getpid()).resident_bytes
        found.append([answers, touched, memory.part_bytes("kv_cache"), mapped, asleep - start])
    print(json.dumps(found))
"""


def test_a_real_model_gives_back_cache_and_weights() -> None:
    real_model("smollm2")
    # In a process of its own: others' memory is not at its start.
    done = subprocess.run([sys.executable, "-c", REAL], capture_output=True, text=True, check=True)
    light, deep, awake = json.loads(done.stdout)
    assert light[0] == deep[0] == awake[0]
    for touched, left in (light[1:3], deep[1:3]):
        assert touched > 10 << 20
        assert left <= 0.05 * touched
    assert light[3] > 40 << 20
    assert deep[3] < 0.05 * light[3]
    assert deep[4] < 80 << 20
    assert awake[3] > 0.9 * light[3]


def test_it_does_not_sleep_while_a_prompt_runs(model: Path) -> None:
    with LLM(model, kv_cache_memory="1MiB", threads=1) as llm:
        stream = llm.stream(PROMPTS[0], SAMPLED)
        next(stream)
        with pytest.raises(RuntimeError, match="1 requests run"):
            llm.sleep()
        assert llm.sleeping.level == 0
        stream.close()
        llm.sleep()
        llm.wake_up()
        assert (llm.sleeping.level, len(llm.engine.listeners)) == (0, 0)


@pytest.mark.parametrize("level", [0, 3, -1])
def test_a_level_that_there_is_not(model: Path, level: int) -> None:
    with (
        LLM(model, kv_cache_memory="1MiB", threads=1) as llm,
        pytest.raises(ValueError, match="1 gives the cache back"),
    ):
        llm.sleep(level)


@pytest.mark.parametrize("num_naps", [30, pytest.param(1000, marks=pytest.mark.full)])
def test_naps_between_random_work(model: Path, num_naps: int) -> None:
    dice = Random(3)
    with LLM(model, kv_cache_memory="4MiB", threads=1) as llm:
        expected = answers(llm)
        for _ in range(num_naps):
            llm.sleep(dice.choice((1, 2)))
            if dice.random() < 0.2:
                llm.sleep(dice.choice((1, 2)))
            chosen = dice.sample(range(len(PROMPTS)), dice.randint(1, 3))
            assert answers(llm, [PROMPTS[i] for i in chosen]) == [expected[i] for i in chosen]
        llm.engine.check()
        assert len(llm.engine.listeners) == 0


def test_a_draft_model_sleeps_too(model: Path) -> None:
    config = {"method": "draft_model", "model": str(model), "always": True}
    with LLM(model, kv_cache_memory="4MiB", threads=1, speculative_config=config) as llm:
        first = answers(llm)
        before = resident(llm, "draft_model.kv_cache")
        assert before > 0
        llm.sleep()
        assert resident(llm, "draft_model.kv_cache") <= 0.05 * before
        assert answers(llm) == first
        llm.engine.check()
