"""Adapters (LoRA): each row's own, whatever is beside it; the answers are the reference's."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the cuda backend needs torch: make test-gpu")

from ridgeline import LLM
from ridgeline.core.params import SamplingParams
from ridgeline.core.request import NO_ADAPTER, Adapter
from ridgeline.core.step import Sampling, Step, Work
from ridgeline.model.files.checkpoint import load_checkpoint
from tests.answers.tiny_families import write_family
from tests.gpu import ordered_twins as ordered
from tests.gpu.engines import IDS, answers, engine_over, runners
from tests.lora import random_adapter, random_pairs, write_peft

RANK = 20
# Biases; windows and norms around; experts; attention that reads another layer's keys.
FAMILIES = ["qwen2", "gemma3"]
FAMILIES += [pytest.param(name, marks=pytest.mark.full) for name in ("mixtral", "gemma4")]
ALL = SamplingParams(temperature=0, prompt_logprobs=5)


def params(max_tokens: int, **wishes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **wishes)


REQUESTS = [
    (IDS[:41], params(9, temperature=0)),
    (IDS[:41], params(9, temperature=0)),
    (IDS[:35] + IDS[60:70], params(9, temperature=0.9, seed=4, n=2)),
    (IDS[80:83], params(12, temperature=0.8, top_k=20, seed=5)),
    (IDS[90:120], params(8, temperature=1.0, seed=6, repetition_penalty=1.3, logprobs=2)),
    (IDS[20:26], params(9, temperature=0.7, seed=9)),
]
NUMBERS = (1, 2, 2, 0, 1, 3)  # the adapter of each; 0 is none


def adapt(arch: Any, *backends: Any) -> tuple[list[Adapter], list[Any]]:
    """Give three adapters to runners; return those of the requests, and what keeps them.

    The third is only of some matrices.
    """
    has_experts = hasattr(arch.layers[0].ffn, "per_token")
    every = ("q", "k", "v", "o", *(() if has_experts else ("gate", "up", "down")))
    made = {n: random_adapter(arch, RANK - 3 * n, n, every) for n in (1, 2)}
    made[3] = random_adapter(arch, 2, 3, ("v", "o"))
    kept = [one.add_adapter(n, weights) for one in backends for n, weights in made.items()]
    return [Adapter(n, bytes([n])) if n else NO_ADAPTER for n in NUMBERS], kept


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_the_references_in_steps_of_any_form(name: str, tmp_path: Path) -> None:
    mine, plain, setup = runners(tmp_path, name, max_lora_rank=RANK)
    adapters, kept = adapt(mine.arch, mine, plain)
    wanted = [
        tokens
        for request, adapter in zip(REQUESTS, adapters, strict=True)
        for tokens in answers(engine_over(plain, setup), [request], [adapter])
    ]
    assert wanted[0] != wanted[1]  # of one prompt: with one adapter and with another
    for pads, tokens in ((False, 64), (True, 64), (True, 7)):
        mine.graphs.pads = pads
        engine = engine_over(mine, setup, tokens=tokens)
        assert answers(engine, REQUESTS, adapters) == wanted
    assert bool(mine.num_ahead) == mine.looks_ahead
    num_bytes = sum(one.num_bytes for one in kept[:3])
    assert mine.memory()["adapters"].num_bytes == num_bytes
    kept.clear()
    gc.collect()
    assert "adapters" not in mine.memory()
    with pytest.raises(KeyError):
        answers(engine_over(mine, setup), REQUESTS[:1], adapters[:1])


def test_adapters_of_files_beside_states(tmp_path: Path) -> None:
    path = write_family(tmp_path / "falcon-h1", "falcon-h1")
    shapes = load_checkpoint(path).arch.matrix_shapes()
    lora = {}
    for seed, names in enumerate(("qv", "qkvo")):
        of_files = {
            f"model.layers.{i}.self_attn.{name}_proj": shapes[f"layers.{i}.{name}"]
            for name in names
            for i in range(2)
        }
        lora[names] = write_peft(tmp_path / names, random_pairs(of_files, seed=seed))
    found = {}
    options = {"dtype": "f32", "max_model_len": 64, "threads": 1, "kv_cache_memory": "4MiB"}
    for backend in ("reference", "cuda"):
        with LLM(path, backend=backend, lora=lora, **options) as llm:
            outs = llm.generate(
                [IDS[:9]] * 3, params(12, temperature=0), lora_request=["qv", "qkvo", None]
            )
        found[backend] = [out.outputs[0].token_ids for out in outs]
    assert found["cuda"] == found["reference"]
    assert len({tuple(tokens) for tokens in found["cuda"]}) == 3


def work(index: int, adapter: int, end: int, start: int = 0) -> Work:
    """Return tokens of one text in a sequence with blocks of its own; all are ranked."""
    table, targets = tuple(range(index * 4, index * 4 + 4)), tuple(IDS[start + 1 : end + 1])
    sampling = Sampling(ALL, 64, ())
    given = (start, tuple(IDS[start:end]), table, (), sampling, (), targets)
    return Work((index, 0), *given, adapter=adapter)


def found(runner: Any, *items: Work) -> list[Any]:
    """Return each item's log-probabilities."""
    output = runner.execute(Step(items, (), (), (), ()))
    assert not output.errors
    return [output.prompt_logprobs[i] for i in range(len(items))]


@pytest.mark.parametrize("dtype", ["f32", "bf16", pytest.param("int8", marks=pytest.mark.full)])
def test_a_row_s_bits_are_its_own(dtype: str, tmp_path: Path) -> None:
    """Alone, beside other adapters, in pieces; one without has the bits of a runner without."""
    cache = "f32" if dtype == "f32" else "bf16"
    how = {"dtype": dtype, "kv_cache_dtype": cache, "ops": ordered}
    mine, _, _ = runners(tmp_path / "a", "qwen2", max_lora_rank=RANK, **how)
    without, _, _ = runners(tmp_path / "b", "qwen2", **how)
    _, kept = adapt(mine.arch, mine)
    alone = {n: found(mine, work(0, n, 12))[0] for n in (0, 1, 2, 3)}
    assert alone[0] == found(without, work(0, 0, 12))[0]
    assert len(set(alone.values())) == 4
    together = found(mine, *(work(i, n, 12) for i, n in enumerate((2, 0, 3, 1, 2))))
    assert together == [alone[n] for n in (2, 0, 3, 1, 2)]
    beside, cuts = work(1, 3, 30), ((0, 5), (5, 6), (6, 12))
    pieces = [found(mine, work(0, 1, high, low), beside)[0] for low, high in cuts]
    assert tuple(rank for piece in pieces for rank in piece) == alone[1]
    assert kept


def test_too_large_a_rank_is_refused(tmp_path: Path) -> None:
    mine, _, _ = runners(tmp_path, "qwen2", max_lora_rank=8)
    with pytest.raises(ValueError, match="rank 9: the runner has room for 8"):
        mine.add_adapter(1, random_adapter(mine.arch, 9))
