"""Published configs: the tensors that transformers makes of them bind, without any values."""

from __future__ import annotations

import numpy as np
import pytest

from ridgeline.model.cost import costs
from ridgeline.model.files.families import model_from_config
from ridgeline.model.files.tensors import Tensor
from tests.model.files.test_published import CONFIGS
from tests.parity.tiny import torch, transformers

# Files name the tensors of experts and of halves otherwise than transformers holds them; and one
# would take a gigabyte, as it is gpt2 with more layers.
OTHERWISE = (
    "deepseek-r1",
    "deepseek-v2",
    "deepseek-v2-lite",
    "dots.llm1",
    "ernie-4.5-21b-a3b",
    "gemma-3-4b-it",
    "glm-4.5",
    "glm-4.5-air",
    "glm-4.7-flash",
    "gpt2-medium",
    "granite-3.1-1b-a400m",
    "granite-4.0-h-tiny",
    "kimi-k2",
    "lfm2-8b-a1b",
    "minimax-m2",
    "ministral-3-3b",
    "mpt-7b",
    "nemotron-3-nano-30b-a3b",
    "nemotron-h-8b",
    "phi-3.5-moe",
    "olmoe-1b-7b",
    "llama-4-maverick",
    "llama-4-scout",
    "qwen2-vl-2b",
    "qwen2.5-vl-7b",
    "qwen1.5-moe-a2.7b-chat",
    "qwen3-30b-a3b",
    "qwen3-vl-4b",
)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in OTHERWISE])
def test_tensors_of_the_real_model_bind(name: str) -> None:
    values = CONFIGS[name]["config"]
    kind = getattr(transformers, values["architectures"][0])
    with torch.device("meta"):
        model = kind(kind.config_class.from_dict(values))
    tied = {key for key, _ in model.named_parameters(remove_duplicate=False)}
    tied -= {key for key, _ in model.named_parameters()}
    raw = {}
    learnt = [pair for pair in model.named_buffers() if pair[0].endswith("layer_scalar")]
    for key, value in [*model.named_parameters(), *learnt]:
        shape = tuple(value.shape)
        # Norms of some families are raised when they are bound, transposed matrices are turned.
        is_small = value.numel() < 1 << 24
        data = np.zeros((shape[0], 4 * (shape[-1] if len(shape) > 1 else 1) * is_small), np.uint8)
        if name.startswith("pythia"):
            key = key.replace("lm_head", "embed_out")
        raw[key] = Tensor(key, "F32", shape, data)
    arch, bound = model_from_config(values, raw, name)
    assert bool(tied) == arch.tied_embeddings
    assert costs.weight_params(arch) == CONFIGS[name]["num_params"]
    assert bound.keys() == arch.matrix_shapes().keys()
