"""Vectors of a step's texts: made of the right states, bit for bit the same in any company."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from ridgeline.backends.pooling import pooled, tanh
from ridgeline.backends.reference import ReferenceRunner
from ridgeline.core.params import POOLINGS, SamplingParams
from ridgeline.core.step import Sampling, Step, StepOutput, Work
from ridgeline.engine.outputs import cosine, shaped
from tests.tiny import ARCHS, checkpoint, new_setup

States = NDArray[np.float32]
_ALL = Sampling(SamplingParams(), 0, ())


def work(tokens: tuple[int, ...], block: int, pool: str = "", start: int = 0) -> Work:
    table = tuple(range(block, block + 4))
    return Work((block, 0), start, tokens, table, (), _ALL, (), (), pool=pool)


def step(*items: Work) -> Step:
    return Step(items, (), (), (), ())


def made(items: list[Work], states: States) -> StepOutput:
    output = StepOutput(((),) * len(items))
    return pooled(step(*items), output, lambda tokens: states[tokens.start : tokens.stop])


def test_each_pooling_takes_its_own_states() -> None:
    states = np.random.default_rng(3).normal(size=(9, 5)).astype(np.float32)
    items = [work((1, 2), 0), work((1, 2, 3, 4), 4, "mean"), work((5,) * 3, 8, "last", 7)]
    found = made(items, states).vectors
    assert found.keys() == {1, 2}
    assert found[1] == pytest.approx(states[2:6].astype(float).mean(axis=0), abs=1e-12)
    assert found[2] == tuple(states[8].astype(float).tolist())
    assert made([work((1,) * 4, 0, "cls")], states).vectors[0] == tuple(states[0].tolist())


def test_a_state_that_is_not_finite_fails_its_text_alone() -> None:
    states = np.ones((4, 3), np.float32)
    states[1, 1] = np.inf
    output = made([work((1, 2), 0, "mean"), work((3, 4), 4, "mean")], states)
    assert output.errors == {0: "the vector is not finite"}
    assert output.vectors == {1: (1.0, 1.0, 1.0)}


def test_where_nobody_asks_nothing_is_computed() -> None:
    def forbidden(tokens: range) -> States:
        raise AssertionError

    output = StepOutput(((1,),))
    assert pooled(step(work((1, 2), 0)), output, forbidden) is output


@pytest.mark.parametrize("name", ["plain", "learnt positions", "beside"])
def test_the_reference_pools_its_final_states(name: str) -> None:
    """The head of the vector is the text's logits: checked without a second implementation."""
    model = checkpoint(ARCHS[name])
    runner = ReferenceRunner(model, new_setup(num_blocks=8, block_size=16, max_model_len=96))
    tokens = tuple(range(1, 21))
    vectors = {
        pool: np.array(runner.execute(step(work(tokens, 0, pool))).vectors[0]) for pool in POOLINGS
    }
    logits = runner.prompt_logits(tokens)
    for pool, row in (("last", logits[-1]), ("cls", logits[0]), ("mean", logits.mean(axis=0))):
        found = runner._logits(vectors[pool].astype(np.float32)[None])[0]
        assert np.abs(found - row).max() < 1e-4


def test_shaped_cuts_and_scales() -> None:
    assert shaped((3.0, 4.0, 12.0), 2) == pytest.approx([0.6, 0.8])
    assert shaped((3.0, 4.0), normalises=False) == [3.0, 4.0]
    assert shaped((0.0, 0.0)) == [0.0, 0.0]
    for wrong in (0, 3):
        with pytest.raises(ValueError, match=f"dimensions is {wrong}: this model's vectors have 2"):
            shaped((3.0, 4.0), wrong)


def test_cosine() -> None:
    assert cosine((1.0, 2.0), (2.0, 4.0)) == pytest.approx(1)
    assert cosine((1.0, 0.0), (1.0, 1.0)) == pytest.approx(math.sqrt(0.5))
    assert cosine((0.0, 0.0), (1.0, 1.0)) == 0.0


def test_vectors_scale_with_no_logits() -> None:
    """The factor of the logits is not the states'."""
    arch = ARCHS["beside"]
    tokens = tuple(range(1, 9))
    found = [
        ReferenceRunner(
            checkpoint(replace(arch, logit_scale=scale)),
            new_setup(num_blocks=8, block_size=16, max_model_len=96),
        )
        .execute(step(work(tokens, 0, "last")))
        .vectors[0]
        for scale in (1.0, 0.25)
    ]
    assert found[0] == found[1]


def test_tanh_is_that_of_the_library() -> None:
    x = np.concatenate([np.linspace(-30, 30, 4001), [0.0, 1e-9, -1e-9, 800.0, -800.0]])
    assert np.abs(tanh(x) - np.tanh(x)).max() < 1e-15
