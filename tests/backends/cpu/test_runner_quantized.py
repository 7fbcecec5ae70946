"""Quantised safetensors run: on both backends, as the same model without quantisation answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ridgeline.backends.cpu.layout.model_weights import load_weights, model_sizes
from ridgeline.backends.cpu.layout.packed_sizes import packed_bytes
from ridgeline.model.files.quantized.floats import microscaled
from ridgeline.model.files.safetensors_dir import load_directory
from ridgeline.model.files.tensors import Checkpoint, Tensor
from ridgeline.model.shape.model import Experts
from tests.backends.cpu.machine import same_bits
from tests.backends.runners import TOKENS, WIDE, Make, error, make, reference
from tests.model.files.quantizers import mxfp4_values, write_safetensors
from tests.model.files.test_quantized import FORMATS, SIZES, model
from tests.tiny import checkpoint

__all__ = ["make"]  # a fixture

# Kinds of matrices that the types of tensors become where they are kept; of others w8.
KINDS = {"INT4": "s4", "INT4_ZERO": "z4", "INT4_FLOAT_ZERO": "w4", "MXFP4": "t4", "NF4": "t4"}
# Differ from another one in what is done long before they run.
OTHERS = (
    "gptq, one group", "gptq, no g_idx", "gptq v2", "gptq v2, zeros", "awq, groups of 64",
    "w4a16 per output", "w4a16, plain zeros", "w8a8, one scale", "nf4, twice",
)  # fmt: skip
PROMPT = tuple(token % SIZES["vocab_size"] for token in TOKENS[:40])


def load(path: Path, name: str) -> tuple[Checkpoint, Checkpoint]:
    """Return a model of a format, and the same in float32."""
    config, stored, wanted = model(FORMATS[name][0])
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    write_safetensors(path / "model.safetensors", stored)
    quantised = load_directory(path)
    tensors = {}
    for canonical, tensor in quantised.tensors.items():
        values = np.atleast_2d(np.ascontiguousarray(wanted[tensor.name], np.float32))
        tensors[canonical] = Tensor(tensor.name, "F32", tensor.shape, values.view(np.uint8))
    return quantised, replace(quantised, tensors=tensors)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.full] if n in OTHERS else []) for n in FORMATS],
)
def test_a_quantised_model_answers_like_itself_in_floats(
    name: str, make: Make, tmp_path: Path
) -> None:
    """Bit for bit where weights are floats; else as near as activations in 8 bits come."""
    quantised, plain = load(tmp_path / "m", name)
    wanted = reference(plain).prompt_logits(PROMPT)
    assert same_bits(reference(quantised).prompt_logits(PROMPT), wanted)
    for dtype in ("f32", "bf16"):
        logits = [make(one, dtype=dtype).prompt_logits(PROMPT) for one in (quantised, plain)]
        assert same_bits(*logits)
    runner = make(quantised, dtype="auto")
    kind = KINDS.get(FORMATS[name][1], "w8")
    kinds = {k for n, (k, _) in runner.weights.arrays.items() if n.startswith("layers.")}
    assert kinds - {""} == {kind}
    logits = runner.prompt_logits(PROMPT)
    assert error(logits, wanted) < 0.06
    in_parts = make(quantised, dtype="auto", threads=2)
    for low, high in ((0, 23), (23, 24), (24, 27), (27, 40)):
        assert same_bits(in_parts.prompt_logits(PROMPT[low:high], low), logits[low:high])
    narrow = make(quantised, dtype="int4")
    assert error(narrow.prompt_logits(PROMPT), wanted) < (0.06 if "4" in kind else 0.3)


def test_experts_of_mxfp4_answer_like_themselves_in_floats(make: Make) -> None:
    """Stacks as gpt-oss has them; a tile's table goes where the tile goes."""
    arch = replace(WIDE, layers=(replace(WIDE.layers[0], ffn=Experts(5, 2, 160)),) * 2)
    plain, rng = checkpoint(arch), np.random.default_rng(8)
    tensors = dict(plain.tensors)
    for name, tensor in plain.tensors.items():
        if name.rpartition(".")[2] in ("gate", "up", "down"):
            packed, exponents, weights = mxfp4_values(rng, (tensor.shape[0], tensor.shape[1]))
            blocks = Tensor(name, "U8", packed.shape, packed)
            scales = Tensor(name, "U8", exponents.shape, exponents)
            tensors[name] = microscaled(name, tensor.shape, blocks, scales)
            assert (tensors[name].to_f32() == weights).all()
    model = replace(plain, tensors=tensors)
    runner = make(model, dtype="auto")
    assert {runner.weights.arrays[f"layers.1.{name}"].kind for name in ("up", "down")} == {"t4"}
    logits = runner.prompt_logits(TOKENS[:40])
    assert error(logits, reference(model).prompt_logits(TOKENS[:40])) < 0.06
    for low, high in ((0, 35), (35, 36), (36, 40)):
        assert same_bits(runner.prompt_logits(TOKENS[low:high], low), logits[low:high])


@pytest.mark.parametrize("name", ["gptq", "awq", "mxfp4", "fp8 in blocks", "hqq"])
def test_packed_weights_have_the_size_that_was_foretold(name: str, tmp_path: Path) -> None:
    quantised, _ = load(tmp_path / "m", name)
    sizes = model_sizes(quantised.arch, "auto", "int8")
    weights = load_weights(quantised, sizes, "auto", 64, None, lambda done, total: None)
    real = sum(array.data.nbytes for array in weights.arrays.values())
    assert sum(packed_bytes(quantised, "auto", "int8").values()) == real
