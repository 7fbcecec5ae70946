"""The primitives of pictures: ticks, and where a chart draws its values."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ridgeline.system import svg


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_round_ticks_are_few_and_evenly_spaced_within_the_ends(low: float, length: float) -> None:
    high = low + length
    if high - low < 1e-9 * max(abs(low), abs(high)):
        return  # too near for a float to tell apart
    ticks = svg.round_ticks(low, high)
    assert 2 <= len(ticks) <= 10
    slack = 1e-6 * length
    assert low - slack <= ticks[0] <= ticks[-1] <= high + slack
    steps = [after - before for before, after in pairwise(ticks)]
    assert max(steps) == pytest.approx(min(steps), rel=1e-3)


@pytest.mark.parametrize("is_log", [True, False])
def test_a_chart_draws_its_ends_at_the_ends_of_its_axes(is_log: bool) -> None:
    across = svg.Axis("ms", 2, 3, is_log)
    chart = svg.Chart(across, svg.Axis("share", 0.5, 1, is_log))
    chart.dot(2, 0.5, "#000", "a < b")
    chart.dot(3, 1, "#000")
    drawn = ElementTree.fromstring(chart.picture("t", {}))
    places = [(dot.get("cx"), dot.get("cy")) for dot in drawn.iter() if dot.tag.endswith("circle")]
    assert places == [("84.0", "410.0"), ("860.0", "96.0")]
    assert len(across.labels()) >= 3  # also where no power of ten lies between the ends


def test_names_cover_no_dot_and_no_other_name_unless_they_must() -> None:
    chart = svg.Chart(svg.Axis("ms", 1, 10), svg.Axis("share", 1, 10))
    for _ in range(20):
        chart.dot(2, 2, "#000")
        chart.name(2, 2, "a name", "#000", must=False)
    drawn = ElementTree.fromstring(chart.picture("t", {}))
    names = [
        (float(one.get("x", "")), float(one.get("y", "")))
        for one in drawn.iter()
        if one.text == "a name"
    ]
    assert 4 < len(names) < 20
    width = svg.CHARACTER * len("a name")
    for i, (x, y) in enumerate(names):
        assert all(abs(x - a) >= width or abs(y - b) >= 14 for a, b in names[:i])
        assert not (x < chart.x(2) + 8 and x + width > chart.x(2) - 8 and abs(y - chart.y(2)) < 8)
    num_parts = len(chart.parts)
    chart.name(2, 2, "a name", "#000")
    assert len(chart.parts) == num_parts + 1


def test_a_long_note_ends_with_a_whole_clause_where_it_has_one() -> None:
    def noted(note: str) -> str:
        (shown,) = svg.heading("t", {}, note)[1:]
        return ElementTree.fromstring(shown).text or ""

    first, rest = "it costs 1 (busy; late)", "x" * 130
    assert noted(f"{first}; and {rest}") == first
    assert noted(f"it costs 1 (busy; {rest})").endswith("...")
    assert noted(first) == first
