"""A tiny model with latent attention behind the engine: the same answer, and what a cache takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models

from ridgeline import LLM, SamplingParams
from ridgeline.model.cost.costs import kv_bytes_per_token
from ridgeline.model.files.families import HF_FAMILIES, arch_from_config
from tests.model.files.test_deepseek import CONFIG, shapes_in_file

PARAMS = SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True)
TEXTS = [
    [int(token) for token in np.random.default_rng(n).integers(3, 40, n)] for n in (37, 7, 1, 20)
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with random weights and 40 words."""
    folder, rng = tmp_path_factory.mktemp("latent"), np.random.default_rng(0)
    arch = arch_from_config(CONFIG, {}, "x")
    weights = {}
    for name, shape in shapes_in_file(arch, HF_FAMILIES["DeepseekV3ForCausalLM"]).items():
        values = rng.normal(size=shape)
        is_norm = "norm" in name
        values = 1 + values / 4 if is_norm else values * 2 / np.sqrt(shape[-1])
        weights[name] = values.astype(np.float32)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = Tokenizer(models.BPE({f"w{i}": i for i in range(40)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


OPTIONS: dict[str, dict[str, Any]] = {
    "reference": {"backend": "reference"},
    "cpu": {"backend": "cpu", "kv_cache_dtype": "int8"},
}


@pytest.mark.parametrize("backend", OPTIONS)
def test_an_answer_is_the_same_in_company_in_pieces_and_from_the_cache(
    path: Path, backend: str
) -> None:
    options = {**OPTIONS[backend], "kv_cache_memory": "1MiB", "block_size": 16}
    with LLM(path, **options, threads=1, enable_prefix_caching=False) as llm:
        alone = [llm.generate([ids], PARAMS)[0] for ids in TEXTS]
    with LLM(path, **options, threads=2, max_num_batched_tokens=17) as llm:
        lines = {line.name: line.num_bytes for line in llm.memory().lines}
        assert lines["kv_cache"] == llm.config.kv_bytes
        if backend == "reference":  # one vector per layer and token; the cpu backend pads it
            of_a_token = kv_bytes_per_token(arch_from_config(CONFIG, {}, "x"), 4)
            assert of_a_token == 4 * 3 * (16 + 6)
            assert lines["kv_cache"] == llm.config.num_blocks * 16 * of_a_token
        together = llm.generate(TEXTS, PARAMS)
        again = llm.generate(TEXTS, PARAMS)
    assert again[0].num_cached_tokens == 32
    assert len({token for one in alone for token in one.outputs[0].token_ids}) > 4
    for one, *others in zip(alone, together, again, strict=True):
        for other in others:
            assert other.outputs[0].token_ids == one.outputs[0].token_ids
            if backend == "cpu":
                assert other.outputs[0].logprobs == one.outputs[0].logprobs
