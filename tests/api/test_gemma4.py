"""A tiny Gemma 4 behind the engine: what its cache takes, and that company changes no bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models

from ridgeline import LLM, SamplingParams
from ridgeline.models.families import arch_from_config
from ridgeline.models.families.gemma4 import FAMILIES
from tests.models.test_gemma4 import CONFIG, EXPERTS
from tests.tiny import random_arrays

OPTIONS: dict[str, Any] = {"backend": "reference", "kv_cache_memory": "64KiB", "block_size": 4}
PARAMS = SamplingParams(temperature=0, max_tokens=12, logprobs=5, ignore_eos=True)
TEXTS = [
    [int(token) for token in np.random.default_rng(n).integers(3, 40, n)] for n in (30, 7, 1, 18)
]


def directory(path: Path, config: dict[str, Any]) -> Path:
    """Write a model with random weights, stacks of experts as one tensor, and 40 words."""
    arch = arch_from_config(config, {}, "x")
    family = FAMILIES["Gemma4ForCausalLM" + " of experts" * config.get("enable_moe_block", False)]
    raw: dict[str, list[np.ndarray]] = {}
    for name, array in random_arrays(arch).items():
        if name in family.outer:
            raw[family.outer[name]] = [array]
        else:
            _, index, part = name.split(".")
            raw.setdefault(family.prefix.format(index) + family.layer[part], []).append(array)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({n: np.concatenate(parts) for n, parts in raw.items()}, path / "model.safetensors")
    tokenizer = Tokenizer(models.BPE({f"w{i}": i for i in range(40)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_shared_keys_and_values_halve_what_the_ledger_holds(tmp_path: Path) -> None:
    alone = CONFIG | {"num_kv_shared_layers": 0, "use_double_wide_mlp": False}
    taken = []
    for name, config in (("shared", CONFIG), ("alone", alone)):
        with LLM(directory(tmp_path / name, config), **OPTIONS) as llm:
            lines = {line.name: line.num_bytes for line in llm.memory().lines}
            assert lines["kv_cache"] == llm.config.kv_bytes
            taken.append(llm.config.kv_bytes / llm.config.num_blocks)
    # A block of 4 tokens in f32; 3 of 6 layers have keys and values, of 2 heads of 8, 16, 8.
    assert taken == [4 * 4 * 2 * 2 * (8 + 16 + 8), 4 * 4 * 2 * 2 * 3 * (8 + 16)]


@pytest.mark.parametrize("config", [{**CONFIG}, {**EXPERTS}], ids=["dense", "experts"])
def test_an_answer_is_the_same_in_company_and_in_pieces(
    config: dict[str, Any], tmp_path: Path
) -> None:
    config["tie_word_embeddings"] = False  # else a random model repeats what it reads
    path = directory(tmp_path / "model", config)
    with LLM(path, **OPTIONS, enable_prefix_caching=False) as llm:
        alone = [llm.generate([ids], PARAMS)[0] for ids in TEXTS]
    with LLM(path, **OPTIONS, max_num_batched_tokens=5) as llm:
        together = llm.generate(TEXTS, PARAMS)
        again = llm.generate(TEXTS, PARAMS)  # out of shared blocks
    assert len({token for one in alone for token in one.outputs[0].token_ids}) > 4
    for one, other, third in zip(alone, together, again, strict=True):
        ids = one.outputs[0].token_ids
        assert ids == other.outputs[0].token_ids == third.outputs[0].token_ids


def test_the_cpu_backend_refuses_by_name(tmp_path: Path) -> None:
    path = directory(tmp_path / "model", CONFIG)
    with pytest.raises(ValueError, match="layer 0 has values that are normed: use --backend ref"):
        LLM(path, backend="cpu", kv_cache_memory="64KiB")
