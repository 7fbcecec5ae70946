"""The same answer, however steps are formed, padded, or computed before they are asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the cuda backend needs torch: make test-gpu")


from ridgeline import LLM, StructuredOutputsParams
from ridgeline.backends.interface import Setup
from ridgeline.core.params import SamplingParams
from tests.gpu.engines import IDS, Answers, answers, engine_over, runners, take_events
from tests.real_models import real_model

FAMILIES = ["qwen2", "gemma3", "gpt-oss", "kimi"]  # one group of layers; several; experts; latents


def params(max_tokens: int, **wishes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **wishes)


REQUESTS = [
    (IDS[:41], params(10, temperature=0)),
    (IDS[:35] + IDS[60:70], params(9, temperature=0.9, seed=4, n=2)),
    (IDS[80:83], params(12, temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=5)),
    (IDS[90:120], params(8, temperature=1.0, seed=6, repetition_penalty=1.3, logprobs=2)),
    (IDS[100:117], params(6, temperature=0, prompt_logprobs=1)),
    (IDS[20:26], params(7, temperature=0.7, seed=9, typical_p=0.9, logit_bias={5: 2.0})),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_steps_of_any_form(name: str, tmp_path: Path) -> None:
    mine, plain, setup = runners(tmp_path, name)
    wanted = [
        tokens for request in REQUESTS for tokens in answers(engine_over(plain, setup), [request])
    ]
    alone = [answers(engine_over(mine, setup), [request]) for request in REQUESTS]
    assert [tokens for found in alone for tokens in found] == wanted
    few = 14 * len(setup.groups)
    for pads in (False, True):
        mine.graphs.pads = pads
        assert answers(engine_over(mine, setup), REQUESTS) == wanted
        assert answers(engine_over(mine, setup, tokens=7), REQUESTS) == wanted
        tight = engine_over(mine, setup, num_blocks=few, caches=False)
        assert answers(tight, REQUESTS) == wanted


@pytest.mark.parametrize("name", FAMILIES)
def test_running_ahead_changes_no_answer(name: str, tmp_path: Path) -> None:
    """Prompts come while others are answered, which end early, pause, or lose their blocks."""
    mine, _, setup = runners(tmp_path, name)
    num_ahead = num_in_vain = 0
    for seed in range(8):
        mine.runs_ahead, mine.num_ahead, mine.num_in_vain = False, 0, 0
        wanted = random_workload(mine, setup, seed)
        assert not mine.num_ahead
        mine.runs_ahead = True
        assert random_workload(mine, setup, seed) == wanted
        num_ahead += mine.num_ahead
        num_in_vain += mine.num_in_vain
    assert num_ahead > 100
    assert num_in_vain > 10


def random_workload(runner: Any, setup: Setup, seed: int) -> Answers:
    random = np.random.default_rng(seed)
    engine = engine_over(
        runner,
        setup,
        num_blocks=int(random.integers(9, 30)) * len(setup.groups),
        tokens=24,
        seqs=4,
        caches=bool(seed % 2),
    )
    found: Answers = {}
    left, number = 7, 0
    while left or engine.has_work():
        if left and (not engine.has_work() or random.random() < 0.1):
            left -= 1
            first = int(random.integers(0, 3)) * 20
            prompt = IDS[first : first + int(random.integers(3, 36))]
            asked = SamplingParams(
                temperature=float(random.choice([0, 0.9])),
                seed=int(random.integers(0, 99)),
                n=int(random.choice([1, 1, 1, 2])),
                max_tokens=int(random.integers(2, 25)),
                stop_token_ids=[int(random.integers(3, 90))],
                logprobs=None if random.random() < 0.8 else 1,
            )
            engine.add(tuple(prompt), asked)
        alive = list(engine.requests)
        if alive and random.random() < 0.05:
            engine.pause(alive[0])
        number += 1
        if number % 7 == 0 or not engine.has_work():
            for request in alive:
                engine.resume(request)
        if engine.has_work():
            take_events(engine, found)
    return found


def test_nearly_all_tokens_of_long_answers_come_from_ahead(tmp_path: Path) -> None:
    mine, _, setup = runners(tmp_path, "qwen2")
    long = [(IDS[i : i + 4], params(58, temperature=0.9, seed=i)) for i in range(5)]
    found = answers(engine_over(mine, setup), long)
    assert mine.num_ahead >= 0.95 * sum(map(len, found))
    assert mine.num_in_vain == 0


def test_a_step_that_ran_ahead_is_dropped_with_a_poisoned_cache(tmp_path: Path) -> None:
    """A request whose keys are not finite fails alone, and others go on as before."""
    mine, _, setup = runners(tmp_path, "qwen2")
    other = ((5, 6, 7), params(9, temperature=0))
    wanted = answers(engine_over(mine, setup), [other])
    mine.weights.embed[IDS[1]] = float("inf")
    engine, found, errors = engine_over(mine, setup), [], {}
    engine.add(*other)
    while engine.has_work():
        if len(found) == 4:
            engine.add(tuple(IDS[:4]), params(4, temperature=0))
        for event in engine.step():
            if event.error:
                errors[event.seq_id] = event.error
            elif event.seq_id == (0, 0):
                found.append(event.token)
    assert [found] == wanted
    assert errors == {(1, 0): "K/V of this sequence is not finite"}


def test_a_real_model_says_what_the_reference_says() -> None:
    path = real_model("smollm2")
    prompts = ["The capital of France is", "def fibonacci(n):", "2 + 2 ="]
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    drawn = SamplingParams(temperature=0.8, top_p=0.9, top_k=40, seed=3, max_tokens=8)
    words = StructuredOutputsParams(regex="( [a-z]{1,8}){3}")
    formed = SamplingParams(temperature=0.8, seed=4, max_tokens=12, structured_outputs=words)
    found = {}
    for backend in ("reference", "cuda"):
        options = {"dtype": "f32", "max_model_len": 64, "threads": 1, "kv_cache_memory": "32MiB"}
        with LLM(path, backend=backend, speculative_config="off", **options) as llm:
            outs = llm.generate(prompts * 2, [greedy] * 3 + [drawn] * 2 + [formed])
            found[backend] = [list(out.outputs[0].token_ids) for out in outs]
    assert found["cuda"] == found["reference"]
