"""Formats: what is written reads as what was meant, and errors are those of good quantisers."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from ridgeline.engine.quantise.feedback import weight_of
from ridgeline.engine.quantise.grids import FORMS
from tests.engine.quantise.weights import heavy_tailed

# Root mean square of what is lost, over that of the weights, as llama.cpp's quantisers lose it on
# the same weights: without importance, and weighed by random importance (ggml 0.25.3).
OF_LLAMA_CPP = {
    "Q4_0": (0.1078, 0.1010),
    "Q5_0": (0.0539, 0.0506),
    "Q5_1": (0.0436, 0.0369),
    "Q4_K": (0.0831, 0.0778),
    "Q5_K": (0.0421, 0.0398),
    "Q6_K": (0.0215, 0.0202),
}
EDGES = {
    "zeros": np.zeros((1, 256)),
    "ones": np.ones((1, 256)),
    "all negative": -np.linspace(1, 2, 256)[None],
    "one large": np.eye(1, 256) * 1e4,
    "tiny": np.full((1, 256), 1e-9),
    "of both signs": np.linspace(-3, 3, 256)[None],
}


@pytest.mark.parametrize("name", FORMS)
def test_what_is_written_reads_as_what_was_meant(name: str) -> None:
    form, x = FORMS[name], heavy_tailed(16)
    grid = form.fit(x, weight_of(x, 1.0, form.span))
    q = form.rounded(x, grid)
    encoded = form.rows(q, grid.numbers)
    read = gguf.quants.dequantize(encoded, gguf.GGMLQuantizationType[name])
    np.testing.assert_allclose(read, form.values(q, grid), rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", FORMS)
def test_errors_are_at_most_those_of_llama_cpp(name: str) -> None:
    form, x = FORMS[name], heavy_tailed(1024)
    importance = np.random.default_rng(1).random(1024).astype(np.float32) ** 2 + np.float32(0.01)
    for weight, most in zip(
        (np.ones(1024, np.float32), importance), OF_LLAMA_CPP[name], strict=True
    ):
        grid = form.fit(x, weight_of(x, weight, form.span))
        lost = form.values(form.rounded(x, grid), grid) - x
        share = np.sqrt((weight * lost**2).mean() / (weight * x**2).mean())
        assert most / 2 < share < most * 1.025


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", FORMS)
def test_edges_are_finite_and_near(name: str, edge: str) -> None:
    form, x = FORMS[name], EDGES[edge].astype(np.float32)
    grid = form.fit(x, weight_of(x, 1.0, form.span))
    encoded = form.rows(form.rounded(x, grid), grid.numbers)
    read = gguf.quants.dequantize(encoded, gguf.GGMLQuantizationType[name])
    steps = 1 << {"Q4": 3, "Q5": 4, "Q6": 5}[name[:2]]
    assert np.abs(read - x).max() <= 1.3 * max(np.abs(x).max(), 1e-6) / steps
