"""Draws of a lone stream from a head of which little is read: the tokens of the whole head."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ridgeline.backends.cpu.kernels.argmax import DRAWN, BoundPruning
from ridgeline.backends.cpu.runner import CpuRunner
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, Step, Work
from tests.backends.runners import WIDE
from tests.kept_kernels import KERNELS
from tests.tiny import checkpoint, new_setup, random_arrays

VOCAB = 3000
ARCH = replace(WIDE, vocab_size=VOCAB)
LENGTH = 12
PROMPTS = np.random.default_rng(5).integers(0, VOCAB, (40, LENGTH)).tolist()
PRUNED: list[dict[str, Any]] = [
    {"temperature": 0, "repetition_penalty": 1.3},
    {"temperature": 0, "frequency_penalty": 2.0, "presence_penalty": 1.0},
    {"temperature": 0, "min_tokens": 16, "max_tokens": 200},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.1},
    {"top_k": 20, "typical_p": 0.7},
    {"top_k": 12, "xtc_probability": 1.0, "xtc_threshold": 0.01},
    {"temperature": 0.3, "min_p": 0.3},
    {"temperature": 2, "min_p": 0.05, "frequency_penalty": 0.5},
    {"min_p": 0.2, "xtc_probability": 1.0, "xtc_threshold": 0.01},
]
WHOLE: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 5, "top_n_sigma": 1.0},
    {"min_p": 0.1, "typical_p": 0.5},
    {"min_p": 0.1, "top_p": 0.5},
    {"temperature": 0, "repetition_penalty": 0.9},
    {"temperature": 0, "presence_penalty": -1.0},
    {"temperature": 0, "logit_bias": {5: -1.0, 2900: 0.5}},
    {"top_k": 5, "logprobs": 0},
]


@pytest.fixture(scope="module", params=["random", "near ties"])
def runner(request: pytest.FixtureRequest) -> Iterator[CpuRunner]:
    """Return a runner on two threads; of near ties its proxy can tell none from the others."""
    arrays = random_arrays(ARCH)
    if request.param == "near ties":
        rng = np.random.default_rng(3)
        like = arrays["head"][rng.integers(0, 40, VOCAB)]
        arrays["head"] = like * np.where(rng.random(like.shape) < 0.02, 1.01, 1).astype(np.float32)
    setup = new_setup(
        dtype="auto",
        kv_cache_dtype="int8",
        num_blocks=4,
        block_size=16,
        max_model_len=32,
        max_num_batched_tokens=64,
        threads=2,
    )
    made = CpuRunner(checkpoint(ARCH, arrays), setup, kernel_cache=KERNELS)
    yield made
    made.close()


def drawn(
    runner: CpuRunner,
    number: int,
    options: dict[str, Any],
    *,
    beside: bool,
    masks: tuple[bytes, ...] = (),
) -> list[int]:
    """Draw behind a prompt: of a lone stream, or the same beside another."""
    runner._pruning[DRAWN] = BoundPruning()  # which rests where many tiles stay
    prompt = tuple(PROMPTS[number])
    sampling = Sampling(SamplingParams(**options), LENGTH - 4, (7, 8, 9))
    items = [
        Work((i, 0), 0, prompt, (i,), (number + 1,), sampling, prompt, (), masks=masks)
        for i in range(1 + beside)
    ]
    output = runner.execute(Step(tuple(items), (), (), (), ()))
    assert not output.errors
    return list(output.tokens[0])


@pytest.mark.parametrize("options", PRUNED, ids=str)
def test_a_lone_streams_draw_is_that_of_the_whole_head(
    runner: CpuRunner, options: dict[str, Any]
) -> None:
    for number in range(len(PROMPTS)):
        alone = drawn(runner, number, options, beside=False)
        assert runner._buffers.get("prunes") == DRAWN
        assert alone == drawn(runner, number, options, beside=True)
        assert not runner._buffers.get("prunes")


@pytest.mark.parametrize("options", WHOLE, ids=str)
def test_what_may_depend_on_any_logit_has_them_all(
    runner: CpuRunner, options: dict[str, Any]
) -> None:
    drawn(runner, 0, options, beside=False)
    assert not runner._buffers.get("prunes")


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0, "repetition_penalty": 1.2}, {"top_k": 4}, {"min_p": 0.5}],
    ids=str,
)
def test_where_the_likeliest_are_ruled_out_more_is_read(
    runner: CpuRunner, options: dict[str, Any]
) -> None:
    """Of the first tiles nothing is left; the last mask leaves less than is asked for."""
    for number, count in enumerate((1, 30, 300, 2990, 2998)):
        order = np.argsort(-runner.prompt_logits(PROMPTS[number])[-1], kind="stable")
        allowed = np.ones(VOCAB, bool)
        allowed[order[:count]] = False
        masks = (np.packbits(allowed, bitorder="little").tobytes(),)
        alone = drawn(runner, number, options, beside=False, masks=masks)
        assert runner._buffers.get("prunes") == DRAWN
        assert alone == drawn(runner, number, options, beside=True, masks=masks)
        assert alone[0] in order[count:]


@pytest.mark.parametrize("runner", ["random"], indirect=True)
def test_a_draw_does_not_read_what_cannot_matter(runner: CpuRunner) -> None:
    """Without a number in the least likely tiles, the token stays."""
    assert runner.weights.head is not None
    options = {"top_k": 2}
    logits = runner.prompt_logits(PROMPTS[0])[-1]
    wanted = drawn(runner, 0, options, beside=False)
    scales = runner.weights.head.data[:, :, 1024:].view(np.float16)
    tops = np.array([logits[32 * i : 32 * i + 32].max() for i in range(len(scales))])
    unlikely, kept = tops < 0.5 * logits.max(), scales.copy()
    assert unlikely.sum() > 5
    scales[unlikely] = np.nan
    assert drawn(runner, 0, options, beside=False) == wanted
    scales[:] = kept
