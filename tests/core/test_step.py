"""The vocabulary of the seam."""

from __future__ import annotations

import pytest

from ridgeline.core.params import SamplingParams
from ridgeline.core.step import Sampling, Work, sampled_from


@pytest.mark.parametrize(("seeds", "first"), [((), 3), ((7,), 2), ((7, 8), 2)])
def test_something_is_drawn_behind_the_last_token_if_there_are_seeds(
    seeds: tuple[int, ...], first: int
) -> None:
    sampling = Sampling(SamplingParams(), 3, ())
    assert sampled_from(Work((0, 0), 5, (1, 2, 3), (0,), seeds, sampling, (), ())) == first
