"""Published figures of memory: each within 1 % of what is computed here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ridgeline.planner import plan
from ridgeline.planner.plan import memory_of
from tests.physics.published import PUBLISHED

KNOWN: list[dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "data" / "known_memory.json").read_text()
)


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known["id"])
def test_a_published_figure(known: dict[str, Any]) -> None:
    config = dict(PUBLISHED[known["model"]]["config"])
    if "quantised" in known:
        config["quantization_config"] = known["quantised"]
    wishes = {"on": "mi325x", "engine": "vllm"} | known.get("wishes", {})
    memory = memory_of(plan(config, **wishes).best)
    found = {**memory, **memory["per_device"]}[known["what"]] if (
        known["what"] not in memory
    ) else memory[known["what"]]  # fmt: skip
    assert found == pytest.approx(known["expected"], rel=0.01)


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
