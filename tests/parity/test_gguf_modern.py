"""GGUF files of families from 2025 on, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from tests.model.files.gguf_conversion import converted
from tests.model.files.test_gguf_modern import NAMES
from tests.parity import tiny
from tests.parity.compare import check
from tests.parity.gguf_files import write_file


def write_gguf(model: Any, path: Path) -> Path:
    """Write ``model`` in float32, by way of the directory that transformers makes of it."""
    directory = tiny.save(model, path.with_suffix(""))
    config = json.loads((directory / "config.json").read_text())
    return write_file(path, *converted(config, load_file(directory / "model.safetensors")))


# transformers keeps the experts of gpt-oss otherwise: test_gguf_families.py has its files.
@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpt-oss"])
def test_family(name: str, tmp_path: Path) -> None:
    model = tiny.make_model(name)
    answers = [tiny.answer(model, ids) for ids in tiny.prompts(12, 40)]
    check(write_gguf(model, tmp_path / "tiny.gguf"), answers)
