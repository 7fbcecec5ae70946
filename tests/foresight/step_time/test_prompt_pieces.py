"""How many tokens of prompts suit a device, by how long its steps take."""

from __future__ import annotations

import pytest

from ridgeline.model.cost.costs import Features
from ridgeline.planner.capacity.option import least_prompt_tokens


@pytest.mark.parametrize("floor_s", [0.01, 0.03])
@pytest.mark.parametrize("token_s", [1e-5, 1e-4])
def test_arithmetic_takes_twice_as_long_as_reading_the_weights(
    floor_s: float, token_s: float
) -> None:
    def seconds(step: Features) -> float:
        return max(floor_s, token_s * step.num_tokens)

    assert least_prompt_tokens(seconds) == round(2 * floor_s / token_s)


def test_it_has_an_end_where_tokens_cost_nothing() -> None:
    assert least_prompt_tokens(lambda step: 1.0) == 1 << 13


def test_a_device_without_a_knee_gets_few() -> None:
    assert least_prompt_tokens(lambda step: float(step.num_tokens)) == 2
