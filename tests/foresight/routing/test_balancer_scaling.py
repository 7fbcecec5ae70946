"""How many servers are wanted: never too few for the load, and no fewer before five minutes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ridgeline.foresight.routing.balancer import CALM_S, Scaling

LOADS = st.lists(st.tuples(st.floats(0, 200), st.integers(0, 300)), min_size=1, max_size=40)


@given(LOADS, st.integers(1, 9), st.integers(0, 20), st.integers(1, 12))
def test_as_many_as_the_busiest_of_the_last_minutes_needed(
    loads: list[tuple[float, int]], least: int, more: int, each: int
) -> None:
    """The rule again, by looking at all that was seen."""
    scaling, now_s, seen = Scaling(least, least + more, each), 0.0, list[tuple[float, int]]()
    for rest_s, num in loads:
        now_s += rest_s
        seen.append((now_s, num))
        most = max(count for at_s, count in seen if at_s >= now_s - CALM_S)
        needed = (most + each - 1) // each
        assert scaling.wanted(num, now_s) == min(max(needed, least), least + more)


def test_more_at_once_and_fewer_later() -> None:
    scaling = Scaling(1, 16, 8)
    found = [scaling.wanted(num, at_s) for at_s, num in ((0, 0), (1, 8), (2, 9), (3, 1000), (4, 0))]
    assert found == [1, 1, 2, 16, 16]
    assert scaling.wanted(0, 3 + CALM_S) == 16
    assert scaling.wanted(0, 4 + CALM_S) == 1
