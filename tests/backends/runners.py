"""Runners of all backends over tiny models, and steps for them: what tests of runners share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from ridgeline.backends import cuda
from ridgeline.backends.cpu.runner import CpuRunner
from ridgeline.backends.reference.runner import ReferenceRunner
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, Step, TokenLogprobs, Work
from ridgeline.model.files.tensors import Checkpoint
from ridgeline.model.shape.model import Rope
from tests.kept_kernels import KERNELS
from tests.tiny import ARCHS, BY_LAYER, LATENT, PLAIN, changed, checkpoint, new_setup

MODELS = ARCHS | BY_LAYER | LATENT
# Heads without padding: what is packed has the file's groups of 32.
WIDE = changed(
    PLAIN, hidden_size=96, size=160, num_heads=3, num_kv_heads=1, head_dim=32,
    rope=Rope(theta=1e4, dim=32),
)  # fmt: skip
NUM_BLOCKS, MAX_LEN, VOCAB = 24, 96, PLAIN.vocab_size
TOKENS = tuple(int(token) for token in np.random.default_rng(5).integers(0, VOCAB, MAX_LEN))
GREEDY = SamplingParams(temperature=0)
# The whole distribution comes back, so that a wrong logit cannot hide.
ALL = SamplingParams(temperature=0, logprobs=VOCAB)
PROMPT_TOO = SamplingParams(temperature=0, logprobs=VOCAB, prompt_logprobs=VOCAB)


class Format(NamedTuple):
    """Weights and cache of a backend.

    ``error`` is how far logits may be from the reference's, relative to their size: the root mean
    square over a text. Tiny models are a hard case; of real ones, see docs/results.md#accuracy.
    """

    backend: str
    dtype: str
    cache: str
    error: float


CPU_FORMATS = {
    "f32": Format("cpu", "f32", "f32", 5e-6),
    "f32, f16 cache": Format("cpu", "f32", "f16", 0.003),
    "int8": Format("cpu", "auto", "int8", 0.12),
    "int8-int4 cache": Format("cpu", "auto", "int8-int4", 0.2),
    "int8-row": Format("cpu", "int8-row", "int8", 0.12),
    "bf16": Format("cpu", "bf16", "f16", 0.02),
    "int4": Format("cpu", "int4", "int8", 0.12),  # of the same weights after rounding to 4 bits
}
OTHERS = {
    "reference": Format("reference", "f32", "f32", 5e-6),
    "cuda": Format("cuda", "f32", "f32", 5e-6),  # computed on the CPU by torch's twins
}
FORMATS = OTHERS | CPU_FORMATS
EXACT = ["reference", "f32", "cuda"]  # one of each backend

Runner = Any  # what a backend makes: it has ``execute`` and ``prompt_logits``
Make = Callable[..., Runner]


def new_runner(model: Checkpoint, kind: str, **options: Any) -> Runner:
    """Return a runner of a key of ``FORMATS``; skip the test where its library is missing."""
    of = FORMATS[kind]
    base = {"dtype": of.dtype, "kv_cache_dtype": of.cache, "threads": 1, "max_num_seqs": 32}
    base |= {"num_blocks": NUM_BLOCKS, "block_size": 16, "max_model_len": MAX_LEN}
    setup = new_setup(**base | {"max_num_batched_tokens": 256} | options)
    if of.backend == "reference":
        return ReferenceRunner(model, setup)
    if of.backend == "cpu":
        return CpuRunner(model, setup, kernel_cache=KERNELS)
    pytest.importorskip("torch", reason="the cuda backend needs torch: make test-gpu")
    from ridgeline.backends.cuda.loading import load_runner
    from ridgeline.backends.cuda.measure import twins
    from tests.gpu.engines import NOWHERE

    return load_runner(model, cuda.settle(setup, model.arch), NOWHERE, twins)


@pytest.fixture(scope="module")
def make() -> Iterator[Make]:
    """Return a function that makes runners; they are closed in the end."""
    made: list[Runner] = []

    def build(model: Checkpoint | str = "plain", kind: str = "int8", **options: Any) -> Runner:
        model = checkpoint(MODELS[model]) if isinstance(model, str) else model
        made.append(new_runner(model, kind, **options))
        return made[-1]

    yield build
    for runner in made:
        if isinstance(runner, CpuRunner):
            runner.close()


def reference(model: Checkpoint) -> ReferenceRunner:
    return ReferenceRunner(model, new_setup(num_blocks=8, block_size=16, max_model_len=MAX_LEN))


def forget(runner: Runner) -> None:
    """Let nothing be in the cache."""
    getattr(runner.cache, "blocks", runner.cache)[:] = 0


def work(
    tokens: tuple[int, ...],
    table: tuple[int, ...],
    *,
    start: int = 0,
    end: int | None = None,
    params: SamplingParams = ALL,
    seeds: tuple[int, ...] = (7,),
    index: int | None = None,
) -> Work:
    """Compute ``tokens[start:end]`` of a sequence; sample where that reaches its last token.

    Its number is ``index``, or else that of its first block.
    """
    end = len(tokens) if end is None else end
    targets = tokens[start + 1 : end + 1] if params.prompt_logprobs is not None else ()
    wanted = seeds if end == len(tokens) else ()
    sampling = Sampling(params, len(tokens), ())
    seq_id = (table[0] if index is None else index, 0)
    return Work(seq_id, start, tokens[start:end], table, wanted, sampling, tokens, targets)


def pool(tokens: tuple[int, ...], block: int, how: str, start: int = 0) -> Work:
    """The work of a text whose vector is wanted, in six blocks from this one on."""
    table = tuple(range(block, block + 6))
    return work(tokens, table, start=start, seeds=(), params=GREEDY)._replace(pool=how)


def step(*items: Work, copies: tuple[tuple[int, int], ...] = ()) -> Step:
    return Step(items, copies, (), (), ())


def error(got: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """The root mean square of differences, relative to that of the logits."""
    return float(np.sqrt(((got - wanted) ** 2).mean() / (wanted**2).mean()))


def log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))


def distribution(entry: TokenLogprobs) -> NDArray[np.float64]:
    """Logprobs by token id."""
    top = dict(entry.top)
    return np.array([top[token] for token in range(len(top))])


def assert_near(entry: TokenLogprobs, wanted: NDArray[np.float64]) -> None:
    np.testing.assert_allclose(distribution(entry), wanted, atol=2e-4)
