"""The GGUF writer: the format's reference reader finds what was written, in any order."""

from __future__ import annotations

import resource
from pathlib import Path

import gguf
import numpy as np
import pytest

from ridgeline.model.files.gguf.file import read_gguf, stored_keys
from ridgeline.model.files.gguf.write import GGUFOut, TensorRoom, number, numbers, string, strings
from tests.model.files.tiny import CONFIG, gguf_metadata, gguf_weights, vocabulary, write_gguf


def test_a_file_is_copied_bit_for_bit(tmp_path: Path) -> None:
    metadata = gguf_metadata(CONFIG, "llama") | vocabulary()
    before = write_gguf(tmp_path / "a.gguf", metadata, gguf_weights(CONFIG, "llama"))
    _, tensors = read_gguf(before)
    rooms = {name: TensorRoom(tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    with (tmp_path / "b.gguf").open("wb") as file:
        out = GGUFOut(file, stored_keys(before), rooms)
        for name in reversed(tensors):  # in any order, and in pieces
            data = tensors[name].data
            out.put(name, data[1:], data.shape[1])
            out.put(name, data[:1])
    assert (tmp_path / "b.gguf").read_bytes() == before.read_bytes()


def test_the_reference_reader_finds_each_kind_of_value(tmp_path: Path) -> None:
    values = {
        "general.architecture": string("llama"),
        "a.u32": number("u32", 7),
        "a.i32": number("i32", -7),
        "a.f32": number("f32", 0.5),
        "a.bool": number("bool", True),
        "a.strings": strings(["", "naïve"]),
        "a.i32s": numbers("i32", np.array([1, -2], np.int32)),
        "a.f32s": numbers("f32", np.array([1.5, -2], np.float32)),
    }
    matrix = np.arange(12, dtype=np.float32).reshape(3, 4)
    with (tmp_path / "a.gguf").open("wb") as file:
        GGUFOut(file, values, {"m": TensorRoom("F32", (3, 4))}).put("m", matrix.view(np.uint8))
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    found = {key: reader.fields[key].contents() for key in values}
    assert found == {
        "general.architecture": "llama", "a.u32": 7, "a.i32": -7, "a.f32": 0.5, "a.bool": True,
        "a.strings": ["", "naïve"], "a.i32s": [1, -2], "a.f32s": [1.5, -2],
    }  # fmt: skip
    assert (reader.tensors[0].data == matrix).all()


def test_a_disk_that_is_too_small_says_so_before_a_weight_is_written(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with (tmp_path / "a.gguf").open("wb", buffering=0) as file:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                GGUFOut(file, {}, {"m": TensorRoom("F32", (1000, 1000))})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
