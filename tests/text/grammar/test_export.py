"""A tokenizer written as Hugging Face's files gives the same ids in Hugging Face's library."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tokenizers

from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.hub.short_names import packaged
from ridgeline.text.checkpoint_tokenizer import tokenizer_of
from ridgeline.text.grammar.export import export_tokenizer, tokenizer_config
from ridgeline.text.tokenizers.tokenizer import load_tokenizer
from tests import tiny
from tests.engine.test_llm import model, write_model
from tests.model.files.test_checkpoint import with_text
from tests.model.files.vocabularies import ENCODERS
from tests.real_models import CACHE, real_model

__all__ = ["model"]  # a fixture

TEXTS = (
    "",
    "Hello  wörld 12345\n\n\tx",
    "你好 مرحبا 👩‍👩‍👧",
    "<|im_start|>user\nHi<|im_end|></s>",
    "a" * 99,
)


def real(name: str) -> Path:
    if packaged(name):
        return real_model(name)
    path = CACHE / f"{name}.gguf"
    if not path.exists():
        pytest.skip(f"{name} is not here")
    return path


@pytest.mark.parametrize("name", ["smollm2", "qwen2.5-coder:0.5b", "tinyllama-1.1b-chat-iq2_xxs"])
def test_gguf(name: str, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(real(name))
    ours = load_tokenizer(checkpoint.tokenizer, checkpoint.bos_id, checkpoint.begin_ids)
    assert {path.name for path in export_tokenizer(checkpoint, ours, tmp_path)} == {
        "tokenizer.json", "tokenizer_config.json"
    }  # fmt: skip
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        assert theirs.encode(text).ids == ours.encode(text)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert theirs.token_to_id(config["eos_token"]) == checkpoint.eos_ids[0]
    assert config["chat_template"] == checkpoint.chat_template


def test_templates_by_names(tmp_path: Path) -> None:
    """A directory's own files are copied; of a GGUF file a list is made."""
    metadata = {
        "tokenizer.chat_template.tool_use": "{{ tools }}",
        "tokenizer.ggml.merges": ["t1 t2"],
    }
    checkpoint = with_text(tmp_path, metadata)
    assert checkpoint.tool_template == "{{ tools }}"
    export_tokenizer(checkpoint, tokenizer_of(checkpoint), tmp_path / "a")
    config = json.loads((tmp_path / "a" / "tokenizer_config.json").read_text())
    assert config["chat_template"] == [
        {"name": "default", "template": "{{ messages }}"},
        {"name": "tool_use", "template": "{{ tools }}"},
    ]
    model = write_model(tmp_path / "b")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tool_use.jinja").write_text("x")
    checkpoint = load_checkpoint(model)
    assert (checkpoint.tool_template, checkpoint.can_chat) == ("x", True)
    written = export_tokenizer(checkpoint, tokenizer_of(checkpoint), tmp_path / "c")
    assert tmp_path / "c" / "additional_chat_templates" / "tool_use.jinja" in written
    assert load_checkpoint(model).tool_template == written[0].read_text()


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_from_gguf(kind: str, tmp_path: Path) -> None:
    make, metadata = ENCODERS[kind]
    told = metadata(make())
    around = {"bos_id": 0, "begin_ids": (0,), "end_ids": (3,)}
    checkpoint = replace(tiny.checkpoint(tiny.PLAIN), tokenizer=told, **around)  # type: ignore[arg-type]
    ours = load_tokenizer(told, 0, (0,), (3,))
    export_tokenizer(checkpoint, ours, tmp_path)
    theirs = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    for text in TEXTS:
        assert theirs.encode(text).ids == ours.encode(text)


def test_a_directorys_own_files(model: Path, tmp_path: Path) -> None:
    checkpoint = load_checkpoint(model)
    ours = load_tokenizer(checkpoint.tokenizer)
    export_tokenizer(checkpoint, ours, tmp_path / "new" / "folder")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "new" / "folder" / name).read_bytes() == (model / name).read_bytes()
    assert not (tmp_path / "new" / "folder" / "model.safetensors").exists()
    assert tokenizer_config(checkpoint, ours)["bos_token"] is None


def test_the_command(model: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ridgeline", "export", "tokenizer", str(model), str(tmp_path)],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == [
        str(tmp_path / "tokenizer.json"), str(tmp_path / "tokenizer_config.json")
    ]  # fmt: skip
