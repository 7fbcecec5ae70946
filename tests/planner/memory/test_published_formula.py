"""The best-known estimator of memory: its figures, and where they err."""

from __future__ import annotations

import pytest

from ridgeline.planner import plan
from tests.model.cost.published_configs import PUBLISHED


def test_the_well_known_formula_is_reproduced_and_its_error_named() -> None:
    """Phi-4 with 16,384 tokens: 29.4 + 1.34 + 5.39 = 36.1 GB, where the cache alone has 3.36."""
    config = PUBLISHED["phi-4"]["config"]
    found = plan(config, on="a100-80-sxm", context=16384, compare_published=True).as_dict()
    published = found["published"]
    assert published["weights_gb"] == pytest.approx(29.4, rel=0.01)
    assert published["kv_gb"] == pytest.approx(1.34, abs=0.01)
    assert published["activations_gb"] == pytest.approx(5.39, abs=0.01)
    assert published["plain_activations_gb"] == pytest.approx(26.26, abs=0.01)
    assert published["total_gb"] == pytest.approx(36.13, rel=0.01)
    assert "KV cache 2.5 times too low (3.36 GB" in published["why_wrong"][0]
    assert found["memory"]["kv_bytes"] == pytest.approx(3.36e9, rel=0.01)
