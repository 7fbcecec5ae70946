"""Small models on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file

from tests.model.files.tiny import (
    CONFIG,
    gguf_metadata,
    gguf_weights,
    hf_weights,
    vocabulary,
    write_gguf,
)


@pytest.fixture
def tiny_gguf(tmp_path: Path) -> Path:
    """A whole llama model as a GGUF file."""
    metadata = gguf_metadata(CONFIG, "llama") | vocabulary()
    return write_gguf(tmp_path / "tiny.gguf", metadata, gguf_weights(CONFIG, "llama"))


@pytest.fixture
def make_directory(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a model directory; keyword arguments replace JSON files."""

    def make(name: str = "model", weights: bool = True, **files: Any) -> Path:
        path = tmp_path / name
        path.mkdir(parents=True)
        contents = {"config": CONFIG, "tokenizer": {"model": {}}} | files
        for stem, content in contents.items():
            if content is not None:
                (path / f"{stem}.json").write_text(json.dumps(content))
        if weights:
            save_file(hf_weights(contents["config"]), path / "model.safetensors")
        return path

    return make
