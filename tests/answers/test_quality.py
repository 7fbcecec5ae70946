"""What the default format, and the one for throughput, cost real models in accuracy.

The bars hold on each kind of text. What does not reach them is named here, with the bar that it
does keep: nothing may get worse unseen.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ridgeline.bench.quality import WeightsFormat, measure, texts, windows
from ridgeline.engine.setup.options import Options
from ridgeline.model.files.checkpoint import load_checkpoint
from tests.real_models import real_model

DEFAULT, ROWS = WeightsFormat("auto", "auto", "auto"), WeightsFormat("auto", "int8-row", "auto")
QWEN, GEMMA = "qwen2.5-coder:0.5b", "gemma-3-270m-q4_k_m"
NUM_TOKENS, WINDOW = 512, 512
MAX_MEAN_KL, MIN_TOP1_AGREEMENT = 0.006, 0.97  # of both, on each kind of text
KINDS = ["prose", "code", "scripts", "repeats"]
MAX_NARROW_KL = 0.010
MISSED_NARROW = {("smollm2", "scripts"): 0.018}
# By model, dtype and text: mean KL at most, top-1 agreement at least. Activations of bytes turn
# near ties where a small model is unsure, by little; 511 predictions are some 0.8 % uncertain.
MISSED = {
    ("smollm2", "auto", "prose"): (MAX_MEAN_KL, 0.96),
    ("smollm2", "auto", "code"): (MAX_MEAN_KL, 0.955),
    ("smollm2", "auto", "scripts"): (MAX_MEAN_KL, 0.935),
    ("smollm2", "int8-row", "prose"): (MAX_MEAN_KL, 0.945),
    ("smollm2", "int8-row", "code"): (0.0075, 0.935),
    ("smollm2", "int8-row", "scripts"): (0.011, 0.915),
    (QWEN, "auto", "scripts"): (MAX_MEAN_KL, 0.955),
    (QWEN, "int8-row", "scripts"): (MAX_MEAN_KL, 0.925),
    (GEMMA, "auto", "code"): (MAX_MEAN_KL, 0.955),
    (GEMMA, "auto", "scripts"): (MAX_MEAN_KL, 0.92),
    (GEMMA, "int8-row", "prose"): (MAX_MEAN_KL, 0.945),
    (GEMMA, "int8-row", "code"): (MAX_MEAN_KL, 0.945),
    (GEMMA, "int8-row", "scripts"): (0.0175, 0.885),
}


@pytest.mark.parametrize(
    ("model", "kinds", "formats"),
    [
        ("smollm2", ["prose"], [DEFAULT]),
        pytest.param("smollm2", KINDS, [DEFAULT, ROWS], marks=pytest.mark.full),
        pytest.param(QWEN, KINDS, [DEFAULT, ROWS], marks=pytest.mark.full),
        pytest.param(GEMMA, KINDS, [DEFAULT, ROWS], marks=pytest.mark.full),
    ],
    ids=["smollm2", "smollm2, all texts", "qwen", "gemma"],
)
def test_accuracy_of_a_real_model(
    model: str,
    kinds: list[str],
    formats: list[WeightsFormat],
    shared_model: Callable[[str], Path],
) -> None:
    checkpoint = load_checkpoint(shared_model(model) if model == GEMMA else real_model(model))
    parts = {
        kind: windows(checkpoint, text, NUM_TOKENS, WINDOW, whole=False)
        for kind, text in texts().items()
        if kind in kinds
    }
    results = measure(checkpoint, formats, parts, Options())
    rows = {
        (model, format.dtype, kind): found
        for format, of_format in results.items()
        for kind, found in of_format.items()
    }
    for case, found in rows.items():
        print(*case, found.num_predictions, f"{found.mean_kl:.5f} {found.top1_agreement:.2%}")
    for case, found in rows.items():
        most, least = MISSED.get(case, (MAX_MEAN_KL, MIN_TOP1_AGREEMENT))
        assert found.num_predictions >= 500, case
        assert found.mean_kl <= most, case
        assert found.top1_agreement >= least, case


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "kinds", "num_tokens"),
    [("smollm2", KINDS, NUM_TOKENS), (QWEN, ["prose"], 4096)],
    ids=["smollm2, all texts", "qwen, far back"],
)
def test_accuracy_with_values_of_4_bits(model: str, kinds: list[str], num_tokens: int) -> None:
    """What the cache alone costs; weights are in f32."""
    checkpoint = load_checkpoint(real_model(model))
    parts = {
        kind: windows(checkpoint, texts()[kind], num_tokens, num_tokens, whole=False)
        for kind in kinds
    }
    format = WeightsFormat("cpu", "f32", "int8-int4")
    of_kinds = measure(checkpoint, [format], parts, Options())[format]
    for kind, quality in of_kinds.items():
        print(model, kind, quality.num_predictions, f"{quality.mean_kl:.5f}")
    for kind, quality in of_kinds.items():
        assert quality.num_predictions >= 500, kind
        assert quality.mean_kl <= MISSED_NARROW.get((model, kind), MAX_NARROW_KL), kind
