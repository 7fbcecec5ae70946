"""What a rank has of a model is what a plan says of it, and what cannot be divided is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the cuda backend needs torch: make test-gpu")

from ridgeline.backends.cuda import device
from ridgeline.backends.cuda.ranks.shard import Shard, check
from ridgeline.backends.cuda.sizes import weights_bytes
from ridgeline.backends.step_codec import StepDecoder, StepEncoder
from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Step
from ridgeline.model.cost.format_bytes import FORMATS, Storage
from ridgeline.model.cost.layers import shape_of_arch
from ridgeline.model.shape.model import ModelArch
from ridgeline.planner.memory.ledger import weights_by_group
from tests.gpu.engines import BLOCK, IDS, answers, engine_over
from tests.gpu.ranks.threads import ThreadRanks, tiny_model
from tests.tiny import PLAIN, changed

F32 = Storage(FORMATS["f32"], FORMATS["f32"])


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", ["llama2", "qwen2", "mixtral", "deepseek-v2"])
def test_a_rank_takes_what_a_plan_says(name: str, count: int, tmp_path: Path) -> None:
    checkpoint, setup = tiny_model(tmp_path, name, tensor_parallel_size=count)
    shape = shape_of_arch(checkpoint.arch, name)
    planned = sum(weights_by_group(F32, list(shape.matrices()), count).values())
    assert sum(weights_bytes(checkpoint, "f32", count).values()) == planned
    for runner in ThreadRanks(checkpoint, setup).runners:
        memory = runner.memory()
        held = {n: part.num_bytes for n, part in memory.items() if n.startswith("weights.")}
        assert sum(held.values()) - held["weights.rope"] == planned
        values = sum(layer.cache.values_per_token(count) for layer in shape.layers)
        assert memory["kv_cache"].num_bytes == setup.num_blocks * BLOCK * 4 * values


def test_all_shares_are_the_whole() -> None:
    for name, (num_rows, *_) in PLAIN.matrix_shapes().items():
        of_ranks = [Shard(PLAIN, rank, 4).rows(name, num_rows) for rank in range(4)]
        rows = np.concatenate([np.arange(num_rows)[part] for part in of_ranks])
        assert sorted(set(rows.tolist())) == list(range(num_rows))
        is_shared = name.endswith(("norm", "k", "v"))
        assert (len(rows) == num_rows) == (not is_shared), name


@pytest.mark.parametrize(
    ("arch", "count", "message"),
    [
        (PLAIN, 3, "--tensor-parallel-size 3 does not divide 4 heads"),
        (changed(PLAIN, num_heads=6, num_kv_heads=3), 2, "3 key and value heads: one must divide"),
        (replace(PLAIN, hidden_size=30), 4, "--tensor-parallel-size 4 does not divide 30 channels"),
        (changed(PLAIN, size=42), 4, "does not divide 42 inner channels"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_refused(arch: ModelArch, count: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(arch, count)
    check(arch, 1)


def test_more_ranks_than_gpus_are_refused() -> None:
    with pytest.raises(ValueError, match="--tensor-parallel-size 2: this machine has 0 GPUs"):
        device.check_count(2)


def test_steps_arrive_as_they_were_and_share_what_they_shared(tmp_path: Path) -> None:
    """Forks, preemption and penalties among them; a step is small beside its tables."""
    checkpoint, setup = tiny_model(tmp_path, "gpt-oss", tensor_parallel_size=1)
    runner, encoder, decoder = ThreadRanks(checkpoint, setup), StepEncoder(), StepDecoder()
    seen: dict[Any, Any] = {}
    num_same = 0

    class Told:
        looks_ahead = runner.looks_ahead

        def execute(self, step: Step) -> Any:
            nonlocal num_same
            found = decoder.read(encoder.write(step))
            assert (found.work, found.copies, found.state_copies) == step[:2] + step[5:6]
            for item, arrived in zip(step.work, found.work, strict=True):
                known = seen.get(item.seq_id)
                if known is not None and known[0] is item.sampling:
                    assert known[1] is arrived.sampling
                    num_same += 1
                seen[item.seq_id] = item.sampling, arrived.sampling
            return runner.execute(found)

    asked = SamplingParams(max_tokens=12, n=3, seed=2, repetition_penalty=1.2, ignore_eos=True)
    requests = [(IDS[:30], asked), (IDS[:25], asked), (IDS[50:60], asked)]
    wanted = answers(engine_over(runner, setup, num_blocks=20, tokens=16), requests)
    assert answers(engine_over(Told(), setup, num_blocks=20, tokens=16), requests) == wanted
    assert num_same > 20
