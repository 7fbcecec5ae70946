"""Adapters in plans: what they take stands in the ledger as the engine will take it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ridgeline.backends import BACKENDS
from ridgeline.backends.interface import Setup
from ridgeline.planner import plan
from ridgeline.planner.plan import Plan
from ridgeline.system.machine import usable_cpus
from tests.lora import llama_shapes, random_pairs, write_peft
from tests.model.cost.published_configs import PUBLISHED
from tests.model.files.tiny import CONFIG, gguf_metadata, gguf_weights, vocabulary, write_gguf

LLAMA = PUBLISHED["llama-3.1-8b"]["config"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    metadata = gguf_metadata(CONFIG, "llama") | vocabulary()
    return write_gguf(tmp_path / "tiny.gguf", metadata, gguf_weights(CONFIG, "llama"))


@pytest.fixture
def adapter(tmp_path: Path) -> str:
    return f"sql={write_peft(tmp_path / 'sql', random_pairs(llama_shapes(CONFIG), rank=6))}"


def line(found: Plan, name: str) -> tuple[int, str]:
    return next((n, how) for given, n, how in found.best.ledger.lines if given.startswith(name))


def test_adapters_take_what_the_engine_leaves_for_them(base: Path, adapter: str) -> None:
    without, found = plan(base), plan(base, lora=[adapter])
    num_values = sum(6 * sum(shape) for shape in llama_shapes(CONFIG).values())
    assert line(found, "adapters") == (num_values * 4 * 9 // 8, "from the file")
    checkpoint = found.spec.checkpoint
    assert checkpoint is not None
    bare = Setup("auto", "int8", 16, usable_cpus(), 128, 256, 2048)
    steps = [
        BACKENDS["cpu"].footprint(checkpoint.arch, setup).step_bytes
        for setup in (replace(bare, max_lora_rank=6), bare)
    ]
    grown = line(found, "activations")[0] - line(without, "activations")[0]
    assert grown == steps[0] - steps[1] > 0
    weights = [one.best.ledger.weights_bytes for one in (found, without)]
    assert weights[0] - weights[1] == line(found, "adapters")[0]
    assert not any(name == "adapters" for name, *_ in without.best.ledger.lines)


def test_room_for_later_ones_is_assumed_and_a_size_is_taken_at_its_word(base: Path) -> None:
    assert line(plan(base, enable_lora=True), "adapters") == (256 << 20, "assumed")
    found = plan(base, enable_lora=True, lora_memory="1GiB", max_lora_rank=8)
    assert line(found, "adapters") == (1 << 30, "assumed")
    assert line(found, "activations")[0] < line(plan(base, enable_lora=True), "activations")[0]


def test_of_a_model_that_is_not_here_the_room_is_what_is_said() -> None:
    wishes: dict[str, Any] = {"on": "l4", "enable_lora": True, "lora_memory": "2GiB"}
    without, found = plan(LLAMA, on="l4"), plan(LLAMA, **wishes)
    assert line(found, "adapters") == (2 << 30, "assumed")
    assert found.best.ledger.weights_bytes == without.best.ledger.weights_bytes + (2 << 30)
    assert found.best.max_concurrency < without.best.max_concurrency
    # Stages have their layers' share; ranks keep all of it.
    divided = plan(LLAMA, tensor_parallel_size="2", pipeline_parallel_size="2", **wishes)
    assert line(divided, "adapters")[0] == 1 << 30
    assert "each rank keeps adapters whole" in divided.assumptions


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"lora": ["sql"]}, "--lora is 'sql=': write NAME=PATH"),
        ({"lora": ["a=/nowhere/at/all"]}, "no such adapter"),
        ({"lora_memory": "1GiB"}, "name some with --lora, or give --enable-lora"),
        ({"max_lora_rank": 0}, "--max-lora-rank is 0"),
        ({"enable_lora": True, "lora_memory": "much"}, "'much' is not a size"),
    ],
)
def test_wishes_that_make_no_sense_are_refused(
    base: Path, wishes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        plan(base, **wishes)


def test_an_adapter_that_would_not_load_is_refused(base: Path, adapter: str) -> None:
    with pytest.raises(ValueError, match="its rank is 6: give --max-lora-rank 6"):
        plan(base, lora=[adapter], max_lora_rank=4)
    with pytest.raises(ValueError, match="for this one give --enable-lora and --lora-memory"):
        plan(LLAMA, on="l4", lora=[adapter])
