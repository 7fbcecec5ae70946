"""Experts in 8 and 4 bits: a file's own blocks, whose numbers are the reference's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

pytest.importorskip("torch", reason="the cuda backend needs torch: make test-gpu")

import torch
from gguf.quants import quantize

from ridgeline.backends import cuda, reference
from ridgeline.backends.cuda.measure import twins
from ridgeline.backends.cuda.measure.shapes import SMALL_ARCHS, setup_of
from ridgeline.backends.cuda.model.weights import load
from ridgeline.backends.cuda.packed import Packed, pack
from ridgeline.backends.cuda.ranks.shard import Shard
from ridgeline.backends.cuda.runner import CudaRunner
from ridgeline.backends.cuda.sizes import packed_bits, weights_bytes
from ridgeline.model.files.tensors import Checkpoint, Tensor
from tests.gpu.engines import IDS, NOWHERE

ARCH = SMALL_ARCHS["latents and experts"]  # of which one has a shared network too
KINDS = {8: "Q8_0", 4: "Q4_0"}


def stored(dtype: str, kinds: dict[int, str]) -> Checkpoint:
    """Return a model in which each matrix has the blocks that a format keeps; others fit bf16."""
    random, tensors = np.random.default_rng(5), {}
    for name, shape in ARCH.matrix_shapes().items():
        array = random.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5)
        array = torch.from_numpy(array).bfloat16().float().numpy()
        kind = kinds.get(packed_bits(name, shape, dtype, ""), "F32")
        data = np.atleast_2d(array).view(np.uint8)
        if kind != "F32":
            data = quantize(array, gguf.GGMLQuantizationType[kind])
        tensors[name] = Tensor(name, kind, shape, data)
    return Checkpoint(Path("tiny"), ARCH, tensors, (), None, (), None, {})


def loaded(checkpoint: Checkpoint, dtype: str) -> Any:
    return load(checkpoint, dtype, torch.device("cpu"), lambda done, of: None)


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_a_file_s_blocks_of_experts_are_computed_as_they_are(dtype: str) -> None:
    checkpoint = stored(dtype, KINDS)
    weights = loaded(checkpoint, dtype)
    experts = weights.layers[1].ffn
    assert all(isinstance(one, Packed) for one in (experts.gate_up, experts.down))
    assert isinstance(experts.shared.gate_up, Packed)
    taken = sum(part.nbytes for parts in weights.by_name().values() for part in parts)
    assert taken == sum(weights_bytes(checkpoint, dtype).values())
    setup = setup_of(
        "f32", max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, num_blocks=8
    )
    # Tokens in float32, so that nothing else is rounded.
    mine = CudaRunner(Shard(ARCH), weights, setup, ops=twins)
    plain = reference.new_runner(checkpoint, setup, NOWHERE)
    for low, high in ((0, 40), (40, 41)):
        got, wanted = (one.prompt_logits(IDS[low:high], low) for one in (mine, plain))
        assert np.abs(got - wanted).max() < 5e-6 * np.abs(wanted).max()


def test_other_experts_are_rounded_each_by_its_own_scales() -> None:
    checkpoint = stored("int4", {})
    experts = loaded(checkpoint, "int4").layers[1].ffn
    parts = [checkpoint.tensors[f"layers.1.{name}"].to_f32() for name in ("gate", "up")]
    for number in (0, 5):
        wanted = [torch.from_numpy(part[64 * number : 64 * (number + 1)]) for part in parts]
        rows = experts.gate_up.rows(torch.arange(128 * number, 128 * (number + 1)))
        assert torch.equal(rows.wide(), pack(torch.cat(wanted), 4).wide())


def test_matrices_of_five_bits_in_a_file_are_not_rounded_to_four() -> None:
    """As in a Q4_K_M file, some of whose matrices have 6."""
    fives, fours = (stored("int4", {8: "Q8_0", 4: kind}) for kind in ("Q5_0", "Q4_0"))
    weights = loaded(fives, "int4")
    kept = [one for one in weights.layers[1].arrays()["mlp"] if isinstance(one, Packed)]
    assert {one.bits for one in kept} == {8}
    taken = sum(part.nbytes for parts in weights.by_name().values() for part in parts)
    assert taken == sum(weights_bytes(fives, "int4").values())
    assert taken > 1.2 * sum(weights_bytes(fours, "int4").values())


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_no_format_of_experts_is_refused(dtype: str) -> None:
    setup = setup_of(
        dtype, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, num_blocks=8
    )
    assert cuda.settle(setup, ARCH).dtype == dtype
    room = sum(weights_bytes(stored("int4", {}), "int4").values())
    assert "--dtype int4 takes" in cuda.too_large(stored("int4", {}), "bf16", room)
