"""One rank, two and four give the same bits, whatever the model looks like."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the cuda backend needs torch: make test-gpu")

import torch

from ridgeline.backends.cuda.layer_spec import missing
from ridgeline.backends.cuda.loading import load_runner
from ridgeline.backends.cuda.ranks.shard import check
from ridgeline.core.params import SamplingParams
from ridgeline.core.request import NO_ADAPTER, Adapter
from ridgeline.model.files.tensors import Checkpoint
from tests.gpu import ordered_twins as ordered
from tests.gpu.engines import IDS, NOWHERE, answers, engine_over
from tests.gpu.ranks.threads import ThreadRanks, tiny_model
from tests.lora import random_adapter
from tests.parity.tiny_configs import CONFIGS, NEWER

PIECES = (0, 37), (37, 38), (38, 60)
# As many key heads as query heads; fewer than ranks; one, and a tied head; a norm over all heads;
# experts; latents; states beside attention, and in layers of their own.
SOME = ["llama2", "qwen2", "gemma", "olmo2", "gpt-oss", "kimi", "falcon-h1", "qwen3-next"]
OTHERS = [name for name in (*CONFIGS, *NEWER) if name not in SOME]


@pytest.fixture(autouse=True)
def _sigmoids_by_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no bit depend on the size of a tensor.

    On a CPU torch computes the last few sigmoids of a tensor in another way than the others.
    """
    sigmoid = torch.sigmoid
    monkeypatch.setattr(torch, "sigmoid", lambda x: sigmoid(x.double()).to(x.dtype))


def params(**wishes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 6, "ignore_eos": True} | wishes)


REQUESTS = [
    (IDS[:41], params(temperature=0)),
    (IDS[:35] + IDS[60:63], params(temperature=0.9, top_p=0.9, seed=4, n=2)),
    (IDS[90:110], params(seed=6, repetition_penalty=1.3, logprobs=2)),
    (IDS[20:26], params(temperature=0.7, seed=9, typical_p=0.9, logit_bias={5: 2.0})),
]


def found_by(runner: Any, setup: Any) -> tuple[np.ndarray[Any, Any], list[list[list[int]]]]:
    """Return logits of a text in pieces, and answers: in room for all, and in little room."""
    logits = [runner.prompt_logits(IDS[begin:end], begin) for begin, end in PIECES]
    if not runner.arch.has_head:
        return np.concatenate(logits), []
    few = 14 * len(setup.groups)
    tight = engine_over(runner, setup, num_blocks=few, tokens=17, caches=False)
    engines = engine_over(runner, setup), tight
    return np.concatenate(logits), [answers(engine, REQUESTS) for engine in engines]


def same(folder: Path, name: str, counts: Sequence[int] = (2, 4), **settings: Any) -> None:
    checkpoint, setup = tiny_model(folder, name, **settings)
    wanted = found_by(load_runner(checkpoint, setup, NOWHERE, ordered), setup)
    for count in counts:
        several = replace(setup, tensor_parallel_size=count)
        logits, tokens = found_by(ThreadRanks(checkpoint, several), several)
        assert (logits == wanted[0]).all(), count
        assert tokens == wanted[1], count


@pytest.mark.parametrize("name", SOME)
def test_ranks_give_the_bits_of_one(name: str, tmp_path: Path) -> None:
    same(tmp_path, name, num_states=4)


@pytest.mark.parametrize(
    "name", ["qwen2", "gpt-oss", pytest.param("gemma3", marks=pytest.mark.full)]
)
def test_ranks_give_the_bits_of_one_with_adapters(name: str, tmp_path: Path) -> None:
    """Each request its own; the second adapter is only of some matrices."""
    checkpoint, setup = tiny_model(tmp_path, name, max_lora_rank=20)
    has_experts = hasattr(checkpoint.arch.layers[0].ffn, "per_token")
    every = ("q", "k", "v", "o", *(() if has_experts else ("gate", "up", "down")))
    made = [random_adapter(checkpoint.arch, 20, 1, every)]
    made += [random_adapter(checkpoint.arch, 3, 2, ("v", "o"))]
    adapters = [Adapter(1, b"1"), NO_ADAPTER, Adapter(2, b"2"), Adapter(1, b"1")]
    found, b_bytes = [], list[int]()
    for count in (1, 2, 4):
        several = replace(setup, tensor_parallel_size=count)
        ranks = ThreadRanks(checkpoint, several)
        kept = [ranks.add_adapter(n, one) for n, one in enumerate(made, 1)]
        found.append(answers(engine_over(ranks, several), REQUESTS, adapters))
        b_bytes.append(sum(sum(b.nbytes for _, b in one.parts.values()) for one, *_ in kept))
    assert found[0] == found[1] == found[2]
    assert b_bytes[0] > b_bytes[1] > b_bytes[2]
    plain = ThreadRanks(checkpoint, setup)
    without = answers(engine_over(plain, setup), REQUESTS)
    are_same = [a == b for a, b in zip(found[0], without, strict=True)]
    assert are_same == [False, True, True, False, False]  # the second has two answers


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen2", "bf16"),
        ("qwen2", "int8"),
        ("qwen2", "int4"),
        pytest.param("mixtral", "int4", marks=pytest.mark.full),
    ],
)
def test_ranks_give_the_bits_of_one_in_each_format(name: str, dtype: str, tmp_path: Path) -> None:
    same(tmp_path, name, dtype=dtype, kv_cache_dtype="bf16")


def refusal(checkpoint: Checkpoint, count: int) -> str:
    """Return why a model cannot be divided so, or nothing."""
    try:
        check(checkpoint.arch, count)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.full
@pytest.mark.parametrize("name", OTHERS)
def test_ranks_of_any_family_give_the_bits_of_one_or_are_refused(name: str, tmp_path: Path) -> None:
    checkpoint, _ = tiny_model(tmp_path, name, checks=False)
    if missing(checkpoint.arch):
        return
    refused = {count: refusal(checkpoint, count) for count in (2, 3, 4)}
    assert all(f"--tensor-parallel-size {n}" in why for n, why in refused.items() if why)
    counts = [count for count, why in refused.items() if not why]
    same(tmp_path / "again", name, counts, num_states=4)


def test_outputs_in_another_order_are_noticed(tmp_path: Path) -> None:
    checkpoint, setup = tiny_model(tmp_path, "qwen2", tensor_parallel_size=2)
    right, wrong = ThreadRanks(checkpoint, setup), ThreadRanks(checkpoint, setup, order=[1, 0])
    assert (right.prompt_logits(IDS[:20]) != wrong.prompt_logits(IDS[:20])).any()
