"""What is said at start of weights that become something else."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import gguf
import numpy as np
import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.engine.setup.options import Options
from ridgeline.engine.setup.resolve import conversion_line, resolve
from ridgeline.model.files.tensors import Checkpoint, Tensor
from tests.engine.test_llm import VOCAB, write_model
from tests.model.files import quantizers
from tests.model.files.quantizers import write_safetensors
from tests.model.files.test_quantized import Make, model
from tests.model.files.tiny import CONFIG
from tests.tiny import PLAIN, changed, checkpoint

BENCH = "; `ridgeline bench quality m` measures what it costs"


def quantised(path: Path, make: Make) -> Path:
    """A whole model with a tokenizer, whose matrices are quantised."""
    write_model(path)
    wanted = json.loads((path / "config.json").read_text())
    config, stored, _ = model(make, config=CONFIG | {"vocab_size": VOCAB})
    (path / "config.json").write_text(json.dumps(config | wanted))
    write_safetensors(path / "model.safetensors", stored)
    return path


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (quantizers.gptq, "GPTQ (4 bits, groups of 32) runs as 4 bits, as in the file: "),
        (
            partial(quantizers.gptq, act_order=True),
            "; 8 bits, quantised again, for its groups are ",
        ),
        (quantizers.awq, "AWQ (4 bits, groups of 32) runs as 4 bits with zeros, as in the file: "),
        (partial(quantizers.fp8, kind="tensor"), "FP8 (e4m3, a scale per matrix or output) runs "),
        (quantizers.int_quantized, "compressed-tensors (int8 per channel) runs as 8 bits, as in "),
    ],
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_start_says_what_became_of_the_weights(
    make: Make, wanted: str, backend: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And the model answers."""
    path = quantised(tmp_path / "m", make)
    with LLM(path, kv_cache_memory="1MiB", threads=1, backend=backend) as llm:
        assert llm.generate("a", SamplingParams(max_tokens=3))[0].outputs[0].token_ids
    lines = [line for line in capfd.readouterr().err.splitlines() if " runs as " in line]
    assert len(lines) == 1
    if backend == "reference":
        wanted = " runs as f32: "
    assert wanted in lines[0]
    measured = backend == "cpu" and "act-order" not in lines[0]
    assert ("to the mean KL of SmolLM2" in lines[0]) is measured
    assert lines[0].endswith(f"`ridgeline bench quality {path}` measures what it costs")


BROAD = changed(PLAIN, hidden_size=256, size=512, num_heads=8, head_dim=32)


def with_blocks(dtype: str) -> Checkpoint:
    """A model whose matrices are superblocks of zeros."""
    plain, tensors = checkpoint(BROAD), {}
    size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[dtype]][1]
    for name, tensor in plain.tensors.items():
        tensors[name] = tensor
        if len(tensor.shape) == 2:
            data = np.zeros((tensor.shape[0], tensor.shape[1] // 256 * size), np.uint8)
            tensors[name] = Tensor(name, dtype, tensor.shape, data)
    return replace(plain, tensors=tensors)


@pytest.mark.parametrize(
    ("dtype", "wish", "wanted"),
    [
        (
            "Q2_K",
            "auto",
            "8 bits, quantised again: 379 kB in the file, 2 MB in memory; --dtype in",
        ),
        ("Q3_K", "int8", "8 bits: 495 kB in the file, 2 MB in memory; --dtype int4 takes less, a"),
        ("IQ2_XS", "auto", "8 bits, quantised again: 335 kB in the file, 2 MB in memory; --dtype "),
        ("Q3_K", "int4", f"4 bits: 495 kB in the file, 966 kB in memory{BENCH}"),
        ("IQ1_S", "f32", f"f32: 228 kB in the file, 6 MB in memory{BENCH}"),
    ],
)
def test_few_bits_of_gguf_say_both_sizes(dtype: str, wish: str, wanted: str) -> None:
    model = with_blocks(dtype)
    config = resolve(Options(dtype=wish, kv_cache_memory="1MiB"), model)
    line = conversion_line("m", model, config)
    assert line.startswith(f"{dtype} runs as {wanted}")
    assert line.endswith(BENCH)


def test_a_file_of_four_bits_starts_where_eight_do_not_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Weights are counted as they will lie in memory, in the blocks of their file."""
    model = with_blocks("Q4_K")
    on_cpu = partial(Options, backend="cpu", max_model_len=64, max_num_batched_tokens=16)
    narrow, wide = (resolve(on_cpu(dtype=dtype), model) for dtype in ("auto", "int8"))
    assert narrow.weights_bytes < 0.7 * wide.weights_bytes
    room = narrow.total_bytes * 20 // 19 + 20
    monkeypatch.setattr("ridgeline.engine.setup.resolve.available_bytes", lambda: room)
    assert resolve(on_cpu(), model).notes == narrow.notes == ()
    (note,) = resolve(on_cpu(dtype="int8"), model).notes
    assert "the others are read from the disk whenever they are needed" in note


@pytest.mark.parametrize("dtype", ["Q4_K", "Q6_K", "IQ4_XS"])
def test_what_runs_as_it_is_needs_no_line(dtype: str) -> None:
    model = with_blocks(dtype)
    config = resolve(Options(kv_cache_memory="1MiB"), model)
    assert conversion_line("m", model, config) == ""
