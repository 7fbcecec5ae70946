"""Files of llama.cpp's own converter, read by llama.cpp and by us, and its quantised types."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("conversion", reason="make test-parity-full has llama.cpp's converter")
from gguf import GGMLQuantizationType

from ridgeline.model.files.tensors import Tensor
from tests.parity import llama_cpp, tiny, verdicts

# Tiny models that the converter takes as they are: of the rest it wants other keys or sizes.
SAY_ALL = (
    "llama3", "llama-linear", "llama-yarn", "qwen2", "qwen3", "phi3", "mixtral", "qwen2-moe",
    "qwen3-moe", "gemma4", "gemma4-moe", "olmo2", "olmo3", "granite", "granite-moe", "smollm3",
    "stablelm", "cohere", "lfm2", "mamba2", "gpt-oss", "glm4", "glm4-moe", "exaone4", "ernie4.5",
    "seed-oss", "arcee", "nemotron",
)  # fmt: skip
# Files of these lack a number that the config has, so that ours is the model that llama.cpp reads:
# the window, the scale of experts.
SAY_LESS = ("starcoder2", "lfm2-moe")
_NEAR = 2e-3  # llama.cpp reads some functions from tables of halves
_RNG = np.random.default_rng(7)


@pytest.mark.parametrize("name", [*SAY_ALL, *SAY_LESS])
def test_a_converted_file_means_the_published_model(name: str, tmp_path: Path) -> None:
    model = tiny.make_model(name, **verdicts.roomy(name))
    path = llama_cpp.convert(tiny.save(model, tmp_path), tmp_path / "tiny.gguf")
    (said,) = verdicts.answers_of(path, tiny.prompts(220), verdicts.ROOM, "reference")
    ours, ids = said.picked(), said.ids[:-1]
    published = said.picked(verdicts.logprobs_of(model, ids))
    theirs = said.picked(llama_cpp.logprobs(path, ids, verdicts.ROOM))
    print(
        f"\n{name}: ours - transformers {_far(ours, published):.0e}, "
        f"ours - llama.cpp {_far(ours, theirs):.0e}, "
        f"llama.cpp - transformers {_far(theirs, published):.0e}"
    )
    if name in SAY_LESS:
        assert _far(ours, published) > _NEAR >= _far(ours, theirs)
    else:
        assert _far(ours, published) <= verdicts.TOLERANCE


def _far(some: np.ndarray, others: np.ndarray) -> float:
    return float(abs(some - others).max())


@pytest.mark.parametrize("kind", llama_cpp.QUANTISED)
def test_quantised_blocks_have_the_bits_of_llama_cpp(kind: str) -> None:
    """Blocks of its own quantiser, and any bytes at all."""
    number, ggml = GGMLQuantizationType[kind], llama_cpp.Ggml()
    rows = _RNG.normal(size=(32, 1024)) * _RNG.choice([1e-3, 0.1, 1.0, 30.0], (32, 1))
    packed = ggml.quantise(number, rows)
    anything = _RNG.integers(0, 256, packed.shape).astype(np.uint8)
    for data in (packed, anything):
        with np.errstate(invalid="ignore"):
            ours = Tensor("x", kind, rows.shape, data).to_f32()
        theirs = ggml.dequantise(number, data)
        numbers = ~np.isnan(theirs)
        np.testing.assert_array_equal(np.isnan(ours), ~numbers)
        np.testing.assert_array_equal(ours.view("u4")[numbers], theirs.view("u4")[numbers])
