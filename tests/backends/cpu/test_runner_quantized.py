"""Quantised safetensors run: on both backends, as the same model without quantisation answers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ridgeline.backends.cpu.layout.load import load_weights, model_sizes
from ridgeline.backends.cpu.layout.packed_sizes import packed_bytes
from ridgeline.models.safetensors_dir import load_directory
from ridgeline.models.tensors import Checkpoint, Tensor
from tests.backends.cpu.machine import same_bits
from tests.backends.cpu.test_runner import TOKENS, Make, error, make, reference
from tests.models.quantizers import write_safetensors
from tests.models.test_quantized import FORMATS, SIZES, model

__all__ = ["make"]  # a fixture

# Kinds of matrices that the types of tensors become where they are kept; of others w8.
KINDS = {"INT4": "s4", "INT4_ZERO": "z4", "INT4_FLOAT_ZERO": "w4", "MXFP4": "t4", "NF4": "t4"}
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


@pytest.mark.parametrize("name", FORMATS)
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
    assert error(runner.prompt_logits(PROMPT), wanted) < 0.06
    narrow = make(quantised, dtype="int4")
    assert error(narrow.prompt_logits(PROMPT), wanted) < (0.06 if "4" in kind else 0.3)


@pytest.mark.parametrize("name", ["gptq", "awq", "mxfp4", "fp8 in blocks", "hqq"])
def test_packed_weights_have_the_size_that_was_foretold(name: str, tmp_path: Path) -> None:
    quantised, _ = load(tmp_path / "m", name)
    sizes = model_sizes(quantised.arch, "auto", "int8")
    weights = load_weights(quantised, sizes, "auto", 64, None, lambda done, total: None)
    real = sum(array.data.nbytes for array in weights.arrays.values())
    assert sum(packed_bytes(quantised, "auto", "int8").values()) == real
