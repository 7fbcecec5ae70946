"""What a quantised model loses: a calibrated one less than a rounded one, on another text.

Mean KL of next tokens' distributions from the source's. Weights are random; with few tokens, and an
embedding of few directions, inputs of matrices vary together as those of real models do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from ridgeline.bench.quality import REFERENCE, measure
from ridgeline.engine.quantise.job import QuantisedFile
from ridgeline.engine.setup.options import Options
from ridgeline.model.files.checkpoint import load_checkpoint
from tests.engine.quantise.test_job import WIDE, WINDOWS, model, quantised
from tests.model.files.tiny import gguf_weights

OTHERS = [tuple(np.random.default_rng(100 + i).integers(5, 40, 64)) for i in range(2)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng, raw = np.random.default_rng(3), gguf_weights(WIDE, "llama")
    size = WIDE["hidden_size"]
    raw = {name: array / size**0.5 if array.ndim > 1 else array for name, array in raw.items()}
    directions = rng.normal(size=(8, size)) * rng.random(size)
    raw["token_embd.weight"] = (rng.normal(size=(40, 8)) @ directions).astype(np.float32)
    raw["output.weight"] *= 2  # so that a choice of tokens matters
    return model(tmp_path_factory.mktemp("source") / "a.gguf", raw)


def written(
    source: Path, out: Path, windows: Sequence[object], importance: Mapping[str, np.ndarray]
) -> tuple[QuantisedFile, float]:
    """Write a q4_k_m; return what was written, and its KL in nats."""
    done = quantised(source, out, "q4_k_m", windows=windows, importance=importance)
    base, found = load_checkpoint(source), load_checkpoint(out)
    parts = {"text": OTHERS}
    return done, measure(found, [REFERENCE], parts, Options(), base)[REFERENCE]["text"].mean_kl


def test_each_step_of_calibration_loses_less(source: Path, tmp_path: Path) -> None:
    _, rounded = written(source, tmp_path / "a.gguf", [], {})
    done, fed_back = written(source, tmp_path / "b.gguf", WINDOWS, {})
    _, weighed = written(source, tmp_path / "c.gguf", [], done.spreads)
    assert 1e-4 < rounded < 0.2
    assert weighed < 0.85 * rounded
    assert fed_back < 0.8 * weighed
