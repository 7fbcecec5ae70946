"""What is written for people: figures, and tables as markdown, as CSV and on a terminal."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from ridgeline.system.report import (
    Cell,
    Table,
    as_csv,
    as_markdown,
    bold,
    counted,
    duration,
    figure,
    gb,
    gib,
    of_pairs,
)
from ridgeline.system.terminal import drawn


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (3.42, "3.42 s"), (0.0615, "61.5 ms"), (0.34, "340 ms"), (12.345, "12.3 s"),
        (1234.5, "1,234 s"), (4e-6, "0.00 ms"),
    ],
)  # fmt: skip
def test_times_have_the_digits_that_matter(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"), (0, "0"), (0.01234, "0.0123"), (12.34, "12.3"), (999.4, "999"),
        (999.6, "1,000"), (1234567.8, "1,234,568"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits_and_never_an_exponent(value: float | None, text: str) -> None:
    assert figure(value) == text


def test_what_is_asked_for_is_how_a_number_is_written() -> None:
    assert [figure(one, ",.2f") for one in (None, 1234.5)] == ["-", "1,234.50"]
    assert [counted(number, "token") for number in (0, 1, 1024)] == [
        "0 tokens", "1 token", "1,024 tokens",
    ]  # fmt: skip
    assert [gb(size) for size in (2_000, 999_600, 1_500_000_000)] == [
        "2 kB", "1 MB", "1.50 GB",
    ]  # fmt: skip
    assert [gib(size) for size in (1023, 3 << 19, 20 << 30)] == ["1,023 B", "1.50 MiB", "20.0 GiB"]


def test_a_table_in_markdown() -> None:
    table = Table(("name", "size"), [("a|b", "1"), bold("all", "")])
    assert table.markdown() == [
        "| name | size |", "|---|--:|", "| a\\|b | 1 |", "| **all** |  |",
    ]  # fmt: skip


def test_rows_lack_what_they_lack() -> None:
    rows = [{"name": "a", "right": True}, {"name": "b,c", "value": 12345.6}]
    assert list(csv.reader(io.StringIO(as_csv(rows)))) == [
        ["name", "right", "value"], ["a", "true", ""], ["b,c", "", "12345.6"],
    ]  # fmt: skip
    assert as_markdown(rows).splitlines() == [
        "| name | right | value |", "|---|--:|--:|", "| a | true |  |", "| b,c |  | 12,346 |",
    ]  # fmt: skip


def printed(table: Table, columns: int) -> list[str]:
    text = io.StringIO()
    Console(file=text, width=columns, markup=True).print(drawn(table))
    return text.getvalue().splitlines()


@given(st.lists(st.text("abc1-[]", min_size=1, max_size=30), min_size=2, max_size=2))
def test_a_narrow_terminal_cuts_nothing(texts: list[str]) -> None:
    lines = printed(Table(("", ""), [texts]), 12)
    assert max(map(len, lines)) <= 12
    assert sorted("".join("".join(lines).split())) == sorted("".join(texts))


def test_names_and_numbers_stand_at_their_sides() -> None:
    assert printed(Table(("[dim]", "size"), [("a", "1"), ("[bold]", "12")]), 40) == [
        "[dim]   size", "a          1", "[bold]    12",
    ]  # fmt: skip
    assert printed(of_pairs([("long name", "1"), ("b", "22")]), 40) == [
        "long name  1 ", "b          22",
    ]  # fmt: skip


def test_a_short_row_is_filled_and_styles_are_not_text() -> None:
    table = Table(("a", "b", "c"), [("1",), (Cell("2", "dim"), "3", "4")], "lll")
    assert [line.rstrip() for line in printed(table, 40)] == ["a  b  c", "1", "2  3  4"]
