"""Every family's tiny model: its logits are the reference's, or what is missing is named."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the cuda backend needs torch: make test-gpu")

from ridgeline.arch.model import Experts
from ridgeline.backends.cuda.layer_spec import missing
from ridgeline.models.checkpoint import load_checkpoint
from tests.engine.tiny_families import write_family
from tests.gpu.engines import IDS, runners
from tests.parity.tiny_configs import CONFIGS, NEWER

PIECES = (0, 37), (37, 38), (38, 60)
NAMES = [*CONFIGS, *NEWER]


@pytest.fixture(scope="module")
def computed() -> dict[str, bool]:
    """Whether each family that was computed has experts."""
    return {}


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_the_references(name: str, tmp_path: Path, computed: dict[str, bool]) -> None:
    arch = load_checkpoint(write_family(tmp_path / "model", name)).arch
    if what := missing(arch):
        with pytest.raises(
            ValueError, match=r"--backend cuda has no .* yet: take --backend cpu"
        ) as e:
            runners(tmp_path, name)
        assert what in str(e.value)
        return
    mine, plain, _ = runners(tmp_path, name)
    for low, high in PIECES:
        got, wanted = (one.prompt_logits(IDS[low:high], low) for one in (mine, plain))
        assert np.abs(got - wanted).max() < 5e-6 * np.abs(wanted).max()
    mine.graphs.pads = True  # as on a GPU
    for low, high in PIECES:
        got, wanted = (one.prompt_logits(IDS[low:high], low) for one in (mine, plain))
        assert np.abs(got - wanted).max() < 5e-6 * np.abs(wanted).max()
    computed[name] = any(isinstance(layer.ffn, Experts) for layer in arch.layers)


def test_most_families_are_computed(computed: dict[str, bool]) -> None:
    assert len(computed) >= 70
    assert sum(computed.values()) >= 15


@pytest.mark.parametrize(("dtype", "least"), [("bf16", 0.999), ("int8", 0.995), ("int4", 0.85)])
@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_narrow_formats_are_near(name: str, dtype: str, least: float, tmp_path: Path) -> None:
    mine, plain, _ = runners(tmp_path, name, dtype=dtype, kv_cache_dtype="bf16")
    got, wanted = (one.prompt_logits(IDS[:40]) for one in (mine, plain))
    lengths = np.linalg.norm(got, axis=1) * np.linalg.norm(wanted, axis=1)
    cosines = (got * wanted).sum(axis=1) / lengths
    assert least < cosines.min() < 1 - 1e-7
