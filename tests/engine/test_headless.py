"""A decoder without its head makes the vectors of the whole one, and no answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import save_file

from ridgeline import LLM
from tests.answers.tiny_families import write_family
from tests.model.files.test_gguf_modern import in_directory
from tests.model.files.test_headless import without_head

IDS = [[5, 6, 7], [9] * 40, [11]]


@pytest.mark.parametrize("options", [{"backend": "reference"}, {"dtype": "int8"}])
def test_vectors_are_those_of_the_whole(tmp_path: Path, options: dict[str, str]) -> None:
    config, weights = without_head(*in_directory("mistral-window", tmp_path))
    whole = write_family(tmp_path / "whole", "mistral-window")
    bare = write_family(tmp_path / "bare", "mistral-window")
    (bare / "config.json").write_text(json.dumps(config))
    save_file(weights, bare / "model.safetensors")
    memory = {"kv_cache_memory": "8MiB", "threads": 1, **options}
    with LLM(whole, **memory) as llm:
        wanted = [out.outputs.embedding for out in llm.embed(IDS)]
        assert "weights.head" in llm.engine.runner.memory()
    with LLM(bare, **memory) as llm:
        assert [out.outputs.embedding for out in llm.embed(IDS)] == wanted
        assert "weights.head" not in llm.engine.runner.memory()
        with pytest.raises(ValueError, match="cannot generate text: it makes embeddings"):
            llm.generate("w5")
        with pytest.raises(ValueError, match="cannot generate text: it makes embeddings"):
            llm.chat([{"role": "user", "content": "w5"}])
