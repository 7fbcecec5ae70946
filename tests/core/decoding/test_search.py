"""Which sampling a request has, where a model recommends one."""

from __future__ import annotations

from typing import Any

import pytest

from ridgeline.core.decoding.search import with_recommended
from ridgeline.core.params import SamplingParams

RECOMMENDED = {"temperature": 0.7, "top_k": 20, "top_p": 0.8}


def test_what_a_request_leaves_open_is_as_the_model_recommends() -> None:
    assert with_recommended(RECOMMENDED, max_tokens=3) == SamplingParams(
        temperature=0.7, top_k=20, top_p=0.8, max_tokens=3
    )
    assert with_recommended(RECOMMENDED, top_k=5).top_k == 5


@pytest.mark.parametrize(
    "changes", [{"use_beam_search": True, "n": 2}, {"penalty_alpha": 0.6}, {"penalty_alpha": 0}]
)
def test_a_search_takes_no_recommendations(changes: dict[str, Any]) -> None:
    assert with_recommended(RECOMMENDED, **changes) == SamplingParams(**changes)
