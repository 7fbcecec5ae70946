"""Parts of a model that are not counted: said where they may lack, refused where they would."""

from __future__ import annotations

import pytest

from ridgeline.planner import plan
from tests.model.cost.published_configs import PUBLISHED

LLAMA = PUBLISHED["llama-3.1-8b"]["config"]


def test_what_reads_pictures_is_not_counted_and_that_is_said() -> None:
    config = {"text_config": LLAMA, "vision_config": {"hidden_size": 1152}}
    found, said = plan(config, on="l4"), "only the half that reads text is counted"
    assert found.best.ledger.weights_bytes == 2 * 8030261248
    assert any(said in line and "vision_config" in line for line in found.assumptions)
    whole = plan(config, on="l4", weights_memory="18GiB")
    assert whole.best.ledger.weights_bytes == 18 << 30
    assert not any(said in line for line in whole.assumptions)


def test_parts_of_the_text_half_that_are_not_understood_need_their_size() -> None:
    config = LLAMA | {"laurel_rank": 64}
    with pytest.raises(ValueError, match=r"laurel_rank describes weights .* --weights-memory"):
        plan(config, on="l4")
    assert plan(config, on="l4", weights_memory="18GiB").best.ledger.weights_bytes == 18 << 30
