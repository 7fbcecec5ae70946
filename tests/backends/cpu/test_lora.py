"""Adapters on the cpu backend: right, and each row's bits its own, however work is split."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from ridgeline.backends.cpu.layout.arguments import ADAPTER
from ridgeline.backends.cpu.layout.lora import pack_adapter
from ridgeline.backends.cpu.layout.model_weights import model_sizes
from ridgeline.backends.cpu.runner import CpuRunner
from ridgeline.backends.reference import ReferenceRunner
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, Step, Work
from ridgeline.model.files.adapters import AdapterWeights, LowRank
from tests.kept_kernels import KERNELS
from tests.lora import merged_arrays, random_adapter
from tests.tiny import ARCHS, PLAIN, checkpoint, new_setup, random_arrays

VOCAB, MAX_LEN, RANK = PLAIN.vocab_size, 96, 9
PARAMS = SamplingParams(temperature=0, logprobs=VOCAB, prompt_logprobs=VOCAB)
TOKENS = tuple(int(token) for token in np.random.default_rng(5).integers(0, VOCAB, MAX_LEN))
FORMATS = {
    "f32": ("f32", "f32"),
    "int8": ("auto", "int8"),
    "int8-row": ("int8-row", "int8"),
    "bf16": ("bf16", "f16"),
    "int4": ("int4", "int8"),
}
Make = Callable[..., CpuRunner]


@pytest.fixture(scope="module")
def make() -> Iterator[Make]:
    made = []

    def build(name: str = "plain", kind: str = "int8", arrays: Any = None, **options: Any) -> Any:
        dtype, kv_cache_dtype = FORMATS[kind]
        shape = {"num_blocks": 40, "block_size": 16, "max_model_len": MAX_LEN}
        rest = {"max_num_batched_tokens": 256, "threads": 1, "max_lora_rank": RANK} | options
        runner = CpuRunner(
            checkpoint(ARCHS[name], arrays),
            new_setup(dtype=dtype, kv_cache_dtype=kv_cache_dtype, **shape, **rest),
            kernel_cache=KERNELS,
        )
        made.append(runner)
        return runner

    yield build
    for runner in made:
        runner.close()


def work(index: int, adapter: int, end: int, start: int = 0) -> Work:
    """Tokens of the text in a sequence with blocks of its own; all are ranked."""
    sampling = Sampling(PARAMS, MAX_LEN, ())
    table = tuple(range(index * 6, index * 6 + -(-end // 16)))
    targets = TOKENS[start + 1 : end + 1]
    return Work(
        (index, 0), start, TOKENS[start:end], table, (), sampling, (), targets, adapter=adapter
    )


def run(runner: Any, *items: Work) -> list[bytes]:
    """Return each item's log-probabilities of the whole vocabulary, as bytes."""
    output = runner.execute(Step(items, (), (), (), ()))
    assert not output.errors
    return [numbers(output.prompt_logprobs[i]).tobytes() for i in range(len(items))]


def numbers(ranks: Any) -> np.ndarray:
    return np.array([[value for _, value in sorted(rank.top)] for rank in ranks])


def adapted(arch: Any) -> tuple[str, ...]:
    experts = hasattr(arch.layers[0].ffn, "per_token")
    inner = () if experts else ("gate", "up") if arch.layers[0].ffn.gated else ("up",)
    return ("q", "k", "v", "o", *inner, *(() if experts else ("down",)))


STRUCTURES = ["plain", "qkv bias", "partial rope", "norms around", "beside", "beside, own"]
STRUCTURES += ["experts", "learnt positions"]


@pytest.mark.parametrize("name", STRUCTURES)
def test_an_adapter_is_as_merged_weights_in_f32(make: Make, name: str) -> None:
    """For few rows, for some and for many, against the reference with merged weights."""
    arch = ARCHS[name]
    adapter = random_adapter(arch, rank=RANK, names=adapted(arch))
    runner = make(name, "f32")
    kept = runner.add_adapter(3, adapter)
    whole = ReferenceRunner(
        checkpoint(arch, merged_arrays(random_arrays(arch), adapter)),
        new_setup(num_blocks=40, block_size=16, max_model_len=MAX_LEN),
    )
    for end in (3, 12, 80):
        (found,) = run(runner, work(0, 3, end))
        (wanted,) = run(whole, work(0, 0, end))
        exact = np.frombuffer(wanted).reshape(end, -1)
        np.testing.assert_allclose(
            np.frombuffer(found).reshape(end, -1), exact, atol=1e-5 * np.abs(exact).max(), rtol=0
        )
    assert runner.memory()["adapters"].num_bytes == kept.num_bytes


@pytest.mark.parametrize(("kind", "most"), [("bf16", 0.02), ("int8", 0.12), ("int8-row", 0.12)])
def test_other_formats_are_as_far_from_merged_weights_as_without(
    make: Make, kind: str, most: float
) -> None:
    adapter = random_adapter(PLAIN, rank=RANK)
    runner = make(kind=kind)
    kept = runner.add_adapter(1, adapter)
    whole = ReferenceRunner(
        checkpoint(PLAIN, merged_arrays(random_arrays(PLAIN), adapter)),
        new_setup(num_blocks=40, block_size=16, max_model_len=MAX_LEN),
    )
    for end in (4, 60):
        found, wanted = (
            np.frombuffer(run(one, work(0, number, end))[0])
            for one, number in ((runner, 1), (whole, 0))
        )
        assert np.sqrt(np.square(found - wanted).mean() / np.square(wanted).mean()) < most
    assert kept.num_bytes > 0  # and it was kept until here


@pytest.mark.parametrize("size", [1e-10, 1e-4, 1.0, 1e6])
def test_halves_are_within_a_thousandth_of_what_they_stand_for(size: float) -> None:
    rng = np.random.default_rng(3)
    sizes = model_sizes(PLAIN, "auto", "int8", RANK)
    a = rng.normal(0, size, (RANK, 24)).astype(np.float32)
    b = rng.normal(0, 0.3, (16, RANK)).astype(np.float32)
    packed = pack_adapter(AdapterWeights(b"", {"layers.1.v": LowRank(a, b)}), PLAIN, sizes)
    assert packed.values.dtype == np.float16
    words = dict(zip(ADAPTER, packed.words[1].tolist(), strict=True))
    scale = np.array([words["v_scale"]], np.int64).view(np.float32)[0]
    assert words["v_rank"] == 12
    # [rank / 4, inputs / 16, 4, 16] and [outputs / 16, rank, 16], as the module's text says
    values = packed.values.astype(np.float64)
    found_a = values[: 12 * 32].reshape(3, 2, 4, 16).swapaxes(1, 2).reshape(12, 32)
    found_b = values[12 * 32 :].reshape(-1, 12, 16).swapaxes(1, 2).reshape(-1, 12)
    wanted = b.astype(np.float64) @ a.astype(np.float64)
    product = (found_b @ (found_a * float(scale)))[:, :24]
    rows = np.flatnonzero(np.abs(product).sum(axis=1))
    assert len(rows) == 16
    np.testing.assert_allclose(product[rows], wanted, atol=2e-3 * np.abs(wanted).max(), rtol=0)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_rows_bits_are_its_own(make: Make, kind: str) -> None:
    """The same alone, in pieces, beside others with other adapters, on three threads; and a row
    without an adapter has the bits of a runner that has no room for any."""
    adapters = {n: random_adapter(PLAIN, rank=3 * n, seed=n) for n in (1, 2, 3)}
    partly = random_adapter(PLAIN, rank=4, seed=4, names=("v", "down"))
    adapters[4] = partly
    without = make(kind=kind, max_lora_rank=0)
    plain = {end: run(without, work(0, 0, end))[0] for end in (1, 5, 14, 70)}
    alone: dict[tuple[int, int], bytes] = {}
    for threads in (1, 3):
        runner = make(kind=kind, threads=threads)
        kept = [runner.add_adapter(n, adapter) for n, adapter in adapters.items()]
        for end in plain:
            assert run(runner, work(0, 0, end))[0] == plain[end]
            for n in adapters:
                found = run(runner, work(0, n, end))[0]
                assert found == alone.setdefault((n, end), found)
                assert found != plain[end]
        for ends in ((1, 1, 1, 1, 1), (5, 1, 5, 1, 1), (70, 5, 14, 1, 70)):
            numbers_of = zip((1, 0, 2, 3, 4), ends, strict=True)
            items = [work(i, n, end) for i, (n, end) in enumerate(numbers_of)]
            for item, found in zip(items, run(runner, *items), strict=True):
                end = len(item.tokens)
                assert found == (alone[item.adapter, end] if item.adapter else plain[end])
        for n in (0, 2):
            whole = alone[n, 70] if n else plain[70]
            cuts = (0, 1, 4, 16, 40, 41, 70)
            parts = [run(runner, work(0, n, b, a))[0] for a, b in pairwise(cuts)]
            assert b"".join(parts) == whole
        assert len(kept) == 4


@pytest.mark.parametrize("kind", ["int8", "int8-row"])
@pytest.mark.parametrize("name", ["experts", "one kv head", "beside, own", "learnt positions"])
def test_threads_and_batches_change_no_bit_of_other_structures(
    make: Make, kind: str, name: str
) -> None:
    adapter = random_adapter(ARCHS[name], rank=5, names=adapted(ARCHS[name]))
    found = set()
    for threads in (1, 2):
        runner = make(name, kind, threads=threads)
        kept = runner.add_adapter(1, adapter)
        found.add(run(runner, work(0, 1, 5))[0])
        found.add(run(runner, work(0, 1, 5), work(1, 0, 9))[0])
        found.add(run(runner, work(1, 0, 60), work(0, 1, 5))[1])
        assert kept.num_bytes
    assert len(found) == 1


def test_what_is_unknown_or_too_large_is_refused(make: Make) -> None:
    runner = make()
    with pytest.raises(ValueError, match="room for 9"):
        runner.add_adapter(1, random_adapter(PLAIN, rank=10))
    with pytest.raises(KeyError):
        run(runner, work(0, 1, 3))
    assert "adapters" not in runner.memory()
