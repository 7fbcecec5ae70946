"""Adapters: a base with one says what transformers says of the same merged into its weights.

Merging is W + s B A in float64 (Hu et al., 2021), with the names of modules that PEFT would save.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.lora import Pairs, random_pairs, write_peft
from tests.parity import tiny
from tests.parity.compare import check
from tests.parity.gguf_files import write_gguf
from tests.parity.tiny import torch

RANK, ALPHA = 5, 3
NAMES = [
    "llama2", "llama-bias", "mistral-window", "qwen2", "qwen3", "phi3", "gemma2", "gemma3",
    "gemma4-keys", "granite", "olmo2", "smollm3", "cohere", "neox", "stablelm", "phi2", "mixtral",
]  # fmt: skip


def adapt(model: Any, where: str = "") -> Pairs:
    """Make an adapter of all matrices of layers, merge it into the model, and return it.

    It is of those alone whose names have ``where`` in them.
    """
    modules = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in name and where in name
    }
    pairs = random_pairs({name: tuple(m.weight.shape) for name, m in modules.items()}, RANK)
    with torch.no_grad():
        for name, module in modules.items():
            a, b = (torch.from_numpy(matrix).double() for matrix in pairs[name])
            module.weight.copy_(module.weight.double() + ALPHA / RANK * (b @ a))
    return pairs


@pytest.mark.parametrize("name", NAMES)
def test_family(name: str, tmp_path: Path) -> None:
    model = tiny.make_model(name)
    base = tiny.save(model, tmp_path / "base")
    prompts = tiny.prompts(12, 5)
    without = [tiny.answer(model, ids) for ids in prompts]
    adapter = write_peft(tmp_path / "adapter", adapt(model), lora_alpha=ALPHA)
    answers = [tiny.answer(model, ids) for ids in prompts]
    assert [one.output_ids for one in answers] != [one.output_ids for one in without]
    check(base, answers, lora={"adapter": adapter})


OF_EXPERTS = ("gpt-oss", "olmoe", "granite-moe", "qwen2-moe", "lfm2-moe")
ON_GGUF = dict.fromkeys(("llama2", "qwen2", "gemma2", "stablelm", "cohere", "neox"), "")
ON_GGUF |= dict.fromkeys(("lfm2", *OF_EXPERTS), "self_attn.")
ON_GGUF["gemma4"] = "self_attn.q_proj"  # some layers have no other


@pytest.mark.parametrize("name", ON_GGUF)
def test_an_adapter_of_peft_on_a_gguf(name: str, tmp_path: Path) -> None:
    model = tiny.make_model(name)
    if "gemma" in name:  # GGUF has no word for it
        model = tiny.make_model(name, query_pre_attn_scalar=32)
    base = write_gguf(model, tmp_path / "tiny.gguf")
    pairs = adapt(model, ON_GGUF[name])
    adapter = write_peft(tmp_path / "adapter", pairs, lora_alpha=ALPHA)
    answers = [tiny.answer(model, ids) for ids in tiny.prompts(12, 5)]
    check(base, answers, lora={"adapter": adapter})
