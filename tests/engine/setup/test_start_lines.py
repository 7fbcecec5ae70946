"""What is said at start: of weights that become something else, of answers that may differ."""

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
from ridgeline.engine.setup.resolve import conversion_line, resolve, start_lines
from ridgeline.model.files.tensors import Checkpoint, Tensor
from tests.engine.test_llm import VOCAB, write_model
from tests.model.files import quantizers
from tests.model.files.quantizers import write_safetensors
from tests.model.files.test_quantized import Make, model
from tests.model.files.tiny import CONFIG
from tests.tiny import ARCHS, PLAIN, changed, checkpoint

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


# --- answers that may be others than the publisher's --------------------------------------------


def lines(name: str, **options: object) -> list[str]:
    model = checkpoint(ARCHS[name])
    return start_lines("m", model, resolve(Options(kv_cache_memory="1MiB", **options), model))


def test_factors_of_long_texts_are_named_with_the_way_out() -> None:
    (line,) = lines("long rope")
    assert line.startswith("LongRoPE: sequences may have 1,024 tokens, so positions of all texts")
    assert "texts of up to 32 tokens, and --max-model-len 32 takes those" in line
    assert lines("long rope", max_model_len=33) == [line.replace("have 1,024", "have 33")]


def test_nothing_is_said_where_short_texts_have_their_own_factors() -> None:
    assert lines("long rope", max_model_len=32) == []
    assert lines("scaled rope") == lines("plain") == []


def test_an_end_of_the_context_before_the_model_s_is_said() -> None:
    model = checkpoint(replace(ARCHS["plain"], chunk=512, max_position=511))
    config = resolve(Options(kv_cache_memory="1MiB"), model)
    (line,) = start_lines("m", model, config)
    assert line.startswith("sequences end at 511 tokens: beyond them layers of this model see")
    assert "chunks of 512 tokens, which is not computed" in line


def test_a_model_without_any_end_says_so() -> None:
    model = replace(checkpoint(ARCHS["plain"]), eos_ids=())
    config = resolve(Options(kv_cache_memory="1MiB"), model)
    (line,) = start_lines("m", model, config)
    assert line.startswith("m names no token that ends an answer: answers run to their limit")
    assert "eos_token in tokenizer_config.json" in line
    makes_vectors = replace(model, arch=replace(model.arch, has_head=False, tied_embeddings=True))
    assert start_lines("m", makes_vectors, config) == []


def test_what_a_file_says_that_is_not_gone_by_is_said() -> None:
    model = replace(checkpoint(ARCHS["plain"]), notes=("one", "two"))
    config = resolve(Options(kv_cache_memory="1MiB"), model)
    assert start_lines("m", model, config) == ["m: one", "m: two"]


def test_four_bits_of_a_wider_file_are_named_with_the_way_out() -> None:
    (line,) = lines("plain", dtype="int4")
    assert line.startswith("--dtype int4: what the file has as F32 becomes 4 bits, which raised")
    assert "those run without --dtype; `ridgeline bench quality m` measures it" in line
    assert lines("plain", dtype="int8") == []
    blocks = with_blocks("Q4_K")
    config = resolve(Options(dtype="int4", kv_cache_memory="1MiB"), blocks)
    assert start_lines("m", blocks, config) == []
