"""Hugging Face directories: what they say is found, what they try is refused."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from ridgeline.model.files.safetensors_dir import load_directory
from ridgeline.model.files.summary import summarise
from ridgeline.model.files.tensors import ModelFileError
from ridgeline.model.hub.local_models import ModelStores
from ridgeline.planner.memory.model_spec import read_model_spec
from tests.lines_run import at_most_lines
from tests.model.files.test_checkpoint import POINTER
from tests.model.files.tiny import CONFIG, hf_weights

Maker = Callable[..., Path]
NO_STORES = ModelStores.of(Path("/nowhere"), {}, Path("/nowhere"))


def write_raw(path: Path, header: dict[str, Any] | bytes, data: bytes, claim: int = -1) -> None:
    """A safetensors file by hand; ``claim`` replaces the length of the header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if claim < 0 else claim) + text + data)


def refusal(path: Path) -> str:
    with pytest.raises(ModelFileError) as caught, at_most_lines(500_000):
        load_directory(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_single_file(make_directory: Maker) -> None:
    path = make_directory()
    checkpoint = load_directory(path)
    raw = hf_weights(CONFIG)
    up = checkpoint.tensors["layers.1.up"]
    np.testing.assert_array_equal(up.to_f32(), raw["model.layers.1.mlp.up_proj.weight"])
    assert not up.data.flags.writeable
    assert checkpoint.tokenizer == path / "tokenizer.json"
    assert (checkpoint.eos_ids, checkpoint.bos_id, checkpoint.begin_ids) == ((2,), 1, ())
    assert checkpoint.chat_template is None
    assert checkpoint.generation_defaults == {}
    assert checkpoint.nbytes == sum(a.nbytes for a in raw.values())


def shard(path: Path) -> dict[str, str]:
    """Write the weights as two files with an index; return the index's map."""
    raw = hf_weights(CONFIG)
    names = sorted(raw)
    parts = {"model-1.safetensors": names[:9], "model-2.safetensors": names[9:]}
    for file, members in parts.items():
        save_file({n: raw[n] for n in members}, path / file)
    weight_map = {n: file for file, members in parts.items() for n in members}
    write_index(path, weight_map)
    return weight_map


def write_index(path: Path, weight_map: Any) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_sharded_weights(make_directory: Maker) -> None:
    path = make_directory(weights=False)
    weight_map = shard(path)
    for name, tensor in load_directory(path).tensors.items():
        np.testing.assert_array_equal(tensor.to_f32(), hf_weights(CONFIG)[tensor.name], name)

    write_index(path, weight_map | {"lm_head.weight": "model-2.safetensors"})
    assert "'lm_head.weight' is missing" in refusal(path)
    write_index(path, weight_map | {"lm_head.weight": "model-3.safetensors"})
    assert "model-3.safetensors: the index names it" in refusal(path)
    write_index(path, ["model-1.safetensors"])
    assert "weight_map" in refusal(path)


def test_half_precision(make_directory: Maker) -> None:
    path = make_directory(weights=False)
    header: dict[str, Any] = {}
    data = b""
    exact = {n: np.round(a * 8) / 8 for n, a in hf_weights(CONFIG).items()}  # fits 8 bits of bf16
    for i, (name, array) in enumerate(exact.items()):
        if i % 2:
            dtype, item = "BF16", (array.view(np.uint32) >> 16).astype("<u2").tobytes()
        else:
            dtype, item = "F16", array.astype("<f2").tobytes()
        offsets = [len(data), len(data) + len(item)]
        header[name] = {"dtype": dtype, "shape": array.shape, "data_offsets": offsets}
        data += item
    write_raw(path / "model.safetensors", header | {"__metadata__": {"format": "pt"}}, data)
    tensors = load_directory(path).tensors
    assert {t.dtype for t in tensors.values()} == {"BF16", "F16"}
    for tensor in tensors.values():
        np.testing.assert_array_equal(tensor.to_f32(), exact[tensor.name])


def entry(begin: int = 0, end: int = 8, dtype: str = "F32", shape: Any = (2,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


DAMAGED: dict[str, tuple[dict[str, Any] | bytes, bytes, int]] = {
    "a header of 2**63 bytes": ({}, b"", 2**63),
    "a header past the end": ({}, b"", 64),
    "no JSON": (b"{]", b"", -1),
    "no object": (b"[]", b"", -1),
    "nested JSON": (b"[" * 200_000, b"", -1),
    "an end past the end": ({"t": entry(0, 8)}, b"1234", -1),
    "a huge shape": ({"t": entry(shape=[2**62, 2])}, b"12345678", -1),
    "a negative offset": ({"t": entry(-8, 0)}, b"12345678", -1),
    "overlap": ({"t": entry(), "u": entry(4, 12)}, b"123456781234", -1),
    "a hole": ({"t": entry(), "u": entry(16, 24)}, bytes(24), -1),
    "an unknown type": ({"t": entry(dtype="Q4")}, bytes(8), -1),
    "an unsupported type": ({"t": entry(dtype="F64", shape=[1])}, bytes(8), -1),
    "an empty tensor": ({"t": entry(0, 0, shape=[0])}, b"", -1),
    "an entry that is no object": ({"t": 3}, bytes(8), -1),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_file_is_refused(damage: str, make_directory: Maker) -> None:
    path = make_directory(weights=False)
    write_raw(path / "model.safetensors", *DAMAGED[damage])
    assert "model.safetensors" in refusal(path)


def test_a_file_cut_anywhere_is_refused(make_directory: Maker) -> None:
    path = make_directory()
    content = (path / "model.safetensors").read_bytes()
    for cut in [*range(200), *range(200, len(content), 499), len(content) - 1]:
        (path / "model.safetensors").write_bytes(content[:cut])
        refusal(path)


def test_pickles_are_never_read(make_directory: Maker) -> None:
    path = make_directory(weights=False)
    assert "neither model.safetensors nor" in refusal(path)
    (path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    message = refusal(path)
    assert "pytorch_model.bin is a pickle" in message
    assert "safetensors" in message


def test_what_is_missing_is_named(make_directory: Maker, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "no config.json, so not a Hugging Face model directory: " in refusal(tmp_path / "empty")
    (tmp_path / "empty" / "b.gguf").touch()
    assert "no config.json, but b.gguf: give the path of that file" in refusal(tmp_path / "empty")
    message = refusal(make_directory(tokenizer=None))
    assert "no tokenizer.json beside config.json: fetch it from where the model is from" in message


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja",
     "model-1.safetensors", "model.safetensors.index.json"],
)  # fmt: skip
def test_a_pointer_of_git_lfs_is_called_by_its_name(name: str, make_directory: Maker) -> None:
    """git without git-lfs leaves them in the place of files."""
    path = make_directory(weights=not name.startswith("model"))
    if name.startswith("model-") or name.endswith("index.json"):
        shard(path)
    (path / name).write_bytes(POINTER)
    message = refusal(path)
    assert message.startswith(f"{path / name}: a git-lfs pointer, not the file itself: run `git ")


def test_a_byte_order_mark_is_no_damage(make_directory: Maker) -> None:
    path = make_directory(config=CONFIG | {"model_type": "llama"})
    for name in ("config.json", "tokenizer.json"):
        (path / name).write_bytes(b"\xef\xbb\xbf" + (path / name).read_bytes())
    assert summarise(load_directory(path)).family == "llama"
    assert read_model_spec(path / "config.json", NO_STORES).shape.name == "llama"


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "a/../../secret.safetensors"]
)
def test_an_index_cannot_lead_out(name: str, make_directory: Maker) -> None:
    path = make_directory(weights=False)
    save_file(hf_weights(CONFIG), path.parent / "secret.safetensors")
    write_index(path, dict.fromkeys(hf_weights(CONFIG), name))
    assert "leads out of the directory" in refusal(path)
    write_index(path, dict.fromkeys(hf_weights(CONFIG), "x\0y"))
    assert "not a file name" in refusal(path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a" * 5000, "File name too long$"),
        ("a\nb\u2028c", r"a\\nb\\nc: the index names it, but it is missing$"),
        ("a/" * 1500, r"[a/] \.\.\. .*missing$"),
    ],
)
def test_an_error_is_one_line_of_bounded_length(
    name: str, words: str, make_directory: Maker
) -> None:
    path = make_directory(weights=False)
    write_index(path, {"x": name})
    line = refusal(path)
    assert re.search(words, line)
    assert len(line.splitlines()) == 1
    assert len(line) < 2010


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "chat_template.jinja",
        "model.safetensors",
    ],
)
def test_links_cannot_lead_out(name: str, make_directory: Maker) -> None:
    path = make_directory(tokenizer_config={}, generation_config={})
    (path / "chat_template.jinja").write_text("x")
    load_directory(path)
    (path / name).rename(path / "inside")
    (path / name).symlink_to("inside")
    load_directory(path)  # a link that stays inside is fine
    (path / name).unlink()
    (path / "inside").rename(path.parent / "outside")
    (path / name).symlink_to("../outside")
    message = refusal(path)
    assert "leads out of the directory" in message
    assert name in message


def test_a_linked_folder_cannot_lead_out(make_directory: Maker) -> None:
    path = make_directory(weights=False)
    outside = path.parent / "outside"
    outside.mkdir()
    save_file(hf_weights(CONFIG), outside / "w.safetensors")
    (path / "sub").symlink_to(outside)
    write_index(path, dict.fromkeys(hf_weights(CONFIG), "sub/w.safetensors"))
    assert "leads out of the directory" in refusal(path)


def test_the_cache_of_the_hub(make_directory: Maker, tmp_path: Path) -> None:
    snapshot = make_directory("models--owner--name/snapshots/abc")
    blobs = tmp_path / "models--owner--name" / "blobs"
    other = tmp_path / "models--owner--other" / "blobs"
    for folder in (blobs, other):
        folder.mkdir(parents=True)
    os.rename(snapshot / "model.safetensors", blobs / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    assert load_directory(snapshot).arch.num_layers == 2
    # Also through a link of the user's own to the snapshot.
    (tmp_path / "mine").symlink_to(snapshot)
    assert load_directory(tmp_path / "mine").arch.num_layers == 2

    os.rename(blobs / "0123", other / "0123")
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to("../../../models--owner--other/blobs/0123")
    assert "leads out of the directory" in refusal(snapshot)


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"[" * 100_000, b"\xff", b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_a_damaged_config(content: bytes, make_directory: Maker) -> None:
    path = make_directory()
    (path / "config.json").write_bytes(content)
    assert "config.json: " in refusal(path)


def test_a_config_larger_than_sane(make_directory: Maker) -> None:
    path = make_directory()
    os.truncate(path / "config.json", 1 << 40)
    assert "config.json: 1099511627776 bytes" in refusal(path)


def test_code_beside_a_model_is_data(make_directory: Maker, tmp_path: Path) -> None:
    auto_map = {"AutoModelForCausalLM": "modeling_evil.Evil"}
    path = make_directory(config=CONFIG | {"auto_map": auto_map})
    (path / "modeling_evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    load_directory(path)
    assert not (tmp_path / "ran").exists()


def test_ends_and_defaults_of_generation(make_directory: Maker) -> None:
    generation = {
        "eos_token_id": [5, 6],
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "repetition_penalty": 1.1,
        "min_p": None,
        "max_new_tokens": 99,
        "do_sample": True,
    }
    checkpoint = load_directory(make_directory(generation_config=generation))
    assert checkpoint.eos_ids == (5, 6, 2)
    assert checkpoint.bos_id == 1
    assert checkpoint.generation_defaults == {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 20,
        "repetition_penalty": 1.1,
    }
    path = make_directory("bad", generation_config={"eos_token_id": "</s>"})
    assert "eos_token_id is '</s>'" in refusal(path)
    path = make_directory("worse", generation_config={"temperature": "hot"})
    assert "temperature in generation_config.json is 'hot'" in refusal(path)


def test_the_tokenizer_adds_its_own_end(make_directory: Maker) -> None:
    text = {
        "eos_token": {"content": "<|im_end|>"},
        "added_tokens_decoder": {"7": {"content": "<|im_end|>"}, "99": {"content": "<s>"}},
        "bos_token": "<s>",
    }
    config = CONFIG | {"bos_token_id": None}
    checkpoint = load_directory(make_directory(tokenizer_config=text, config=config))
    assert checkpoint.eos_ids == (7, 2)  # the tokenizer's own first
    assert checkpoint.bos_id is None  # 99 is beyond the vocabulary


def template(*pieces: dict[str, Any]) -> dict[str, Any]:
    special = {
        "<s>": {"id": "<s>", "ids": [3], "tokens": ["<s>"]},
        "<sop>": {"id": "<sop>", "ids": [5], "tokens": ["<sop>"]},
    }
    return {"type": "TemplateProcessing", "single": list(pieces), "special_tokens": special}


BOS, SOP = ({"SpecialToken": {"id": name, "type_id": 0}} for name in ("<s>", "<sop>"))
TEXT = {"Sequence": {"id": "A", "type_id": 0}}


@pytest.mark.parametrize(
    ("post_processor", "bos"),
    [
        (template(BOS, TEXT), (3, (3,))),
        (template(BOS, SOP, TEXT), (3, (3, 5))),  # as GLM-4's [gMASK]<sop>
        (template(BOS, SOP, TEXT, SOP), (3, (3, 5))),
        (template(TEXT, BOS), (1, ())),
        (
            {"type": "Sequence", "processors": [{"type": "ByteLevel"}, template(BOS, TEXT)]},
            (3, (3,)),
        ),
        ({"type": "ByteLevel"}, (1, ())),
        ({"type": "BertProcessing", "cls": ["[CLS]", 3], "sep": ["[SEP]", 4]}, (3, (3,))),
        ({"type": "TemplateProcessing", "single": [BOS]}, (1, ())),
        (None, (1, ())),
    ],
)
def test_the_beginning_of_a_text(
    post_processor: Any, bos: tuple[int, tuple[int, ...]], make_directory: Maker
) -> None:
    tokenizer = {"model": {}, "post_processor": post_processor}
    checkpoint = load_directory(make_directory(tokenizer=tokenizer))
    assert (checkpoint.bos_id, checkpoint.begin_ids) == bos
    path = make_directory(
        "told", tokenizer=tokenizer, tokenizer_config={"add_bos_token": not bos[1]}
    )
    told = load_directory(path)
    assert (told.bos_id, told.begin_ids) == (1, () if bos[1] else (1,))


@pytest.mark.parametrize(("told", "ids"), [(None, None), (True, (2,)), (False, ())])
def test_the_end_of_a_text(
    told: bool | None, ids: tuple[int, ...] | None, make_directory: Maker
) -> None:
    path = make_directory(tokenizer_config={} if told is None else {"add_eos_token": told})
    assert load_directory(path).end_ids == ids


def test_chat_templates(make_directory: Maker) -> None:
    inline = make_directory("a", tokenizer_config={"chat_template": "one"})
    assert load_directory(inline).chat_template == "one"
    (inline / "chat_template.jinja").write_text("file ü", encoding="utf-8")
    assert load_directory(inline).chat_template == "file ü"
    (inline / "chat_template.jinja").write_bytes(b"\xff")
    assert "chat_template.jinja: not UTF-8" in refusal(inline)
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert (
        load_directory(make_directory("b", tokenizer_config={"chat_template": named})).chat_template
        == "d"
    )
    bad = make_directory("c", tokenizer_config={"chat_template": 5})
    assert "chat_template" in refusal(bad)
