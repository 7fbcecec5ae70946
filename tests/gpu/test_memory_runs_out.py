"""A device whose memory runs out in a step: it is repeated in halves, and no answer changes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the cuda backend needs torch: make test-gpu")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ridgeline.core.engine import Engine
from ridgeline.core.params import SamplingParams
from ridgeline.serve.engine.async_engine import BisectingRunner
from tests.gpu import ordered_twins as ordered
from tests.gpu.engines import IDS, engine_over, runners

GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=8, temperature=0.9, seed=3, ignore_eos=True)
PENALTIES = SamplingParams(max_tokens=8, temperature=0, repetition_penalty=1.3, ignore_eos=True)
PROMPTS = [(IDS[:41], GREEDY), (IDS[3:20], DRAWN), (IDS[40:55], PENALTIES), (IDS[60:75], GREEDY)]
SHORT = [(IDS[:5], GREEDY), (IDS[7:13], DRAWN), (IDS[20:24], GREEDY)]  # in step until they end


class Allocations(TorchDispatchMode):
    """What torch allocates while this is entered; it may be refused, as a full device does.

    ``largest`` is the most bytes that were asked for at once, and ``count`` how often.
    """

    def __init__(self, refuses: Callable[[int, int], bool] = lambda count, size: False) -> None:
        super().__init__()
        self.largest = self.count = self.num_refused = 0
        self._refuses = refuses

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **kwargs or {})
        is_new = all(one.alias_info is None for one in func._schema.returns)
        for one in made if isinstance(made, (tuple, list)) else [made]:
            if is_new and isinstance(one, torch.Tensor):
                self.count, size = self.count + 1, one.numel() * one.element_size()
                self.largest = max(self.largest, size)
                if self._refuses(self.count, size):
                    self.num_refused += 1
                    raise torch.OutOfMemoryError(f"CUDA out of memory: {size} bytes")
        return made


@pytest.fixture(params=["qwen2", pytest.param("gpt-oss", marks=pytest.mark.full)])
def engine(request: Any, tmp_path: Path) -> Callable[[list[BaseException]], Engine]:
    """Make an engine that repeats failed steps in halves, as a server does."""
    runner, _, setup = runners(tmp_path, request.param, ops=ordered)

    def made(failures: list[BaseException]) -> Engine:
        engine = engine_over(runner, setup, caches=False)
        engine.runner = BisectingRunner(runner, failures.append)
        return engine

    return made


def answered(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> Any:
    """Return tokens and errors of each request."""
    found = dict[int, tuple[list[int | None], list[str]]]()
    for prompt, params in requests:
        engine.add(tuple(prompt), params)
    while engine.has_work():
        for event in engine.step():
            tokens, errors = found.setdefault(event.seq_id[0], ([], []))
            if event.error is None:
                tokens.append(event.token)
            else:
                errors.append(event.error)
        engine.check()
    return [found[key] for key in sorted(found)]


def test_a_step_that_is_too_large_is_repeated_in_halves(engine: Any) -> None:
    alone, together = Allocations(), Allocations()
    wanted, failures = [], list[BaseException]()
    with alone:
        for request in PROMPTS:
            wanted += answered(engine(failures), [request])
    with together:
        assert answered(engine(failures), PROMPTS) == wanted
    assert together.largest > alone.largest
    with Allocations(lambda count, size: size > alone.largest) as device:
        assert answered(engine(failures), PROMPTS) == wanted
    assert device.num_refused > 0
    assert failures == []


def test_a_request_that_never_fits_fails_alone(engine: Any) -> None:
    others, failures = Allocations(), list[BaseException]()
    wanted = answered(engine(failures), PROMPTS)
    with others:
        for request in PROMPTS[1:]:
            answered(engine(failures), [request])
    with Allocations(lambda count, size: size > others.largest):
        (tokens, errors), *rest = answered(engine(failures), PROMPTS)
    assert rest == wanted[1:]
    assert (tokens, len(errors)) == ([], 1)
    (error,) = failures
    assert isinstance(error, MemoryError)
    assert "too little memory for a step: lower --max-num-batched-tokens" in str(error)


def test_memory_that_runs_out_anywhere_in_a_step_changes_no_answer(engine: Any) -> None:
    """Between layers, in draws, and in a step that runs ahead."""
    whole, failures = Allocations(), list[BaseException]()
    with whole:
        wanted = answered(engine(failures), SHORT)
    for at in range(1, whole.count, max(whole.count // 11, 1)):
        with Allocations(lambda count, size, at=at: count == at) as device:
            assert answered(engine(failures), SHORT) == wanted
        assert device.num_refused == 1
    assert failures == []
