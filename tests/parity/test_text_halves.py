"""Models that also see, asked about text alone: the half that runs says what the whole says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from tests.parity import tiny
from tests.parity.compare import check
from tests.parity.modern_configs import MODERN
from tests.parity.tiny_configs import ROPE, SIZES

_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "deepstack_visual_indexes": [0, 1],
    "num_position_embeddings": 16,
}


def test_qwen3_vl(tmp_path: Path) -> None:
    rope = {**ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = SIZES | {"head_dim": 16, "rope_parameters": rope}
    kind = tiny.transformers.Qwen3VLConfig
    config = kind(text_config=text, vision_config=_VISION, attn_implementation="eager")
    model = tiny.randomised(tiny.transformers.Qwen3VLForConditionalGeneration(config), seed=3)
    answers = [tiny.answer(model, ids) for ids in tiny.prompts(40, 7)]
    check(tiny.save(model, tmp_path), answers)


_OF_A_HALF = re.compile(r"^model\.(language_model|visual)\.")
_VISION_OF_QWEN2 = {
    "Qwen2VL": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
    "Qwen2_5_VL": {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 64,
    },
}


@pytest.mark.parametrize("kind", _VISION_OF_QWEN2)
def test_qwen2_vl(kind: str, tmp_path: Path) -> None:
    """Also as it was published: a flat config, the type of rope "mrope", and older names."""
    text = SIZES | {"rope_parameters": {**ROPE, "mrope_section": [4, 2, 2]}}
    config = getattr(tiny.transformers, f"{kind}Config")(
        text_config=text, vision_config=_VISION_OF_QWEN2[kind], attn_implementation="eager"
    )
    whole = getattr(tiny.transformers, f"{kind}ForConditionalGeneration")(config)
    model = tiny.randomised(whole, seed=5)
    answers = [tiny.answer(model, ids) for ids in tiny.prompts(40, 7)]
    path = tiny.save(model, tmp_path)
    check(path, answers)
    values = json.loads((path / "config.json").read_text())
    half = values.pop("text_config")
    rope = half.pop("rope_parameters")
    half |= {
        "model_type": values["model_type"],
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "mrope", "mrope_section": rope["mrope_section"]},
    }
    (path / "config.json").write_text(json.dumps(half | values))
    weights = load_file(path / "model.safetensors")
    assert any("visual." in name for name in weights)
    older = {_OF_A_HALF.sub(_older_prefix, name): array for name, array in weights.items()}
    save_file(older, path / "model.safetensors")
    check(path, answers)


def _older_prefix(match: re.Match[str]) -> str:
    return "visual." if match[1] == "visual" else "model."


@pytest.mark.parametrize("is_tied", [True, False])
def test_ministral_3(is_tied: bool, tmp_path: Path) -> None:
    """What the whole config says of the head counts, whatever its text half says."""
    text = SIZES | MODERN["ministral3"][1] | {"model_type": "ministral3"}
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "image_size": 28,
        "patch_size": 14,
    }
    kind = tiny.transformers.Mistral3Config
    config = kind(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=is_tied,
        attn_implementation="eager",
    )
    model = tiny.randomised(tiny.transformers.Mistral3ForConditionalGeneration(config), seed=4)
    answers = [tiny.answer(model, ids) for ids in tiny.prompts(40, 7)]
    check(tiny.save(model, tmp_path), answers)


def test_llama_4(tmp_path: Path) -> None:
    text = SIZES | MODERN["llama4"][1]
    vision = {
        "hidden_size": 32, "intermediate_size": 128, "num_attention_heads": 2,
        "num_hidden_layers": 1, "image_size": 28, "patch_size": 14, "vision_output_dim": 32,
        "projector_input_dim": 32, "projector_output_dim": 32,
    }  # fmt: skip
    kind = tiny.transformers.Llama4Config
    config = kind(text_config=text, vision_config=vision, attn_implementation="eager")
    model = tiny.randomised(tiny.transformers.Llama4ForConditionalGeneration(config), seed=6)
    answers = [tiny.answer(model.language_model, ids) for ids in tiny.prompts(40, 7)]
    check(tiny.save(model, tmp_path), answers)
