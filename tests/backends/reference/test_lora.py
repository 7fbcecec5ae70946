"""Adapters on the reference backend: as if they were merged into the weights, row by row."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from ridgeline.backends.reference.runner import ReferenceRunner
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, Step, Work
from ridgeline.model.shape.model import Experts
from tests.lora import merged_arrays, random_adapter
from tests.tiny import ARCHS, PLAIN, checkpoint, new_setup, random_arrays

VOCAB = PLAIN.vocab_size
ALL = SamplingParams(temperature=0, logprobs=VOCAB, prompt_logprobs=VOCAB)
TOKENS = tuple(int(token) for token in np.random.default_rng(5).integers(0, VOCAB, 12))
MATRICES = ("q", "k", "v", "o")


def make(name: str = "plain", arrays: dict[str, np.ndarray] | None = None) -> ReferenceRunner:
    return ReferenceRunner(
        checkpoint(ARCHS[name], arrays), new_setup(num_blocks=8, block_size=16, max_model_len=64)
    )


def work(index: int, adapter: int = 0) -> Work:
    sampling = Sampling(ALL, len(TOKENS), ())
    return Work(
        (index, 0), 0, TOKENS, (index,), (7,), sampling, (), TOKENS[1:], adapter=adapter
    )  # fmt: skip


def logprobs(runner: ReferenceRunner, *items: Work) -> np.ndarray:
    """Log-probabilities of the vocabulary behind each token, ``[items, tokens, vocabulary]``."""
    output = runner.execute(Step(items, (), (), (), ()))
    assert not output.errors
    found = []
    for i in range(len(items)):
        ranks = (*output.prompt_logprobs[i], *output.logprobs[i])
        found.append([[value for _, value in sorted(rank.top)] for rank in ranks])
    return np.array(found)


@pytest.mark.parametrize("name", ARCHS)
def test_an_adapter_is_as_merged_weights(name: str) -> None:
    arch = ARCHS[name]
    has_experts = any(isinstance(layer.ffn, Experts) for layer in arch.layers)
    wanted = MATRICES if has_experts else ()
    if not has_experts and not arch.layers[0].ffn.gated:
        wanted = (*MATRICES, "up", "down")
    adapter = random_adapter(arch, names=wanted)
    runner = make(name)
    kept = runner.add_adapter(3, adapter)
    whole = make(name, merged_arrays(random_arrays(arch), adapter))
    found, merged = logprobs(runner, work(0, 3)), logprobs(whole, work(0))
    np.testing.assert_allclose(found, merged, atol=1e-5 * np.abs(merged).max(), rtol=0)
    assert np.abs(found - logprobs(runner, work(0))).max() > 0.1
    assert kept.num_bytes == sum(p.a.nbytes + p.b.nbytes for p in adapter.parts.values())


def test_each_row_of_a_step_has_its_own() -> None:
    runner = make()
    adapters = {number: random_adapter(PLAIN, rank=number, seed=number) for number in (1, 2, 3)}
    kept = [runner.add_adapter(number, adapter) for number, adapter in adapters.items()]
    together = logprobs(runner, *(work(i, number) for i, number in enumerate((0, 1, 2, 1, 0, 3))))
    for i, number in enumerate((0, 1, 2, 1, 0, 3)):
        alone = logprobs(runner, work(i, number))[0]
        np.testing.assert_allclose(together[i], alone, atol=1e-4, rtol=0)
    assert len({row.tobytes() for row in np.round(together, 2)}) == 4
    assert len(kept) == 3


def test_what_nobody_keeps_is_gone() -> None:
    runner = make()
    assert "adapters" not in runner.memory()
    kept = runner.add_adapter(1, random_adapter(PLAIN))
    assert runner.memory()["adapters"].num_bytes == kept.num_bytes
    del kept
    gc.collect()
    assert "adapters" not in runner.memory()
    with pytest.raises(KeyError):
        runner.execute(Step((work(0, 1),), (), (), (), ()))
