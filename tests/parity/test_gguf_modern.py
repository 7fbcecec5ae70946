"""GGUF files of families from 2025 on, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from safetensors.numpy import load_file

from tests.models.gguf_converted import converted
from tests.models.test_gguf_modern import NAMES
from tests.parity import tiny
from tests.parity.compare import check
from tests.parity.gguf_files import add_vocabulary

_ADDERS = {int: "add_uint32", float: "add_float32", bool: "add_bool", str: "add_string"}


def write_gguf(model: Any, path: Path) -> Path:
    """Write ``model`` in float32, by way of the directory that transformers makes of it."""
    directory = tiny.save(model, path.with_suffix(""))
    config = json.loads((directory / "config.json").read_text())
    metadata, raw = converted(config, load_file(directory / "model.safetensors"))
    writer = gguf.GGUFWriter(path, metadata.pop("general.architecture"))
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            getattr(writer, _ADDERS[type(value)])(key, value)
    add_vocabulary(writer)
    for name, array in raw.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("name", NAMES)
def test_family(name: str, tmp_path: Path) -> None:
    model = tiny.make_model(name)
    answers = [tiny.answer(model, ids) for ids in tiny.prompts(12, 40)]
    check(write_gguf(model, tmp_path / "tiny.gguf"), answers)
