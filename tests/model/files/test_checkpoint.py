"""One door for models: what a path is, and what a GGUF file says about text."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ridgeline.model.files.checkpoint import load_checkpoint
from ridgeline.model.files.safetensors_dir import map_safetensors
from ridgeline.model.files.tensors import Checkpoint, ModelFileError
from tests.model.files.tiny import (
    CONFIG,
    gguf_metadata,
    gguf_weights,
    hf_weights,
    vocabulary,
    write_gguf,
)

POINTER = (
    b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 98362432\n"
)


def with_text(tmp_path: Path, changes: dict[str, Any], kind: str = "gpt2") -> Checkpoint:
    """The tiny GGUF model with ``changes`` to its metadata; None takes a key out."""
    metadata = gguf_metadata(CONFIG, "llama") | vocabulary(kind) | changes
    metadata = {k: v for k, v in metadata.items() if v is not None}
    return load_checkpoint(write_gguf(tmp_path / "m.gguf", metadata, gguf_weights(CONFIG, "llama")))


def test_a_gguf_file(tiny_gguf: Path) -> None:
    checkpoint = load_checkpoint(tiny_gguf)
    assert checkpoint.path == tiny_gguf
    q = checkpoint.tensors["layers.0.q"]
    assert q.dtype == "Q8_0"  # moved, but not decoded
    raw = hf_weights(CONFIG)["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_allclose(q.to_f32(), raw, atol=0.02)
    assert checkpoint.eos_ids == (2, 3)  # </s>, and <|im_end|>, which is a control token
    assert (checkpoint.bos_id, checkpoint.begin_ids) == (1, ())
    assert (checkpoint.chat_template, checkpoint.tool_template) == ("{{ messages }}", None)
    assert isinstance(checkpoint.tokenizer, dict)
    assert set(checkpoint.tokenizer) == {*vocabulary(), "general.architecture"}
    assert checkpoint.tokenizer["tokenizer.ggml.tokens"][2] == "</s>"


def test_a_directory(make_directory: Callable[..., Path]) -> None:
    assert load_checkpoint(make_directory()).arch.num_layers == 2


def test_ends_of_an_answer(tmp_path: Path) -> None:
    ids = {"tokenizer.ggml.eot_token_id": 6, "tokenizer.ggml.eom_token_id": 2}
    assert with_text(tmp_path, ids).eos_ids == (2, 6, 3)
    none = {"tokenizer.ggml.eos_token_id": 2**32 - 1, "tokenizer.ggml.token_type": None}
    assert with_text(tmp_path, none).eos_ids == ()


@pytest.mark.parametrize(
    ("changes", "kind", "bos"),
    [
        ({}, "llama", (1, (1,))),
        ({"tokenizer.ggml.bos_token_id": None}, "llama", (1, (1,))),
        ({"tokenizer.ggml.add_bos_token": False}, "llama", (1, ())),
        ({"tokenizer.ggml.add_bos_token": True}, "gpt2", (1, (1,))),
        ({"tokenizer.ggml.pre": "llama-bpe"}, "gpt2", (1, (1,))),
        ({"tokenizer.ggml.pre": "falcon3"}, "gpt2", (1, (1,))),
        ({"tokenizer.ggml.pre": "tekken"}, "gpt2", (1, (1,))),
        ({"tokenizer.ggml.pre": "qwen2"}, "gpt2", (1, ())),
        ({"tokenizer.ggml.pre": "dbrx"}, "gpt2", (1, ())),
        (
            {"tokenizer.ggml.bos_token_id": None, "tokenizer.ggml.add_bos_token": True},
            "gpt2",
            (None, ()),
        ),
    ],
)
def test_the_beginning_of_a_text(
    changes: dict[str, Any], kind: str, bos: tuple[int | None, tuple[int, ...]], tmp_path: Path
) -> None:
    checkpoint = with_text(tmp_path, changes, kind)
    assert (checkpoint.bos_id, checkpoint.begin_ids) == bos


@pytest.mark.parametrize(
    ("changes", "kind", "around"),
    [
        ({"bos_token_id": None}, "bert", (101, (101,), (102,))),
        ({"bos_token_id": None, "cls_token_id": 5}, "bert", (5, (5,), (102,))),
        ({"cls_token_id": 5, "seperator_token_id": 6}, "bert", (1, (1,), (6,))),
        ({}, "t5", (1, (), (2,))),
        ({"bos_token_id": None, "eos_token_id": None}, "t5", (None, (), (1,))),
        ({"add_bos_token": True, "add_eos_token": False}, "t5", (1, (1,), ())),
        ({"add_eos_token": True}, "llama", (1, (1,), (2,))),
        ({}, "llama", (1, (1,), ())),
        ({"add_eos_token": True}, "gpt2", (1, (), (2,))),
        ({"add_bos_token": False}, "gemma4", (1, (1,), ())),
    ],
)
def test_what_stands_around_a_text(
    changes: dict[str, Any], kind: str, around: tuple[Any, ...], tmp_path: Path
) -> None:
    told = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    checkpoint = with_text(tmp_path, told, kind)
    assert (checkpoint.bos_id, checkpoint.begin_ids, checkpoint.end_ids) == around


def test_gemma_4_ends_an_answer_with_tokens_of_any_type(tmp_path: Path) -> None:
    """Converters call these normal tokens, or defined by the user."""
    names = ["<unk>", "<s>", "<eos>", "<|tool_response>", "<turn|>", *(f"t{i}" for i in range(35))]
    told = {
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": [2, 3, 1, 4, 3, *[1] * 35],
        "tokenizer.ggml.eos_token_id": 4,
    }
    assert with_text(tmp_path, told, "gemma4").eos_ids == (4, 2, 3)
    assert with_text(tmp_path, told, "llama").eos_ids == (4,)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"split.count": 3}, "it is one of 3 parts, but its name says 1"),
        ({"tokenizer.ggml.model": None}, "tokenizer.ggml.model is missing"),
        ({"tokenizer.chat_template": 4}, "tokenizer.chat_template is 4"),
        ({"general.type": "imatrix"}, "of importance, not a model: .*quantize --imatrix"),
        ({"general.type": "mmproj"}, "sees or hears, not a model: give the model that lies beside"),
        ({"general.type": "adapter"}, "of a LoRA adapter, not a model: .*--lora NAME=FILE"),
        ({"general.type": "vocab"}, "of a vocabulary alone, not a model"),
        ({"general.type": "x" * 99}, "of type 'x{40}', not a model"),
        ({"general.type": 3}, "general.type is 3, not a string"),
        ({"llama.attention.head_count": [4, 2]}, "head_count differs from layer to layer"),
    ],
)
def test_metadata_that_is_refused(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=named):
        with_text(tmp_path, changes)


def test_heads_may_be_named_for_each_layer_and_a_type_may_say_model(tmp_path: Path) -> None:
    plain = with_text(tmp_path, {}).arch
    heads = {"llama.attention.head_count": [4, 4], "llama.attention.head_count_kv": [2, 2]}
    assert with_text(tmp_path, heads | {"general.type": "model"}).arch == plain


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("absent.gguf", None, "no such model file or directory"),
        ("empty.gguf", b"", "empty"),
        ("page.gguf", b"<html>", "not a GGUF file; .*fetch it again"),
        ("pytorch_model.bin", b"PK\x03\x04", "never read; use a GGUF or safetensors"),
        ("model.safetensors", b"\x08" + bytes(7) + b"{}      ", "give the directory"),
        ("pointer.gguf", POINTER, "a git-lfs pointer, not the file itself: run `git lfs pull`"),
        ("model.safetensors", POINTER, "a git-lfs pointer"),
    ],
)
def test_what_is_no_model(name: str, content: bytes | None, named: str, tmp_path: Path) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelFileError, match=named) as caught:
        load_checkpoint(path)
    assert str(caught.value).startswith(str(path))


@pytest.mark.skipif(sys.platform != "linux", reason="a file that cannot be read is Linux's own")
def test_an_error_of_the_disk_names_the_file(tmp_path: Path) -> None:
    unreadable = Path("/proc/self/mem")  # its first bytes are no memory: EIO
    (tmp_path / "m.gguf").symlink_to(unreadable)
    with pytest.raises(OSError, match="Input/output error") as caught:
        load_checkpoint(tmp_path / "m.gguf")
    assert caught.value.filename == str(tmp_path / "m.gguf")
    with pytest.raises(OSError, match="Input/output error") as caught:
        map_safetensors(unreadable)
    assert caught.value.filename == str(unreadable)
