"""GGUF files: the same weights under llama.cpp's names, in its order, with its rope metadata."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity import tiny, tiny_configs
from tests.parity.compare import check
from tests.parity.gguf_files import write_gguf

# A Mistral GGUF calls itself llama, and a Qwen2 one has no window.
OTHERS = ("mistral", "mistral-window", "qwen2-window", "phi3-longrope")
CASES = [(name, (12, 5), 64) for name in tiny_configs.CONFIGS if name not in OTHERS]
CASES += [
    (name, (12, 40), 64)
    for name in (
        "gemma",
        "gemma2",
        "gemma3",
        "gemma4",
        "gemma4-moe",
        "granite",
        "granite-moe",
        "granite-moe-shared",
        "lfm2",
        "lfm2-moe",
        "gpt-oss",
        "mixtral",
        "olmo2",
        "phimoe",
        "olmo3",
        "olmoe",
        "smollm3",
        "qwen2-moe",
        "qwen3-moe",
        "stablelm",
        "cohere",
        "cohere2",
        "starcoder2",
        "falcon",
        "falcon-groups",
        "phi2",
        "neox",
        "gpt2",
        "bloom",
        "mpt",
    )
]
CASES += [("phi3-longrope", (8, 5), 32), ("phi3-longrope", (40, 33), 64)]


@pytest.mark.parametrize(("name", "lengths", "context"), CASES)
def test_family(name: str, lengths: tuple[int, ...], context: int, tmp_path: Path) -> None:
    model = tiny.make_model(name)
    if name in ("gemma2", "gemma3"):  # GGUF has no word for it
        model = tiny.make_model(name, query_pre_attn_scalar=32)
    if name == "phi2":  # its converter writes four times the hidden size
        model = tiny.make_model(name, intermediate_size=256)
    if name == "falcon-groups":  # as of Phi-2
        model = tiny.make_model(name, ffn_hidden_size=256)
    if name == "phimoe":  # files do not say how far experts may be from the best
        model = tiny.make_model(name, router_jitter_noise=0.01)
    if name == "starcoder2":  # converters leave its window out: it is that of published ones
        model = tiny.make_model(name, sliding_window=4096)
    if name == "cohere2":  # every fourth layer sees everything
        model = tiny.make_model(name, layer_types=None)
    if name == "olmo3":  # every fourth layer sees everything, and one base serves both ropes
        ropes = {"sliding_attention": tiny_configs.ROPE, "full_attention": tiny_configs.YARN_ROPE}
        model = tiny.make_model(name, layer_types=None, rope_parameters=ropes)
    answers = [tiny.answer(model, ids) for ids in tiny.prompts(*lengths)]
    check(write_gguf(model, tmp_path / "tiny.gguf"), answers, max_model_len=context)
