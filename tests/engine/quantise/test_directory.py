"""Directories of safetensors become GGUF files: the same model, the same tokens, near weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from ridgeline.engine.quantise.job import QuantiseOptions, quantise_file
from ridgeline.engine.quantise.source import additions, read_source
from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.gguf.file import read_gguf
from ridgeline.model.files.tensors import ModelFileError
from ridgeline.text.checkpoint_tokenizer import tokenizer_of
from tests.lora import llama_shapes, merged, random_pairs, write_peft
from tests.model.files.tiny import CONFIG, Raw, hf_weights
from tests.model.files.vocabularies import byte_level, metaspace_first, sentencepiece, wordpiece

WIDE = CONFIG | {
    "hidden_size": 256, "intermediate_size": 512, "vocab_size": 512, "num_hidden_layers": 1,
}  # fmt: skip
PHI = WIDE | {"architectures": ["Phi3ForCausalLM"]}
WINDOWS = [tuple(np.random.default_rng(i).integers(5, 40, 64)) for i in range(8)]
TEXT = "Hello  world! It isn't 2024\n\n\t naïve 東京 👩‍👩‍👧 def f(x): return x**2   \n"
VOCABULARIES = {
    "bytes": byte_level, "pieces": sentencepiece, "pieces, newer": metaspace_first,
}  # fmt: skip


def directory(
    path: Path, weights: Raw, config: dict[str, Any] = WIDE, spec: dict[str, Any] | None = None
) -> Path:
    path.mkdir()
    save_file({k: v.astype(np.float16) for k, v in weights.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text(json.dumps(spec or byte_level()))
    named = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    text = {"chat_template": named, "add_bos_token": True}
    (path / "tokenizer_config.json").write_text(json.dumps(text))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7, 9]}))
    return path


def quantised(source: Path, out: Path, target: str, **options: Any) -> Path:
    wanted = {"windows": (), "importance": {}, "added": {}, "threads": 1} | options
    quantise_file(read_source(source), out, QuantiseOptions(target, **wanted), lambda *_: None)
    return out


def most_lost(found: Path, wanted: Path) -> float:
    """The largest share of a matrix's size that is lost; vectors must be equal."""
    one, other = load_checkpoint(found), load_checkpoint(wanted)
    assert one.arch.matrix_shapes() == other.arch.matrix_shapes()
    shares = []
    for name, tensor in one.tensors.items():
        was = other.tensors[name].to_f32()
        shares.append(float(np.linalg.norm(tensor.to_f32() - was) / np.linalg.norm(was)))
        assert len(tensor.shape) > 1 or shares[-1] == 0, name
    return max(shares)


@pytest.mark.parametrize("calibrated", [False, True])
@pytest.mark.parametrize("config", [WIDE, PHI], ids=["llama", "phi3"])
def test_matrices_are_near_and_all_else_is_the_same(
    config: dict[str, Any], calibrated: bool, tmp_path: Path
) -> None:
    source = directory(tmp_path / "a", hf_weights(config, fused=config is PHI), config)
    windows = WINDOWS if calibrated else ()
    out = quantised(source, tmp_path / "b.gguf", "q4_k_m", windows=windows)
    assert 0.03 < most_lost(out, source) < 0.15
    _, raw = read_gguf(out)
    assert {raw["blk.0.attn_output.weight"].dtype, raw["output.weight"].dtype} == {"Q4_K", "Q6_K"}
    assert len(gguf.GGUFReader(out).tensors) == len(raw)


@pytest.mark.parametrize("kind", VOCABULARIES)
def test_texts_are_read_alike(kind: str, tmp_path: Path) -> None:
    source = directory(tmp_path / "a", hf_weights(WIDE), spec=VOCABULARIES[kind]())
    out = quantised(source, tmp_path / "b.gguf", "q8_0")
    was, now = load_checkpoint(source), load_checkpoint(out)
    for part in ("bos_id", "begin_ids", "chat_template", "tool_template"):
        assert getattr(now, part) == getattr(was, part) is not None, part
    assert now.eos_ids[:3] == was.eos_ids
    old, new = tokenizer_of(was), tokenizer_of(now)
    # GGUF files cannot say that no space begins what stands behind a control token.
    more = () if kind == "pieces, newer" else (f"<|end|>{TEXT}", "</s> x")
    for text in (TEXT, *more):
        assert new.encode(text) == old.encode(text)
    assert [new.decode([i], skip_special=False) for i in now.eos_ids[3:]] == ["<|end|>"]
    ids = list(range(old.vocab_size))
    assert new.decode(ids) == old.decode(ids)
    metadata, _ = read_gguf(out)
    assert len(metadata["tokenizer.ggml.tokens"]) == 512
    assert metadata["tokenizer.ggml.token_type"][511] == 5  # a row that no text has


def test_an_adapter_is_merged_on_the_way(tmp_path: Path) -> None:
    weights = hf_weights(PHI, fused=True)
    source = directory(tmp_path / "a", weights, PHI)
    pairs = random_pairs(llama_shapes(PHI, fused=True))
    adapter = write_peft(tmp_path / "adapter", pairs, lora_alpha=8)
    added = additions(adapter, read_source(source))
    out = quantised(source, tmp_path / "b.gguf", "q8_0", added=added)
    wanted = directory(tmp_path / "c", merged(weights, pairs, 2.0), PHI)
    assert most_lost(out, wanted) < 0.012


def test_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    weights = hf_weights(WIDE)
    with pytest.raises(ModelFileError, match="it must be BPE"):
        read_source(directory(tmp_path / "a", weights, spec=wordpiece()))
    capital = byte_level() | {"normalizer": {"type": "Lowercase"}}
    with pytest.raises(ModelFileError, match="no pre-tokenizer that these files name"):
        read_source(directory(tmp_path / "b", weights, spec=capital))
    many = directory(tmp_path / "c", weights)
    (many / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3, 4, 5]}))
    with pytest.raises(ModelFileError, match="4 tokens end an answer, more than a GGUF file"):
        read_source(many)
