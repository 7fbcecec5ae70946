"""Which experts' matrices the kernels read, by their own counters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ridgeline.backends.reference import parts
from tests.backends.runners import TOKENS, Make, make, reference
from tests.tiny import ARCHS, checkpoint

__all__ = ["make"]  # a fixture


@pytest.mark.parametrize("threads", [1, 2])
def test_no_more_experts_are_read_than_rows_meet(
    make: Make, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted by the kernels, and by who is met in the reference; one thread shares no blocks."""
    met: list[int] = []

    def counted(*args: Any) -> NDArray[np.float32]:
        found = routes(*args)
        met.append(int(found.any(axis=0).sum()))
        return found

    routes = parts.routes
    monkeypatch.setattr(parts, "routes", counted)
    wanted = reference(checkpoint(ARCHS["many experts"]))
    runner = make("many experts", "f32", threads=threads)
    counters, start = runner.profile(), 0
    for end in (40, 41, 44, 56):
        met.clear()
        wanted.prompt_logits(TOKENS[start:end], start)
        runner.prompt_logits(TOKENS[start:end], start)
        num_read = counters.take()["experts"].sum()
        if end > 40 or threads == 1:
            assert num_read == sum(met) < 2 * 20
        else:
            assert sum(met) <= num_read <= 2 * sum(met)
        start = end
