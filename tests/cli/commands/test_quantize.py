"""``ridgeline quantize``: what it says and writes, and bad input before any work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM, SamplingParams
from ridgeline.cli.commands.quantize import quantize
from ridgeline.cli.flags import UsageError
from ridgeline.model.files.gguf.file import read_gguf
from ridgeline.model.files.tensors import ModelFileError
from ridgeline.system.report import gb
from tests.lora import random_pairs, write_gguf_adapter
from tests.model.files.tiny import CONFIG, gguf_metadata, gguf_weights, write_gguf
from tests.model.files.vocabularies import byte_level
from tests.real_models import real_model

RIDGELINE = Path(sys.executable).parent / "ridgeline"
TEXT = "The quick brown fox jumps over the lazy dog; 1, 2, 3 and so on.\n" * 80


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = byte_level()["model"]
    tokens = sorted(spec["vocab"], key=spec["vocab"].get)
    config = CONFIG | {"vocab_size": len(tokens), "hidden_size": 256, "intermediate_size": 512}
    metadata = gguf_metadata(config, "llama") | {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [" ".join(pair) for pair in spec["merges"]],
        "tokenizer.ggml.token_type": [1] * len(tokens),
        "tokenizer.ggml.eos_token_id": 0,
    }
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_gguf(path, metadata, gguf_weights(config, "llama"), "F16")


def test_a_model_is_calibrated_merged_written_and_answers(model: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    pairs = random_pairs({"blk.0.attn_q.weight": (256, 256)})
    adapter = write_gguf_adapter(tmp_path / "adapter.gguf", "llama", pairs, 4.0)
    out, importance = tmp_path / "out.gguf", tmp_path / "importance.gguf"
    done = subprocess.run(
        [RIDGELINE, "quantize", model, out, "--to", "q4_k_m", "--calibrate", tmp_path / "text.txt",
         "--imatrix-out", importance, "--merge-lora", adapter],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"3 MB -> {gb(out.stat().st_size)}" in done.stdout
    for words in ("bits a weight", "Q4_K", "calibrated", "merged", f"next: ridgeline serve {out}"):
        assert words in done.stdout
    assert read_gguf(importance)[0]["general.type"] == "imatrix"
    with LLM(str(out), kv_cache_memory="1MiB", threads=1) as llm:
        answer = llm.generate(["The quick"], SamplingParams(temperature=0, max_tokens=4))[0]
    assert len(answer.outputs[0].token_ids) > 0


def ask(model: Path | str, out: Path, to: str = "q4_0", **wishes: Any) -> None:
    quantize(str(model), out, to, **wishes)


def test_bad_input_is_named_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    there, out = tmp_path / "there.gguf", tmp_path / "new.gguf"
    there.write_bytes(b"mine")
    (tmp_path / "short.txt").write_text("too short")
    (tmp_path / "bytes.txt").write_bytes(b"\xff" * 9000)
    (tmp_path / "damaged.gguf").write_bytes(model.read_bytes()[:5000])
    folder = tmp_path / "folder.gguf"
    folder.mkdir()
    cases: list[tuple[type[Exception], str, Path, Path, dict[str, Any]]] = [
        (UsageError, "there.gguf exists: .*--force", model, there, {}),
        (UsageError, "is the model itself", model, model, {"force": True}),
        (UsageError, "exists: name another directory", model, folder, {"to": "int4-gptq"}),
        (ModelFileError, "a GGUF file; int4-gptq", model, tmp_path / "o", {"to": "int4-gptq"}),
        (UsageError, "--to q9: give one of q4_k_m", model, out, {"to": "q9"}),
        (UsageError, "ends in .gguf", model, tmp_path / "out.bin", {}),
        (UsageError, "there is no folder", model, tmp_path / "no" / "out.gguf", {}),
        (UsageError, "is a folder", model, folder, {"force": True}),
        (UsageError, "give that too", model, out, {"imatrix_out": tmp_path / "i.gguf"}),
        (UsageError, "give one of them", model, out, {"imatrix": there, "calibrate": there}),
        (ValueError, "fewer than the 2,000", model, out, {"calibrate": tmp_path / "short.txt"}),
        (ValueError, "not UTF-8", model, out, {"calibrate": tmp_path / "bytes.txt"}),
        (OSError, "No such file", model, out, {"calibrate": tmp_path / "none.txt"}),
        (ModelFileError, "no such adapter", model, out, {"merge_lora": tmp_path / "none"}),
        (ModelFileError, "not a GGUF", model, out, {"imatrix": there}),
        (ModelFileError, "cut short|past the end", tmp_path / "damaged.gguf", out, {}),
    ]
    for kind, words, source, target, wishes in cases:
        with pytest.raises(kind, match=words):
            ask(source, target, **wishes)
        assert not out.exists()
    assert there.read_bytes() == b"mine"


def test_a_file_is_replaced_if_forced_and_what_is_quantised_already_is_said(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, out = tmp_path / "first.gguf", tmp_path / "out.gguf"
    ask(model, first, "q8_0")
    assert "already" not in capsys.readouterr().err
    out.write_bytes(b"old")
    ask(first, out, "q8_0", force=True)
    assert "Q8_0 already" in capsys.readouterr().err
    assert out.read_bytes() == first.read_bytes()  # of the same types: copied


@pytest.mark.engine
def test_a_real_model_answers_from_its_new_file(tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    ask(real_model("smollm2"), out, "q4_0")
    with LLM(str(out), threads=2, kv_cache_memory="64MiB") as llm:
        params = SamplingParams(temperature=0, max_tokens=6)
        answer = llm.generate(["1, 2, 3, 4, 5, 6, 7,"], params)[0]
    assert " 8, 9" in answer.outputs[0].text
